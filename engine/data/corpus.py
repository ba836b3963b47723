"""A corpus: documents tokenised once into memory-mapped files, split into training and held-out documents.

Each corpus has a folder of its own in the cache, named by what it was made from (paths, sizes and times of the files,
tokenizer, settings), so that a start with a known corpus reads no text. It is made under another name and renamed when
complete; builders of the same corpus wait for each other.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import ValidationError

from engine.atomic import sync_folder, write_json
from engine.data.documents import SourceFile, find_files, read_documents
from engine.data.sequences import TokenSet
from engine.data.tokenizer import Encoded, Tokenizer, load_tokenizer
from engine.errors import UserError
from engine.file_lock import file_lock
from engine.schema import Schema
from engine.spec import DataSpec

CACHE_VARIABLE = "PARETUNE_CACHE"
"""Environment variable that names the cache folder."""

_FORMAT = 1
_MANIFEST = "manifest.json"
_HASH_SPACE = 2**64


@dataclass(frozen=True)
class Corpus:
    """Tokenised documents in two sets that share no document."""

    train: TokenSet
    """Documents to train on."""
    held_out: TokenSet
    """Documents for evaluation."""
    hash: str
    """Hash of the text, the tokenizer and the split: equal hashes mean equal tokens on both sides."""
    vocab_size: int
    """Ids of the tokenizer, the end of a document included."""
    num_bytes: int
    """Bytes of text on both sides (UTF-8)."""
    num_documents: int
    """Documents on both sides."""


class _SideManifest(Schema):
    num_documents: int
    """Documents."""
    num_bytes: int
    """Bytes of text."""
    num_bytes_predicted: int
    """Those of them that are not in the first token of a document, which nothing predicts."""
    file_bytes: dict[str, int]
    """Size of each file."""


class _Manifest(Schema):
    """What a complete corpus folder holds; written last."""

    schema_version: int = _FORMAT
    """Version of this file format."""
    hash: str
    """Hash of the corpus."""
    vocab_size: int
    """Ids of the tokenizer."""
    end_of_document: int
    """Id of the end token."""
    dtypes: dict[str, str]
    """numpy type of each kind of file."""
    sides: dict[str, _SideManifest]
    """The training and the held-out side."""


def prepare_corpus(data: DataSpec, cache: Path | None = None) -> Corpus:
    """The corpus of ``data``: from the cache, or tokenised now.

    Args:
        data: Where the text comes from and how it becomes tokens. Relative paths are taken from the working folder.
        cache: The cache folder. Default: ``$PARETUNE_CACHE``, else ``~/.cache/paretune``, else, where that can't be
            written, a folder of this user among the temporary files.

    Raises:
        UserError: No documents, too few for a held-out side, unreadable or binary files, bad records, a bad tokenizer,
            or a cache folder that can't be written.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    files = find_files(data)
    key = _key(data, tokenizer, files)
    roots = _cache_folders(cache)
    for root in roots:  # a cache that is full, or can't be written, may still be read
        corpus = _open(root / key)
        if corpus is not None:
            return corpus
    folder = writable_cache(cache) / key
    try:
        with _only_builder(folder):
            corpus = _open(folder)  # another process may have built it while this one waited
            if corpus is None:
                _build(folder, data, tokenizer, files)
                corpus = _open(folder)
    except OSError as error:
        raise UserError(
            f"cannot write the tokenised corpus to {folder.parent}: {error.strerror}",
            hint=f"free some space, or set {CACHE_VARIABLE} to another folder",
        ) from None
    assert corpus is not None, f"the corpus just written to {folder} is not valid"
    return corpus


def _key(data: DataSpec, tokenizer: Tokenizer, files: list[SourceFile]) -> str:
    """Name of the corpus's folder: changes when any setting or file does, without reading the files."""
    made_from = {
        "format": _FORMAT,
        "data": data.to_data(),
        "tokenizer": tokenizer.identity,
        "files": [[str(file.path), file.size_bytes, file.modified_ns] for file in files],
    }
    return hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:32]


