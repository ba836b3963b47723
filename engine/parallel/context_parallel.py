"""Context parallelism: every sequence is split between the ranks of the ``cp`` axis.

Only attention looks beyond a token, so only its core is replaced; positions go with the tokens. Parameters are whole on
each rank and used on different tokens, as in data parallelism: their gradients are summed with those of the
data-parallel ranks, and states are sharded over both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from engine.context import ParallelContext
from engine.models.decoder import Decoder
from engine.parallel.ring_attention import AllGather, Exchange, Ring, SplitAttention
from engine.parallel.sequence_order import SequenceOrder, SplitPositions
from engine.plan import Plan

_EXCHANGES: dict[str, Callable[[dist.ProcessGroup], Exchange]] = {"ring": Ring, "all_gather": AllGather}


def split_sequences(context: ParallelContext, *sequences: Tensor) -> tuple[Tensor, ...]:
    """This rank's part of each sequence. Labels belong to their tokens already, so they are split alike.

    Args:
        context: This rank's place.
        sequences: Tokens, labels: each [B, L].

    Returns:
        Each [B, L / cp]; as they are without context parallelism.
    """
    if not context.has_axis("cp"):
        return sequences
    order = _order(context)
    return tuple(order.split(sequence) for sequence in sequences)


def apply_context_parallel(part: Decoder, plan: Plan, context: ParallelContext) -> None:
    """Let a model or a stage take split sequences, if the plan has any."""
    if not context.has_axis("cp"):
        return
    order = _order(context)
    part.use_positions(SplitPositions(order))
    core = SplitAttention(_EXCHANGES[plan.cp_attention](context.group("cp")), order)
    for block in part.layers.values():
        block.attention.core = core  # type: ignore[union-attr]


def _order(context: ParallelContext) -> SequenceOrder:
    return SequenceOrder(context.plan.cp, context.cp_rank)
