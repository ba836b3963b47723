"""Candidates ranked and filtered before any trial, by planted estimates: the rules of choice are what is tested."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.cost.estimate import HIDDEN_PARTS, MEMORY_PARTS, TIME_PARTS, EstimateTable
from autotune.search import forecast as module
from autotune.search.forecast import DOMINATED, MEMORY, Forecast, Predicted
from autotune.search.uniform import uniform_draws
from autotune.space.grammar import load_space
from autotune.study.assignment import Assignment
from autotune.study.record import record_of
from autotune.study.study import Study, load_snapshot
from engine.errors import UserError
from engine.outcome import Outcome
from engine.plan import PlanTable

pytestmark = pytest.mark.unit

SPACE = """
use: [tiny_llama]
cluster: cpu:2
objectives: [speed, memory, quality]
space:
  plan:
    dp_shard: [1, 2]
    micro_batch_size: [1, 2, 4, 8]
  hyperparameters:
    global_batch_size: [16]
"""


def table_of(step: np.ndarray, memory: np.ndarray, *, spread: float = 0.02) -> EstimateTable:
    zero = np.zeros(len(step))
    return EstimateTable(
        step, step * (1 - spread), step * (1 + spread),
        memory, memory * (1 - spread), memory * (1 + spread), memory / 2,
        dict.fromkeys(TIME_PARTS, zero), dict.fromkeys(HIDDEN_PARTS, zero), dict.fromkeys(MEMORY_PARTS, zero),
        zero.astype(int),
    )  # fmt: skip


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces the cost model by a function of the plans."""

    def use(formula: Callable[[PlanTable], tuple[np.ndarray, np.ndarray]], **changes: Any) -> None:
        monkeypatch.setattr(module, "estimate", lambda m, c, table, **_: table_of(*formula(table), **changes))

    return use


def small_is_slow(table: PlanTable) -> tuple[np.ndarray, np.ndarray]:
    """A true trade-off in the micro-batch; two devices are slower and need more memory."""
    micro, penalty = table["micro_batch_size"], 1 + 0.5 * (table["dp_shard"] - 1)
    return penalty / micro, 1e6 * micro * penalty


def load(tmp_path: Path, text: str = SPACE) -> Any:
    path = tmp_path / "small.yaml"
    path.write_text(text)
    return load_space(str(path))


def test_what_another_plan_surely_beats_is_not_tried(tmp_path: Path, plant: Callable[..., None]) -> None:
    space, enumeration = load(tmp_path)
    plant(small_is_slow)
    forecast = Forecast.make(space, enumeration)
    assert set(forecast.enumeration.table["dp_shard"]) == {1}
    assert sorted(forecast.enumeration.table["micro_batch_size"]) == [1, 2, 4, 8]
    assert forecast.enumeration.removed[DOMINATED] == 4
    assert (forecast.ranks == 0).all()


def test_intervals_that_overlap_remove_nothing_but_rank(tmp_path: Path, plant: Callable[..., None]) -> None:
    space, enumeration = load(tmp_path)
    plant(small_is_slow, spread=0.6)
    forecast = Forecast.make(space, enumeration)
    assert DOMINATED not in forecast.enumeration.removed
    assert set(forecast.ranks[forecast.enumeration.table["dp_shard"] == 1]) == {0}
    assert (forecast.ranks[forecast.enumeration.table["dp_shard"] == 2] > 0).all()
    first = [chosen["plan.mesh"] for chosen in uniform_draws(space, forecast.enumeration, 3, forecast.ranks)]
    assert first == ["single"] * 4 + ["dp2"] * 4


def test_what_surely_does_not_fit_is_removed_and_nothing_else(tmp_path: Path, plant: Callable[..., None]) -> None:
    space, enumeration = load(tmp_path)
    capacity = space.cluster.memory_bytes
    plant(lambda t: (1.0 / t["micro_batch_size"], capacity * t["micro_batch_size"] / 3.99))
    forecast = Forecast.make(space, enumeration)
    assert sorted(set(forecast.enumeration.table["micro_batch_size"])) == [1, 2, 4]  # 4 fits by its low end
    assert forecast.enumeration.removed[MEMORY] == 2


