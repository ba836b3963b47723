"""Safetensors files read by name. Pickles can run code and are never opened."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}
_MAX_NAMES_TOLD = 8
_DTYPES = {"F64", "F32", "F16", "BF16"}
_NOT_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(?:masked_)?bias$")
"""Constants that older versions saved beside the weights."""


class ForeignWeights:
    """Tensors of some safetensors files by name. Headers are read at once, tensors when asked for.

    Raises:
        UserError: A damaged file, or quantised weights.
    """

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

    def leave_out(self, name: str) -> None:
        """Forget a tensor."""
        del self.shapes[name], self._places[name]

    def read(self, name: str) -> Tensor:
        """One tensor, as it is stored."""
        path, stored_name = self._places[name]
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(stored_name)
        return tensor


def _prefixed(name: str, prefix: str) -> str:
    return name if name.startswith("lm_head.") else prefix + name


def weight_files(source: Path) -> list[Path]:
    """The safetensors files of a folder, or of one such file.

    Raises:
        UserError: There are none, or some that the index names are missing.
    """
    hint = "name a folder with model.safetensors (or its index), or a .safetensors file"
    if not source.exists():
        raise UserError(f"there are no weights at {source}: it does not exist", hint=hint)
    if source.is_file():
        if source.suffix == ".safetensors":
            return [source]
        raise (
            _pickled(source) if source.suffix in _PICKLES else UserError(f"{source} is no safetensors file", hint=hint)
        )
    if (source / SINGLE).is_file():
        return [source / SINGLE]
    if (source / INDEX).is_file():
        return _indexed(source)
    found = sorted(source.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise UserError(f"{source} has {len(found)} safetensors files and no {INDEX}", hint=f"add it, or {hint}")
    for path in sorted(source.iterdir()):
        if path.suffix in _PICKLES:
            raise _pickled(path)
    raise UserError(f"there are no weights in the folder {source}", hint=hint)


def _indexed(folder: Path) -> list[Path]:
    where = str(folder / INDEX)
    try:
        names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"not an index of weights: {error!r}", hint="copy the file again", where=where) from None
    missing = sorted(str(name) for name in names if Path(str(name)).name != name or not (folder / name).is_file())
    if missing:
        raise UserError(
            f"files named in the index are missing: {some_names(missing)}", hint="copy them too", where=where
        )
    return sorted(folder / name for name in names)


def _pickled(path: Path) -> UserError:
    return UserError(
        f"{path} is a pickle, which can run code when it is opened: only safetensors are read",
        hint="convert it where you trust it: model.save_pretrained(FOLDER, safe_serialization=True)",
    )


def some_names(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    more = len(names) - _MAX_NAMES_TOLD
    return ", ".join(names[:_MAX_NAMES_TOLD]) + (f" and {more} more" if more > 0 else "")