# ------------------------------------------------------------------------------------------------------------- reading


def _open(folder: Path) -> Corpus | None:
    """The corpus in ``folder``; None when it is absent, incomplete or damaged."""
    try:
        manifest = _Manifest.model_validate_json((folder / _MANIFEST).read_text(encoding="utf-8"))
        if manifest.schema_version != _FORMAT:
            return None
        sides = {
            name: _open_side(folder, name, side, manifest.dtypes, manifest.end_of_document)
            for name, side in manifest.sides.items()
        }
        return Corpus(
            train=sides["train"],
            held_out=sides["held_out"],
            hash=manifest.hash,
            vocab_size=manifest.vocab_size,
            num_bytes=sum(side.num_bytes for side in manifest.sides.values()),
            num_documents=sum(side.num_documents for side in manifest.sides.values()),
        )
    except (OSError, ValidationError, ValueError, KeyError, TypeError):
        return None


def _open_side(folder: Path, name: str, side: _SideManifest, dtypes: dict[str, str], end: int) -> TokenSet:
    arrays = {}
    for kind, dtype in dtypes.items():
        path = folder / f"{name}.{kind}"
        if path.stat().st_size != side.file_bytes[kind]:
            raise ValueError(f"{path} has another size than when it was written")
        arrays[kind] = np.asarray(np.memmap(path, dtype=dtype, mode="r"))
    return TokenSet(arrays["tokens"], arrays["token_bytes"], end, pad_tail=name == "held_out")


# ------------------------------------------------------------------------------------------------------------ building


@dataclass
class _Split:
    """Which documents are held out: those whose hash is below ``threshold``. Equal documents stay on one side."""

    threshold: int
    smallest: int = _HASH_SPACE
    largest: int = -1

    def side(self, digest: bytes) -> str:
        """The side of a document, by the digest of its text."""
        value = int.from_bytes(digest[:8], "big")
        self.smallest, self.largest = min(self.smallest, value), max(self.largest, value)
        return "held_out" if value < self.threshold else "train"


