"""Expert weights from their homes to the slots that compute with them, and gradients back.

The exchange is part of the computation graph: a forward pass sends each weight to its slots, the backward pass sends
each slot's gradient home and sums those of all copies there. Parameters, gradients, norms, optimizer states and
checkpoints know nothing of slots.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from engine.moe.placement import Placement, home_ranks
from engine.precision.policy import wide


class SlotExchange:
    """What one rank sends and receives to fill the slots of a placement.

    Args:
        placement: The experts of all ranks' slots.
        group: The ranks, in the placement's order.
        device: Of the weights.
    """

    def __init__(self, placement: Placement, group: dist.ProcessGroup, device: torch.device) -> None:
        rank = dist.get_rank(group)
        experts = placement.experts
        num_ranks, num_slots = experts.shape
        num_experts = len(placement.num_copies)
        homes = home_ranks(num_experts, num_ranks)
        wanted = homes[experts] == rank
        self.group = group
        self.sent_counts: list[int] = wanted.sum(axis=1).tolist()
        self.received_counts: list[int] = np.bincount(homes[experts[rank]], minlength=num_ranks).tolist()
        sent = experts[wanted] - rank * (num_experts // num_ranks)
        self.sent = torch.from_numpy(sent).to(device)
        """Which of this rank's experts are sent, by receiver and slot, [sent]."""
        # Slots ascend by expert and homes with them, so weights come in the order of the slots.
        self.num_slots = num_slots
        # Copy numbers: in each of these sets no expert stands twice, so gradients are added in a fixed order.
        copy = np.array([np.count_nonzero(sent[:i] == expert) for i, expert in enumerate(sent)], dtype=np.int64)
        self.sums = [torch.from_numpy(np.flatnonzero(copy == number)).to(device) for number in range(max(copy) + 1)]

    def __call__(self, weights: Tensor) -> Tensor:
        """Weights of this rank's slots.

        Args:
            weights: Of this rank's experts, [E / ranks, ...].

        Returns:
            [slots, ...]
        """
        return _Exchange.apply(weights, self)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, exchange: SlotExchange) -> Tensor:
        ctx.exchange, ctx.num_experts = exchange, len(weights)
        received = weights.new_empty(exchange.num_slots, *weights.shape[1:])
        dist.all_to_all_single(
            received,
            weights.index_select(0, exchange.sent),
            exchange.received_counts,
            exchange.sent_counts,
            group=exchange.group,
        )
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        returned = gradient.new_empty(len(exchange.sent), *gradient.shape[1:])
        dist.all_to_all_single(
            returned,
            gradient.contiguous(),
            exchange.sent_counts,
            exchange.received_counts,
            group=exchange.group,
        )
        total = returned.new_zeros(ctx.num_experts, *returned.shape[1:], dtype=wide(returned.dtype))
        for copies in exchange.sums:
            total[exchange.sent[copies]] += returned[copies]
        return total.to(gradient.dtype), None
