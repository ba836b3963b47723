"""Text to token ids, with the number of bytes of the text that each token stands for.

The byte counts make bits per byte exact under every tokenizer: they add up to the bytes of each document, whatever
a tokenizer normalises away or splits within a character.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from engine.errors import UserError

if TYPE_CHECKING:
    import tokenizers

BYTES = "bytes"
"""The name of the byte tokenizer in ``DataSpec.tokenizer``."""

_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "[EOS]")


@dataclass(frozen=True)
class Encoded:
    """One document's tokens, without the end-of-document token.

    ``ids`` (int64 [n]) are the tokens; ``num_bytes`` (int64 [n]) the bytes of the text each stands for, which add up
    to the document's.
    """

    ids: np.ndarray
    num_bytes: np.ndarray


class Tokenizer(Protocol):
    """What a corpus needs of a tokenizer."""

    vocab_size: int
    """One more than the largest id, the end-of-document token included."""
    end_of_document: int
    """The id put after each document; ``encode`` never gives it."""
    token_bytes_dtype: str
    """numpy type that holds the bytes of any token."""
    identity: str
    """Equal for two tokenizers only if they encode alike."""

    def encode(self, text: str) -> Encoded:
        """Tokens of one document."""


class ByteTokenizer:
    """The 256 byte values of UTF-8 text, and 256 as the end of a document."""

    vocab_size = 257
    end_of_document = 256
    token_bytes_dtype = "|u1"
    identity = BYTES

    def encode(self, text: str) -> Encoded:
        """One token a byte."""
        ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int64)
        return Encoded(ids, np.ones_like(ids))


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` of the Hugging Face ``tokenizers`` library.

    The end-of-document token is the ``eos_token`` of a ``tokenizer_config.json`` beside it, else the special token with
    a customary name, else one id more. Special tokens spelt out in the text are encoded as plain text, so that the text
    can't end a document.
    """

    token_bytes_dtype = "<u4"  # a normaliser may drop text of any length

    def __init__(self, path: Path) -> None:
        """Load ``path`` (the file, or the folder that holds it).

        Raises:
            UserError: There is no such file, or it is no tokenizer.
        """
        path = path / "tokenizer.json" if path.is_dir() else path
        self._tokenizer, content = _load(path)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        end = _end_token(self._tokenizer, path.with_name("tokenizer_config.json"))
        largest = max(vocabulary.values(), default=-1)
        self.end_of_document = largest + 1 if end is None else vocabulary[end]
        self.vocab_size = max(largest, self.end_of_document) + 1
        self.identity = f"{hashlib.sha256(content).hexdigest()}:{self.end_of_document}"

    def encode(self, text: str) -> Encoded:
        """Tokens of one document. A token stands for the bytes from where the one before it ended to its own end; of a
        character that is split among tokens the first has all bytes; what follows the last token belongs to it."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids = np.asarray(encoding.ids, dtype=np.int64)
        if not len(ids):
            return Encoded(ids, ids.copy())
        starts = _byte_positions(text)
        ends = np.maximum.accumulate(starts[np.asarray(encoding.offsets, dtype=np.int64)[:, 1]])
        ends[-1] = starts[-1]
        return Encoded(ids, np.diff(ends, prepend=0))


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that ``DataSpec.tokenizer`` names.

    Raises:
        UserError: Neither ``bytes`` nor a tokenizer file.
    """
    return ByteTokenizer() if name == BYTES else HuggingFaceTokenizer(Path(name).expanduser())


def _load(path: Path) -> tuple[tokenizers.Tokenizer, bytes]:
    import tokenizers

    hint = f"set workload.data.tokenizer to {BYTES} or to a Hugging Face tokenizer.json"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the tokenizer {path}: {error.strerror}", hint=hint) from None
    try:
        tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises plain Exception
        raise UserError(f"{path} is not a tokenizer of the tokenizers library: {error}", hint=hint) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer, content


def _end_token(tokenizer: tokenizers.Tokenizer, config_path: Path) -> str | None:
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    try:
        config = json.loads(config_path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = None
    stated = config.get("eos_token") if isinstance(config, dict) else None
    stated = stated.get("content") if isinstance(stated, dict) else stated
    return next((name for name in (stated, *_END_NAMES) if name in special), None)


def _byte_positions(text: str) -> np.ndarray:
    """Position in UTF-8 of each character and of the end, int64 [len(text) + 1]."""
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    widths = 1 + (code_points > 0x7F).astype(np.int64) + (code_points > 0x7FF) + (code_points > 0xFFFF)
    return np.concatenate(([0], np.cumsum(widths)))
