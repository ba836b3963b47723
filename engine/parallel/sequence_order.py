"""Which tokens of a split sequence a rank holds, and where they stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine.models.positions import Positions


class Part(NamedTuple):
    """Consecutive tokens of a sequence that a rank holds."""

    start: int
    """Place of the first among the rank's tokens."""
    position: int
    """Position of the first in the whole sequence."""
    length: int


@dataclass(frozen=True)
class SequenceOrder:
    """Sequences are cut into 2·size chunks, and rank r holds chunk r, then chunk 2·size - 1 - r: under a causal mask
    early chunks see little and late ones much, and each such pair the same.

    Args:
        size: Ranks that a sequence is split between.
        rank: This rank.
    """

    size: int
    rank: int

    def chunks(self, rank: int) -> tuple[int, int]:
        """The chunks of a rank in the order it holds them."""
        return rank, 2 * self.size - 1 - rank

    def parts(self, rank: int, length: int) -> list[Part]:
        """What a rank holds of a sequence.

        Args:
            rank: Any of the ranks.
            length: Tokens that each rank holds.
        """
        half = length // 2
        return [Part(index * half, chunk * half, half) for index, chunk in enumerate(self.chunks(rank))]

    def split(self, sequences: Tensor) -> Tensor:
        """This rank's tokens of whole sequences [B, size·L], in its order: [B, L]."""
        chunks = sequences.unflatten(1, (2 * self.size, -1))
        return chunks[:, list(self.chunks(self.rank))].flatten(1, 2)


class SplitPositions(Positions):
    """Positions of the tokens that a rank holds of split sequences."""

    def __init__(self, order: SequenceOrder) -> None:
        self._order = order

    def ids(self, length: int, device: torch.device) -> Tensor:
        """See ``Positions``."""
        parts = self._order.parts(self._order.rank, length)
        return torch.cat([torch.arange(p.position, p.position + p.length, device=device) for p in parts])

    def whole_length(self, length: int) -> int:
        """See ``Positions``."""
        return length * self._order.size
