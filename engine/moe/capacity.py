"""Capacity: a limit to the rows that one expert takes, so that the fullest expert does not hold up all others."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def expert_capacity(factor: float, num_assignments: int, num_experts: int) -> int:
    """Rows that an expert takes of those that one rank sends: ``factor`` times its even share, rounded up."""
    return math.ceil(factor * num_assignments / num_experts)


def within_capacity(chosen: Tensor, weights: Tensor, num_experts: int, capacity: int) -> Tensor:
    """Which assignments an expert takes: those with the largest weights, of equal ones the first.

    Args:
        chosen: Expert of each assignment, int64 [N].
        weights: Its weight, [N].
        num_experts: Experts there are.
        capacity: Assignments that each takes.

    Returns:
        bool [N].
    """
    heaviest_first = weights.argsort(descending=True, stable=True)
    order = heaviest_first[chosen[heaviest_first].argsort(stable=True)]
    counts = count_of_each(chosen, num_experts)
    places = torch.arange(len(chosen), device=chosen.device) - (counts.cumsum(0) - counts)[chosen[order]]
    return torch.empty_like(chosen, dtype=torch.bool).scatter(0, order, places < capacity)


def count_of_each(numbers: Tensor, size: int) -> Tensor:
    """How often each of 0 .. size - 1 is in ``numbers`` (of any shape): int64 [size]."""
    flat = numbers.flatten()
    return torch.zeros(size, dtype=torch.int64, device=flat.device).scatter_add(0, flat, torch.ones_like(flat))
