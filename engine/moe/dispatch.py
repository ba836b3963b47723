"""Token rows to the experts that were chosen for them, and the experts' outputs back to the tokens.

Experts are computed in *slots*, equally many on each rank of the expert-parallel group: slot ``s`` of rank ``r`` has
the number ``r * slots per rank + s``. Rows are sorted by slot, exchanged (all-to-all), computed, exchanged back and
summed with the router's weights where they came from: so the router's gradient needs no further communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from engine.moe.capacity import count_of_each, expert_capacity, within_capacity
from engine.moe.kept_routing import RoutingMemory
from engine.moe.stacked_linear import experts_of_rows

Compute = Callable[[Tensor, Sequence[int]], Tensor]
"""Rows [R, H], those of the first slot of this rank first, and the rows of each slot, to outputs [R, H]."""


class Loads(NamedTuple):
    """Rows that go to slots, as numbers on the host: what sizes follow from."""

    sent: list[int]
    """Rows of this rank for each slot of all ranks, [ranks * slots]."""
    received: list[int]
    """Rows of each rank for each slot of this one, [ranks * slots], rank by rank."""


def loads_of(sent: Tensor, received: Tensor, num_rows: int) -> Loads:
    """Counts on the device as numbers on the host.

    A dry run, whose counts have no values, puts another function in this one's place.

    Args:
        sent: int64 [ranks * slots].
        received: int64 [ranks * slots].
        num_rows: Rows that this rank has; all are sent where there is no capacity.
    """
    return Loads(*torch.stack([sent, received]).tolist())


class Dispatch:
    """How the rows of one layer find their experts.

    Args:
        num_experts: Experts of the layer.
        memory: The layer's.
        capacity_factor: In training each expert takes at most so many times its even share of the rows that a rank
            sends (``capacity.py``); tokens beyond it do without that expert. None, and evaluation, drop none.

    Attributes:
        group: Ranks that hold different experts; None where each holds all.
        num_slots: Slots of all ranks together.
        slots_of: The slot of each assignment: experts, int64 [T, K], to slots, of the same shape. At first every expert
            has one slot, with its own number.
        loads_of: ``loads_of``, or what a dry run has in its place.
    """

    def __init__(self, num_experts: int, memory: RoutingMemory, capacity_factor: float | None = None) -> None:
        self.group: dist.ProcessGroup | None = None
        self.num_slots = num_experts
        self.slots_of: Callable[[Tensor], Tensor] = lambda chosen: chosen
        self.loads_of = loads_of
        self.capacity_factor = capacity_factor
        self._num_experts = num_experts
        self._memory = memory

    def __call__(self, tokens: Tensor, weights: Tensor, chosen: Tensor, compute: Compute, *, limited: bool) -> Tensor:
        """Sum over each token's experts of its weight times the expert's output.

        Args:
            tokens: [T, H].
            weights: Weight of each chosen expert, [T, K].
            chosen: The experts of each token, int64 [T, K].
            compute: The experts of this rank's slots.
            limited: Whether the capacity holds.

        Returns:
            [T, H].
        """
        slots = self.slots_of(chosen).flatten()
        if limited and self.capacity_factor is not None:
            kept = self._memory("kept", lambda: self._within_capacity(chosen.flatten(), weights.detach().flatten()))
            slots = torch.where(kept, slots, self.num_slots)  # past the last slot, so past the rows that are sent
        loads = self._memory("loads", lambda: self._exchange_counts(slots))
        assignments = slots.argsort(stable=True)[: sum(loads.sent)]
        token_of = assignments // chosen.shape[1]
        rows = self._compute(tokens.index_select(0, token_of), loads, compute)
        weighted = rows * weights.flatten().index_select(0, assignments)[:, None]
        return torch.zeros_like(tokens).index_add(0, token_of, weighted)

    def _within_capacity(self, chosen: Tensor, weights: Tensor) -> Tensor:
        assert self.capacity_factor is not None
        capacity = expert_capacity(self.capacity_factor, len(chosen), self._num_experts)
        return within_capacity(chosen, weights, self._num_experts, capacity)

    def _exchange_counts(self, slots: Tensor) -> Loads:
        sent = count_of_each(slots, self.num_slots + 1)[:-1]
        received = sent
        if self.group is not None:
            received = torch.empty_like(sent)
            dist.all_to_all_single(received, sent, group=self.group)
        return self.loads_of(sent, received, len(slots))

    def _compute(self, rows: Tensor, loads: Loads, compute: Compute) -> Tensor:
        """Rows sorted by slot to the outputs of their slots."""
        if self.group is None:
            return compute(rows, loads.sent)
        num_ranks = dist.get_world_size(self.group)
        num_slots = self.num_slots // num_ranks
        to_ranks = [sum(loads.sent[rank * num_slots : (rank + 1) * num_slots]) for rank in range(num_ranks)]
        from_ranks = [sum(loads.received[rank * num_slots : (rank + 1) * num_slots]) for rank in range(num_ranks)]
        # Rows come rank by rank, each rank's sorted by slot; computed they are slot by slot.
        slot_of = experts_of_rows(loads.received, rows.device) % num_slots
        by_slot = slot_of.argsort(stable=True)
        arrived = _AllToAll.apply(rows, to_ranks, from_ranks, self.group)
        outputs = compute(
            arrived.index_select(0, by_slot), [sum(loads.received[slot::num_slots]) for slot in range(num_slots)]
        )
        returning = outputs.index_select(0, by_slot.argsort())
        return _AllToAll.apply(returning, from_ranks, to_ranks, self.group)  # type: ignore[no-any-return]


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks; gradients take the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _all_to_all(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
