"""The joint search: estimates are corrected by trials, every kind of end is learnt from, and plans and hyperparameters
are chosen for what they add to the front."""

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autotune.search.forecast import Forecast
from autotune.search.gain import expected_gain
from autotune.search.joint import LEAST_KNOWN, JointSampler
from autotune.search.pareto import Box, front_box, hypervolume
from autotune.search.plan_rows import PlanRows
from autotune.search.plan_side import corrected
from autotune.search.sampler import Observation, SearchState
from autotune.search.seeds import derive_seed
from autotune.search.uniform import uniform_draws
from autotune.space.grammar import load_space
from autotune.space.objectives import Objective
from autotune.space.space import Dimension, Scalar, Space
from autotune.space.training import TrainingSpace

pytestmark = pytest.mark.unit

OVERRIDES = (
    "cluster=h100x8",
    "workload.total_tokens=40M",
    "space.plan={tp: [1, 2], dp_shard: [1, 2, 4, 8], micro_batch_size: [1, 2, 4, 8], zero_stage: [1, 3],"
    " recompute: [none, full], precision: bf16}",
    "space.hyperparameters={global_batch_size: [32, 64], learning_rate: {log_float: [1e-4, 1e-1]}}",
    "space.constraints=['plan.world_size == devices']",
)
ALL = "objectives=[speed, memory, quality]"
Chosen = Mapping[str, Scalar]
SLOWER = 1.3


