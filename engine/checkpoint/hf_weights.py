"""Hugging Face weights in and out, as safetensors only: pickles can run code and are never opened.

Each family is a table from our names to Hugging Face's. Several of our tensors under one foreign name are that tensor's
parts, one after another along the output dimension; so fused projections need no code of their own.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.atomic import make_folder, write_json
from engine.errors import UserError
from engine.hf_config import to_hf_config
from engine.models.decoder import Decoder
from engine.spec import ModelSpec

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
_MAX_SHARD_BYTES = 5 * 10**9
_MAX_NAMES_TOLD = 8
_DTYPES = {"F64", "F32", "F16", "BF16"}
_VOCABULARY = {"embedding.weight", "head.weight"}
_NOT_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(?:masked_)?bias$")
"""Constants that older versions saved beside the weights."""

_LLAMA = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers": "model.layers",
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_GPT2 = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "layers": "transformer.h",
    "attention_norm": "ln_1",
    "attention.query": "attn.c_attn",
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn.up": "mlp.c_fc",
    "ffn.down": "mlp.c_proj",
}
# ``{}`` stands for the number of an expert: each has tensors of its own, which are stacked in ours.
_MIXTRAL = _LLAMA | {
    "moe.router": "block_sparse_moe.gate",
    "moe.experts.gate": "block_sparse_moe.experts.{}.w1.weight",
    "moe.experts.up": "block_sparse_moe.experts.{}.w3.weight",
    "moe.experts.down": "block_sparse_moe.experts.{}.w2.weight",
}
_STACKED_MIXTRAL = _LLAMA | {
    "moe.router": "mlp.gate",
    "moe.experts.gate": "mlp.experts.gate_up_proj",
    "moe.experts.up": "mlp.experts.gate_up_proj",
    "moe.experts.down": "mlp.experts.down_proj",
}
_TABLES = {"llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "gpt2": _GPT2, "mixtral": _MIXTRAL}


@dataclass(frozen=True)
class _Part:
    """One of our tensors, or one expert's slice of it."""

    fqn: str
    expert: int | None

    def of(self, tensor: Tensor) -> Tensor:
        """The part of our whole tensor."""
        return tensor if self.expert is None else tensor[self.expert]


Shapes = dict[str, torch.Size]
Layout = dict[str, list[_Part]]
"""Foreign name to its parts, in order."""


