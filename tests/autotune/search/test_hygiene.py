"""Models see costs that are finite and capped; what was measured stays as it was."""

import numpy as np
import pytest

from autotune.search.hygiene import CAP_RATIO, costs_of, tells, violations_of
from autotune.search.sampler import Observation
from autotune.space.objectives import Objective

pytestmark = pytest.mark.unit

QUALITY = Objective(name="quality")
SPEED = Objective(name="speed")


def observed(*losses: float | None, speed: float = 10.0) -> list[Observation]:
    """Trials with these losses; None for a failed one."""
    return [
        Observation(n, "failed" if v is None else "ok", {}, None if v is None else {"quality": v, "speed": speed})
        for n, v in enumerate(losses)
    ]


def test_a_diverged_loss_is_capped_near_what_was_predicted() -> None:
    costs = costs_of(observed(2.4, 2.5, 8.0), [QUALITY], {"quality": 2.4})[:, 0]
    assert costs.tolist() == pytest.approx([2.4, 2.5, 2.4 * CAP_RATIO])


def test_without_a_prediction_the_spread_of_the_trials_caps() -> None:
    costs = costs_of(observed(2.0, 2.1, 2.2, 1e6), [QUALITY])[:, 0]
    assert costs[:3].tolist() == [2.0, 2.1, 2.2]
    assert 2.2 < costs[3] < 3.0


def test_a_prediction_that_was_too_low_does_not_cap_the_best_trials() -> None:
    costs = costs_of(observed(3.0, 3.1), [QUALITY], {"quality": 2.0})[:, 0]
    assert costs.tolist() == [3.0, 3.1]


def test_failures_get_the_greatest_cost_and_running_ones_none() -> None:
    observations = [*observed(2.0, 2.1, 2.3, None), Observation(4, "running", {}), Observation(5, "refused", {})]
    costs = costs_of(observations, [QUALITY, SPEED])
    assert np.isnan(costs[4]).all()
    assert np.isfinite(np.delete(costs, 4, axis=0)).all()
    assert costs[3, 0] == costs[5, 0] == costs[[0, 1, 2, 3, 5], 0].max()
    assert costs[0, 1] == -10.0


def test_all_failed_is_finite_too() -> None:
    assert np.isfinite(costs_of(observed(None, None), [QUALITY, SPEED])).all()
    assert costs_of([], [QUALITY]).shape == (0, 1)


def test_the_first_failure_costs_more_than_what_was_predicted() -> None:
    """Where nothing has ended well yet a failure must not look like the best trial there could be."""
    assert costs_of(observed(None), [QUALITY], {"quality": 2.4}).tolist() == [[pytest.approx(2.4 * CAP_RATIO)]]


def test_failures_of_the_machines_tell_nothing() -> None:
    ends = [Observation(n, "failed", {}, failure=kind) for n, kind in enumerate(("infra", "interrupted", "oom", "nan"))]
    assert [tells(o) for o in ends] == [False, False, True, True]
    assert not tells(Observation(4, "running", {}))


def test_speed_and_memory_are_not_capped() -> None:
    slow = Observation(3, "ok", {}, {"quality": 2.0, "speed": 1e-3})
    assert costs_of([*observed(2.0, 2.1, 2.2), slow], [SPEED])[:, 0].tolist() == [-10.0, -10.0, -10.0, -1e-3]


def test_failures_and_bounds_are_violations() -> None:
    bounded = Objective(name="quality", bound=2.0)
    violations = violations_of([*observed(1.0, 3.0, None), Observation(3, "running", {})], [bounded, SPEED])
    assert violations[:3].tolist() == [[-1.0, -0.5, 0.0], [-1.0, 0.5, 0.0], [1.0, 1.0, 0.0]]
    assert np.isnan(violations[3]).all()
