"""Which route sums a buffer fastest over given links: the communication graph, candidates made from it, the best one.

Candidates: rings, halving-doubling, two levels over clusters, trees. Orders of ranks come from the graph (spanning
tree, clusters, nearest neighbours) and are improved by local search; ``exact=True`` tries every order instead, for up
to 8 devices.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations

import numpy as np

from engine.routes import Route, halving_doubling, replay, ring, ring_seconds, tree, two_level
from engine.topology import Edge, Links

SIZE_CLASSES = (2**14, 2**20, 2**26)
"""Bytes of a small, a middle and a large buffer: a route is chosen for each."""
MAX_EXACT = 8
"""Devices up to which every order can be tried."""
_MAX_IMPROVED = 16
"""Ranks up to which orders are improved by exchanging two, and trees by trying sends; beyond, the graph's own serve."""
_MAX_RING_IMPROVED = 64
"""Ranks up to which rings are improved; beyond, nearest neighbours serve: a round looks at (ranks)^3 places."""
_RANDOM_STARTS, _FEW_STARTS = 16, 8
"""Random orders to improve, up to ``MAX_EXACT`` ranks and beyond."""
_RESTARTED_SHAPES = 5
_MAX_APART = 4
"""Slow devices that are put in a cluster of their own."""
_BLOCK = 2000
"""Orders that are replayed at once."""
_MAX_SENDS = 300
"""Sends that are tried for each tree, beyond the first guesses."""
_MAX_ROOTS = 2
"""Roots that are tried beyond ``_MAX_IMPROVED`` ranks: those with the fastest links."""
_BEST_ROOTS, _MORE_SENDS = 2, 20
"""The best roots so far, and how many times more sends are tried for their trees."""


@dataclass(frozen=True)
class Choice:
    """A route for buffers of some size."""

    num_bytes: float
    route: Route
    seconds: float
    """What it takes over the links it was chosen for."""

    def seconds_over(self, links: Links) -> float:
        """What it takes over other links."""
        return float(replay(self.route, links, self.num_bytes)[0])


def size_class(num_bytes: float) -> int:
    """Index of the size class that is nearest in ratio."""
    return int(np.abs(np.log(np.array(SIZE_CLASSES) / max(num_bytes, 1))).argmin())


def choose(links: Links, num_bytes: float, *, exact: bool = False) -> Choice:
    """The fastest candidate for a buffer of ``num_bytes``.

    Args:
        links: Between two devices or more.
        num_bytes: The buffer.
        exact: Try every order of ranks of every shape, and every tree.
    """
    found = sorted(_candidates(links, num_bytes), key=lambda choice: choice.seconds)
    best = min((found[0], *_restarted(found, links, num_bytes)), key=lambda choice: choice.seconds)
    if exact:
        assert links.num_devices <= MAX_EXACT, f"every order of {links.num_devices} devices is too many"
        for other in _all_orders(links, num_bytes, best.seconds):
            best = min(best, other, key=lambda choice: choice.seconds)
    return best


def plan_id(choices: Sequence[Choice]) -> str:
    """Names a set of routes: equal on all ranks that chose the same."""
    told = repr([(choice.num_bytes, choice.route.kind, choice.route.steps) for choice in choices])
    return hashlib.sha256(told.encode()).hexdigest()[:12]


# --------------------------------------------------------------------------------------------------------------- graph


def spanning_tree(seconds: np.ndarray) -> list[Edge]:
    """The minimum spanning tree (Prim), each edge from what was reached before, in the order of reaching.

    Args:
        seconds: Of a message, [source, target]; an edge counts for the slower of its directions.
    """
    both = np.maximum(seconds, seconds.T)
    size = len(both)
    nearest, reached = both[0].copy(), np.zeros(size, dtype=bool)
    parent = np.zeros(size, dtype=int)
    reached[0] = True
    edges = []
    for _ in range(size - 1):
        new = int(np.where(reached, np.inf, nearest).argmin())
        edges.append((int(parent[new]), new))
        reached[new] = True
        closer = both[new] < nearest
        nearest[closer], parent[closer] = both[new][closer], new
    return edges


def clusters(seconds: np.ndarray, count: int) -> list[list[int]]:
    """``count`` clusters by single linkage, the largest first: the spanning tree without its slowest edges."""
    both = np.maximum(seconds, seconds.T)
    edges = sorted(spanning_tree(seconds), key=lambda edge: both[edge])
    label = list(range(len(seconds)))
    for one, other in edges[: len(seconds) - count]:
        label = [label[one] if name == label[other] else name for name in label]
    found = [[rank for rank, name in enumerate(label) if name == cluster] for cluster in dict.fromkeys(label)]
    return sorted(found, key=lambda members: (-len(members), members))


