"""Which rank computes which expert: forecast of the experts' load, and placements of expert copies that even it out.

Each expert has a home, the rank along ``ep`` that holds its parameters, gradients and optimizer states; homes never
change. What is placed are *slots*: each rank computes ``(experts + replicas) / ep`` expert copies, whose weights come
from the homes in each forward pass and whose gradients go back there (``engine/moe/migration.py``). So a placement
changes who computes what and nothing else, and a new one costs no more than any other that has as many copies away
from home.

Everything here is made of elementwise operations and sums in a fixed order, so that all ranks come to the same plan.
Loads are numbers of assignments (token, expert) in one optimizer step; ``E`` is the number of experts, ``R`` of
replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

LEVEL_RATE = 0.3
"""How fast the forecast's level follows the loads."""
TREND_RATE = 0.05
"""How fast its trend follows the level's changes."""
TREND_DAMPING = 0.9
"""What is left of the trend after each step ahead: no expert's load rises for ever."""


@dataclass(frozen=True)
class LoadForecast:
    """Exponential moving average of each expert's load with a damped linear trend.

    Holt's method with Gardner and McKenzie's damping ("Forecasting trends in time series", 1985)::

        level' = a * load + (1 - a) * (level + d * trend)
        trend' = b * (level' - level) + (1 - b) * d * trend
        forecast of h steps ahead = level + (d + d^2 + ... + d^h) * trend

    Its two arrays are its whole state.
    """

    level: np.ndarray
    """[..., E]; all zero before the first observation."""
    trend: np.ndarray
    """[..., E], per step."""

    @classmethod
    def empty(cls, *shape: int) -> LoadForecast:
        """A forecast that has seen nothing; its shape ends in the number of experts."""
        return cls(np.zeros(shape), np.zeros(shape))

    def after(self, load: np.ndarray) -> LoadForecast:
        """The forecast with one more step's load, [..., E]."""
        if not self.level.any():
            return LoadForecast(np.array(load, dtype=np.float64), np.zeros_like(self.trend))
        drift = TREND_DAMPING * self.trend
        level = LEVEL_RATE * load + (1 - LEVEL_RATE) * (self.level + drift)
        return LoadForecast(level, TREND_RATE * (level - self.level) + (1 - TREND_RATE) * drift)

    def mean(self, num_steps: int) -> np.ndarray:
        """Mean load of the next ``num_steps`` steps, [..., E], non-negative."""
        reach = np.cumsum(TREND_DAMPING ** np.arange(1, num_steps + 1)).mean()
        return np.maximum(self.level + reach * self.trend, 0.0)


@dataclass(frozen=True)
class Placement:
    """The expert of each slot.

    Args:
        experts: int64 [ranks, slots per rank], ascending in each row. Every expert stands somewhere.
    """

    experts: np.ndarray

    @property
    def num_experts(self) -> int:
        """E."""
        return int(self.experts.max()) + 1

    @property
    def num_copies(self) -> np.ndarray:
        """Copies of each expert, [E]."""
        return np.bincount(self.experts.ravel())

    def rank_loads(self, load: np.ndarray) -> np.ndarray:
        """Assignments that each rank computes, [..., ranks]: an expert's load (``load``: [..., E]) is spread evenly
        over its copies."""
        return (load / self.num_copies)[..., self.experts].sum(axis=-1)

    @property
    def num_moved(self) -> int:
        """Weights of how many experts the busiest rank sends or receives in a forward pass."""
        ranks = np.arange(len(self.experts)).repeat(self.experts.shape[1])
        return _num_moved(ranks, home_ranks(self.num_experts, len(self.experts))[self.experts.ravel()])

    def price(self, load: np.ndarray, move_cost: float) -> float:
        """What a step with this placement costs, in assignments: the busiest rank's load, and its moved experts at
        ``move_cost`` each (see ``move_cost``)."""
        return float(self.rank_loads(load).max() + move_cost * self.num_moved)


def home_ranks(num_experts: int, num_ranks: int) -> np.ndarray:
    """The rank that holds the parameters of each expert, int64 [E]."""
    return np.arange(num_experts) // (num_experts // num_ranks)


