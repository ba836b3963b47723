"""Tokens cut into sequences, and the batches made of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import UserError

IGNORED_LABEL = -100
"""The label of a position that has nothing to predict."""


@dataclass(frozen=True)
class Batch:
    """Sequences with what is to be predicted at each position."""

    tokens: torch.Tensor
    """int64 [num_sequences, sequence_length]."""
    labels: torch.Tensor
    """int64 [num_sequences, sequence_length]: the next token, or ``IGNORED_LABEL``."""
    ids: np.ndarray
    """int64 [num_sequences]: which sequences these are."""


@dataclass(frozen=True)
class TokenSet:
    """One side of a corpus: its documents' tokens one after another, each document closed by the end token."""

    tokens: np.ndarray
    """Unsigned integers [num_tokens], mapped from disk."""
    token_bytes: np.ndarray
    """Unsigned integers [num_tokens], mapped from disk: bytes of the text each token stands for; 0 for the end."""
    end_of_document: int
    """Id of the end token."""
    pad_tail: bool
    """Whether a last, shorter sequence is kept and padded (held-out documents) or left out (training)."""

    def __len__(self) -> int:
        return len(self.tokens)

    def sequences(self, sequence_length: int) -> SequenceSet:
        """The set cut into sequences of ``sequence_length`` tokens."""
        return SequenceSet(self, sequence_length)


class SequenceSet:
    """Sequence i covers tokens [i·L, (i+1)·L) and predicts [i·L+1, (i+1)·L+1), so each token is predicted once.

    The first token of a document is not predicted: what stands before it belongs to another document.

    Args:
        source: The tokens.
        sequence_length: L, in tokens.
    """

    def __init__(self, source: TokenSet, sequence_length: int) -> None:
        self.source = source
        self.sequence_length = sequence_length
        num_predicted = len(source) - 1
        if num_predicted < 1:
            raise UserError("a set of documents needs two tokens or more", hint="add text to workload.data.paths")
        whole, rest = divmod(num_predicted, sequence_length)
        # Training leaves out a tail, unless there is nothing else.
        self._num_sequences = whole + int(rest > 0 and (source.pad_tail or whole == 0))

    def __len__(self) -> int:
        return self._num_sequences

    def batch(self, ids: np.ndarray) -> Batch:
        """The sequences ``ids`` (int64 [n]). A short last one is filled with the end token, its labels ignored."""
        positions, valid = self._predicted(ids)
        window = np.concatenate((positions[:, :1] - 1, positions), axis=1)
        tokens = self.source.tokens[np.minimum(window, len(self.source) - 1)].astype(np.int64)
        tokens[window >= len(self.source)] = self.source.end_of_document
        labels = np.where(valid, tokens[:, 1:], IGNORED_LABEL)
        return Batch(torch.from_numpy(tokens[:, :-1].copy()), torch.from_numpy(labels), np.asarray(ids, dtype=np.int64))

    def num_bytes_predicted(self, ids: np.ndarray) -> int:
        """Bytes of the text that the valid labels of the sequences ``ids`` stand for.

        Bits per byte of these sequences is their summed loss in nats / (ln 2 · this). The end of a document is
        predicted too and has no bytes: to know where a text ends is part of knowing the text.
        """
        positions, valid = self._predicted(ids)
        return int(self.source.token_bytes[positions[valid]].sum(dtype=np.int64))

    def _predicted(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Positions of the tokens to predict, int64 [n, L] (past the end: padding); which are valid, bool [n, L]."""
        ids = np.asarray(ids, dtype=np.int64)
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < len(self)), "sequence id out of range"
        positions = ids[:, None] * self.sequence_length + np.arange(1, self.sequence_length + 1)
        before = self.source.tokens[np.minimum(positions, len(self.source)) - 1]
        return positions, (positions < len(self.source)) & (before != self.source.end_of_document)
