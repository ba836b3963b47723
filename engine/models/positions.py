"""Where tokens stand in their sequence, and rotary positions. Shapes: B sequences, L tokens, D head dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.precision.policy import wide
from engine.rope import rotation
from engine.spec import ModelSpec


class Positions:
    """The positions of the tokens at hand, asked for by everything that depends on them.

    Here the tokens are whole sequences in order. Who splits sequences between ranks gives the decoder another object
    (``Decoder.use_positions``); its answers must depend on the length alone.
    """

    def ids(self, length: int, device: torch.device) -> Tensor:
        """Positions of ``length`` tokens held here, int64 [L]."""
        return torch.arange(length, device=device)

    def whole_length(self, length: int) -> int:
        """Tokens of the whole sequence of which ``length`` are held here."""
        return length


class RotaryPositions:
    """Rotary positions, scaled as the architecture says. Dimension i is paired with i + D/2 (Hugging Face's half-split
    convention).

    The tables are kept for the last length asked for; every layer asks for the same.
    """

    def __init__(self, spec: ModelSpec, positions: Positions) -> None:
        self._spec = spec
        self._positions = positions
        self._key: tuple[int, torch.device, torch.dtype] | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def use_positions(self, positions: Positions) -> None:
        """Turn by other positions from now on."""
        self._positions = positions
        self._key = self._tables = None

    def _tables_for(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every angle, each [L, D], the second half repeating the first."""
        key = (length, like.device, like.dtype)
        if self._tables is None or self._key != key:
            dtype = wide(like.dtype)
            turning = rotation(self._spec, self._positions.whole_length(length))
            frequencies = torch.tensor(turning.frequencies, dtype=dtype, device=like.device)
            angles = torch.outer(self._positions.ids(length, like.device).to(dtype), frequencies).repeat(1, 2)
            cos, sin = (turning.amplitude * table for table in (angles.cos(), angles.sin()))
            self._key, self._tables = key, (cos.to(like.dtype), sin.to(like.dtype))
        return self._tables

    def rotate(self, x: Tensor) -> Tensor:
        """[B, heads, L, D] to the same, each pair turned by its position's angle."""
        cos, sin = self._tables_for(x.shape[-2], x)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin
