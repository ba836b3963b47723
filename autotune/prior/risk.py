"""Where to begin when it is not known exactly where the optimum lies: the point of least expected excess loss.

The loss rises faster towards high learning rates than towards low ones, and not far beyond the optimum runs diverge. So
of two errors of equal size the high one is worse, and the less is known, the lower a careful proposal lies. The excess
is averaged over a normal law of where the surface lies, with a probability, by the same law, that the cliff is passed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autotune.prior.robust import Floats
from autotune.prior.surface import LAW_CAP

CLIFF, CLIFF_SD = 1.5, 0.5
"""Logarithm of the learning rate over the best one from which runs diverge, before any were seen to, and how much
recipes differ in it."""
CLIFF_WIDTH = 0.3
"""Over which the probability rises, in the same logarithms."""
LAPSE = 0.08
"""Share of runs that diverge for another reason, such as a weight decay far off."""
MOST_SD = 0.2
"""Most that the surface is averaged over: wider averages made proposals at sizes beyond the tables worse."""
REACH = (1.2, 0.6)
"""How far from the likeliest optimum a careful proposal is looked for, in logarithms of learning rate and batch."""
NUM_NODES = (49, 33)
"""Of the lattice over both; odd, so that the likeliest optimum is one of them."""

Excess = Callable[[Floats, Floats], Floats]
"""Coordinates of learning rates and batches, ``[n]`` each -> nats above the optimum, ``[n]``."""


def cliff_seen(distance: Floats, has_diverged: NDArray[np.bool_]) -> Floats:
    """What runs tell of the cliff: ``[2]``, its place and the standard deviation of that; infinite where they tell
    nothing.

    Args:
        distance: Logarithm of the learning rate over the best one, ``[n]``.
        has_diverged: ``[n]``.
    """
    from scipy.special import ndtr

    places = np.linspace(0.0, 4.0, 81)
    chance = LAPSE + (1 - LAPSE) * ndtr((distance[:, None] - places) / CLIFF_WIDTH) * (1 - 1e-6)
    log = np.where(has_diverged[:, None], np.log(chance), np.log1p(-chance)).sum(axis=0)
    log -= 0.5 * ((places - CLIFF) / CLIFF_SD) ** 2
    weights = np.exp(log - log.max()) / np.exp(log - log.max()).sum()
    mean = float(weights @ places)
    variance = float(weights @ (places - mean) ** 2) + 1e-3
    information = 1 / variance - CLIFF_SD**-2  # the belief before is taken out again
    if information < 0.05 * CLIFF_SD**-2:
        return np.array([CLIFF, np.inf])
    place = (mean / variance - CLIFF * CLIFF_SD**-2) / information
    return np.array([np.clip(place, places[0], places[-1]), information**-0.5])


def careful(
    excess: Excess, likeliest: Floats, sd: Floats, cliff: Floats, ranges: Sequence[tuple[float, float]]
) -> Floats:
    """The point of least expected excess, ``[2]`` coordinates of learning rate and batch.

    Args:
        excess: Above the loss at ``likeliest``, were the surface known exactly.
        likeliest: ``[2]``: its optimum within the ranges.
        sd: ``[2]``: standard deviations of where the surface lies along both coordinates.
        cliff: ``[2]``: place of the cliff beyond the best learning rate, and its standard deviation.
        ranges: Least and greatest value of both.
    """
    from scipy.special import ndtr

    width = float(np.sqrt(CLIFF_WIDTH**2 + cliff[1] ** 2 + min(sd[0], CLIFF_SD) ** 2))
    sd = np.minimum(sd, MOST_SD)
    axes = [
        near + np.linspace(-1, 1, num) * (reach + 4 * spread)
        for near, reach, spread, num in zip(likeliest, REACH, sd, NUM_NODES, strict=True)
    ]
    x, y = np.meshgrid(*axes, indexing="ij")
    values = np.minimum(excess(x.ravel(), y.ravel()), LAW_CAP).reshape(x.shape)
    # A surface that lies further by d has at x the value that this one has at x - d.
    expected = _weights(axes[0], sd[0]) @ values @ _weights(axes[1], sd[1]).T
    diverges = ndtr((axes[0] - likeliest[0] - cliff[0]) / width)[:, None]
    expected = expected + diverges * (LAW_CAP - expected)
    allowed = [
        (axis >= max(low, near - reach) - 1e-9) & (axis <= min(high, near + reach) + 1e-9)
        for axis, near, reach, (low, high) in zip(axes, likeliest, REACH, ranges, strict=True)
    ]
    best = np.where(np.outer(*allowed), expected, np.inf)
    place = np.unravel_index(int(best.argmin()), best.shape)
    return np.array([_vertex(axis, best, place, k) for k, axis in enumerate(axes)])


def _weights(axis: Floats, sd: float) -> Floats:
    """``[n, n]``: for each node the share of every node in a normal law round it."""
    away = (axis[:, None] - axis[None]) / max(sd, (axis[1] - axis[0]) / 4)
    weights = np.exp(-0.5 * away**2)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _vertex(axis: Floats, values: Floats, place: tuple[np.intp, ...], along: int) -> float:
    """The least of the parabola through the lowest node and its neighbours along one axis; the node at a border."""
    line = np.moveaxis(values, along, 0)[:, place[1 - along]]
    index = int(place[along])
    around = line[max(index - 1, 0) : index + 2]
    if len(around) < 3 or not np.isfinite(around).all():
        return float(axis[index])
    slope, bend = (around[2] - around[0]) / 2, around[2] + around[0] - 2 * around[1]
    return float(axis[index] - (axis[1] - axis[0]) * slope / max(bend, 1e-12))
