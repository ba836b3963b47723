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
    kept = turns(chosen[heaviest_first], num_experts) < capacity
    return torch.empty_like(kept).scatter(0, heaviest_first, kept)


def turns(numbers: Tensor, size: int) -> Tensor:
    """How many equal numbers stand before each of ``numbers``, which lie in 0 .. size - 1: int64 [N] to [N]."""
    order = numbers.argsort(stable=True)
    counts = count_of_each(numbers, size)
    sorted_turns = torch.arange(len(numbers), device=numbers.device) - (counts.cumsum(0) - counts)[numbers[order]]
    return torch.empty_like(numbers).scatter(0, order, sorted_turns)


def count_of_each(numbers: Tensor, size: int) -> Tensor:
    """How often each of 0 .. size - 1 is in ``numbers`` (of any shape): int64 [size]."""
    flat = numbers.flatten()
    return torch.zeros(size, dtype=torch.int64, device=flat.device).scatter_add(0, flat, torch.ones_like(flat))