def all_at_home(num_experts: int, num_ranks: int, num_replicas: int = 0) -> Placement:
    """The placement that moves nothing: further slots hold second copies of the rank's own experts."""
    own = np.arange(num_experts).reshape(num_ranks, -1)
    slots = np.arange((num_experts + num_replicas) // num_ranks) % own.shape[1]
    return Placement(np.sort(own[:, slots], axis=1))


def move_cost(flops_per_byte: float, bytes_per_weight: int, num_micro_batches: int) -> float:
    """What one expert away from home costs in a step, in assignments, so that it can be weighed against load.

    Of an expert of ``w`` weights each micro-batch moves ``2 w`` values (weights out, gradients back), and an assignment
    computes ``6 w`` floating-point operations (forward 2, backward 4): whatever the width, a move takes as long as
    ``bytes_per_weight * flops_per_byte / 3`` assignments.

    Args:
        flops_per_byte: What a rank computes in the time in which one byte crosses its link.
        bytes_per_weight: Of the dtype that is computed with.
        num_micro_batches: Per step; weights are exchanged for each.
    """
    return bytes_per_weight * flops_per_byte / 3 * num_micro_batches


def place(
    load: np.ndarray,
    num_ranks: int,
    num_replicas: int = 0,
    *,
    num_nodes: int = 1,
    num_groups: int = 1,
    move_cost: float = 0.0,
) -> Placement:
    """The placement that fits a forecast load: even in assignments, with equally many slots on each rank.

    The expert with the most load per copy gets the next replica. Copies are packed longest first and then swapped out
    of the busiest rank while that helps, from two starts: experts at home, and empty ranks. The cheapest placement met
    on the way counts, and all experts at home where nothing is cheaper. Over several nodes, experts (or whole groups of
    them, where the router limits tokens to groups) are spread over the nodes first, then replicated and packed within
    each.

    Args:
        load: Expected assignments of each expert, [E].
        num_ranks: Ranks along ``ep``; divides E and E + R.
        num_replicas: Further copies, at most ``E * (num_ranks - 1)``.
        num_nodes: Nodes that these ranks lie on, equally many on each in order. Where it does not divide the groups
            and the replicas, or where a node has no room for its replicas on different ranks, they count as one.
        num_groups: Groups of the router, or 1.
        move_cost: What an expert away from home costs, in assignments.
    """
    num_experts = len(load)
    # Experts without load tie: the little added makes their replicas go round.
    load = load + max(float(load.mean()), 1.0) * 1e-9
    num_items = num_groups if num_groups > 1 else num_experts
    most = num_experts * (num_ranks // num_nodes - 1)
    if num_items % num_nodes or num_replicas % num_nodes or num_replicas > most:
        num_nodes = 1
    ranks_per_node = num_ranks // num_nodes
    group_size = num_experts // num_items
    items = np.arange(num_items)
    node_of = _pack(
        load.reshape(num_items, group_size).sum(axis=1),
        items,
        items // (num_items // num_nodes),
        num_nodes,
        move_cost * group_size / ranks_per_node,
    ).repeat(group_size)
    homes = home_ranks(num_experts, num_ranks)
    rows = []
    for node in range(num_nodes):
        experts = np.flatnonzero(node_of == node)
        copies = _copies(load[experts], num_replicas // num_nodes, ranks_per_node)
        expert = experts.repeat(copies)
        home = homes[expert] - node * ranks_per_node
        home[(home < 0) | (home >= ranks_per_node)] = -1
        rank_of = _pack((load[experts] / copies).repeat(copies), expert, home, ranks_per_node, move_cost)
        rows += [np.sort(expert[rank_of == rank]) for rank in range(ranks_per_node)]
    packed = Placement(np.stack(rows))
    return min((packed, all_at_home(num_experts, num_ranks, num_replicas)), key=lambda p: p.price(load, move_cost))


def _copies(load: np.ndarray, num_replicas: int, most: int) -> np.ndarray:
    """Copies of each expert: the next one goes to the most load per copy, none gets more than ``most``."""
    copies = np.ones(len(load), dtype=np.int64)
    for _ in range(num_replicas):
        copies[np.argmax(np.where(copies < most, load / copies, -1.0))] += 1
    return copies


def _pack(load: np.ndarray, item: np.ndarray, home: np.ndarray, num_bins: int, move_cost: float) -> np.ndarray:
    """The bin of each of n copies, int64 [n], equally many in each, no item twice in one while another has room.

    Args:
        load: Of each copy, [n].
        item: What it is a copy of, [n], copies of one item side by side.
        home: Bin in which it costs nothing, or -1, [n].
        num_bins: Divides n.
        move_cost: Of a copy in another bin, beside the busiest bin's load.
    """
    is_first = np.diff(item, prepend=-1) != 0
    *_, anywhere = _swaps(load, item, _fill(load, item, np.full(len(item), -1), num_bins), num_bins)
    candidates = [
        *_swaps(load, item, _fill(load, item, np.where(is_first, home, -1), num_bins), num_bins),
        _relabel(anywhere, home, num_bins),
    ]
    return min(candidates, key=lambda bins: np.bincount(bins, load).max() + move_cost * _num_moved(bins, home))


def _num_moved(bins: np.ndarray, home: np.ndarray) -> int:
    """Copies away from home that the busiest bin takes in, or gives out: of n copies their bins and homes, -1 for a
    home that is none of the bins."""
    away = bins != home
    given = np.bincount(home[away & (home >= 0)], minlength=1)
    return int(max(np.bincount(bins[away], minlength=1).max(), given.max()))


def _fill(load: np.ndarray, item: np.ndarray, bins: np.ndarray, num_bins: int) -> np.ndarray:
    """``bins`` with the copies at -1 put into the least loaded bins with room, the heaviest first."""
    bins = bins.copy()
    room = np.full(num_bins, len(item) // num_bins)
    sums = np.zeros(num_bins)
    holds = np.zeros((num_bins, int(item.max()) + 1), dtype=bool)

    def put(copy: int, into: int) -> None:
        bins[copy] = into
        room[into] -= 1
        sums[into] += load[copy]
        holds[into, item[copy]] = True

    for copy in np.flatnonzero(bins >= 0):
        put(int(copy), int(bins[copy]))
    for copy in np.argsort(-load, kind="stable"):
        if bins[copy] < 0:
            free = room > 0
            better = free & ~holds[:, item[copy]]
            put(int(copy), int(np.argmin(np.where(better if better.any() else free, sums, np.inf))))
    return bins


def _swaps(load: np.ndarray, item: np.ndarray, bins: np.ndarray, num_bins: int) -> Iterator[np.ndarray]:
    """``bins``, and what becomes of it with each swap between the busiest bin and another, while there is one that
    lowers the larger load of the two; the one that lowers it most is taken."""
    while True:
        yield bins
        sums = np.bincount(bins, load)
        busiest = int(np.argmax(sums))
        ours, others = np.flatnonzero(bins == busiest), np.flatnonzero(bins != busiest)
        given = load[ours, None] - load[None, others]
        larger = np.maximum(sums[busiest] - given, sums[bins[others]] + given)
        holds = np.zeros((num_bins, int(item.max()) + 1), dtype=bool)
        holds[bins, item] = True
        larger[holds[bins[others][None, :], item[ours][:, None]] | holds[busiest, item[others]]] = np.inf
        if not larger.min(initial=np.inf) < sums[busiest] * (1 - 1e-12):
            return
        one, other = np.unravel_index(int(np.argmin(larger)), larger.shape)
        bins = bins.copy()
        bins[ours[one]], bins[others[other]] = bins[others[other]], busiest


def _relabel(bins: np.ndarray, home: np.ndarray, num_bins: int) -> np.ndarray:
    """The same packing with the bins' numbers exchanged so that many copies are at home, the best match first."""
    overlap = np.zeros((num_bins, num_bins), dtype=np.int64)
    np.add.at(overlap, (bins[home >= 0], home[home >= 0]), 1)
    label = np.zeros(num_bins, dtype=np.int64)
    for _ in range(num_bins):
        old, new = np.unravel_index(int(np.argmax(overlap)), overlap.shape)
        label[old] = new
        overlap[old], overlap[:, new] = -1, -1
    return label[bins]
