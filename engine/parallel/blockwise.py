"""Causal attention in tiles: blocks of keys are seen one after another, in any order that begins with a query's own.

What a query has seen so far is its output and the logarithm of the sum of its exponentiated logits (Milakov and
Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867; Dao, "FlashAttention-2", arXiv 2307.08691,
sections 2 and 3). Arithmetic is in at least fp32.

Shapes: B sequences, L tokens held here, Hq and Hkv heads, G = Hq / Hkv, D and Dv head dimensions; a tile has T queries
and S keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.parallel.sequence_order import Part
from engine.precision.policy import wide

TILE_TOKENS = 512
"""At most so many queries and keys in a tile."""


@dataclass(frozen=True)
class Tile:
    """Queries and keys of which some see each other."""

    queries: Part
    keys: Part
    window: int | None
    """Tokens that a query sees; None for all before it."""

    @property
    def nearest(self) -> int:
        """Least distance of a key before a query; negative where keys come later."""
        return self.queries.position - (self.keys.position + self.keys.length - 1)

    @property
    def farthest(self) -> int:
        """Greatest distance of a key before a query."""
        return self.queries.position + self.queries.length - 1 - self.keys.position

    @property
    def is_hidden(self) -> bool:
        """Whether no query sees any key."""
        return self.farthest < 0 or (self.window is not None and self.nearest >= self.window)

    def hidden(self, device: torch.device) -> Tensor | None:
        """Which keys a query does not see, bool [T, S]; None where each sees all."""
        if self.nearest >= 0 and (self.window is None or self.farthest < self.window):
            return None
        rows = torch.arange(self.queries.length, device=device) + self.queries.position
        distance = rows[:, None] - (torch.arange(self.keys.length, device=device) + self.keys.position)
        return (distance < 0) if self.window is None else (distance < 0) | (distance >= self.window)


def tiles(queries: Sequence[Part], keys: Sequence[Part], window: int | None, size: int = TILE_TOKENS) -> list[Tile]:
    """The tiles in which a query sees a key. The latest keys come first, so that of keys at its own place a query sees
    itself in its first tile.

    Args:
        queries: Held by a rank.
        keys: Held by a rank.
        window: Tokens that a query sees, itself included; None for all before it.
        size: At most so many tokens on a side.
    """
    latest_first = sorted(_cut(keys, size), key=lambda part: -part.position)
    found = (Tile(some, others, window) for some in _cut(queries, size) for others in latest_first)
    return [tile for tile in found if not tile.is_hidden]


def _cut(parts: Sequence[Part], size: int) -> list[Part]:
    return [
        Part(part.start + first, part.position + first, min(size, part.length - first))
        for part in parts
        for first in range(0, part.length, size)
    ]


class Queries:
    """Queries, those that share a key head side by side.

    Args:
        query: [B, Hq, L, D].
        num_kv_heads: Hkv.
        scale: Factor on the logits.
    """

    def __init__(self, query: Tensor, num_kv_heads: int, scale: float) -> None:
        self.grouped = query.to(wide(query.dtype)).unflatten(1, (num_kv_heads, -1))
        self._scale = scale

    def nothing_seen(self, value_dim: int, sinks: Tensor | None) -> Seen:
        """Where to begin.

        Args:
            value_dim: Dv.
            sinks: A logit per query head [Hq] that carries no value, or None.
        """
        shape = self.grouped.shape[:-1]
        log_sum = self.grouped.new_full(shape, float("-inf"))
        if sinks is not None:
            log_sum = log_sum.copy_(sinks.view(1, *shape[1:3], 1))
        return Seen(self.grouped.new_zeros(*shape, value_dim), log_sum)

    def gradients(self, grad: Tensor, out: Tensor, log_sum: Tensor) -> Gradients:
        """The backward pass.

        Args:
            grad: Gradient of the output [B, Hq, L, Dv].
            out: The output [B, Hq, L, Dv].
            log_sum: Logarithm of the sum of exponentiated logits [B, Hkv, G, L].
        """
        heads = self.grouped.shape[1:3]
        grad, out = (tensor.to(log_sum.dtype).unflatten(1, heads) for tensor in (grad, out))
        return Gradients(grad, (grad * out).sum(-1), log_sum, torch.zeros_like(self.grouped))

    def of(self, tile: Tile) -> Tensor:
        """[B, Hkv, G·T, D]"""
        return _rows(self.grouped, tile.queries).flatten(2, 3)

    def logits(self, keys: Tensor, tile: Tile) -> Tensor:
        """[B, Hkv, G, T, S]

        Args:
            keys: Of the tile, [B, Hkv, S, D].
            tile: The tile.
        """
        logits = (self.of(tile) @ keys.transpose(-1, -2)).mul_(self._scale).unflatten(2, (self.grouped.shape[2], -1))
        hidden = tile.hidden(keys.device)
        return logits if hidden is None else logits.masked_fill_(hidden, float("-inf"))

    @property
    def scale(self) -> float:
        """Factor on the logits."""
        return self._scale


@dataclass
class Seen:
    """What queries have seen so far."""

    out: Tensor
    """[B, Hkv, G, L, Dv]"""
    log_sum: Tensor
    """Logarithm of the sum of exponentiated logits [B, Hkv, G, L]."""

    def see(self, queries: Queries, keys: Tensor, values: Tensor, tile: Tile) -> None:
        """Take in a tile.

        Args:
            queries: All of this rank.
            keys: The block [B, Hkv, L, D].
            values: The block [B, Hkv, L, Dv].
            tile: Places of both.
        """
        keys, values = (_rows(block, tile.keys).to(self.out.dtype) for block in (keys, values))
        logits = queries.logits(keys, tile)
        before = _rows(self.log_sum, tile.queries, dim=-1)
        after = torch.logaddexp(before, logits.logsumexp(-1))
        shares = logits.sub_(after[..., None]).exp_()
        out = _rows(self.out, tile.queries)
        out.mul_((before - after).exp_()[..., None]).add_(_mix(shares, values))
        before.copy_(after)


@dataclass
class Gradients:
    """The backward pass: with P the shares of the softmax, dS = P (dP - sum(dO O))."""

    grad: Tensor
    """Of the output [B, Hkv, G, L, Dv]."""
    inner: Tensor
    """Gradient times output, summed over Dv: [B, Hkv, G, L]."""
    log_sum: Tensor
    """Of the forward pass [B, Hkv, G, L]."""
    grouped: Tensor
    """Gradient of the queries so far [B, Hkv, G, L, D]."""

    def see(self, queries: Queries, keys: Tensor, values: Tensor, tile: Tile, share: Tensor) -> None:
        """Take in a tile.

        Args:
            queries: All of this rank.
            keys: The block [B, Hkv, L, D].
            values: The block [B, Hkv, L, Dv].
            tile: Places of both.
            share: Gradient of the block so far [B, Hkv, L, D + Dv], added to.
        """
        keys, values = (_rows(block, tile.keys).to(share.dtype) for block in (keys, values))
        shares = queries.logits(keys, tile).sub_(_rows(self.log_sum, tile.queries, dim=-1)[..., None]).exp_()
        grad = _rows(self.grad, tile.queries)
        of_shares = _mix(grad, values.transpose(-1, -2))
        of_logits = of_shares.sub_(_rows(self.inner, tile.queries, dim=-1)[..., None]).mul_(shares).mul_(queries.scale)
        _rows(self.grouped, tile.queries).add_(_mix(of_logits, keys))
        of_keys, of_values = _rows(share, tile.keys).split((keys.shape[-1], values.shape[-1]), dim=-1)
        of_keys.add_(of_logits.flatten(2, 3).transpose(-1, -2) @ queries.of(tile))
        of_values.add_(shares.flatten(2, 3).transpose(-1, -2) @ grad.flatten(2, 3))

    def of_queries(self) -> Tensor:
        """[B, Hq, L, D]"""
        return self.grouped.flatten(1, 2)

    def of_sinks(self, sinks: Tensor) -> Tensor:
        """[Hq]: a sink's share of the softmax gives nothing, and is taken from all others."""
        heads = self.log_sum.shape[1:3]
        shares = (sinks.to(self.log_sum.dtype).view(1, *heads, 1) - self.log_sum).exp()
        return shares.mul(self.inner).sum((0, 3)).neg().flatten().to(sinks.dtype)


def _rows(tensor: Tensor, part: Part, dim: int = -2) -> Tensor:
    """The tokens of a part, sharing storage."""
    return tensor.narrow(dim, part.start, part.length)


def _mix(weights: Tensor, rows: Tensor) -> Tensor:
    """[B, Hkv, G, T, S] and [B, Hkv, S, Dv] to [B, Hkv, G, T, Dv], all groups in one product."""
    return (weights.flatten(2, 3) @ rows).unflatten(2, weights.shape[2:4])
