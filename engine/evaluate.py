"""The held-out loss: the same tokens every time, spread over the data-parallel ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from engine.data.sequences import IGNORED_LABEL, SequenceSet
from engine.errors import UserError
from engine.step import Stepper


@dataclass(frozen=True)
class Evaluation:
    """One evaluation, equal on all ranks."""

    loss: float
    """Mean over all valid tokens, nats per token; may be non-finite."""
    bits_per_byte: float
    """The same in bits per byte of the text predicted."""
    num_tokens: int
    """Valid tokens."""
    seconds: float
    """Wall time."""


class Evaluator:
    """Evaluates on the first sequences of the held-out set, up to a number of tokens.

    Args:
        sequences: The held-out sequences.
        stepper: What computes the loss; its context says which part is this rank's.
        local_batch_size: Sequences per call and data-parallel rank: as many as in training, since a pipeline's shapes
            are fixed.
        max_tokens: Upper bound of the tokens, at least one sequence.

    Raises:
        UserError: There is nothing to predict in them.
    """

    def __init__(self, sequences: SequenceSet, stepper: Stepper, local_batch_size: int, max_tokens: int) -> None:
        count = min(len(sequences), max(1, max_tokens // sequences.sequence_length))
        self._ids = np.arange(count, dtype=np.int64)
        self._sequences = sequences
        self._stepper = stepper
        self._local_batch_size = local_batch_size
        self._num_bytes = sequences.num_bytes_predicted(self._ids)
        if self._num_bytes == 0:
            raise UserError(
                f"nothing to predict in the first {count} held-out sequences",
                hint="raise evaluation.max_tokens or workload.data.holdout_ratio",
            )

    def run(self, is_wanted: Callable[[], bool] = lambda: True) -> Evaluation | None:
        """Evaluate; called on all ranks.

        Args:
            is_wanted: Asked before each batch on every rank; one that says no ends the evaluation on all.

        Returns:
            The evaluation, None when it was given up.
        """
        start = time.perf_counter()
        context = self._stepper.context
        total, num_valid = 0.0, 0
        for first in range(0, len(self._ids), self._local_batch_size * context.dp_size):
            if not context.all_agree(is_wanted()):
                return None
            tokens, labels = self._slice(first + context.dp_rank * self._local_batch_size)
            loss_sum, valid = self._stepper.evaluate(tokens, labels)
            total, num_valid = total + loss_sum, num_valid + valid
        return Evaluation(
            loss=total / num_valid,
            bits_per_byte=total / (math.log(2) * self._num_bytes),
            num_tokens=num_valid,
            seconds=time.perf_counter() - start,
        )

    def _slice(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and labels int64 [local_batch_size, L] from sequence ``start``; beyond the end nothing is valid."""
        ids = self._ids[start : start + self._local_batch_size]
        num_missing = self._local_batch_size - len(ids)
        batch = self._sequences.batch(np.concatenate((ids, np.zeros(num_missing, dtype=np.int64))))
        batch.labels[len(ids) :] = IGNORED_LABEL
        return batch.tokens, batch.labels
