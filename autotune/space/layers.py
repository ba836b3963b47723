"""The layers of a space file: the files it uses, itself, and overrides of the command line, laid over each other."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Self

from autotune.specs.cluster import is_cluster_file
from engine.config import absolute_paths
from engine.errors import UserError
from engine.yaml_file import KeyPath, YamlDocument, parse_yaml, read_yaml

MERGE_DEPTH = {"space": 2, "workload": 2, "model": 0, "cluster": 0, "objectives": 0}
"""How deep the parts of a section named by ``use`` are replaced one by one (1 for sections not named)."""
COMMAND_MERGE_DEPTH = {"cluster": 0, "objectives": 0, "constraints": 0, "devices": 0}
"""The same where a command is searched."""
COMMAND = "command"
"""The section that makes it a space of a user's own program."""
WORKING_FOLDER = "folder"
"""Where that program runs: by default the folder of the file that names it."""


class Override(str):
    """``dotted.key=value``, laid over a file, with the words in which the user gave it.

    Args:
        text: The override.
        given: As it was typed; None for ``--set``.
    """

    given: str

    def __new__(cls, text: str, given: str | None = None) -> Self:
        """See the class."""
        override = super().__new__(cls, text)
        override.given = given or f"--set {text}"
        return override


@dataclass(frozen=True)
class MergedDocument:
    """Documents laid over each other; a value's place is in the last one that has it."""

    data: dict[str, Any]
    documents: tuple[YamlDocument, ...]

    def where(self, path: KeyPath = ()) -> str:
        """``file:line`` of the value at ``path``, or the option that gave it."""
        for length in range(len(path), 0, -1):
            for document in reversed(self.documents):
                if path[:length] in document.lines:
                    is_typed = document.source.startswith("--")  # which has no lines
                    return document.source if is_typed else document.where(path[:length])
        return self.documents[-1].where()


def shipped_spaces() -> list[str]:
    """Names of the spaces that come with the product."""
    return sorted(
        entry.name.removesuffix(".yaml") for entry in resources.files("search_spaces").iterdir()
        if entry.name.endswith(".yaml")
    )  # fmt: skip


def find_space(path: str | Path) -> YamlDocument:
    """A space file, or a shipped space by its name.

    Raises:
        UserError: There is none.
    """
    name = str(path)
    if not Path(name).exists() and "/" not in name and name.removesuffix(".yaml") in shipped_spaces():
        entry = resources.files("search_spaces") / f"{name.removesuffix('.yaml')}.yaml"
        return parse_yaml(entry.read_text(encoding="utf-8"), str(entry))
    if not Path(name).exists() and not name.endswith((".yaml", ".yml", ".json")) and "/" not in name:
        close = difflib.get_close_matches(name, shipped_spaces(), n=1)
        raise UserError(
            f"no space file and no shipped space is called {name!r}",
            hint=f"did you mean {close[0]}?"
            if close
            else f"name a .yaml file, or one of: {', '.join(shipped_spaces())}",
        )
    return read_yaml(name)


def merge(document: YamlDocument, overrides: Sequence[str] = ()) -> MergedDocument:
    """The file on top of what it uses, and the overrides on top of the file. Paths in it are absolute: those of a file
    are relative to its folder, those of an override to the working folder.

    Args:
        document: The file.
        overrides: ``dotted.key=value`` texts, values as in YAML.

    Raises:
        UserError: A layer is no space file, or an override is none.
    """
    layers = [*_used_layers(document, ()), document]
    has_command = any(isinstance(layer.data, dict) and COMMAND in layer.data for layer in layers)
    depths = COMMAND_MERGE_DEPTH if has_command else MERGE_DEPTH
    data: dict[str, Any] = {}
    for layer in layers:
        if not isinstance(layer.data, dict):
            raise UserError(
                "a space file is a mapping of sections", hint="see search_spaces/README.md", where=layer.where()
            )
        above = _absolute(layer.data, Path(layer.source).parent)
        data = {
            key: _overlay(data.get(key), value, depths.get(key, 1)) if key in data else value
            for key, value in {**data, **above}.items()
        }
    for override in (text if isinstance(text, Override) else Override(text) for text in overrides):
        key, separator, text = override.partition("=")
        parts = tuple(key.strip().split("."))
        if not separator or not all(parts):
            raise UserError(f"--set needs key=value, got {override!r}", hint="example: --set workload.total_tokens=1M")
        value = parse_yaml(text, override.given).data
        _set(data, parts, value, override)
        if parts == (COMMAND,):
            data.pop(WORKING_FOLDER, None)
        layers.append(YamlDocument(value, override.given, {parts: 1}))
    return MergedDocument(_absolute(data, Path()), tuple(layers))


def _absolute(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A copy of a layer whose paths, relative to ``folder``, are absolute."""
    data = absolute_paths(data, folder)
    cluster = data.get("cluster")
    if isinstance(cluster, str) and is_cluster_file(cluster):
        data["cluster"] = str(folder.absolute() / Path(cluster).expanduser())
    if COMMAND in data:
        data.setdefault(WORKING_FOLDER, ".")
        if isinstance(data[WORKING_FOLDER], str):
            data[WORKING_FOLDER] = str((folder.absolute() / Path(data[WORKING_FOLDER]).expanduser()).resolve())
    return data


def _used_layers(document: YamlDocument, seen: tuple[str, ...]) -> list[YamlDocument]:
    used = document.data.get("use") if isinstance(document.data, dict) else None
    if used is None:
        return []
    if not isinstance(used, list) or not all(isinstance(name, str) for name in used):
        raise UserError(
            "'use' must be a list of names", hint="example: use: [tiny_llama]", where=document.where(("use",))
        )
    layers: list[YamlDocument] = []
    for name in used:
        if name in seen:
            raise UserError(
                f"'use' goes in a circle through {name!r}", hint="leave one out", where=document.where(("use",))
            )
        path = Path(document.source).parent / name if name.endswith((".yaml", ".yml")) else name
        try:
            layer = find_space(path)
        except UserError as error:
            raise UserError(error.message, hint=error.hint, where=document.where(("use",))) from None
        layers += [*_used_layers(layer, (*seen, name)), layer]
    return layers


def _overlay(below: Any, above: Any, depth: int) -> Any:
    if depth == 0 or not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return {**below, **{key: _overlay(below.get(key), value, depth - 1) for key, value in above.items()}}


def _set(data: dict[str, Any], parts: tuple[str, ...], value: Any, override: Override) -> None:
    for part in parts[:-1]:
        below = data.get(part) or {}
        if not isinstance(below, dict):
            raise UserError(f"{override.given}: {part!r} is not a section", hint="name a key that holds a value")
        data[part] = dict(below)
        data = data[part]
    data[parts[-1]] = value
