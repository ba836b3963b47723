"""Causal attention in tiles: blocks of keys are seen one after another, in any order that begins with a query's own.

What a query has seen so far is its output and the logarithm of the sum of its exponentiated logits (Milakov and
Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867; Dao, "FlashAttention-2", arXiv 2307.08691,
sections 2 and 3). Sums are in at least fp32. Tiles without a window's edge go through torch's fused kernel where it
tells that logarithm (on the CPU, values as wide as keys), others through products of matrices.

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
from engine.torch_private import flash_attention, flash_attention_backward

TILE_TOKENS = 512
"""At most so many queries and keys in a tile whose logits are held."""


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

    @property
    def is_whole(self) -> bool:
        """Whether each query sees all keys."""
        return self.nearest >= 0 and (self.window is None or self.farthest < self.window)

    @property
    def is_diagonal(self) -> bool:
        """Whether each query sees the keys up to its own, of keys at the same places."""
        same = self.queries[1:] == self.keys[1:]
        return same and (self.window is None or self.farthest < self.window)

    def hidden(self, device: torch.device) -> Tensor:
        """Which keys a query does not see, bool [T, S]."""
        rows = torch.arange(self.queries.length, device=device) + self.queries.position
        distance = rows[:, None] - (torch.arange(self.keys.length, device=device) + self.keys.position)
        return (distance < 0) if self.window is None else (distance < 0) | (distance >= self.window)


def tiles(queries: Sequence[Part], keys: Sequence[Part], window: int | None, size: int) -> list[Tile]:
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


@dataclass(frozen=True)
class Queries:
    """A rank's queries, and how they look at keys."""

    query: Tensor
    """[B, Hq, L, D]"""
    scale: float
    """Factor on the logits."""
    fused: bool
    """Whether a fused kernel takes the tiles that it can."""

    @classmethod
    def of(cls, query: Tensor, value_dim: int, scale: float) -> Queries:
        """Queries that look at values of ``value_dim``."""
        return cls(query, scale, query.device.type == "cpu" and query.shape[-1] == value_dim)

    def tiles(self, held: Sequence[Part], others: Sequence[Part], window: int | None) -> list[Tile]:
        """The tiles in which they see keys.

        Args:
            held: Parts of the sequence that the queries are.
            others: Parts that the keys are.
            window: Tokens that a query sees, itself included; None for all before it.
        """
        return tiles(held, others, window, self.query.shape[2] if self.fused and window is None else TILE_TOKENS)

    def takes_fused(self, tile: Tile) -> bool:
        """Whether the fused kernel takes a tile."""
        return self.fused and (tile.is_whole or tile.is_diagonal)

    def at(self, tile: Tile) -> Tensor:
        """Those of a tile, [B, Hq, T, D]."""
        return _rows(self.query, tile.queries)

    def logits(self, keys: Tensor, tile: Tile) -> Tensor:
        """[B, Hq, T, S] of a tile's keys [B, Hkv, S, D]."""
        logits = _product(self.at(tile).to(keys.dtype), keys.transpose(-1, -2)).mul_(self.scale)
        return logits if tile.is_whole else logits.masked_fill_(tile.hidden(keys.device), float("-inf"))


@dataclass
class Seen:
    """What queries have seen so far."""

    out: Tensor
    """[B, Hq, L, Dv]"""
    log_sum: Tensor
    """Logarithm of the sum of exponentiated logits [B, Hq, L]."""

    @classmethod
    def nothing(cls, query: Tensor, value_dim: int, sinks: Tensor | None) -> Seen:
        """Where to begin.

        Args:
            query: [B, Hq, L, D].
            value_dim: Dv.
            sinks: A logit per query head [Hq] that carries no value, or None.
        """
        dtype = wide(query.dtype)
        log_sum = query.new_full(query.shape[:-1], float("-inf"), dtype=dtype)
        if sinks is not None:
            log_sum.copy_(sinks[:, None])
        return cls(query.new_zeros(*query.shape[:-1], value_dim, dtype=dtype), log_sum)

    def see(self, queries: Queries, keys: Tensor, values: Tensor, tile: Tile) -> None:
        """Take in a tile.

        Args:
            queries: All of this rank.
            keys: The block [B, Hkv, L, D].
            values: The block [B, Hkv, L, Dv].
            tile: Places of both.
        """
        keys, values = _rows(keys, tile.keys), _rows(values, tile.keys)
        out, before = _rows(self.out, tile.queries), _rows(self.log_sum, tile.queries, dim=-1)
        if queries.takes_fused(tile):
            causal = tile.is_diagonal
            share, log_sum = flash_attention(queries.at(tile), keys, values, causal=causal, scale=queries.scale)
            after = torch.logaddexp(before, log_sum)
            share = share * (log_sum - after).exp_()[..., None]
        else:
            keys, values = keys.to(out.dtype), values.to(out.dtype)
            logits = queries.logits(keys, tile)
            after = torch.logaddexp(before, logits.logsumexp(-1))
            share = _product(logits.sub_(after[..., None]).exp_(), values)
        out.mul_((before - after).exp_()[..., None]).add_(share)
        before.copy_(after)


