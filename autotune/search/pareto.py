"""Pareto front, hypervolume and knee of points with a direction per objective. Pure functions of arrays.

Throughout, ``values`` is an array of shape ``[n, k]``: n points in k objectives, in any units. A row with a value that
is not finite is no point: it is never on the front and adds no volume.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autotune.space.objectives import Direction

REFERENCE_MARGIN = 1.1
"""The reference point of the hypervolume lies so many box widths from the ideal point, in each objective."""


class Box(NamedTuple):
    """The range that objectives are scaled by, as costs (lower is better) of shape ``[k]``; ``nadir > ideal``."""

    ideal: np.ndarray
    """Best value of each objective on the front; usually no point has them all."""
    nadir: np.ndarray
    """Worst value of each objective on the front."""

    def scale(self, costs: np.ndarray) -> np.ndarray:
        """Costs ``[..., k]`` with the ideal point at 0 and the nadir point at 1."""
        scaled: np.ndarray = np.divide(costs - self.ideal, self.nadir - self.ideal)
        return scaled


def costs_of(values: np.ndarray, directions: Sequence[Direction]) -> np.ndarray:
    """``values`` with the maximised columns negated, so that lower is better everywhere; shape ``[n, k]``."""
    signs = np.array([-1.0 if direction == "maximize" else 1.0 for direction in directions])
    costs: np.ndarray = np.asarray(values, dtype=np.float64).reshape(-1, len(signs)) * signs
    return costs


def front(values: np.ndarray, directions: Sequence[Direction]) -> np.ndarray:
    """Which points no other point dominates (at least as good in all objectives, better in one); bool of shape ``[n]``.
    Equal points are on the front together."""
    return _front_of_costs(costs_of(values, directions))


def layers(costs: np.ndarray, most: int | None = None) -> np.ndarray:
    """Which front each point is on: 0 on the front of all, 1 on the front of the others, and so on; ints ``[n]``.

    Args:
        costs: ``[n, k]``, lower is better, finite.
        most: This layer and later ones are not told apart; None for all of them.
    """
    unknown = len(costs) if most is None else most
    found = np.full(len(costs), unknown)
    for layer in range(unknown):
        left = np.flatnonzero(found == unknown)
        if not len(left):
            break
        found[left[_front_of_costs(costs[left])]] = layer
    return found


def front_box(values: np.ndarray, directions: Sequence[Direction]) -> Box:
    """The range of the front. Where the front has no extent in an objective, the range of all points is taken, and
    where that has none either, the value's own size.

    Raises:
        AssertionError: No row is finite.
    """
    costs = costs_of(values, directions)
    costs = costs[np.isfinite(costs).all(axis=1)]
    assert len(costs), "a box needs a point"
    best = costs[_front_of_costs(costs)]
    ideal, nadir = best.min(axis=0), best.max(axis=0)
    nadir = np.where(nadir > ideal, nadir, costs.max(axis=0))
    # The step must be felt in floating point beside the value itself, whatever its size.
    nadir = np.where(nadir > ideal, nadir, ideal + np.where(ideal == 0, 1.0, np.abs(ideal)))
    return Box(ideal, nadir)


def hypervolume(values: np.ndarray, directions: Sequence[Direction], box: Box | None = None) -> float:
    """The share of the space between the ideal point and the reference point that the points dominate, 0 to 1.

    The reference point is ``ideal + 1.1 * (nadir - ideal)`` of ``box``, by default the box of the points' own front.
    Shares are comparable only within one box.
    """
    costs = costs_of(values, directions)
    costs = costs[np.isfinite(costs).all(axis=1)]
    if not len(costs):
        return 0.0
    return _share(costs, box or front_box(values, directions))


def hypervolume_history(values: np.ndarray, directions: Sequence[Direction], box: Box | None = None) -> np.ndarray:
    """``hypervolume`` of the first 1, 2, ... n points in one box, by default that of all points; shape ``[n]``."""
    costs = costs_of(values, directions)
    finite = np.isfinite(costs).all(axis=1)
    shares = np.zeros(len(costs))
    if not finite.any():
        return shares
    box = box or front_box(values, directions)
    best = np.empty((0, costs.shape[1]))
    share = 0.0
    for row, cost in enumerate(costs):
        # The volume changes only with a point that nothing before it covers: few do in a long sweep.
        if finite[row] and not (best <= cost).all(axis=1).any():
            best = np.vstack([best[~(cost <= best).all(axis=1)], cost])
            share = _share(best, box)
        shares[row] = share
    return shares


def knee(values: np.ndarray, directions: Sequence[Direction], box: Box | None = None) -> int | None:
    """The row of the front's knee: the point nearest to the ideal point once each objective is scaled to the front's
    range (or to ``box``), so that units do not matter. None when no row is finite.

    Among points equally near (two extremes alone, say) it is the one whose largest single shortfall is least, then the
    first.
    """
    on_front = np.flatnonzero(front(values, directions))
    if not len(on_front):
        return None
    scaled = (box or front_box(values, directions)).scale(costs_of(values, directions)[on_front])
    # Rounded, so that noise in the last digits does not decide between equals.
    distance = np.linalg.norm(scaled, axis=1).round(9)
    shortfall = scaled.max(axis=1).round(9)
    return int(on_front[np.lexsort((on_front, shortfall, distance))[0]])


def _front_of_costs(costs: np.ndarray) -> np.ndarray:
    from moocore import is_nondominated

    mask: np.ndarray = np.isfinite(costs).all(axis=1)
    if mask.any():
        mask[mask] = is_nondominated(costs[mask], keep_weakly=True)
    return mask


def _share(costs: np.ndarray, box: Box) -> float:
    """Dominated share of the box between the ideal point and the reference point; finite costs of shape ``[n, k]``."""
    import moocore

    reference = np.full(costs.shape[1], REFERENCE_MARGIN)
    # Beyond the ideal point (when the box is of other points) there is no more than the whole to win.
    scaled = np.clip(box.scale(costs), 0.0, REFERENCE_MARGIN)
    volume = float(moocore.hypervolume(scaled, ref=reference))
    return volume / float(np.prod(reference))