def cluster_counts(seconds: np.ndarray) -> list[int]:
    """Numbers of clusters, the widest gap between two merges' links first."""
    both = np.maximum(seconds, seconds.T)
    merges = np.sort([both[edge] for edge in spanning_tree(seconds)])
    gaps = merges[1:] / np.maximum(merges[:-1], np.finfo(float).tiny)
    return [len(merges) - int(index) for index in np.argsort(-gaps, kind="stable")]


# ---------------------------------------------------------------------------------------------------------- candidates


def _candidates(links: Links, num_bytes: float) -> Iterator[Choice]:
    size = links.num_devices
    around = ring_order(links.seconds(num_bytes / size))
    yield Choice(num_bytes, ring(size).reordered(around), float(ring_seconds(links, num_bytes, around[None])[0]))
    reversed_bits = sorted(range(size), key=lambda slot: f"{slot:032b}"[::-1])
    for start in (around, around[np.argsort(reversed_bits, kind="stable")]):
        yield _improved(halving_doubling(size), links, num_bytes, start)
    for groups in _groupings(links, num_bytes, around):
        yield _improved(two_level([len(members) for members in groups]), links, num_bytes, np.concatenate(groups))
    yield _best_tree(links, num_bytes, _MAX_SENDS)


def _restarted(found: Sequence[Choice], links: Links, num_bytes: float) -> Iterator[Choice]:
    """The best shapes that depend on all of an order, improved from random ones."""
    shapes = {
        choice.route.kind: choice.route for choice in reversed(found) if choice.route.kind not in ("ring", "tree")
    }
    if links.num_devices <= 2 * MAX_EXACT:
        generator = np.random.default_rng(0)
        for route in list(shapes.values())[-_RESTARTED_SHAPES:]:
            for _ in range(_RANDOM_STARTS if links.num_devices <= MAX_EXACT else _FEW_STARTS):
                yield _improved(route, links, num_bytes, generator.permutation(links.num_devices))


