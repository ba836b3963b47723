"""Hugging Face weights in and out, as safetensors only. ``hf_names`` says which tensors are which, ``hf_files`` reads
them."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from engine.atomic import make_folder, write_json
from engine.checkpoint.hf_files import INDEX, SINGLE, ForeignWeights, some_names, weight_files
from engine.checkpoint.hf_names import ForeignTensor, Layout, Shapes, layout_of, table_of
from engine.errors import UserError
from engine.hf_export import to_hf_config
from engine.models.decoder import Decoder
from engine.spec import ModelSpec

_log = logging.getLogger(__name__)
_MAX_SHARD_BYTES = 5 * 10**9
_VOCABULARY = {"embedding.weight", "head.weight"}


def import_weights(source: Path, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """The weights in ``source`` under our names, one tensor at a time, in the dtype they are stored in.

    Names and shapes are checked before anything is read; multi-token-prediction layers are left out, with a warning.
    The embedding and the head may have fewer rows than the vocabulary of ``spec``, which a run enlarges to its
    tokenizer's; they come as they are stored.

    Args:
        source: A folder with ``model.safetensors`` or its index, or one ``.safetensors`` file.
        spec: The architecture the weights are for.

    Raises:
        UserError: No safetensors there, a damaged file, quantised weights, or names or shapes that don't fit ``spec``.
    """
    weights = ForeignWeights(weight_files(source))
    shapes = _shapes(spec)
    stacked = any(name.endswith("experts.gate_up_proj") for name in weights.shapes)
    table = table_of(spec, stacked_experts=stacked)
    layout = layout_of(spec, shapes, table)
    weights.add_prefix(table["layers"].split(".")[0] + ".")
    _leave_out_mtp(weights, source)
    _check_names(weights, layout, spec, source)
    _check_tied(weights, layout, source)
    _check_shapes(weights, layout, shapes, source)
    return _read(weights, layout, shapes)


def export_weights(
    state: Mapping[str, Tensor], spec: ModelSpec, folder: Path, *, max_shard_bytes: int = _MAX_SHARD_BYTES
) -> None:
    """Write ``config.json`` and the weights to ``folder``, as ``transformers`` reads them.

    Args:
        state: Our names to whole tensors.
        spec: The architecture.
        folder: Made where needed; weights of an earlier export in it are replaced.
        max_shard_bytes: Weights above this are split into files of at most this size (one tensor at least), with an
            index.

    Raises:
        UserError: Hugging Face's configuration can't express the architecture, or the folder can't be written.
    """
    config = to_hf_config(spec)
    shapes = _shapes(spec)
    assert {fqn: tensor.shape for fqn, tensor in state.items()} == shapes, "the state is not one of this architecture"
    layout = layout_of(spec, shapes, table_of(spec))
    shards = _shards(state, layout, max_shard_bytes)
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    make_folder(folder)
    try:
        for name, foreign_names in zip(names, shards, strict=True):
            tensors = {
                foreign: layout[foreign].join([part.of(state[part.fqn]) for part in layout[foreign].parts])
                for foreign in foreign_names
            }
            temporary = folder / f".{name}.tmp"
            try:
                save_file(tensors, temporary, metadata={"format": "pt"})
                os.replace(temporary, folder / name)
            finally:
                temporary.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise UserError(f"cannot write the weights to {folder}: {error}", hint="choose another folder") from None
    if len(shards) > 1:
        weight_map = {foreign: name for name, group in zip(names, shards, strict=True) for foreign in group}
        total = sum(tensor.nbytes for tensor in state.values())
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        names.append(INDEX)
    for path in [folder / INDEX, *folder.glob("model*.safetensors")]:
        if path.name not in names:
            path.unlink(missing_ok=True)
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    write_json(folder / "config.json", config | {"torch_dtype": dtype})


# -------------------------------------------------------------------------------------------------------------- shapes


def _shapes(spec: ModelSpec) -> Shapes:
    """Names and shapes of all our parameters and of the routers' selection biases: those of the model itself, made
    without memory."""
    with torch.device("meta"):
        model = Decoder(spec, layers=range(spec.num_layers))
    biases = {fqn: buffer for fqn, buffer in model.named_buffers() if fqn.endswith(".selection_bias")}
    return {fqn: tensor.shape for fqn, tensor in (dict(model.named_parameters()) | biases).items()}


def _shards(state: Mapping[str, Tensor], layout: Layout, max_shard_bytes: int) -> list[list[str]]:
    """Foreign names by file, in order."""
    shards: list[list[str]] = [[]]
    size = 0
    for foreign, made in layout.items():
        tensor_bytes = sum(part.of(state[part.fqn]).nbytes for part in made.parts)
        if shards[-1] and size + tensor_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(foreign)
        size += tensor_bytes
    return shards


# ------------------------------------------------------------------------------------------------------------- reading


def _leave_out_mtp(weights: ForeignWeights, source: Path) -> None:
    """Pass over the layers that predict further tokens: each has a projection that no other layer has."""
    found = [re.fullmatch(r"(model\.layers\.\d+\.)eh_proj\.weight", name) for name in weights.shapes]
    prefixes = tuple(match[1] for match in found if match)
    if not prefixes:
        return
    for name in [name for name in weights.shapes if name.startswith(prefixes)]:
        weights.leave_out(name)
    _log.warning("%s: multi-token-prediction layers are not built; left out: %d", source, len(prefixes))


def _check_names(weights: ForeignWeights, layout: Layout, spec: ModelSpec, source: Path) -> None:
    optional = {"lm_head.weight"} if spec.tied_embeddings else set()  # saved a second time by some
    missing = [name for name in layout if name not in weights.shapes]
    unexpected = sorted(weights.shapes.keys() - layout.keys() - optional)
    lists = {"missing": missing, "not expected": unexpected}
    problems = [f"{what}: {some_names(names)}" for what, names in lists.items() if names]
    if not problems:
        return
    hint = f"check that the model of the run file is the one these weights are of ({spec.num_layers} layers)"
    if missing == ["lm_head.weight"]:
        hint = "the weights are of a model with tied embeddings: set model.tied_embeddings to true"
    raise UserError(f"the weights in {source} are not of this {spec.family} model: {'; '.join(problems)}", hint=hint)


def _check_tied(weights: ForeignWeights, layout: Layout, source: Path) -> None:
    """A model with tied embeddings takes weights with a head only where that is the embedding saved a second time."""
    head = "lm_head.weight"
    if head not in weights.shapes or head in layout:
        return
    embedding = next(name for name, made in layout.items() if made.parts[0].fqn == "embedding.weight")
    if not torch.equal(weights.read(head), weights.read(embedding)):
        raise UserError(
            f"the weights in {source} have a head of their own, the model ties it to the embedding",
            hint="set model.tied_embeddings to false",
        )


def _check_shapes(weights: ForeignWeights, layout: Layout, shapes: Shapes, source: Path) -> None:
    wrong = []
    for foreign, made in layout.items():
        wanted, found = made.shape(shapes), list(weights.shapes[foreign])
        may_be_fewer = made.parts[0].fqn in _VOCABULARY and found[1:] == wanted[1:] and 0 < found[0] < wanted[0]
        if found != wanted and not may_be_fewer:
            wrong.append(f"{foreign} is {found}, the model needs {wanted}")
    if wrong:
        raise UserError(
            f"the weights in {source} do not fit the model: {some_names(wrong)}",
            hint="check the sizes in the run file's model against the weights' config.json",
        )


def _read(weights: ForeignWeights, layout: Layout, shapes: Shapes) -> Iterator[tuple[str, Tensor]]:
    homes: dict[str, list[tuple[str, ForeignTensor]]] = {}
    for foreign, made in layout.items():
        for part in made.parts:
            homes.setdefault(part.fqn, []).append((foreign, made))
    for fqn in shapes:
        pieces = [made.piece(weights.read(foreign), fqn, shapes) for foreign, made in homes[fqn]]
        is_by_expert = homes[fqn][0][1].parts[0].expert is not None
        yield fqn, torch.stack(pieces) if is_by_expert else pieces[0]
