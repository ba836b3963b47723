"""Causal attention of a sequence that is split between the ranks of a group, and how they see each other's keys.

Each rank holds the queries, keys and values of an early and a late part of every sequence (``engine.parallel.
sequence_order``). Every rank's keys and values come by as one block after another, passed around a ring (Liu et al.,
"Ring Attention with Blockwise Transformers for Near-Infinite Context", arXiv 2310.01889) or gathered at once; what a
query has seen so far is kept as its output and the logarithm of its softmax's denominator, in at least fp32. The
backward pass sees all blocks once more and sums the gradients of keys and values at home. Neither holds more logits
than those of one tile.

Shapes: B sequences, L tokens held here, Hq and Hkv heads, G = Hq / Hkv, D and Dv head dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from engine.parallel.blockwise import Gradients, Queries, Seen, Tile
from engine.parallel.sequence_order import SequenceOrder


class Exchange(Protocol):
    """How ranks see each other's blocks of keys and values."""

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every rank's block with the rank it belongs to: this rank's own, then those of the ranks before it, the
        nearest first. What comes next is on its way while a block is looked at.

        Args:
            own: This rank's; of equal shape on all ranks.
        """

    def sum_home(self, shares: Iterator[Tensor]) -> Tensor:
        """The sum of what all ranks found for this rank's block.

        Args:
            shares: What this rank found for each block, in the order of ``blocks``; on its way to others while the
                next is computed.
        """


class Ring:
    """Blocks are handed to the next rank and taken from the one before; gradients travel the same way.

    A rank sends size - 1 messages of a block's size in each of ``blocks`` and ``sum_home``.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """See ``Exchange``."""
        block = own
        for step in range(self._size - 1):
            transfer = self._pass_on(block)
            yield (self._rank - step) % self._size, block
            block = transfer.wait()
        yield (self._rank + 1) % self._size, block

    def sum_home(self, shares: Iterator[Tensor]) -> Tensor:
        """See ``Exchange``. The sum of a block begins at the next rank and comes home last."""
        own = next(shares)
        transfer = self._pass_on(next(shares))
        for share in shares:
            transfer = self._pass_on(transfer.wait().add_(share))
        return transfer.wait().add_(own)

    def _pass_on(self, block: Tensor) -> _Transfer:
        received = torch.empty_like(block)
        to, source = (self._rank + 1) % self._size, (self._rank - 1) % self._size
        operations = [
            dist.P2POp(dist.isend, block, group=self._group, group_peer=to),
            dist.P2POp(dist.irecv, received, group=self._group, group_peer=source),
        ]
        return _Transfer(dist.batch_isend_irecv(operations), block, received)


@dataclass
class _Transfer:
    works: list[dist.Work]
    sent: Tensor  # kept until it is out
    received: Tensor

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


class AllGather:
    """All blocks are gathered at once, and gradients reduced and scattered: fewer and larger messages than a ring's,
    for which all ranks' blocks are held together."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """See ``Exchange``."""
        gathered = own.new_empty(self._size, *own.shape)
        work = dist.all_gather_single(gathered, own[None], group=self._group, async_op=True)
        yield self._rank, own
        work.wait()
        for step in range(1, self._size):
            owner = (self._rank - step) % self._size
            yield owner, gathered[owner]

    def sum_home(self, shares: Iterator[Tensor]) -> Tensor:
        """See ``Exchange``."""
        found = list(shares)
        by_owner = torch.stack([found[(self._rank - owner) % self._size] for owner in range(self._size)])
        home = torch.empty_like(by_owner[:1])
        dist.reduce_scatter_single(home, by_owner, group=self._group)
        return home[0]


class SplitAttention:
    """The ``core`` of an attention module whose sequences are split; see ``engine.models.attention.attend``.

    Args:
        exchange: How ranks see each other's keys and values.
        order: Which parts of a sequence a rank holds.
    """

    def __init__(self, exchange: Exchange, order: SequenceOrder) -> None:
        self.exchange = exchange
        self.order = order

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        window: int | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """[B, Hq, L, D], [B, Hkv, L, D] and [B, Hkv, L, Dv] of the tokens held here to [B, Hq, L, Dv]."""
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        mixed: Tensor = _SplitAttention.apply(query, key, value, sinks, self, window, scale)
        return mixed

    def look(self, queries: Queries, own: Tensor, window: int | None) -> Iterator[tuple[Tensor, Tensor, list[Tile]]]:
        """Every rank's keys [B, Hkv, L, D] and values [B, Hkv, L, Dv], with the tiles that this rank's queries see.

        Args:
            queries: This rank's.
            own: Its keys and values side by side, [B, Hkv, L, D + Dv].
            window: Tokens that a query sees, itself included; None for all before it.
        """
        length, key_dim = queries.query.shape[2:]
        held = self.order.parts(self.order.rank, length)
        for owner, block in self.exchange.blocks(own):
            keys, values = block.tensor_split((key_dim,), dim=-1)
            yield keys, values, queries.tiles(held, self.order.parts(owner, length), window)


class _SplitAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        core: SplitAttention,
        window: int | None,
        scale: float,
    ) -> Tensor:
        own = torch.cat((key, value), dim=-1)  # one message, and what is kept for the backward pass
        queries = Queries.of(query, value.shape[-1], scale)
        seen = Seen.nothing(query, value.shape[-1], sinks)
        for keys, values, tiles in core.look(queries, own, window):
            for tile in tiles:
                seen.see(queries, keys, values, tile)
        out = seen.out.to(query.dtype)
        ctx.save_for_backward(query, own, out, seen.log_sum, sinks)
        ctx.core, ctx.window, ctx.scale = core, window, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, own, out, log_sum, sinks = ctx.saved_tensors
        queries = Queries.of(query, out.shape[-1], ctx.scale)
        gradients = Gradients.of(grad, out, log_sum, query)

        def shares() -> Iterator[Tensor]:
            for keys, values, tiles in ctx.core.look(queries, own, ctx.window):
                share = torch.zeros_like(own, dtype=log_sum.dtype)
                for tile in tiles:
                    gradients.see(queries, keys, values, tile, share)
                yield share

        key, value = ctx.core.exchange.sum_home(shares()).to(own.dtype).split((query.shape[-1], out.shape[-1]), dim=-1)
        of_sinks = None if sinks is None else gradients.of_sinks(sinks)
        return gradients.query.to(query.dtype), key, value, of_sinks, None, None, None
