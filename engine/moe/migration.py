"""Expert weights from their homes to the slots that compute with them, and gradients back.

The exchange is part of the computation graph: a forward pass sends each weight to its slots, the backward pass sends
each slot's gradient home and sums those of all copies there. Parameters, gradients, norms, optimizer states and
checkpoints know nothing of slots. Slots' weights take memory beside the homes' until the backward pass has used them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from engine.moe.capacity import turns
from engine.moe.experts import Experts, ExpertWeights
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
        num_ranks = len(experts)
        homes = home_ranks(placement.num_experts, num_ranks)
        wanted = homes[experts] == rank
        sent = experts[wanted] - rank * (placement.num_experts // num_ranks)
        self.group = group
        self.rank = rank
        self.moves_any = placement.num_moved > 0
        self.sent_counts: list[int] = wanted.sum(axis=1).tolist()
        # A rank's slots ascend by expert, and homes with them: weights come in the order of the slots.
        self.received_counts: list[int] = np.bincount(homes[experts[rank]], minlength=num_ranks).tolist()
        self.sent = torch.from_numpy(sent).to(device)
        """Which of this rank's experts are sent, by receiver and slot, [sent]."""
        copy = np.array([np.count_nonzero(sent[:index] == expert) for index, expert in enumerate(sent)])
        self.copies = [torch.from_numpy(np.flatnonzero(copy == number)).to(device) for number in range(max(copy) + 1)]
        """Places in ``sent``: first copies, second copies, ...; gradients are added in this order."""

    def __call__(self, weights: Tensor) -> Tensor:
        """The weights of this rank's slots.

        Args:
            weights: Of the experts at home on this rank, [E / ranks, ...].

        Returns:
            [slots, ...]
        """
        return _Exchange.apply(weights, self)  # type: ignore[no-any-return]

    def send(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Rows to all ranks, and theirs to this one, in the order of the ranks; its own stay where they are.

        Args:
            rows: [sum of ``sent``, ...].
            sent: Rows for each rank.
            received: Rows from each rank.
        """
        if not self.moves_any:
            return rows
        own, end = sum(sent[: self.rank]), sum(sent[: self.rank + 1])
        away, back = ([count * (rank != self.rank) for rank, count in enumerate(c)] for c in (sent, received))
        arrived = rows.new_empty(sum(back), *rows.shape[1:])
        dist.all_to_all_single(arrived, torch.cat([rows[:own], rows[end:]]), back, away, group=self.group)
        place = sum(received[: self.rank])
        return torch.cat([arrived[:place], rows[own:end], arrived[place:]])


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, exchange: SlotExchange) -> Tensor:
        ctx.exchange, ctx.num_experts = exchange, len(weights)
        return exchange.send(weights.index_select(0, exchange.sent), exchange.sent_counts, exchange.received_counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        exchange = ctx.exchange
        returned = exchange.send(gradient, exchange.received_counts, exchange.sent_counts)
        total = returned.new_zeros(ctx.num_experts, *returned.shape[1:], dtype=wide(returned.dtype))
        for places in exchange.copies:
            total[exchange.sent[places]] += returned[places]
        return total.to(gradient.dtype), None


class CopyChoice:
    """Which copy of an expert computes an assignment.

    Each rank deals its assignments of an expert out to the copies in turn, beginning with another copy than the rank
    before: evenly, and whatever the other ranks have.

    Args:
        placement: The experts of all ranks' slots.
        rank: Whose tokens are dealt out, along ``ep``.
        device: Of the tokens.
    """

    def __init__(self, placement: Placement, rank: int, device: torch.device) -> None:
        num_copies = placement.num_copies
        slots = np.full((placement.num_experts, num_copies.max()), -1)
        for expert in range(placement.num_experts):
            slots[expert, : num_copies[expert]] = np.flatnonzero(placement.experts.ravel() == expert)
        self._slots = torch.from_numpy(slots).to(device)
        self._num_copies = torch.from_numpy(num_copies).to(device)
        self._rank = rank

    def __call__(self, chosen: Tensor) -> Tensor:
        """Experts, int64 [T, K], to slots of the same shape, numbered over all ranks."""
        experts = chosen.flatten()
        copy = (turns(experts, len(self._num_copies)) + self._rank) % self._num_copies[experts]
        return self._slots[experts, copy].view_as(chosen)


class ExpertSlots:
    """The slots of one layer: what stands between its experts at home and the dispatch of tokens.

    Called with experts, gives slots (see ``CopyChoice``).

    Args:
        experts: Those of the layer, spread over ``group`` already.
        group: The expert-parallel ranks.
        device: Of the weights.
        dtype: That is computed with; weights are rounded before they are sent.
        placement: At first.
    """

    def __init__(
        self,
        experts: Experts,
        group: dist.ProcessGroup,
        device: torch.device,
        dtype: torch.dtype,
        placement: Placement,
    ) -> None:
        self._experts = experts
        self._group = group
        self._device = device
        self._dtype = dtype
        self._home_weights = experts.slot_weights
        experts.slot_weights = self._weights  # type: ignore[method-assign]
        experts.dispatch.slots_of = self
        self.put(placement)

    def __call__(self, chosen: Tensor) -> Tensor:
        return self._choose(chosen)

    def put(self, placement: Placement) -> None:
        """Compute by another placement from the next forward pass on."""
        self.placement = placement
        self._exchange = SlotExchange(placement, self._group, self._device)
        self._choose = CopyChoice(placement, dist.get_rank(self._group), self._device)
        self._experts.dispatch.num_slots = placement.experts.size

    def _weights(self) -> ExpertWeights:
        return ExpertWeights._make(
            None if weight is None else self._exchange(weight.to(self._dtype)) for weight in self._home_weights()
        )
