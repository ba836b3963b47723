"""Which device takes which rank of a plan, so that ranks that talk most are close: a quadratic assignment.

Tensor-parallel groups get the fastest links, then expert and context parallelism, pipelines next, data parallelism the
rest: in the order in which a message holds up the computation. Tensor parallelism sends several times a layer, in the
way of it; expert and context parallelism about once or twice a layer; a pipeline once a stage and micro-batch; data
parallelism once a step, beside it.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np

from engine.layout import axis_groups
from engine.plan import Plan
from engine.topology import Links

AXIS_WEIGHTS = {"tp": 1000.0, "ep": 300.0, "cp": 100.0, "pp": 10.0, "ends": 1.0, "data": 1.0}
"""Weight of the traffic of a rank along each axis, relative. Not bytes, and from no model: chosen so far apart that the
order of axes decides as long as links differ by less than some ten times. Bytes alone would put data parallelism first,
whose large sums are hidden behind the backward pass."""
MESSAGE_BYTES = 2**20
"""Message whose time says how far two devices are apart."""
MAX_EXACT = 8
"""Devices up to which every assignment is tried."""
_STARTS = 8


def traffic(plan: Plan) -> np.ndarray:
    """How much each rank sends to each other, [source, target]; the unit is arbitrary.

    Members of a group all send to each other; along a pipeline neighbours do, and where ranks hold several stages the
    last to the first too.
    """
    sent = np.zeros((plan.world_size, plan.world_size))
    for axis, groups in axis_groups(plan).items():
        if axis not in AXIS_WEIGHTS:
            continue
        for group in groups.tolist():
            if axis == "pp":
                nexts = group[1:] + (group[:1] if plan.virtual_stages > 1 else [])
                pairs = [
                    pair for one, other in zip(group, nexts, strict=False) for pair in ((one, other), (other, one))
                ]
            else:
                pairs = list(permutations(group, 2))
            for pair in pairs:
                sent[pair] += AXIS_WEIGHTS[axis] * len(group) / len(pairs)
    return sent


def place(plan: Plan, links: Links) -> np.ndarray:
    """The device of each rank, [ranks]: the least sum over pairs of traffic times the time of a message.

    All processes get the same answer from the same file. With devices that are all alike, each keeps its number.
    """
    sent, seconds = traffic(plan), links.seconds(MESSAGE_BYTES)
    if plan.world_size <= MAX_EXACT:
        return best_assignment(sent, seconds)
    return improved_assignment(sent, seconds)


def assignment_cost(sent: np.ndarray, seconds: np.ndarray, device: np.ndarray) -> float:
    """Traffic times time over all pairs, of one assignment [ranks]."""
    return float((sent * seconds[np.ix_(device, device)]).sum())


def best_assignment(sent: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """The best of all assignments; of equal ones, the first in order of numbers."""
    rows = np.array(list(permutations(range(len(sent)))))
    costs = np.zeros(len(rows))
    for source, target in np.argwhere(sent > 0):
        costs += sent[source, target] * seconds[rows[:, source], rows[:, target]]
    best: np.ndarray = rows[np.flatnonzero(costs <= costs.min() * (1 + 1e-9))[0]]
    return best


def improved_assignment(sent: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """A good assignment: numbers as they are, greedy and random ones, each improved by exchanging two ranks while
    that helps; the best of them."""
    generator = np.random.default_rng(0)
    size = len(sent)
    is_small = size <= 8 * MAX_EXACT
    centres = np.argsort(seconds.sum(axis=0) + seconds.sum(axis=1), kind="stable")[: _STARTS if is_small else 1]
    starts = [np.arange(size), *(_greedy(sent, seconds, int(first)) for first in centres)]
    starts += [generator.permutation(size) for _ in range(_STARTS if is_small else 0)]
    results = [_exchanged(sent, seconds, start) for start in starts]
    costs = np.array([assignment_cost(sent, seconds, device) for device in results])
    return results[int(np.flatnonzero(costs <= costs.min() * (1 + 1e-9))[0])]


def _greedy(sent: np.ndarray, seconds: np.ndarray, first: int) -> np.ndarray:
    """The rank that talks most on device ``first``; then always the rank that talks most with those placed, where that
    costs least."""
    size = len(sent)
    talk, apart = sent + sent.T, seconds + seconds.T
    device = np.full(size, -1)
    free = np.ones(size, dtype=bool)
    rank, place_at = int(talk.sum(axis=1).argmax()), first
    for _ in range(size):
        device[rank], free[place_at] = place_at, False
        placed = device >= 0
        if not free.any():
            break
        rank = int(np.where(placed, -1.0, talk[:, placed].sum(axis=1)).argmax())
        costs = apart[:, device[placed]] @ talk[rank, placed]
        place_at = int(np.where(free, costs, np.inf).argmin())
    return device


def _exchanged(sent: np.ndarray, seconds: np.ndarray, device: np.ndarray) -> np.ndarray:
    """Exchange the two ranks whose exchange helps most, until none does. Each costs some ``size^2`` operations."""
    device, apart = device.copy(), seconds[np.ix_(device, device)]
    mixed = _mixed(sent, apart)
    while True:
        gain = exchange_gain(sent, apart, mixed)
        one, other = np.unravel_index(gain.argmax(), gain.shape)
        if gain[one, other] <= 1e-9 * (sent * apart).sum():
            return device
        pair = np.array([one, other])
        device[pair] = device[pair[::-1]]
        before, apart = apart, seconds[np.ix_(device, device)]
        # Only two rows and two columns have changed; where they cross counts with the rows.
        rows, columns = apart[pair] - before[pair], apart[:, pair] - before[:, pair]
        columns[pair] = 0.0
        mixed[:, pair] += sent @ rows.T + sent.T @ columns
        mixed += sent[:, pair] @ columns.T + sent[pair].T @ rows


def _mixed(sent: np.ndarray, apart: np.ndarray) -> np.ndarray:
    """What the traffic of each rank would cost in the place of each other, [rank, other]."""
    mixed: np.ndarray = sent @ apart.T + sent.T @ apart
    return mixed


def exchange_gain(sent: np.ndarray, apart: np.ndarray, mixed: np.ndarray | None = None) -> np.ndarray:
    """By how much the cost falls when two ranks change places, [one, other].

    Args:
        sent: Traffic [source, target], zero on the diagonal.
        apart: Times between the ranks' present devices, [source, target], zero on the diagonal.
        mixed: ``_mixed`` of both, if known.
    """
    mixed = _mixed(sent, apart) if mixed is None else mixed
    own = mixed.diagonal()
    straight, crossed = sent * apart, sent * apart.T
    gain: np.ndarray = own[:, None] + own[None, :] - mixed - mixed.T - straight - straight.T - crossed - crossed.T
    np.fill_diagonal(gain, 0.0)
    return gain
