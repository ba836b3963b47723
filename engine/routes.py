"""Ways to sum a buffer over devices, as lists of messages, and how long they take over given links.

A route is a list of steps; in one step a device sends at most one message and receives at most one. Devices don't wait
for each other between steps, only for the messages they need. The same lists are run by processes
(``engine.comm.all_reduce``) and replayed here with the links' times. Every piece of the sum is added up in one place,
or by two devices that add the same two numbers, and copied from there: all devices end with the same bits.

Algorithms: ring and halving-doubling of Thakur et al., "Optimization of Collective Communication Operations in MPICH",
2005; two levels of Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision", 2018.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from engine import collective_cost
from engine.collective_cost import Group
from engine.topology import Edge, Links, as_level


class Transfer(NamedTuple):
    """One message: a range of the buffer's pieces."""

    source: int
    target: int
    start: int
    stop: int
    adds: bool
    """Whether the target adds it to its own; else it replaces it."""


Step = tuple[Transfer, ...]
Span = tuple[int, int]
"""Pieces from, up to."""


@dataclass(frozen=True)
class Route:
    """An all-reduce as messages."""

    kind: str
    """What it is, for people."""
    num_ranks: int
    num_pieces: int
    """Equal pieces that the buffer is cut into."""
    steps: tuple[Step, ...]

    def reordered(self, order: Sequence[int] | np.ndarray) -> Route:
        """With rank ``order[i]`` in the place of ``i``."""
        places = [int(rank) for rank in order]
        steps = tuple(
            tuple(Transfer(places[move.source], places[move.target], *move[2:]) for move in step) for step in self.steps
        )
        return Route(self.kind, self.num_ranks, self.num_pieces, steps)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """The links in use, each once, in order."""
        return tuple(sorted({(move.source, move.target) for step in self.steps for move in step}))


def pack(kind: str, num_ranks: int, num_pieces: int, steps: Iterable[Step]) -> Route:
    """A route whose steps stand as early as each device's own order allows."""
    packed: list[list[Transfer]] = []
    next_free = [0] * num_ranks
    for step in steps:
        ranks = {rank for move in step for rank in (move.source, move.target)}
        place = max((next_free[rank] for rank in ranks), default=0)
        if place == len(packed):
            packed.append([])
        packed[place].extend(step)
        for rank in ranks:
            next_free[rank] = place + 1
    return Route(kind, num_ranks, num_pieces, tuple(tuple(step) for step in packed))


# ---------------------------------------------------------------------------------------------------------- algorithms


def ring(num_ranks: int) -> Route:
    """Everybody sends to the next; each rank's piece goes around twice, first summed, then copied."""
    parts = [(index, index + 1) for index in range(num_ranks)]
    ranks = range(num_ranks)
    steps = [*_ring_steps(ranks, parts, adds=True), *_ring_steps(ranks, parts, adds=False)]
    return pack("ring", num_ranks, num_ranks, steps)


def halving_doubling(num_ranks: int) -> Route:
    """Partners at halving distances exchange halves of what they hold, and back again. Ranks beyond a power of two hand
    their buffer to a partner before and get the sum after."""
    size = 1 << (num_ranks.bit_length() - 1)
    fold = [(extra, extra - size) for extra in range(size, num_ranks)]
    held: dict[int, Span] = dict.fromkeys(range(size), (0, size))
    halving: list[Step] = []
    doubling: list[Step] = []
    distance = size // 2
    while distance:
        before = dict(held)
        for rank, (start, stop) in before.items():
            middle = (start + stop) // 2
            held[rank] = (middle, stop) if rank & distance else (start, middle)
        halving.append(tuple(Transfer(rank, rank ^ distance, *held[rank ^ distance], True) for rank in before))
        doubling.append(tuple(Transfer(rank, rank ^ distance, *held[rank], False) for rank in before))
        distance //= 2
    steps = [
        tuple(Transfer(extra, partner, 0, size, True) for extra, partner in fold),
        *halving,
        *reversed(doubling),
        tuple(Transfer(partner, extra, 0, size, False) for extra, partner in fold),
    ]
    return pack("halving-doubling", num_ranks, size, steps)


def tree(num_ranks: int, up: Sequence[Edge], down: Sequence[Edge]) -> Route:
    """Whole buffers are summed towards a root, the sum is copied back.

    Args:
        num_ranks: Ranks.
        up: Child and parent, in the order of the sums.
        down: Parent and child, in the order of the copies.
    """
    steps = [(Transfer(*edge, 0, 1, True),) for edge in up] + [(Transfer(*edge, 0, 1, False),) for edge in down]
    return pack("tree", num_ranks, 1, steps)


