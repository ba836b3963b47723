"""What a search keeps while rows stream past: the exact Pareto front, and the best rows by one cost.

Rows are told by their number; of rows with equal costs the one with the lowest number stays. So what is kept does not
depend on the order in which rows come.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MAX_LEVELS = 16
"""Levels of each cost beyond the second at which the front is asked whether it dominates a row."""


def first_of_equals(costs: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Indices of one row for each distinct row of costs, that with the lowest number; sorted by costs."""
    order = np.lexsort((numbers, *costs.T[::-1]))
    if len(order) < 2:
        return order
    ordered = costs[order]
    new = np.concatenate(([True], (ordered[1:] != ordered[:-1]).any(axis=1)))
    rows: np.ndarray = order[new]
    return rows


def non_dominated(costs: np.ndarray) -> np.ndarray:
    """``[n]`` bools: which of distinct rows, sorted by costs from the first column on, no other dominates."""
    if costs.shape[1] == 1:
        only: np.ndarray = np.arange(len(costs)) == 0
        return only
    if costs.shape[1] == 2:
        second = costs[:, 1]
        best_before = np.concatenate(([np.inf], np.minimum.accumulate(second)[:-1]))
        mask: np.ndarray = second < best_before
        return mask
    from moocore import is_nondominated

    return np.asarray(is_nondominated(costs, keep_weakly=True), dtype=bool) if len(costs) else np.zeros(0, bool)


class Front:
    """The exact front of all rows seen, one row for each distinct point."""

    def __init__(self, num_costs: int) -> None:
        self.costs = np.empty((0, num_costs))
        """``[m, k]``, sorted by the first cost, then the next."""
        self.numbers = np.empty(0, dtype=np.int64)

    def add(self, costs: np.ndarray, numbers: np.ndarray) -> None:
        """See ``[n, k]`` costs of rows ``[n]``."""
        maybe = np.flatnonzero(~self.dominates(costs))
        if not len(maybe):
            return
        costs, numbers = costs[maybe], numbers[maybe]
        rows = first_of_equals(costs, numbers)
        costs, numbers = costs[rows], numbers[rows]
        costs, numbers = np.concatenate([self.costs, costs]), np.concatenate([self.numbers, numbers])
        rows = first_of_equals(costs, numbers)
        rows = rows[non_dominated(costs[rows])]
        self.costs, self.numbers = costs[rows], numbers[rows]

    def dominates(self, costs: np.ndarray) -> np.ndarray:
        """``[n]`` bools: a point of the front is at least as good in every cost, and better in one.

        With more than two costs some that are dominated may not be told; what is told is.
        """
        if not len(self.costs):
            return np.zeros(len(costs), dtype=bool)
        near = _near_point(self.costs, costs)
        found: np.ndarray = (near >= 0) & _dominates(self.costs[np.maximum(near, 0)], costs)
        return found


def _near_point(points: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """``[n]``: for each row of costs a point that is at least as good in every cost, -1 where none is found.

    Two costs: of the points up to the first cost, the one with the least second cost. More: the points up to each of
    some levels of the last cost are asked by the other costs.
    """
    if points.shape[1] <= 2:
        order = np.lexsort(points.T[::-1])
        sorted_points = points[order]
        at = np.searchsorted(sorted_points[:, 0], costs[:, 0], side="right") - 1
        last = sorted_points[:, -1]
        least = np.minimum.accumulate(last)
        place = np.maximum.accumulate(np.where(last == least, np.arange(len(last)), 0))
        best = place[np.maximum(at, 0)]
        good = (at >= 0) & (last[best] <= costs[:, -1])
        return np.where(good, order[best], -1)
    levels = np.unique(points[:, -1])
    if len(levels) > MAX_LEVELS:
        levels = levels[np.linspace(0, len(levels) - 1, MAX_LEVELS).round().astype(int)]
    level = np.searchsorted(levels, costs[:, -1], side="right") - 1
    near = np.full(len(costs), -1)
    for i in np.unique(level[level >= 0]):
        below, rows = np.flatnonzero(points[:, -1] <= levels[i]), np.flatnonzero(level == i)
        found = _near_point(points[below][:, :-1], costs[rows][:, :-1])
        near[rows] = np.where(found >= 0, below[np.maximum(found, 0)], -1)
    return near


def _dominates(points: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """``[n]`` bools: each point is at least as good as its row of costs, and better in one."""
    weakly, better = np.ones(len(costs), dtype=bool), np.zeros(len(costs), dtype=bool)
    for i in range(costs.shape[1]):
        weakly &= points[:, i] <= costs[:, i]
        better |= points[:, i] < costs[:, i]
    return weakly & better


Keys = Callable[[np.ndarray], np.ndarray]
"""From numbers ``[n]`` to keys ``[n, f]``."""


class Best:
    """The best rows by one cost, ties by the other costs and the number; one row for each distinct key."""

    def __init__(self, size: int, column: int) -> None:
        """Keep ``size`` rows by cost ``column``."""
        self.size, self.column = size, column
        self.costs = np.empty((0, 0))
        self.numbers = np.empty(0, dtype=np.int64)

    @property
    def limit(self) -> float:
        """Rows with a higher cost are of no interest."""
        if not self.size:
            return -np.inf
        return float(self.costs[-1, self.column]) if len(self.numbers) == self.size else np.inf

    def add(self, costs: np.ndarray, numbers: np.ndarray, keys: Keys) -> None:
        """See ``[n, k]`` costs of rows ``[n]``; of rows with equal keys the best stays."""
        maybe = np.flatnonzero(costs[:, self.column] <= self.limit)
        if not len(maybe):
            return
        costs, numbers = costs[maybe], numbers[maybe]
        if len(self.numbers):
            costs, numbers = np.concatenate([self.costs, costs]), np.concatenate([self.numbers, numbers])
        rest = [costs[:, i] for i in range(costs.shape[1] - 1, -1, -1) if i != self.column]
        order = np.lexsort((numbers, *rest, costs[:, self.column]))
        _, first = np.unique(keys(numbers[order]), axis=0, return_index=True)
        order = order[np.sort(first)[: self.size]]
        self.costs, self.numbers = costs[order], numbers[order]
