"""The one YAML reader: YAML 1.2 numbers and booleans, no duplicate keys, and a line number for every value.

PyYAML alone follows YAML 1.1, which reads ``1e-4`` as a string and ``on`` as true.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from engine.errors import UserError

KeyPath = tuple[str | int, ...]


_SafeLoader: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's parser where PyYAML was built with it: ten times as fast."""


class _Loader(_SafeLoader):  # type: ignore[misc, valid-type]
    """SafeLoader with the YAML 1.2 core schema instead of YAML 1.1's implicit types."""


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes what the core schema would read as another type."""


_CORE_SCHEMA = [
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
]

for _class in (_Loader, _Dumper):
    _class.yaml_implicit_resolvers = {}
    for _tag, _pattern, _first in _CORE_SCHEMA:
        _class.add_implicit_resolver(_tag, re.compile(rf"^(?:{_pattern})$"), list(_first))


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    # "010" is ten in YAML 1.2; YAML 1.1 reads it as eight.
    text = str(loader.construct_scalar(node))
    if text.startswith("0o"):
        return int(text[2:], 8)
    return int(text, 16) if text.startswith("0x") else int(text, 10)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)


@dataclass(frozen=True)
class YamlDocument:
    """Data read from a file (or from text) with the line of each value."""

    data: Any
    source: str
    lines: dict[KeyPath, int] = field(default_factory=dict, repr=False)

    def where(self, path: KeyPath = ()) -> str:
        """``file:line`` of the value at ``path``, or of its nearest parent that has a line."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.lines:
                return f"{self.source}:{self.lines[path[:length]]}"
        return self.source


def parse_yaml(text: str, source: str = "<text>") -> YamlDocument:
    """Read one YAML document.

    Raises:
        UserError: Not valid YAML, a duplicate key, or a key that is not a string; with file and line.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: dict[KeyPath, int] = {}
        data = None if node is None else _construct(loader, node, (), lines, source)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError(
            f"not valid YAML: {error.problem or error.context}",
            hint="check the indentation, quotes and colons near this line",
            where=f"{source}:{line}",
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"not valid YAML: {error}", hint="save the file as UTF-8 text", where=source) from None
    finally:
        loader.dispose()
    return YamlDocument(data, source, lines)


def read_yaml(path: str | Path) -> YamlDocument:
    """Read a YAML (or JSON) file.

    Raises:
        UserError: The file is missing, is not readable text, or is not valid YAML.
    """
    return parse_yaml(read_text(path), str(path))


def read_text(path: str | Path) -> str:
    """Read a text file, turning every reason why it can't be read into a message for people."""
    path = Path(path)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = _nearby(path)
        raise UserError(
            f"file not found: {path}", hint=f"did you mean {near}?" if near else "check the path and the working folder"
        ) from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, a file is needed", hint="name the file in it") from None
    except PermissionError:
        raise UserError(f"no permission to read {path}", hint="change its permissions or owner") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text", hint="save it as UTF-8") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"cannot read {path}: {reason}", hint="check the path") from None


def dump_yaml(data: Any) -> str:
    """Write plain data as YAML that ``parse_yaml`` (and any YAML 1.2 reader) reads back as equal data."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    special = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}
    text = repr(value)
    return dumper.represent_scalar("tag:yaml.org,2002:float", special.get(text, text))


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    """Breaks of lines that only Unicode knows stand as escapes: unquoted, a reader folds them into spaces."""
    style = '"' if not _UNICODE_BREAKS.isdisjoint(value) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_UNICODE_BREAKS = frozenset("\x85\u2028\u2029")

_Dumper.add_representer(float, _represent_float)
_Dumper.add_representer(str, _represent_text)


def _nearby(path: Path) -> Path | None:
    import difflib

    if not path.parent.is_dir():
        return None
    close = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir()], n=1)
    return path.parent / close[0] if close else None


def _construct(loader: _Loader, node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], source: str) -> Any:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise UserError(
                    f"keys must be words, got {key!r}", hint="put the key in quotes", where=f"{source}:{line}"
                )
            if key in result:
                raise UserError(f"the key '{key}' stands twice", hint="keep one of them", where=f"{source}:{line}")
            lines[(*path, key)] = line
            result[key] = _construct(loader, value_node, (*path, key), lines, source)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, (*path, index), lines, source) for index, item in enumerate(node.value)]
    return loader.construct_object(node, deep=True)