def two_level(sizes: Sequence[int]) -> Route:
    """Reduce-scatter inside each cluster, all-reduce of each shard across them, all-gather inside.

    Clusters of different sizes hold shards of different sizes: across, what one holder has in every cluster is summed
    span by span. Two holders exchange their whole spans; more go around a ring.

    Args:
        sizes: Members of each cluster; ranks are numbered cluster by cluster.
    """
    num_clusters = len(sizes)
    split = num_clusters if num_clusters > 2 else 1
    unit = split * math.lcm(*sizes)
    starts = np.cumsum([0, *sizes]).tolist()
    clusters = [range(start, stop) for start, stop in pairwise(starts)]
    shards = [_even(unit, size) for size in sizes]
    steps: list[Step] = []
    for members, parts in zip(clusters, shards, strict=True):
        steps += _ring_steps(members, parts, adds=True)
    bounds = sorted({bound for parts in shards for part in parts for bound in part})
    for start, stop in pairwise(bounds):
        holders = [members[start * len(members) // unit] for members in clusters]
        steps += _across(holders, (start, stop))
    for members, parts in zip(clusters, shards, strict=True):
        steps += _ring_steps(members, parts, adds=False)
    return pack("two-level " + "+".join(map(str, sizes)), starts[-1], unit, steps)


def _across(holders: Sequence[int], span: Span) -> list[Step]:
    if len(holders) == 2:
        one, other = holders
        return [(Transfer(one, other, *span, True), Transfer(other, one, *span, True))]
    parts = [(span[0] + start, span[0] + stop) for start, stop in _even(span[1] - span[0], len(holders))]
    return [*_ring_steps(holders, parts, adds=True), *_ring_steps(holders, parts, adds=False)]


def _even(length: int, count: int) -> list[Span]:
    return [(index * length // count, (index + 1) * length // count) for index in range(count)]


def _ring_steps(members: Sequence[int], parts: Sequence[Span], *, adds: bool) -> list[Step]:
    """Reduce-scatter (member ``i`` ends with the sum of ``parts[i]``) or all-gather (begins with it) around a ring."""
    size = len(members)
    first = 1 if adds else 0
    return [
        tuple(
            Transfer(members[i], members[(i + 1) % size], *parts[(i - first - step) % size], adds) for i in range(size)
        )
        for step in range(size - 1)
    ]


# ---------------------------------------------------------------------------------------------------------------- time


def replay(route: Route, links: Links, num_bytes: float, orders: np.ndarray | None = None) -> np.ndarray:
    """Seconds until the last rank has the sum, [rows].

    A device sends one message at a time and receives one at a time: a message keeps its sender busy for the link's time
    from when the sender comes to it, and its receiver for the link's time from when both have come to it.

    Args:
        route: The messages.
        links: Between the devices.
        num_bytes: The buffer.
        orders: The device in each rank's place, [rows, ranks]; None for one row, each its own.
    """
    orders = np.arange(route.num_ranks)[None] if orders is None else orders
    ready = np.zeros(orders.shape)
    known: dict[Step, np.ndarray] = {}
    for step in route.steps:
        sources, targets = [move.source for move in step], [move.target for move in step]
        key = tuple(move._replace(start=0, stop=move.stop - move.start) for move in step)
        if key not in known:
            sizes = np.array([move.stop for move in key]) * (num_bytes / route.num_pieces)
            pairs = orders[:, sources], orders[:, targets]
            known[key] = links.latency[pairs] + sizes / links.bandwidth[pairs]
        begun = ready[:, sources]
        both = np.maximum(begun, ready[:, targets])
        ready[:, sources] = begun + known[key]
        ready[:, targets] = np.maximum(ready[:, targets], both + known[key])
    result: np.ndarray = ready.max(axis=1)
    return result


def ring_seconds(links: Links, num_bytes: float, orders: np.ndarray) -> np.ndarray:
    """What ``replay`` gives for rings, [rows]: the slowest link carries its ``2 (n - 1)`` messages one after another,
    and nobody waits for anything else.

    Args:
        links: Between the devices.
        num_bytes: The buffer.
        orders: Devices around each ring, [rows, n].
    """
    pairs = orders, np.roll(orders, -1, axis=1)
    level = as_level(links.latency[pairs], links.bandwidth[pairs])
    seconds = collective_cost.all_reduce(num_bytes, Group((float(orders.shape[1]),)), [level])
    result: np.ndarray = np.max(seconds, axis=1)
    return result
