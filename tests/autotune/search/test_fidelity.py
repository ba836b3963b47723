"""Who goes on: the best by forecast, once each, the rest of the budget for those begun; samplers see one observation a
candidate."""

from dataclasses import replace

import numpy as np
import pytest

from autotune.search.curves import Curve
from autotune.search.fidelity import Forecasts, Growth, as_candidates, chains_of, next_growth, ranked
from autotune.search.sampler import Observation, SearchState
from autotune.space.fidelity import Fidelity
from autotune.space.objectives import Objective
from autotune.space.space import Dimension, Space

pytestmark = pytest.mark.unit

TWO = Fidelity(rungs=(0.25, 1.0), eta=2.0)
QUALITY = Objective(name="quality")
SPEED = Objective(name="speed")


def state(observations: list[Observation], *objectives: Objective) -> SearchState:
    space = Space("s", objectives or (QUALITY,), (Dimension("x", "float", (), 0.0, 1.0),), {})
    return SearchState(space, observations, len(observations), 0, 0)


def part(number: int, loss: float, *, curve: Curve | None = None, **values: float) -> Observation:
    measured = {"quality": loss, **values}
    return Observation(number, "ok", {"x": 0.1 * number}, measured, fidelity=0.25, curve=curve)


def full(number: int, of: int, loss: float, **values: float) -> Observation:
    return Observation(number, "ok", {"x": 0.1 * of}, {"quality": loss, **values}, rung=1, continues=of)


def forecast(observations: list[Observation], objectives: list[Objective], fidelity: Fidelity) -> Forecasts:
    chains = chains_of(observations)
    return Forecasts.of(chains, [chain.known for chain in chains], objectives, fidelity)


def falling(to: float, by: float) -> Curve:
    """A curve that ends at ``to`` and fell by ``by`` over its second half."""
    x = np.linspace(0.01, 0.25, 40)
    return Curve.of(x.tolist(), (to + by * (0.25 - x) / 0.125).tolist(), (0.25, 1.0))


def test_the_best_half_goes_on_once_there_are_enough() -> None:
    begun = [part(0, 3.0), part(1, 2.5)]
    assert next_growth(state(begun[:1]), TWO, 10.0) is None
    assert next_growth(state(begun), TWO, 10.0) == Growth(1, 1)
    running = replace(full(2, 1, 2.0), state="running", values=None)
    assert next_growth(state([*begun, running]), TWO, 10.0) is None
    more = [*begun, running, part(3, 2.4), part(4, 2.9)]
    assert next_growth(state(more), TWO, 10.0) == Growth(3, 1)


def test_a_slow_starter_with_a_steep_curve_is_not_dropped() -> None:
    flat = [part(number, 2.5, curve=falling(2.5, 0.01)) for number in range(3)]
    steep = part(3, 2.6, curve=falling(2.6, 0.5))
    forecasts = forecast([*flat, steep], [QUALITY], TWO)
    assert forecasts.mean[3, 0] < forecasts.mean[:3, 0].min()
    assert next_growth(state([*flat, steep]), TWO, 10.0) == Growth(3, 1)


def test_forecasts_learn_from_the_candidates_that_went_on() -> None:
    begun = [part(number, 3.0 + 0.1 * number) for number in range(6)]
    grown = [full(6 + number, number, 2.0 + 0.1 * number) for number in range(4)]
    forecasts = forecast([*begun, *grown], [QUALITY], TWO)
    assert forecasts.mean[5, 0] == pytest.approx(2.5, abs=0.1), "a training still gains 1.0"
    assert forecasts.sd[:4].tolist() == [[0.0]] * 4
    assert forecasts.sd[5, 0] > 0


def test_losses_of_a_narrower_model_are_on_a_level_of_their_own() -> None:
    narrow = Fidelity(rungs=(1.0, 1.0), widths=(0.5, 1.0), eta=2.0)
    begun = [part(number, 4.0 + 0.1 * number) for number in range(4)]
    forecasts = forecast([*begun, full(4, 0, 2.0)], [QUALITY], narrow)
    assert forecasts.mean[:, 0] == pytest.approx([2.0, 2.1, 2.2, 2.3], abs=0.05)