def import_weights(source: Path, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    """The weights in ``source`` under our names, one tensor at a time, in the dtype they are stored in.

    Names and shapes are checked before anything is read. The embedding and the head may have fewer rows than the
    vocabulary of ``spec``, which a run enlarges to its tokenizer's; they come as they are stored.

    Args:
        source: A folder with ``model.safetensors`` or its index, or one ``.safetensors`` file.
        spec: The architecture the weights are for.

    Raises:
        UserError: No safetensors there, a damaged file, a family that isn't read, quantised weights, or names or shapes
            that don't fit ``spec``.
    """
    weights = _ForeignWeights(_files(source))
    shapes = _shapes(spec)
    table = _table(spec)
    if spec.family == "mixtral" and any(name.endswith("experts.gate_up_proj") for name in weights.shapes):
        table = _STACKED_MIXTRAL
    layout = _layout(spec, shapes, table)
    weights.add_prefix(table["layers"].split(".")[0] + ".")
    _check_names(weights, layout, spec, source)
    _check_tied(weights, layout, source)
    _check_shapes(weights, layout, shapes, spec, source)
    return _read(weights, layout, shapes, spec)


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
    layout = _layout(spec, shapes, _table(spec))
    shards = _shards(state, layout, max_shard_bytes)
    names = [_SINGLE]
    if len(shards) > 1:
        names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    make_folder(folder)
    try:
        for name, foreign_names in zip(names, shards, strict=True):
            tensors = {
                foreign: _join(state, layout[foreign], _is_transposed(spec, foreign)) for foreign in foreign_names
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
        write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        names.append(_INDEX)
    for path in [folder / _INDEX, *folder.glob("model*.safetensors")]:
        if path.name not in names:
            path.unlink(missing_ok=True)
    dtype = str(next(iter(state.values())).dtype).removeprefix("torch.")
    write_json(folder / "config.json", config | {"torch_dtype": dtype})


# -------------------------------------------------------------------------------------------------------------- layout


def _shapes(spec: ModelSpec) -> Shapes:
    """Names and shapes of all our parameters: those of the model itself, made without memory."""
    with torch.device("meta"):
        model = Decoder(spec, layers=range(spec.num_layers))
    return {fqn: parameter.shape for fqn, parameter in model.named_parameters()}


def _table(spec: ModelSpec) -> dict[str, str]:
    if spec.family not in _TABLES:
        raise UserError(
            f"weights of the family {spec.family} can't be imported or exported",
            hint=f"families that can: {', '.join(_TABLES)}",
        )
    return _TABLES[spec.family]


def _layout(spec: ModelSpec, shapes: Shapes, table: Mapping[str, str]) -> Layout:
    layout: Layout = {}
    for fqn in shapes:
        name = _foreign_name(fqn, table)
        experts = range(spec.moe.num_experts) if spec.moe and "{}" in name else [None]
        for expert in experts:
            layout.setdefault(name.format(expert), []).append(_Part(fqn, expert))
    return layout


def _foreign_name(fqn: str, table: Mapping[str, str]) -> str:
    prefix = ""
    if fqn.startswith("layers."):
        _, layer, fqn = fqn.split(".", 2)
        prefix = f"{table['layers']}.{layer}."
    if fqn in table:  # stacked experts: no module, and so no ".weight"
        return prefix + table[fqn]
    module, kind = fqn.rsplit(".", 1)
    return f"{prefix}{table[module]}.{kind}"


def _is_transposed(spec: ModelSpec, foreign: str) -> bool:
    """GPT-2 keeps the weights of its projections as [in, out]."""
    return spec.family == "gpt2" and bool(re.search(r"\.(?:attn|mlp)\.\w+\.weight$", foreign))


def _output_dim(num_dims: int) -> int:
    """The dimension of outputs: of biases [out], weights [out, in] and stacked weights [experts, out, in]."""
    return max(num_dims - 2, 0)


# ------------------------------------------------------------------------------------------------------------- writing


def _join(state: Mapping[str, Tensor], parts: list[_Part], transposed: bool) -> Tensor:
    tensors = [part.of(state[part.fqn]) for part in parts]
    joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=_output_dim(tensors[0].ndim))
    return (joined.t() if transposed else joined).contiguous()


def _shards(state: Mapping[str, Tensor], layout: Layout, max_shard_bytes: int) -> list[list[str]]:
    """Foreign names by file, in order."""
    shards: list[list[str]] = [[]]
    size = 0
    for foreign, parts in layout.items():
        tensor_bytes = sum(part.of(state[part.fqn]).nbytes for part in parts)
        if shards[-1] and size + tensor_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(foreign)
        size += tensor_bytes
    return shards


# ------------------------------------------------------------------------------------------------------------- reading


class _ForeignWeights:
    """Tensors of some safetensors files by name. Headers are read at once, tensors when asked for."""

    def __init__(self, files: list[Path]) -> None:
        self.shapes: dict[str, torch.Size] = {}
        self._places: dict[str, tuple[Path, str]] = {}
        for path in files:
            try:
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (not a mapping)
                        part = file.get_slice(name)
                        if _NOT_WEIGHTS.search(name):
                            continue
                        if part.get_dtype() not in _DTYPES:
                            raise UserError(
                                f"{path}: {name} is {part.get_dtype()}: quantised weights can't be trained on",
                                hint=f"convert the model to one of {', '.join(sorted(_DTYPES))} first",
                            )
                        self.shapes[name] = torch.Size(part.get_shape())
                        self._places[name] = (path, name)
            except (OSError, SafetensorError) as error:
                raise UserError(
                    f"cannot read the weights in {path}: {error}", hint="the file may be incomplete: copy it again"
                ) from None

    def add_prefix(self, prefix: str) -> None:
        """Bring the names of a model saved without its head to those of the whole one."""
        if not any(name.startswith(prefix) for name in self.shapes):
            self.shapes = {_prefixed(name, prefix): shape for name, shape in self.shapes.items()}
            self._places = {_prefixed(name, prefix): place for name, place in self._places.items()}

    def read(self, name: str) -> Tensor:
        """One tensor, as it is stored."""
        path, stored_name = self._places[name]
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(stored_name)
        return tensor


def _prefixed(name: str, prefix: str) -> str:
    return name if name.startswith("lm_head.") else prefix + name


def _files(source: Path) -> list[Path]:
    """The safetensors files of ``source``."""
    hint = "name a folder with model.safetensors (or its index), or a .safetensors file"
    if not source.exists():
        raise UserError(f"there are no weights at {source}: it does not exist", hint=hint)
    if source.is_file():
        if source.suffix == ".safetensors":
            return [source]
        raise (
            _pickled(source) if source.suffix in _PICKLES else UserError(f"{source} is no safetensors file", hint=hint)
        )
    if (source / _SINGLE).is_file():
        return [source / _SINGLE]
    if (source / _INDEX).is_file():
        return _indexed(source)
    found = sorted(source.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise UserError(f"{source} has {len(found)} safetensors files and no {_INDEX}", hint=f"add it, or {hint}")
    for path in sorted(source.iterdir()):
        if path.suffix in _PICKLES:
            raise _pickled(path)
    raise UserError(f"there are no weights in the folder {source}", hint=hint)


def _indexed(folder: Path) -> list[Path]:
    where = str(folder / _INDEX)
    try:
        names = set(json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not an index of weights: {error!r}", hint="copy the file again", where=where) from None
    missing = sorted(str(name) for name in names if Path(str(name)).name != name or not (folder / name).is_file())
    if missing:
        raise UserError(f"files named in the index are missing: {_some(missing)}", hint="copy them too", where=where)
    return sorted(folder / name for name in names)


def _pickled(path: Path) -> UserError:
    return UserError(
        f"{path} is a pickle, which can run code when it is opened: only safetensors are read",
        hint="convert it where you trust it: model.save_pretrained(FOLDER, safe_serialization=True)",
    )


def _check_names(weights: _ForeignWeights, layout: Layout, spec: ModelSpec, source: Path) -> None:
    optional = {"lm_head.weight"} if spec.tied_embeddings else set()  # saved a second time by some
    missing = [name for name in layout if name not in weights.shapes]
    unexpected = sorted(weights.shapes.keys() - layout.keys() - optional)
    lists = {"missing": missing, "not expected": unexpected}
    problems = [f"{what}: {_some(names)}" for what, names in lists.items() if names]
    if not problems:
        return
    hint = f"check that the model of the run file is the one these weights are of ({spec.num_layers} layers)"
    if missing == ["lm_head.weight"]:
        hint = "the weights are of a model with tied embeddings: set model.tied_embeddings to true"
    raise UserError(f"the weights in {source} are not of this {spec.family} model: {'; '.join(problems)}", hint=hint)


def _check_tied(weights: _ForeignWeights, layout: Layout, source: Path) -> None:
    """A model with tied embeddings takes weights with a head only where that is the embedding saved a second time."""
    head = "lm_head.weight"
    if head not in weights.shapes or head in layout:
        return
    embedding = next(name for name, parts in layout.items() if parts[0].fqn == "embedding.weight")
    if not torch.equal(weights.read(head), weights.read(embedding)):
        raise UserError(
            f"the weights in {source} have a head of their own, the model ties it to the embedding",
            hint="set model.tied_embeddings to false",
        )


def _check_shapes(weights: _ForeignWeights, layout: Layout, shapes: Shapes, spec: ModelSpec, source: Path) -> None:
    wrong = []
    for foreign, parts in layout.items():
        part_shapes = [part.of(torch.empty(shapes[part.fqn], device="meta")).shape for part in parts]
        wanted = list(part_shapes[0])
        wanted[_output_dim(len(wanted))] = sum(shape[_output_dim(len(shape))] for shape in part_shapes)
        if _is_transposed(spec, foreign):
            wanted.reverse()
        found = list(weights.shapes[foreign])
        may_be_fewer = parts[0].fqn in _VOCABULARY and found[1:] == wanted[1:] and 0 < found[0] < wanted[0]
        if found != wanted and not may_be_fewer:
            wrong.append(f"{foreign} is {found}, the model needs {wanted}")
    if wrong:
        raise UserError(
            f"the weights in {source} do not fit the model: {_some(wrong)}",
            hint="check the sizes in the run file's model against the weights' config.json",
        )


def _read(weights: _ForeignWeights, layout: Layout, shapes: Shapes, spec: ModelSpec) -> Iterator[tuple[str, Tensor]]:
    homes: dict[str, list[str]] = {}
    for foreign, parts in layout.items():
        for part in parts:
            homes.setdefault(part.fqn, []).append(foreign)
    for fqn in shapes:
        pieces = [_piece(weights.read(foreign), fqn, layout[foreign], shapes, spec, foreign) for foreign in homes[fqn]]
        yield fqn, torch.stack(pieces) if layout[homes[fqn][0]][0].expert is not None else pieces[0]


def _piece(stored: Tensor, fqn: str, parts: list[_Part], shapes: Shapes, spec: ModelSpec, foreign: str) -> Tensor:
    """The part of a stored tensor that is ours under ``fqn``."""
    if _is_transposed(spec, foreign):
        stored = stored.t()
    if len(parts) == 1:
        return stored.contiguous()
    dim = _output_dim(stored.ndim)
    sizes = [shapes[part.fqn][dim] for part in parts]
    index = [part.fqn for part in parts].index(fqn)
    return stored.split(sizes, dim=dim)[index].contiguous()


def _some(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES_TOLD
    return ", ".join(names[:_MAX_NAMES_TOLD]) + (f" and {more} more" if more > 0 else "")
