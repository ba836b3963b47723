"""The hypervolume that a trial adds, by rays, agrees with the exact one."""

import numpy as np
import pytest

from autotune.search.ehvi import DrawnFront
from autotune.search.pareto import Box, hypervolume

pytestmark = pytest.mark.unit


def repeated(costs: np.ndarray, num_draws: int = 200) -> np.ndarray:
    return np.broadcast_to(costs, (num_draws, *costs.shape))


def drawn(costs: np.ndarray, num_objectives: int) -> DrawnFront:
    box = Box(np.zeros(num_objectives), np.ones(num_objectives))
    values = repeated(costs)
    return DrawnFront.of(values, np.ones(values.shape[:2], dtype=bool), box, np.random.default_rng(0))


@pytest.mark.parametrize("num_objectives", [1, 2, 3, 4])
def test_volume_and_improvement_are_those_of_the_exact_hypervolume(num_objectives: int) -> None:
    rng = np.random.default_rng(num_objectives)
    known = rng.uniform(0.3, 1.0, size=(6, num_objectives))
    others = rng.uniform(0.0, 1.0, size=(40, num_objectives))
    directions = ["minimize"] * num_objectives
    front = drawn(known, num_objectives)
    before = hypervolume(known, directions, front.box)
    exact = [hypervolume(np.vstack([known, point[None]]), directions, front.box) - before for point in others]
    gain, _ = front.improvement(repeated(others), np.ones((200, 40), dtype=bool))
    assert front.volume == pytest.approx(before, rel=0.03)
    assert gain == pytest.approx(exact, abs=0.02)
    assert abs(gain[int(np.argmax(exact))] - max(exact)) < 0.05 * max(exact) + 1e-6


def test_what_breaks_a_bound_adds_nothing_and_is_no_part_of_the_front() -> None:
    front = drawn(np.array([[0.5, 0.5]]), 2)
    values = repeated(np.array([[0.1, 0.1]]))
    gain, near = front.improvement(values, np.zeros(values.shape[:2], dtype=bool))
    assert gain[0] == 0
    assert near[0] <= 0
    box = Box(np.zeros(2), np.ones(2))
    lost = DrawnFront.of(values, np.zeros(values.shape[:2], dtype=bool), box, np.random.default_rng(0))
    assert lost.volume == 0


def test_points_without_gain_are_ranked_by_how_near_they_come() -> None:
    front = drawn(np.array([[0.2, 0.2]]), 2)
    gain, near = front.improvement(repeated(np.array([[0.3, 0.3], [0.8, 0.8]])), np.ones((200, 2), dtype=bool))
    assert (gain == 0).all()
    assert near[0] > near[1]
