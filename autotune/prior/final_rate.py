"""What the end of the schedule costs: a rule of thumb, since the tables vary it in no controlled way.

A learning rate that ends at a share r of its peak is taken to be worse than one that ends at 0 by 0.06 r^0.6 nats. The
formula is ours and no fit. It is set so that a cosine to a tenth costs 0.015 nats (Bergsma et al., arXiv 2502.15938,
report a loss 0.77 % lower for a linear decay to zero at 610M parameters, which is about 0.02 nats, the shape of the
decay included) and so that a constant rate is clearly worse than any decay. Kinds of decay that end alike count as
equal: a constant rate with a cooldown does as well as a cosine (Hägele et al., arXiv 2405.18392). Half of whatever the
formula says is its error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from autotune.prior.coordinates import values_of
from autotune.prior.robust import Floats
from autotune.prior.task import Task

CONSTANT_EXCESS, EXPONENT = 0.06, 0.6
KIND_SD = 0.004
"""How much kinds of decay that end alike may differ, nats."""
DOUBT = 0.5
"""Error of the formula, as a share of the change it makes."""
FULL_TAIL = 0.15
"""Share of the tokens a wsd decay needs to recover nearly all."""


def final_rate_excess(task: Task, points: Mapping[str, Any], num_points: int) -> tuple[Floats, Floats]:
    """Loss above that of a decay to zero, ``[num_points]`` in nats, and the standard deviation of its difference to the
    recipe's own schedule."""
    schedule = values_of(task, points, "schedule", num_points)
    ratio = values_of(task, points, "min_lr_ratio", num_points).astype(float)
    tail = values_of(task, points, "decay_ratio", num_points).astype(float)
    cost = _cost(schedule, ratio, tail)
    own = _cost(np.array([task.schedule]), np.array([task.min_lr_ratio]), np.array([task.decay_ratio]))
    return cost, np.hypot(DOUBT * (cost - own), KIND_SD * (schedule != task.schedule))


def _cost(schedule: Any, ratio: Floats, tail: Floats) -> Floats:
    reached = np.where(schedule == "wsd", 1 - np.exp(-3 * tail / FULL_TAIL), 1.0)
    ends_at = np.where(schedule == "constant", 1.0, 1 - reached * (1 - ratio))
    return np.asarray(CONSTANT_EXCESS * np.clip(ends_at, 0, 1) ** EXPONENT)
