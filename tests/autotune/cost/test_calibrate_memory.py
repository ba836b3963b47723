"""Memory of published runs, the fit of recipes to them, and its file."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from autotune.cost import calibrate_memory, memory_recipe
from autotune.cost.accuracy import memory_errors, memory_gate
from autotune.cost.calibrate_memory import FITTED, MemoryFit, held_out, solve, write_recipes
from autotune.cost.memory_recipe import recipes
from autotune.cost.published import PublishedRun, read_runs
from autotune.cost.run_estimates import estimate_runs

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def published(shared_data: Path) -> tuple[PublishedRun, ...]:
    return read_runs(shared_data / "published_runs.csv").runs


def test_memory_of_published_runs(published: tuple[PublishedRun, ...]) -> None:
    estimates = estimate_runs(published)
    errors = memory_errors(published, estimates)
    errors = np.abs(errors[np.isfinite(errors)])
    assert len(errors) >= 140
    assert np.median(errors) <= 5
    gate = memory_gate(published, estimates)
    assert gate.num_running_refused <= 0.03 * gate.num_running
    assert gate.num_oom_refused >= 2


def test_the_fit_finds_figures_that_made_the_measurements(published: tuple[PublishedRun, ...]) -> None:
    runs = [run for run in published if run.memory_gb and run.outcome == "ok"][::4]
    fit = MemoryFit.of(runs)
    true = np.where(np.arange(len(FITTED)) % 2, 0.2, -0.2)
    measured = fit.log_bytes(true)
    start = np.abs(fit.log_bytes(np.zeros(len(FITTED))) - measured)
    found = np.abs(fit.log_bytes(solve(fit, measured, np.ones(len(runs), dtype=bool))) - measured)
    assert found.mean() < 0.3 * start.mean()


def test_a_fold_never_sees_its_own_runs(published: tuple[PublishedRun, ...]) -> None:
    runs = [run for run in published if run.memory_gb and run.outcome == "ok"][::16]
    fit = MemoryFit.of(runs)
    measured = np.log([(run.memory_gb or np.nan) * 1e9 for run in runs])
    folds = ["a" if run.family == runs[0].family else "b" for run in runs]
    out = np.array(folds) == "a"
    before = held_out(fit, measured, folds)[out]
    after = held_out(fit, np.where(out, measured + 1, measured), folds)[out]
    np.testing.assert_allclose(before, after)


def test_figures_are_written_and_the_rest_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = shutil.copy(memory_recipe.RECIPES_FILE, tmp_path)
    monkeypatch.setattr(calibrate_memory, "RECIPES_FILE", Path(copy))
    before = recipes()
    write_recipes(np.full(len(FITTED), 0.1), {"fsdp": 0.123})
    monkeypatch.setattr(memory_recipe, "RECIPES_FILE", Path(copy))
    recipes.cache_clear()
    after = recipes()
    monkeypatch.undo()
    recipes.cache_clear()
    assert after.keys() == before.keys()
    assert after["fsdp"].interval_ratio == 0.123
    for (name, field), (prior, _) in FITTED.items():
        assert getattr(after[name], field) == pytest.approx(prior * np.exp(0.1), rel=0.01)
    assert after["paretune"] == before["paretune"]
    assert Path(copy).read_text().startswith("# What each training stack keeps")