def _groupings(links: Links, num_bytes: float, around: np.ndarray) -> Iterator[list[list[int]]]:
    """Clusters with members in ring order: by single linkage; equal stretches of the ring (of few devices, stretches of
    all sizes); the devices with the slowest links apart from the rest."""
    seconds = links.seconds(num_bytes / links.num_devices)
    size = links.num_devices
    place = np.argsort(around)
    from_fast = np.argsort(seconds.sum(axis=0) + seconds.sum(axis=1), kind="stable")
    for count in range(1, min(size // 2, _MAX_APART) + 1):
        yield [from_fast[:-count].tolist(), from_fast[-count:].tolist()]
    for count in cluster_counts(seconds)[:size] if size <= _MAX_IMPROVED else cluster_counts(seconds)[:4]:
        if 1 < count < size:
            yield [sorted(members, key=lambda rank: place[rank]) for members in clusters(seconds, count)]
    for count in range(2, size // 2 + 1):
        if size % count == 0:
            yield [part.tolist() for part in np.split(around, count)]
    for sizes in _partitions(size, size) if size <= MAX_EXACT else ():
        if 1 < len(sizes) < size:
            yield [part.tolist() for part in np.split(around, np.cumsum(sizes)[:-1])]


def _improved(route: Route, links: Links, num_bytes: float, order: np.ndarray) -> Choice:
    """The route with the ranks in an order that exchanging two does not make better."""
    best = float(replay(route, links, num_bytes, order[None])[0])
    if route.num_ranks <= _MAX_IMPROVED:
        swaps = _swaps(route.num_ranks)
        while True:
            seconds = replay(route, links, num_bytes, order[swaps])
            if seconds.min() >= best * (1 - 1e-9):
                break
            best, order = float(seconds.min()), order[swaps[seconds.argmin()]]
    return Choice(num_bytes, route.reordered(order), best)


@cache
def _swaps(size: int) -> np.ndarray:
    """Every exchange of two places, [rows, size]."""
    pairs = np.array(np.triu_indices(size, 1)).T
    rows = np.tile(np.arange(size), (len(pairs), 1))
    index = np.arange(len(pairs))
    rows[index, pairs[:, 0]], rows[index, pairs[:, 1]] = pairs[:, 1], pairs[:, 0]
    return rows


def ring_order(seconds: np.ndarray) -> np.ndarray:
    """Order of a ring with the least slowest link, then the least sum: nearest neighbours, then 2-opt and Or-opt.

    Args:
        seconds: Of one message of the ring, [source, target].
    """
    size = len(seconds)
    if size <= 3:
        return min((np.array([0, *rest]) for rest in permutations(range(1, size))), key=lambda o: _rank(seconds, o))
    generator = np.random.default_rng(0)
    few = size <= 2 * MAX_EXACT
    starts = [_nearest_neighbours(seconds, first) for first in range(size if few else 1)]
    starts += [generator.permutation(size) for _ in range(_FEW_STARTS if few else 0)]
    if size > _MAX_RING_IMPROVED:
        return starts[0]
    return min((_improve_ring(seconds, start) for start in starts), key=lambda order: _rank(seconds, order))


def _rank(seconds: np.ndarray, order: np.ndarray) -> tuple[float, float]:
    along = seconds[order, np.roll(order, -1)]
    return float(along.max()), float(along.sum())


def _nearest_neighbours(seconds: np.ndarray, first: int) -> np.ndarray:
    order, left = [first], set(range(len(seconds))) - {first}
    while left:
        order.append(min(left, key=lambda rank: (seconds[order[-1], rank], rank)))
        left.remove(order[-1])
    return np.array(order)


def _improve_ring(seconds: np.ndarray, order: np.ndarray) -> np.ndarray:
    moves = _ring_moves(len(order))
    best = _rank(seconds, order)
    while True:
        rows = order[moves]
        along = seconds[rows, np.roll(rows, -1, axis=1)]
        first = np.lexsort((along.sum(axis=1), along.max(axis=1)))[0]
        found = float(along[first].max()), float(along[first].sum())
        if not found < (best[0], best[1] * (1 - 1e-9)):
            return order
        best, order = found, rows[first]


@cache
def _ring_moves(size: int) -> np.ndarray:
    """Rings after one change, as places of the ring before, [rows, size]: a stretch turned around (2-opt), or up to
    three neighbours put elsewhere (Or-opt)."""
    places = list(range(size))
    rows = [
        places[:start] + places[start:stop][::-1] + places[stop:]
        for start in range(size)
        for stop in range(start + 2, size + 1)
    ]
    for length in range(1, min(4, size - 1)):
        for start in range(size - length + 1):
            rest = places[:start] + places[start + length :]
            rows += [rest[:at] + places[start : start + length] + rest[at:] for at in range(len(rest)) if at != start]
    return np.array(rows)


# --------------------------------------------------------------------------------------------------------------- trees


def _best_tree(links: Links, num_bytes: float, max_sends: float) -> Choice:
    """The best root with the best tree for each direction. Sums go up a tree as copies come down it, backwards in time
    and over links turned around."""
    seconds = links.seconds(num_bytes)

    def best_of(root: int, max_sends: float) -> tuple[float, list[Edge], list[Edge]]:
        up_time, up = _best_copy(seconds.T, root, max_sends)
        down_time, down = _best_copy(seconds, root, max_sends)
        return up_time + down_time, up, down

    roots = np.argsort(seconds.sum(axis=0) + seconds.sum(axis=1), kind="stable").tolist()
    if len(roots) > _MAX_IMPROVED:
        roots, more = roots[:_MAX_ROOTS], 0
    else:
        more = _BEST_ROOTS
    options = {root: best_of(root, max_sends) for root in roots}
    nearest = sorted(roots, key=lambda root: options[root])[:more]
    total, up, down = min([*options.values(), *(best_of(root, max_sends * _MORE_SENDS) for root in nearest)])
    sums = [(child, parent) for parent, child in reversed(up)]
    return Choice(num_bytes, tree(links.num_devices, sums, down), total)


def _copies(seconds: np.ndarray, root: int) -> Iterator[list[Edge]]:
    """Ways to copy from a root to all, parent and child in the order of sending: whoever can be reached first is (Bhat
    et al., "Efficient collective communication in distributed heterogeneous systems", 1999), without and with a look
    at how fast it sends on; and along the minimum spanning tree, the deepest part first."""
    size = len(seconds)
    for looks_ahead in (False, True):
        ready = np.full(size, np.inf)
        ready[root] = 0.0
        left = np.ones(size, dtype=bool)
        left[root] = False
        edges: list[Edge] = []
        while left.any():
            arrival = np.where(left, ready[:, None] + seconds, np.inf)
            score = arrival
            if looks_ahead and left.sum() > 1:
                onward = np.where(left & ~np.eye(size, dtype=bool), seconds, np.inf).min(axis=1)
                score = arrival + onward
            source, target = (int(index) for index in np.unravel_index(score.argmin(), score.shape))
            ready[source] = ready[target] = arrival[source, target]
            left[target] = False
            edges.append((source, target))
        yield edges
    yield _along_tree(spanning_tree(seconds), root)


def _along_tree(edges: Sequence[Edge], root: int) -> list[Edge]:
    """An undirected tree as copies from a root, the child with the deepest part below it first."""
    neighbours: dict[int, list[int]] = {}
    for one, other in edges:
        neighbours.setdefault(one, []).append(other)
        neighbours.setdefault(other, []).append(one)
    order, parent = [root], {root: root}
    for rank in order:
        for child in neighbours[rank]:
            if child != parent[rank]:
                parent[child] = rank
                order.append(child)
    depth = dict.fromkeys(order, 0)
    for rank in reversed(order[1:]):
        depth[parent[rank]] = max(depth[parent[rank]], depth[rank] + 1)
    children: dict[int, list[int]] = {rank: [] for rank in order}
    for rank in order[1:]:
        children[parent[rank]].append(rank)
    return [(rank, child) for rank in order for child in sorted(children[rank], key=lambda child: -depth[child])]


def _best_copy(seconds: np.ndarray, root: int, max_sends: float) -> tuple[float, list[Edge]]:
    """The fastest way to copy from a root to all: the best of the first guesses, then branch and bound over sends in
    the order of arrival, the earliest first.

    Args:
        seconds: Of one copy, [source, target].
        root: Who has it.
        max_sends: How many sends to try; with infinitely many, no way is faster.
    """
    size = len(seconds)
    best, best_edges = min((copy_seconds(seconds, edges), edges) for edges in _copies(seconds, root))
    if size > _MAX_IMPROVED:
        return best, best_edges
    times = seconds.tolist()
    fastest_in = [min(times[source][target] for source in range(size) if source != target) for target in range(size)]
    tried = 0

    def extend(ready: dict[int, float], edges: list[Edge], latest: float) -> None:
        nonlocal best, best_edges, tried
        if len(ready) == size:
            if latest < best:
                best, best_edges = latest, list(edges)
            return
        left = [rank for rank in range(size) if rank not in ready]
        first = min(ready.values())
        if max(first + fastest_in[rank] for rank in left) >= best:
            return
        sends = sorted(
            (start + times[source][target], source, target) for source, start in ready.items() for target in left
        )
        for arrival, source, target in sends:
            if arrival >= best or tried >= max_sends:
                break
            if arrival < latest:  # the same copies in another order
                continue
            tried += 1
            extend({**ready, source: arrival, target: arrival}, [*edges, (source, target)], arrival)

    extend({root: 0.0}, [], 0.0)
    return best, best_edges


def copy_seconds(seconds: np.ndarray, edges: Sequence[Edge]) -> float:
    """Time of copies from a root; each sender sends one at a time, in the order given."""
    ready = np.zeros(len(seconds))
    for source, target in edges:
        ready[source] = ready[target] = ready[source] + seconds[source, target]
    return float(ready.max())


# --------------------------------------------------------------------------------------------------------- every order


def _all_orders(links: Links, num_bytes: float, bound: float) -> Iterator[Choice]:
    """What beats ``bound`` among all rings, all orders of every other shape, and all trees."""
    size = links.num_devices
    everything = np.array(list(permutations(range(size))))
    rings = everything[everything[:, 0] == 0]
    seconds = ring_seconds(links, num_bytes, rings)
    yield Choice(num_bytes, ring(size).reordered(rings[seconds.argmin()]), float(seconds.min()))
    for route in (
        halving_doubling(size),
        *(two_level(sizes) for sizes in _partitions(size, size) if 1 < len(sizes) < size),
    ):
        least = _busiest(route, links, num_bytes, everything)
        promising = np.argsort(least)[: int((least < bound).sum())]
        for block in np.split(promising, range(_BLOCK, len(promising), _BLOCK)):
            if len(block) and least[block[0]] < bound:
                seconds = replay(route, links, num_bytes, everything[block])
                bound = min(bound, float(seconds.min()))
                yield Choice(num_bytes, route.reordered(everything[block][seconds.argmin()]), float(seconds.min()))
    times = links.seconds(num_bytes)
    # Whatever the tree: as many rounds as doublings, up and down.
    if 2 * math.ceil(math.log2(size)) * times[~np.eye(size, dtype=bool)].min() < bound:
        yield _best_tree(links, num_bytes, math.inf)


def _partitions(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    """The ways to write a number as a sum, the largest part first."""
    if total == 0:
        yield ()
    for part in range(min(total, largest), 0, -1):
        for rest in _partitions(total - part, part):
            yield (part, *rest)


def _busiest(route: Route, links: Links, num_bytes: float, orders: np.ndarray) -> np.ndarray:
    """Less than ``replay`` says, [rows]: the time that the busiest device sends."""
    messages: dict[Edge, tuple[int, int]] = {}
    for step in route.steps:
        for move in step:
            count, pieces = messages.get((move.source, move.target), (0, 0))
            messages[move.source, move.target] = count + 1, pieces + move.stop - move.start
    busy = np.zeros(orders.shape)
    for (source, target), (count, pieces) in messages.items():
        pairs = orders[:, source], orders[:, target]
        busy[:, source] += count * links.latency[pairs] + pieces * num_bytes / route.num_pieces / links.bandwidth[pairs]
    result: np.ndarray = busy.max(axis=1)
    return result