def test_speed_of_a_part_is_final() -> None:
    begun = [part(0, 3.0, speed=100.0), part(1, 2.9, speed=50.0)]
    forecasts = forecast(begun, [QUALITY, SPEED], TWO)
    assert forecasts.mean[:, 1].tolist() == [-100.0, -50.0]
    assert forecasts.sd[:, 1].tolist() == [0.0, 0.0]


def test_the_rest_of_the_budget_is_for_those_begun() -> None:
    begun = [part(number, 3.0 - 0.1 * number) for number in range(3)]
    assert next_growth(state(begun), TWO, 0.8, may_begin=False) == Growth(2, 1)
    grown = [*begun, full(3, 2, 2.0)]
    assert next_growth(state(grown), TWO, 10.0) is None
    assert next_growth(state(grown), TWO, 0.8, may_begin=False) == Growth(1, 1)
    assert next_growth(state(grown), TWO, 0.7, may_begin=False) is None


def test_what_failed_does_not_go_on() -> None:
    failed = Observation(0, "failed", {"x": 0.0}, None, "diverged", fidelity=0.25)
    assert next_growth(state([failed, part(1, 3.0)]), TWO, 0.8, may_begin=False) == Growth(1, 1)
    assert next_growth(state([failed]), TWO, 1.0, may_begin=False) is None
    again = [part(0, 2.0), Observation(1, "failed", {"x": 0.0}, None, "nan", rung=1, continues=0)]
    assert next_growth(state(again), TWO, 1.0, may_begin=False) is None


def test_samplers_see_one_observation_a_candidate() -> None:
    refused = Observation(4, "refused", {"x": 0.9}, failure="rule")
    seen = as_candidates(state([part(0, 3.0), part(1, 3.1), part(2, 3.2), full(3, 0, 2.0), refused]), TWO).observations
    assert [o.number for o in seen] == [0, 1, 2, 4]
    assert seen[0].values == {"quality": 2.0}
    assert seen[0].fidelity == 1.0
    assert not seen[0].noise
    assert seen[1].values is not None
    assert seen[1].values["quality"] == pytest.approx(2.1, abs=0.05), "as if it were trained in full"
    assert seen[1].noise["quality"] > 0
    running = [part(0, 3.0), replace(full(1, 0, 0.0), state="running", values=None)]
    assert [o.state for o in as_candidates(state(running), TWO).observations] == ["ok"]
    broken = [part(0, 3.0), Observation(1, "failed", {"x": 0.0}, None, "diverged", rung=1, continues=0)]
    assert [(o.state, o.failure) for o in as_candidates(state(broken), TWO).observations] == [("failed", "diverged")]
    unlucky = [part(0, 3.0), Observation(1, "failed", {"x": 0.0}, None, "infra", rung=1, continues=0)]
    assert [o.state for o in as_candidates(state(unlucky), TWO).observations] == ["ok"]


def test_ranking_by_layers_then_solitude() -> None:
    costs = np.array([[0.0, 1.0], [1.0, 0.0], [0.5, 0.5], [0.45, 0.55], [2.0, 2.0]])
    order = ranked(costs, np.zeros(5)).tolist()
    assert set(order[:2]) == {0, 1}, "the ends of the front"
    assert order[-1] == 4
    assert ranked(costs, np.array([0.0, 0.0, 0.0, 0.0, -1.0]))[-1] == 4
    assert ranked(costs, np.array([1.0, 0.0, 0.0, 0.0, 0.0]))[-1] == 0, "beyond a bound"
    assert ranked(np.array([[3.0], [1.0], [2.0]]), np.zeros(3)).tolist() == [1, 2, 0]


def test_a_growth_is_a_function_of_the_state() -> None:
    begun = [part(number, 3.0 - 0.1 * number, curve=falling(3.0 - 0.1 * number, 0.1 * number)) for number in range(6)]
    assert len({next_growth(state(begun), TWO, 10.0) for _ in range(3)}) == 1