class _SideWriter:
    """Writes the files of one side and counts what is in them. A context: the files are closed at its end."""

    def __init__(self, folder: Path, name: str, dtypes: dict[str, str], end_of_document: int) -> None:
        self.num_documents = 0
        self.num_bytes = 0
        self.num_bytes_predicted = 0
        self._end = end_of_document
        self._dtypes = dtypes
        self._files = {kind: (folder / f"{name}.{kind}").open("wb") for kind in dtypes}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._files.values():
            file.close()

    def add(self, document: Encoded) -> None:
        """Append one document and the end token."""
        columns = {"tokens": np.append(document.ids, self._end), "token_bytes": np.append(document.num_bytes, 0)}
        for kind, values in columns.items():
            self._files[kind].write(values.astype(self._dtypes[kind]).tobytes())
        self.num_documents += 1
        self.num_bytes += int(document.num_bytes.sum())
        self.num_bytes_predicted += int(document.num_bytes[1:].sum())

    def finish(self) -> _SideManifest:
        """Make the files durable and say what they hold."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        return _SideManifest(
            num_documents=self.num_documents,
            num_bytes=self.num_bytes,
            num_bytes_predicted=self.num_bytes_predicted,
            file_bytes={kind: file.tell() for kind, file in self._files.items()},
        )


def _build(folder: Path, data: DataSpec, tokenizer: Tokenizer, files: list[SourceFile]) -> None:
    """Tokenise into a temporary folder, then give it the name ``folder``."""
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=_temporary_prefix(folder)))
    try:
        split = _Split(threshold=int(data.holdout_ratio * _HASH_SPACE))
        manifest = _write(temporary, split, data, tokenizer, files)
        empty = [name for name, side in manifest.sides.items() if side.num_documents == 0]
        if empty and split.smallest < split.largest:
            # So few documents that chance left a side empty: it gets the document nearest to the threshold.
            nearest = split.smallest + 1 if empty == ["held_out"] else split.largest
            manifest = _write(temporary, _Split(nearest), data, tokenizer, files)
        _check_sides(manifest)
        write_json(temporary / _MANIFEST, manifest.to_data())
        if folder.exists():  # damaged, or it would have been opened
            os.rename(folder, tempfile.mkdtemp(dir=folder.parent, prefix=_temporary_prefix(folder)))
        os.rename(temporary, folder)
        sync_folder(folder.parent)
    finally:
        _remove_leftovers(folder)


def _write(folder: Path, split: _Split, data: DataSpec, tokenizer: Tokenizer, files: list[SourceFile]) -> _Manifest:
    """Read, split and tokenise all documents into the files of ``folder``."""
    dtypes = {
        "tokens": "<u2" if tokenizer.vocab_size <= 2**16 else "<u4",
        "token_bytes": tokenizer.token_bytes_dtype,
    }
    content = hashlib.sha256(f"{_FORMAT} {tokenizer.identity}".encode())
    with (
        _SideWriter(folder, "train", dtypes, tokenizer.end_of_document) as train,
        _SideWriter(folder, "held_out", dtypes, tokenizer.end_of_document) as held_out,
    ):
        writers = {"train": train, "held_out": held_out}
        for text in read_documents(files, data):
            digest = hashlib.blake2b(text.encode(), digest_size=32).digest()
            encoded = tokenizer.encode(text)
            if len(encoded.ids):
                side = split.side(digest)
                content.update(side.encode() + digest)
                writers[side].add(encoded)
        sides = {name: writer.finish() for name, writer in writers.items()}
    return _Manifest(
        hash=content.hexdigest()[:32],
        vocab_size=tokenizer.vocab_size,
        end_of_document=tokenizer.end_of_document,
        dtypes=dtypes,
        sides=sides,
    )


def _check_sides(manifest: _Manifest) -> None:
    num_documents = sum(side.num_documents for side in manifest.sides.values())
    if num_documents == 0:
        raise UserError("the corpus is empty: its files hold no text", hint="correct workload.data.paths or patterns")
    texts = f"{num_documents} document{'s' if num_documents > 1 else ''}"
    if not all(side.num_documents for side in manifest.sides.values()):
        raise UserError(
            f"the corpus has {texts} without two different ones: too few to hold any out",
            hint="split the text into several files or JSONL records; one file is one document",
        )
    for name, side in manifest.sides.items():
        if side.num_bytes_predicted == 0:
            raise UserError(
                f"of the corpus's {texts} the {name.replace('_', '-')} side has {side.num_documents}, with no token to "
                "predict",
                hint="add text: a document of one token has nothing that could be predicted",
            )


# --------------------------------------------------------------------------------------------------------------- cache


def _cache_folders(given: Path | None) -> list[Path]:
    """Where corpora are looked for, in this order; a folder named by the user is the only one."""
    named = given or os.environ.get(CACHE_VARIABLE)
    if named:
        return [Path(named).expanduser() / "corpora"]
    return [
        Path("~/.cache/paretune").expanduser() / "corpora",
        Path(tempfile.gettempdir()) / f"paretune-{os.getuid()}" / "corpora",
    ]


def writable_cache(given: Path | None = None) -> Path:
    """The folder that corpora are written to: the first of the cache folders where that's possible.

    Raises:
        UserError: None of them can be written to.
    """
    reasons = []
    for folder in _cache_folders(given):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
    raise UserError(
        f"cannot write tokenised text to {'; '.join(reasons)}",
        hint=f"set {CACHE_VARIABLE} to a folder you may write to",
    )


def _temporary_prefix(folder: Path) -> str:
    return f".{folder.name}."


@contextmanager
def _only_builder(folder: Path) -> Iterator[None]:
    """Hold the lock of one corpus."""
    with file_lock(folder.with_name(f"{folder.name}.lock")):
        _remove_leftovers(folder)
        yield


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders of ``folder``. Only the holder of its lock may: none has a living builder."""
    for path in folder.parent.glob(f"{_temporary_prefix(folder)}*"):
        shutil.rmtree(path, ignore_errors=True)
