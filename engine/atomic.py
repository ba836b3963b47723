"""Writes that survive a kill at any moment: whole-file replacement, and append-only lines with a checksum each."""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import UserError

_CHECKSUM = re.compile(r',"crc":"([0-9a-f]{8})"}$')


def write_text(path: str | Path, text: str) -> None:
    """Replace ``path`` by ``text`` atomically (temporary file, fsync, rename): a reader sees the old or the new, whole.

    Raises:
        UserError: The folder can't be written to.
    """
    path = Path(path)
    make_folder(path.parent)
    try:
        temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            with open(temporary, "x", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise UserError(
            f"cannot write {path}: {error.strerror}", hint="check permissions and free space, or choose another folder"
        ) from None


def write_json(path: str | Path, data: Any) -> None:
    """``write_text`` of indented JSON."""
    write_text(path, json.dumps(data, indent=2, allow_nan=False) + "\n")


def make_folder(path: str | Path) -> Path:
    """Create a folder with its parents.

    Raises:
        UserError: It can't be created.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"cannot create the folder {path}: {reason}", hint="choose a folder you may write to") from None
    return path


def sync_folder(path: str | Path) -> None:
    """Make a rename in ``path`` durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def encode_line(record: dict[str, Any]) -> str:
    """One JSON line whose last key ``crc`` is the CRC-32 of the line without it."""
    text = json.dumps(record, separators=(",", ":"))
    return f'{text[:-1]},"crc":"{zlib.crc32(text.encode()):08x}"}}\n'


def decode_line(line: str) -> dict[str, Any] | None:
    """The record of one line, or None when it is torn or damaged."""
    line = line.rstrip("\n")
    match = _CHECKSUM.search(line)
    if match is None:
        return None
    text = line[: match.start()] + "}"
    if f"{zlib.crc32(text.encode()):08x}" != match.group(1):
        return None
    record = json.loads(text)
    return record if isinstance(record, dict) else None


def append_line(path: str | Path, record: dict[str, Any], *, sync: bool = False) -> None:
    """Append one record. A torn last line left by a killed writer is closed first, so that nothing is glued to it."""
    with open(path, "a+b") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(encode_line(record).encode())
        if sync:
            file.flush()
            os.fsync(file.fileno())


def read_lines(path: str | Path) -> Iterator[dict[str, Any]]:
    """All whole records of an append-only file, in order. Torn or damaged lines are left out; no file, no records."""
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            record = decode_line(line)
            if record is not None:
                yield record
