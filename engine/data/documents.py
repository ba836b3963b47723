"""The documents of a corpus: which files it is made of, and the text in them, in a fixed order."""

from __future__ import annotations

import fnmatch
import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import UserError
from engine.spec import DataSpec

PYTHON_STDLIB = "python-stdlib"
"""The path that stands for the source code of the running Python's standard library."""

_RECORD_SUFFIXES = (".jsonl", ".ndjson")
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
_MAX_UNDECODABLE_RATIO = 0.01
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus, with what tells cheaply whether it changed."""

    path: Path
    size_bytes: int
    modified_ns: int
    optional: bool = False
    """Passed over, not refused, when it is no UTF-8 text: the standard library's tests have such files on purpose."""


def find_files(data: DataSpec) -> list[SourceFile]:
    """The files of a corpus: ``data.paths`` in the order given, each folder's files by relative path.

    Hidden files and folders are passed over in folders, links to folders are not followed, and a file that is reached
    twice is taken once. A file named in ``data.paths`` is taken whatever its name.

    Raises:
        UserError: A path that doesn't exist or can't be read, or a folder without any matching file.
    """
    found: dict[Path, SourceFile] = {}
    for given in data.paths:
        standard = given == PYTHON_STDLIB
        if standard:
            paths = _walk(Path(sysconfig.get_paths()["stdlib"]), ("*.py",), skip=_NOT_LIBRARY)
        else:
            paths = _given_files(given, data.patterns)
        for path in paths:
            if path not in found:
                status = _readable(path).stat()
                found[path] = SourceFile(path, status.st_size, status.st_mtime_ns, optional=standard)
    return list(found.values())


def read_documents(files: list[SourceFile], data: DataSpec) -> Iterator[str]:
    """The text of each document: of a text file the whole, of a JSONL file each record. Empty ones are passed over.

    Ends before the document that would bring the text above ``data.max_bytes``; later files are not read at all.

    Raises:
        UserError: A binary file, a bad JSONL record (with its line), or a first document above ``data.max_bytes``.
    """
    num_bytes = 0
    for file in files:
        for text in _file_documents(file, data.text_key):
            size = len(text.encode())
            if data.max_bytes is not None and num_bytes + size > data.max_bytes:
                if num_bytes == 0:
                    raise UserError(
                        f"the first document ({file.path}) has {size} bytes, more than max_bytes = {data.max_bytes}",
                        hint=f"set workload.data.max_bytes to {size} or more; documents are taken whole",
                    )
                return
            num_bytes += size
            if text:
                yield text
            if num_bytes == data.max_bytes:
                return


def _given_files(given: str, patterns: tuple[str, ...]) -> list[Path]:
    path = Path(os.path.abspath(os.path.expanduser(given)))
    if path.is_dir():
        files = _walk(path, patterns)
        if not files:
            raise UserError(
                f"no file in {path} matches the patterns {', '.join(patterns)}",
                hint="set workload.data.patterns, or name another folder in workload.data.paths",
            )
        return files
    if not path.exists():
        raise UserError(
            f"the corpus path {given!r} does not exist",
            hint=f"correct workload.data.paths: files, folders (relative ones are taken from {Path.cwd()}), "
            f"or {PYTHON_STDLIB}",
        )
    if not path.is_file():
        raise UserError(f"{path} is neither a file nor a folder", hint="correct workload.data.paths")
    return [path]


def _walk(root: Path, patterns: tuple[str, ...], skip: set[str] | frozenset[str] = frozenset()) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise UserError(f"cannot read the folder {error.filename}: {error.strerror}", hint="change its permissions")

    relative = []
    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        relative += [
            Path(folder, name).relative_to(root).as_posix()
            for name in names
            if not name.startswith(".") and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        ]
    # Dangling links are no files.
    return [path for path in (root / name for name in sorted(relative)) if path.is_file()]


def _readable(path: Path) -> Path:
    if not os.access(path, os.R_OK):
        raise UserError(f"no permission to read {path}", hint="change its permissions or owner")
    return path


def _file_documents(file: SourceFile, text_key: str) -> Iterator[str]:
    try:
        if file.path.suffix in _RECORD_SUFFIXES:
            yield from _records(file.path, text_key)
            return
        content = file.path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read {file.path}: {error.strerror}", hint="check the file, or take it out of workload.data.paths"
        ) from None
    text = _decode(content)
    if text is not None:
        yield text
    elif not file.optional:
        raise UserError(
            f"{file.path} is not UTF-8 text",
            hint="convert or unpack it, or leave it out through workload.data.patterns",
        )


def _records(path: Path, text_key: str) -> Iterator[str]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                hint = "each line of a .jsonl file must be one JSON object"
                raise UserError(f"not a JSON record: {error}", hint=hint, where=where) from None
            if not isinstance(record, dict):
                raise UserError(
                    f"a record must be a JSON object, got {type(record).__name__}",
                    hint=f'write {{"{text_key}": "..."}}',
                    where=where,
                )
            if not isinstance(record.get(text_key), str):
                problem = "is not text" if text_key in record else f"is missing; keys: {', '.join(record)}"
                hint = "set workload.data.text_key to the key of the text"
                raise UserError(f"the record's {text_key!r} {problem}", hint=hint, where=where)
            # JSON can spell half a surrogate pair, which is no text: it is replaced like any undecodable byte.
            yield record[text_key].encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _decode(content: bytes) -> str | None:
    """UTF-8 text without a byte order mark, a few undecodable bytes replaced; None for a binary file."""
    text = content.decode("utf-8-sig", "replace")
    num_replaced = text.count(_REPLACEMENT) - content.count(_REPLACEMENT.encode())
    return None if b"\0" in content or num_replaced > max(8, _MAX_UNDECODABLE_RATIO * len(content)) else text