def test_nothing_that_fits_is_an_error_with_the_numbers(tmp_path: Path, plant: Callable[..., None]) -> None:
    space, enumeration = load(tmp_path)
    plant(lambda t: (1.0 * t["micro_batch_size"], 1e15 * t["micro_batch_size"]))
    with pytest.raises(UserError, match="the smallest needs"):
        Forecast.make(space, enumeration)
    bounded = SPACE.replace("[speed, memory, quality]", "[{name: memory, bound: 1MiB}, quality]")
    space, enumeration = load(tmp_path, bounded)
    plant(lambda t: (1.0 * t["micro_batch_size"], 1e9 * t["micro_batch_size"]))
    with pytest.raises(UserError, match="the bounds are memory"):
        Forecast.make(space, enumeration)


@pytest.mark.parametrize("num_costs", [1, 2, 3, 4])
def test_brute_force_agrees_on_what_is_surely_beaten(num_costs: int) -> None:
    """With any number of costs: surely better in one of them, and not worse by its value in any other."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = rng.uniform(1, 2, (num_costs, 12)).round(1)
        costs = [Predicted(v, 0.9 * v, 1.1 * v) for v in values]
        expected = [
            any(
                costs[k].high[j] < costs[k].low[i]
                and all(costs[m].value[j] <= costs[m].value[i] for m in range(num_costs) if m != k)
                for j in range(12)
                for k in range(num_costs)
            )
            for i in range(12)
        ]
        assert module._surely_beaten(costs, costs).tolist() == expected


def test_money_and_energy_are_forecast_from_speed_and_decide_like_other_costs(
    tmp_path: Path, plant: Callable[..., None]
) -> None:
    """Two devices that are a quarter faster than one are the faster and the dearer choice: both stay."""
    figures = "{name: c, device_kind: cpu, device: cpu, devices_per_node: 2, memory_bytes: 1000000000, watts: 50"
    figures += ", dollars_per_device_hour: 2.0}"
    text = SPACE.replace("cluster: cpu:2", f"cluster: {figures}").replace("memory, quality", "cost, energy")
    space, enumeration = load(tmp_path, text)
    plant(lambda t: (1.0 / t["micro_batch_size"] / (1 + 0.25 * (t["dp_shard"] - 1)), 1e6 * t["micro_batch_size"]))
    forecast = Forecast.make(space, enumeration)
    assert sorted(forecast.enumeration.table["dp_shard"]) == [1, 2]
    assert set(forecast.enumeration.table["micro_batch_size"]) == {8}
    runs = (space.candidate(chosen).run for chosen in uniform_draws(space, forecast.enumeration, 0))
    for run in runs:
        assert run is not None
        said = forecast.of(run)
        spent = space.running_costs(run.plan.world_size, said["speed"].value)
        assert (said["cost"].value, said["energy"].value) == pytest.approx((spent["cost"], spent["energy"]))
        dearest = space.running_costs(run.plan.world_size, said["speed"].low)
        assert said["cost"].high == pytest.approx(dearest["cost"])
        assert said["cost"].low < said["cost"].value < said["cost"].high
        assert forecast.refusal(run) == ""


def test_the_forecast_of_a_trial_is_kept_with_it(tmp_path: Path, plant: Callable[..., None]) -> None:
    space, enumeration = load(tmp_path)
    plant(small_is_slow)
    study = Study.create_or_open(
        tmp_path / "study", space, enumeration, num_trials=3, forecast=Forecast.make(space, enumeration)
    )
    assignment = study.ask()
    assert isinstance(assignment, Assignment)
    study.tell(assignment, Outcome(kind="ok", tokens_per_second=9.0, peak_memory_bytes=7, held_out_loss=3.0))
    (row,) = load_snapshot(study.folder).trials
    micro = assignment.config.plan.micro_batch_size
    assert row.forecast["memory"].value == pytest.approx(1e6 * micro / 2)
    assert row.forecast["speed"].low < row.forecast["speed"].value < row.forecast["speed"].high
    assert all(record_of(trial) is not None for trial in study._table.all())
    study.close()
