"""Errors, ranking and the memory gate, on runs whose answers are known."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autotune.cost import fitted
from autotune.cost.accuracy import (
    Errors,
    baseline_seconds,
    judge,
    memory_errors,
    memory_gate,
    predicted_memory_gb,
    ranking,
    spearman,
    spread,
    time_errors,
)
from autotune.cost.published import PublishedRun, read_runs
from autotune.cost.run_estimates import RunEstimates, estimate_runs

pytestmark = pytest.mark.unit

HEADER = (
    "id,source,model_name,layers,hidden,ffn_hidden,heads,vocab,seq_len,gated_mlp,gpu,num_gpus,tp,pp,dp,micro_batch,"
    "global_batch,precision,recompute,step_time_s_equiv,memory_gb_per_gpu,outcome,notes"
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[PublishedRun, ...]:
    """Two families: one of six plans, one of a single run."""
    path = tmp_path_factory.mktemp("runs") / "runs.csv"
    model = "small,24,2048,8192,16,50304,1024,0"
    plans = [(1, 1, 8), (2, 1, 4), (4, 1, 2), (8, 1, 1), (1, 2, 4), (2, 2, 2)]
    lines = [
        f"r{i},One,{model},A100-SXM-80GB,8,{tp},{pp},{dp},1,64,fp16,none,{1 + 0.1 * i},{40 + i},ok,nvidia-smi"
        for i, (tp, pp, dp) in enumerate(plans)
    ]
    lines += [
        "oom,One,small,24,2048,8192,16,50304,1024,0,A100-SXM-80GB,8,1,1,8,64,512,fp16,none,,,oom,",
        "other,Two,large,48,8192,32768,64,50304,2048,0,H100,64,8,1,8,1,64,bf16,full,2.0,60,ok,max allocated",
    ]
    path.write_text("\n".join([HEADER, *lines]) + "\n", encoding="utf-8")
    table = read_runs(path)
    assert not table.skipped
    return table.runs


def estimates(runs: tuple[PublishedRun, ...], **values: np.ndarray | float) -> RunEstimates:
    """Estimates that equal what was measured, apart from ``values``."""
    ones = np.ones(len(runs))
    seconds = np.array([run.step_seconds or 1.0 for run in runs])
    held = np.array([(run.memory_gb or 90) * 1e9 for run in runs])
    table = RunEstimates(seconds, seconds, seconds, {}, held, held, held, held, held)
    return replace(table, **{name: value * ones for name, value in values.items()})


def test_perfect_estimates_have_no_error(runs: tuple[PublishedRun, ...]) -> None:
    accuracy = judge(runs, estimates(runs))
    assert accuracy.time.overall == Errors(7, 0.0, 0.0, 0.0)
    assert accuracy.memory.overall.median_abs_pct == 0.0
    assert accuracy.ranking.mean("spearman") == pytest.approx(1.0)
    assert accuracy.ranking.mean("top1_regret_pct") == 0.0


def test_errors_are_relative_to_what_was_measured(runs: tuple[PublishedRun, ...]) -> None:
    errors = time_errors(runs, np.array([(run.step_seconds or 1.0) * 1.2 for run in runs]))
    assert np.isnan(errors[6])
    np.testing.assert_allclose(errors[np.isfinite(errors)], 20.0)


def test_a_family_counts_once_in_the_mean_over_families(runs: tuple[PublishedRun, ...]) -> None:
    errors = np.array([0.0] * 6 + [np.nan, 50.0])
    table = spread(runs, errors)
    assert table.overall.median_abs_pct == 0.0
    assert table.family_mean("median_abs_pct") == 25.0
    assert set(table.by_family) == {"One", "Two"}
    assert {name: found.num_rows for name, found in table.by_device.items()} == {"a100": 6, "h100": 1}
    assert {name: found.num_rows for name, found in table.by_size.items()} == {"1B to 10B": 6, "10B to 100B": 1}


def test_memory_is_compared_like_with_like(runs: tuple[PublishedRun, ...]) -> None:
    table = estimates(runs, allocated_bytes=30e9, reserved_bytes=40e9, memory_bytes=50e9)
    predicted = predicted_memory_gb(runs, table)
    assert [run.memory_kind for run in runs] == ["device"] * 6 + [None, "allocated"]
    np.testing.assert_allclose(predicted, [50.0] * 7 + [30.0])
    assert memory_errors(runs, table)[7] == pytest.approx(-50)
    assert np.isnan(memory_errors(runs, table)[6])


def test_the_gate_counts_refusals_on_both_sides(runs: tuple[PublishedRun, ...]) -> None:
    capacity = runs[0].cluster.memory_bytes
    low = np.full(len(runs), capacity * 0.9)
    low[[0, 6]] = capacity * 1.01
    gate = memory_gate(runs, estimates(runs, memory_bytes_low=low, memory_bytes_high=low))
    assert (gate.num_running, gate.num_running_refused) == (7, 1)
    assert (gate.num_oom, gate.num_oom_refused, gate.num_oom_promised) == (1, 1, 0)
    fits = memory_gate(runs, estimates(runs, memory_bytes_low=1.0, memory_bytes_high=2.0))
    assert (fits.num_running_refused, fits.num_oom_refused, fits.num_oom_promised) == (0, 0, 1)


def test_regret_is_what_following_the_prediction_costs(runs: tuple[PublishedRun, ...]) -> None:
    """The measured times are 1.0, 1.1 .. 1.5; the last plan is predicted best, then the third and the fourth."""
    predicted = np.array([9.0, 8.0, 2.0, 3.0, 7.0, 1.0, 1.0, 1.0])
    (group,) = ranking(runs, predicted).groups
    assert group.num_plans == 6
    assert group.top1_regret_pct == pytest.approx(50.0)
    assert group.top3_regret_pct == pytest.approx(20.0)


def test_spearman_against_its_definition() -> None:
    """Without ties 1 - 6 sum(d^2) / (n (n^2 - 1)); with ties the mean rank counts; a constant has no correlation."""
    for order in itertools.islice(itertools.permutations(range(5)), 0, 120, 7):
        distance = sum((i - o) ** 2 for i, o in enumerate(order))
        found = spearman(np.arange(5.0), np.array(order, dtype=float))
        assert found == pytest.approx(1 - 6 * distance / (5 * 24))
    assert spearman(np.array([1.0, 2, 2, 3]), np.array([1.0, 2, 2, 3])) == pytest.approx(1.0)
    assert spearman(np.array([1.0, 1, 2, 2]), np.array([1.0, 2, 3, 4])) == pytest.approx(0.8944, abs=1e-4)
    assert spearman(np.arange(4.0), np.ones(4)) == 0.0


def test_no_group_means_no_figure(runs: tuple[PublishedRun, ...]) -> None:
    assert np.isnan(ranking(runs[:3], np.ones(3)).mean("spearman"))
    assert np.isnan(ranking(runs[:3], np.ones(3)).family_mean("spearman"))
    assert Errors.of(np.array([np.nan])).num_rows == 0


def test_the_ten_line_model_follows_the_physics(runs: tuple[PublishedRun, ...]) -> None:
    seconds = baseline_seconds(runs)
    assert np.all(seconds > 0)
    assert seconds[3] > seconds[0]  # splitting a small model over all devices costs more than replicas do
    assert baseline_seconds(()).shape == (0,)


def test_estimates_of_many_runs_equal_those_of_each(runs: tuple[PublishedRun, ...]) -> None:
    together = estimate_runs(runs)
    for index, run in enumerate(runs):
        alone = estimate_runs((run,))
        assert alone.step_seconds[0] == pytest.approx(together.step_seconds[index], rel=1e-9)
        assert alone.memory_bytes[0] == pytest.approx(together.memory_bytes[index], rel=1e-9)
    assert np.all(together.step_seconds_low < together.step_seconds_high)


def test_fitted_runs_are_recognised_and_others_are_not(
    runs: tuple[PublishedRun, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitted, "FITTED_FILE", tmp_path / "fitted_runs.yaml")
    fitted.fitted_fingerprints.cache_clear()
    try:
        assert fitted.num_fitted(runs) == 0
        fitted.write_fitted(runs[:3])
        fitted.fitted_fingerprints.cache_clear()
        assert fitted.num_fitted(runs) == 3
        assert fitted.num_fitted([replace(runs[0], step_seconds=7.7)]) == 0
    finally:
        fitted.fitted_fingerprints.cache_clear()