class Parabola:
    """A prior that is right about the learning rate but for a factor of 1.5."""

    support = "inside"
    reasons = ()

    def excess(self, points: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        mean = 0.02 * np.log(points["learning_rate"] / 0.015) ** 2
        return mean, 0.003 + 0.5 * mean

    def optimum(self) -> dict[str, float]:
        return {"learning_rate": 0.015}

    def loss_level(self) -> tuple[float, float]:
        return 2.0, 0.02


def state_of(objectives: str = ALL, *, with_prior: bool = True, with_forecast: bool = True) -> SearchState:
    space, enumeration = load_space("demo", (*OVERRIDES, objectives))
    assert isinstance(space, TrainingSpace)
    forecast = Forecast.make(space, enumeration) if with_forecast else None
    prior: Any = Parabola() if with_prior else None
    return SearchState(space, (), 0, 0, 0, enumeration=enumeration, forecast=forecast, task_prior=prior)


@functools.cache
def estimates() -> Forecast:
    space, enumeration = load_space("demo", (*OVERRIDES, ALL))
    assert isinstance(space, TrainingSpace)
    return Forecast.make(space, enumeration)


def measured(chosen: Chosen) -> dict[str, float]:
    """As estimated, but that micro-batches above 2 are slower by 1.3; the best learning rate is 0.01."""
    return _measured(tuple(chosen.items()))


@functools.cache
def _measured(items: tuple[tuple[str, Scalar], ...]) -> dict[str, float]:
    chosen = dict(items)
    run = estimates().space.candidate(chosen).run
    assert run is not None
    estimated = estimates().of(run)
    slower = SLOWER if run.plan.micro_batch_size > 2 else 1.0
    off = np.log(float(chosen["hyperparameters.learning_rate"] or 0) / 0.01)
    return {
        "speed": estimated["speed"].value / slower,
        "memory": estimated["memory"].value,
        "quality": 2.0 + 0.02 * float(off) ** 2,
    }


def search(state: SearchState, num: int, tell: Callable[[Chosen], dict[str, float]] = measured) -> SearchState:
    """A few trials."""
    for number in range(len(state.observations), num):
        chosen = JointSampler().propose(replace(state, number=number, seed=derive_seed(0, number)))
        assert chosen is not None
        assert state.space.candidate(chosen).is_legal
        ended = Observation(number, "ok", chosen, tell(chosen))
        state = replace(state, observations=(*state.observations, ended))
    return state


def test_before_any_trial_plans_are_as_uncertain_as_estimated() -> None:
    state = state_of()
    rows = PlanRows.of(state.space, state.enumeration, state.forecast)  # type: ignore[arg-type]
    plans = corrected(rows, (), np.zeros(0, dtype=np.int64))
    every = np.arange(len(rows))
    for name, plan in plans.items():
        mean, sd = plan.process.posterior(plan.points(every))
        assert plan.logarithm(every, mean) == pytest.approx(rows.estimates[name].log)
        assert np.median(plan.unit * sd) == pytest.approx(np.median(rows.estimates[name].sd), rel=0.15)


def test_what_one_axis_costs_is_learnt_from_trials_of_other_plans() -> None:
    state = state_of()
    draws = itertools.islice(uniform_draws(state.space, estimates().enumeration, 1), 30)
    trials = [Observation(n, "ok", c, measured(c)) for n, c in enumerate(draws)]
    rows = PlanRows.of(state.space, state.enumeration, state.forecast)  # type: ignore[arg-type]
    speed = corrected(rows, trials, rows.find([o.parameters for o in trials]))["speed"]
    wrong_by = speed.mean() - rows.estimates["speed"].log
    large = rows.column("micro_batch_size") > 2
    assert wrong_by[large].mean() == pytest.approx(-np.log(SLOWER), abs=0.1)
    assert wrong_by[~large].mean() == pytest.approx(0.0, abs=0.1)


def test_what_a_run_costs_tells_how_fast_it_is() -> None:
    state = state_of("objectives=[energy, quality]")
    chosen = next(uniform_draws(state.space, estimates().enumeration, 1))
    rows = PlanRows.of(state.space, state.enumeration, state.forecast)  # type: ignore[arg-type]
    places = rows.find([chosen])
    speed = 2.0 * np.exp(rows.estimates["speed"].log[places][0])
    energy = rows.space.running_costs(rows.world_size[places][0], speed)["energy"]
    trial = Observation(0, "ok", chosen, {"energy": float(energy), "quality": 2.0})
    found = corrected(rows, [trial], places)["speed"].mean()[places][0]
    assert found > rows.estimates["speed"].log[places][0] + 0.5 * np.log(2.0)


def test_running_out_of_memory_raises_what_a_plan_is_believed_to_need() -> None:
    state = state_of()
    assert state.forecast is not None
    chosen = next(uniform_draws(state.space, state.forecast.enumeration, 1))
    rows = PlanRows.of(state.space, state.enumeration, state.forecast)  # type: ignore[arg-type]
    lost = [Observation(0, "failed", chosen, failure="oom")]
    place = rows.find([chosen])
    before, after = (corrected(rows, trials, rows.find([o.parameters for o in trials])) for trials in ([], lost))
    assert rows.log_capacity is not None
    assert after["memory"].mean()[place][0] > before["memory"].mean()[place][0]
    assert after["memory"].mean()[place][0] == pytest.approx(rows.log_capacity[place][0], abs=0.3)


def volume(trials: list[Chosen], everything: list[Chosen]) -> float:
    names = ("speed", "memory", "quality")
    values, known = (np.array([[measured(c)[n] for n in names] for c in cs]) for cs in (trials, everything))
    directions = ["maximize", "minimize", "minimize"]
    return hypervolume(values, directions, front_box(known, directions)) if len(values) else 0.0


@pytest.mark.parametrize(("with_prior", "with_forecast"), [(True, True), (False, True), (False, False)])
def test_a_few_trials_cover_more_of_the_front_than_random_ones(with_prior: bool, with_forecast: bool) -> None:
    state = state_of(with_prior=with_prior, with_forecast=with_forecast)
    ours = [dict(o.parameters) for o in search(state, 10).observations]
    rival = list(itertools.islice(uniform_draws(state.space, state.enumeration, 1), 10))
    assert volume(ours, ours + rival) > volume(rival, ours + rival)


def test_far_from_the_prior_learning_rates_are_spread_over_after_its_first_word() -> None:
    class Outside(Parabola):
        support = "outside"

    state = replace(state_of(), task_prior=Outside())  # type: ignore[arg-type]
    rates = []
    for number in range(4):
        chosen = JointSampler().propose(replace(state, number=number, seed=number))
        assert chosen is not None
        rates.append(float(chosen["hyperparameters.learning_rate"]))  # type: ignore[arg-type]
        told = Observation(number, "ok", chosen, measured(chosen))
        state = replace(state, observations=(*state.observations, told))
    assert rates[0] == pytest.approx(0.015, rel=0.3)
    assert np.ptp(np.log10(rates)) > 0.8


def test_without_plans_the_prior_has_the_first_word_and_what_it_does_not_know_is_spread_over() -> None:
    rate = Dimension("learning_rate", "log_float", low=1e-4, high=1e-1)
    dropout = Dimension("dropout", "float", low=0.0, high=1.0)
    space = Space("s", (Objective(name="quality"), Objective(name="seconds")), (rate, dropout), {})
    state = SearchState(space, (), 0, 0, 0, task_prior=Parabola())  # type: ignore[arg-type]
    seen: list[Chosen] = []
    for number in range(6):
        chosen = JointSampler().propose(replace(state, number=number, seed=number))
        assert chosen is not None
        seen.append(chosen)
        values = {"quality": 2 + 0.03 * float(chosen["dropout"]), "seconds": 1 - float(chosen["dropout"])}  # type: ignore[arg-type]
        state = replace(state, observations=(*state.observations, Observation(number, "ok", chosen, values)))
    assert [row["learning_rate"] for row in seen[:3]] == pytest.approx([0.015] * 3, rel=0.3)
    assert np.ptp([row["dropout"] for row in seen[:3]]) > 0.2  # type: ignore[misc]


def test_only_plans_matter_where_quality_is_no_objective() -> None:
    state = search(state_of("objectives=[speed, memory]"), 6)
    plans = {tuple((k, v) for k, v in o.parameters.items() if k.startswith("plan.")) for o in state.observations}
    assert len(plans) >= 4


def test_one_objective_that_plans_tell_begins_at_the_best_estimate() -> None:
    state = state_of("objectives=[speed]")
    chosen = JointSampler().propose(state)
    assert chosen is not None
    assert state.forecast is not None
    run = state.space.candidate(chosen).run
    assert run is not None
    assert state.forecast.of(run)["speed"].value >= 0.9 * float(state.forecast.predicted["speed"].value.max())


def test_bounds_are_kept_to_once_trials_tell_how_wrong_the_estimates_are() -> None:
    state = state_of()
    assert state.forecast is not None
    bound = float(np.quantile(state.forecast.predicted["memory"].value, 0.6))
    objectives = tuple(replace_bound(o, bound) for o in state.space.objectives)
    space = replace(state.space, objectives=objectives)
    forecast = Forecast.make(space, state.enumeration)  # type: ignore[arg-type]
    ended = search(replace(state, space=space, forecast=forecast), 12)
    last = [o.values["memory"] for o in ended.observations[6:] if o.values]
    assert np.mean([value <= bound for value in last]) >= 0.8


def replace_bound(objective: Objective, bound: float) -> Objective:
    return objective.changed(bound=bound) if objective.name == "memory" else objective


def test_plans_that_fail_are_left_alone_whatever_the_learning_rate() -> None:
    state = state_of()
    for number in range(12):
        chosen = JointSampler().propose(replace(state, number=number, seed=derive_seed(0, number)))
        assert chosen is not None
        fails = chosen["plan.zero_stage"] == 1 if "plan.zero_stage" in chosen else False
        ended = (
            Observation(number, "failed", chosen, failure="hang")
            if fails
            else Observation(number, "ok", chosen, measured(chosen))
        )
        state = replace(state, observations=(*state.observations, ended))
    assert sum(o.state == "failed" for o in state.observations[6:]) <= 2


def test_running_trials_are_not_proposed_again() -> None:
    state = search(state_of(), 3)
    for number in range(3, 7):
        chosen = JointSampler().propose(replace(state, number=number, seed=derive_seed(0, number)))
        assert chosen is not None
        running = Observation(number, "running", chosen)
        state = replace(state, observations=(*state.observations, running))
    chosen_ones = [tuple(o.parameters.items()) for o in state.observations]
    assert len(set(chosen_ones)) == len(chosen_ones)


def test_expected_gain_falls_as_the_front_becomes_known() -> None:
    sampler = JointSampler()
    state = state_of()
    assert sampler.expected_gain(state) is None
    assert sampler.expected_gain(search(state, 2)) is None, "two trials tell nothing of the front's range"
    early = search(state, 3)
    late = search(early, 12)
    gains = [sampler.expected_gain(s) for s in (early, late)]
    assert gains[0] is not None
    assert gains[1] is not None
    assert 0 <= gains[1] < gains[0]


def test_expected_gain_is_a_share_also_where_the_trials_dominate_next_to_nothing() -> None:
    """Trials beyond the range of the likely front: by what they dominate any gain would be boundless."""
    dimensions = (Dimension("x", "float", low=-100.0, high=100.0), Dimension("y", "float", low=-100.0, high=100.0))
    space = Space("curve", (Objective(name="first"), Objective(name="second")), dimensions, {})
    places = [(-100.0, 99.0), (90.0, -95.0), (99.0, 99.0), (-99.0, -100.0), (80.0, 0.0), (95.0, 60.0), (0.5, 1e-4)]
    rows = [Observation(n, "ok", {"x": x, "y": y}, curve({"x": x, "y": y})) for n, (x, y) in enumerate(places)]
    for count in range(LEAST_KNOWN, len(rows) + 1):
        gain = expected_gain(JointSampler(), SearchState(space, rows[:count], count, 0, 0))
        assert gain is None or 0 <= gain.ratio <= 1


def curve(chosen: Chosen) -> dict[str, float]:
    x, y = float(chosen["x"] or 0), float(chosen["y"] or 0)
    return {"first": x**2 + y**2, "second": (x - 1) ** 2 + y**2}


def test_a_front_of_two_costs_without_plans_is_found() -> None:
    dimensions = tuple(Dimension(name, "float", low=-1.0, high=2.0) for name in ("x", "y"))
    space = Space("curve", (Objective(name="first"), Objective(name="second")), dimensions, {})
    state = search(SearchState(space, (), 0, 0, 0), 18, curve)
    last = np.array([list(curve(o.parameters).values()) for o in state.observations])
    box = Box(np.zeros(2), np.ones(2))
    x = np.linspace(0, 1, 200)
    whole = hypervolume(np.stack([x**2, (x - 1) ** 2], axis=1), ["minimize"] * 2, box)
    assert hypervolume(last, ["minimize"] * 2, box) > 0.9 * whole