@dataclass
class Gradients:
    """The backward pass: with P the shares of the softmax, dS = P (dP - sum(dO O))."""

    grad: Tensor
    """Of the output [B, Hq, L, Dv]."""
    out: Tensor
    """The output [B, Hq, L, Dv]."""
    log_sum: Tensor
    """Of the forward pass [B, Hq, L]."""
    inner: Tensor
    """Gradient times output, summed over Dv: [B, Hq, L]."""
    query: Tensor
    """Gradient of the queries so far [B, Hq, L, D]."""

    @classmethod
    def of(cls, grad: Tensor, out: Tensor, log_sum: Tensor, query: Tensor) -> Gradients:
        """Where to begin; see the fields."""
        inner = (grad.to(log_sum.dtype) * out).sum(-1)
        return cls(grad.contiguous(), out, log_sum, inner, torch.zeros_like(query, dtype=log_sum.dtype))

    def see(self, queries: Queries, keys: Tensor, values: Tensor, tile: Tile, share: Tensor) -> None:
        """Take in a tile.

        Args:
            queries: All of this rank.
            keys: The block [B, Hkv, L, D].
            values: The block [B, Hkv, L, Dv].
            tile: Places of both.
            share: Gradient of the block so far [B, Hkv, L, D + Dv], added to.
        """
        keys, values = _rows(keys, tile.keys), _rows(values, tile.keys)
        grad, log_sum = _rows(self.grad, tile.queries), _rows(self.log_sum, tile.queries, dim=-1)
        query = queries.at(tile)
        if queries.takes_fused(tile):
            out, causal = _rows(self.out, tile.queries), tile.is_diagonal
            found = flash_attention_backward(
                grad, query, keys, values, out, log_sum, causal=causal, scale=queries.scale
            )
        else:
            keys, values, query, grad = (tensor.to(share.dtype) for tensor in (keys, values, query, grad))
            shares = queries.logits(keys, tile).sub_(log_sum[..., None]).exp_()
            of_logits = _product(grad, values.transpose(-1, -2)).sub_(
                _rows(self.inner, tile.queries, dim=-1)[..., None]
            )
            of_logits.mul_(shares).mul_(queries.scale)
            num_heads = keys.shape[1]
            found = (
                _product(of_logits, keys),
                _together(of_logits, num_heads).transpose(-1, -2) @ _together(query, num_heads),
                _together(shares, num_heads).transpose(-1, -2) @ _together(grad, num_heads),
            )
        of_queries, of_keys, of_values = found
        _rows(self.query, tile.queries).add_(of_queries)
        _rows(share, tile.keys).add_(torch.cat((of_keys, of_values), dim=-1))

    def of_sinks(self, sinks: Tensor) -> Tensor:
        """[Hq]: a sink's share of the softmax gives nothing, and is taken from all others."""
        shares = (sinks.to(self.log_sum.dtype)[:, None] - self.log_sum).exp()
        return shares.mul(self.inner).sum((0, 2)).neg().to(sinks.dtype)


def _rows(tensor: Tensor, part: Part, dim: int = -2) -> Tensor:
    """The tokens of a part, sharing storage."""
    return tensor.narrow(dim, part.start, part.length)


def _together(rows: Tensor, num_kv_heads: int) -> Tensor:
    """[B, Hq, T, X] to [B, Hkv, G·T, X]: query heads that share a key head one below the other."""
    return rows.unflatten(1, (num_kv_heads, -1)).flatten(2, 3)


def _product(rows: Tensor, matrices: Tensor) -> Tensor:
    """[B, Hq, T, X] and a matrix per key head [B, Hkv, X, Y] to [B, Hq, T, Y]."""
    return (_together(rows, matrices.shape[1]) @ matrices).view(*rows.shape[:-1], -1)
