"""The fit: it finds parameters that were planted, keeps to priors without data, and never sees what it is judged on."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from autotune.cost import calibration_files
from autotune.cost.calibrate import Fit, grouped_folds, held_out, solve, tabulate
from autotune.cost.software import software_catalogue
from autotune.specs.cluster import ClusterSpec, parse_cluster
from engine.plan import Plan
from engine.spec import ModelSpec
from engine.yaml_file import read_yaml

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Run:
    """A run made up."""

    model: ModelSpec
    cluster: ClusterSpec
    plan: Plan
    global_batch_size: int
    sequence_length: int
    software: str
    recipe: str = ""


def model(hidden: int) -> ModelSpec:
    return ModelSpec(
        num_layers=16, hidden_size=hidden, num_heads=hidden // 128, num_kv_heads=hidden // 128, head_dim=128,
        ffn_size=4 * hidden, vocab_size=51200, mlp="plain",
    )  # fmt: skip


def made_up() -> list[Run]:
    runs = []
    for kind in ("a100", "h100"):
        cluster = parse_cluster(f"{kind}x8:4")
        for software in ("nemo-2024", "torchtitan"):
            for hidden in (2048, 4096, 8192):
                for tp, micro_batch in ((1, 1), (1, 4), (4, 2), (8, 4)):
                    plan = Plan(
                        tp=tp, dp_shard=32 // tp, micro_batch_size=micro_batch, precision="bf16", zero_stage=1,
                        sequence_parallel=tp > 1,
                    )  # fmt: skip
                    runs.append(Run(model(hidden), cluster, plan, 512, 2048, software))
    return runs


@pytest.fixture(scope="module")
def fit() -> Fit:
    return Fit(tabulate(made_up()))


def planted(fit: Fit) -> np.ndarray:
    theta = fit.start.copy()
    for block, offset in zip(fit.blocks, fit.offsets[:-1], strict=True):
        if block.name == "sustained_ratio":
            theta[offset : offset + 2] = [np.log(0.8), np.log(1.1)]
        if block.name == "host_ratio":
            theta[offset] += 0.4
    return theta


def test_the_fit_finds_what_was_planted(fit: Fit) -> None:
    measured = fit.log_seconds(planted(fit))
    rows = np.ones(len(measured), dtype=bool)
    families = np.zeros(len(measured), dtype=np.int64)
    before = np.abs(fit.log_seconds(fit.start) - measured)
    theta = solve(fit, measured, families, rows)
    after = np.abs(fit.log_seconds(theta) - measured)
    assert np.median(before) > 0.05
    assert np.median(after) < 0.01
    assert after.max() < 0.05
    devices = fit.calibration(theta).devices
    assert devices["a100"]["sustained_ratio"] < 0.9 < devices["h100"]["sustained_ratio"]


def test_derivatives_of_groups_equal_those_one_by_one(fit: Fit) -> None:
    rows = np.arange(len(fit.table))
    matrix = fit.jacobian(fit.start, rows)
    base = fit.log_seconds(fit.start)
    for column in (0, int(fit.offsets[-8]), int(fit.offsets[-2]), len(fit.start) - 1):
        moved = fit.start.copy()
        moved[column] += 1e-4
        assert matrix[:, column] == pytest.approx((fit.log_seconds(moved) - base) / 1e-4, abs=1e-6)


def test_without_runs_the_prior_stands(fit: Fit) -> None:
    measured = fit.log_seconds(fit.start)
    rows = np.zeros(len(measured), dtype=bool)
    rows[0] = True
    theta = solve(fit, measured + 0.5, np.zeros(len(measured), dtype=np.int64), rows, max_steps=5)
    assert np.abs((theta - fit.start) / fit.spread).max() < 4
    figures = fit.calibration(fit.start)
    assert all(value == pytest.approx(1.0) for factors in figures.software.values() for value in factors.values())


def test_folds_hold_whole_groups_and_are_of_like_size() -> None:
    keys = [f"group {number}" for number in (0, 0, 0, 0, 1, 1, 2, 3, 4, 4)]
    folds = grouped_folds(keys, 3)
    for key in set(keys):
        assert len({fold for fold, other in zip(folds, keys, strict=True) if other == key}) == 1
    sizes = np.bincount(folds, minlength=3)
    assert sizes.sum() == len(keys)
    assert sizes.max() == 4


def test_held_out_rows_do_not_move_their_own_prediction(fit: Fit) -> None:
    measured = fit.log_seconds(planted(fit))
    families = np.zeros(len(measured), dtype=np.int64)
    folds = np.array([0 if number < 4 else 1 for number in range(len(measured))])
    honest = held_out(fit, measured, families, folds, max_steps=3)
    spoilt = np.where(folds == 0, measured + 1.0, measured)
    again = held_out(fit, spoilt, families, folds, max_steps=3)
    assert honest[folds == 0] == pytest.approx(again[folds == 0])
    assert not np.isnan(honest).any()


def test_a_stack_without_runs_is_like_the_one_it_grew_from(fit: Fit) -> None:
    theta = solve(
        fit,
        fit.log_seconds(planted(fit)),
        np.zeros(len(fit.table), dtype=np.int64),
        np.ones(len(fit.table), dtype=bool),
        max_steps=4,
    )
    figures = fit.calibration(theta).software
    assert figures["nemo-2025"]["host_ratio"] == pytest.approx(figures["nemo-2024"]["host_ratio"], rel=1e-3)


def test_fitted_figures_are_read_back_from_the_files(fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {}
    for name in ("COEFFICIENTS_FILE", "SOFTWARE_FILE", "CATALOGUE_FILE"):
        source: Path = getattr(calibration_files, name)
        files[name] = tmp_path / source.name
        shutil.copy(source, files[name])
        monkeypatch.setattr(calibration_files, name, files[name])
    figures = fit.calibration(planted(fit))
    calibration_files.write_calibration(figures, {"torchtitan": 0.11}, {"a100": 0.22}, unseen_interval=0.77)
    hardware = read_yaml(files["CATALOGUE_FILE"]).data
    assert hardware["a100"]["figures"]["sustained_ratio"] == pytest.approx(0.8)
    assert hardware["a100"]["figures"]["interval_ratio"] == 0.22
    assert hardware["a100"]["figures"]["is_fitted"] is True
    assert hardware["v100"]["figures"]["interval_ratio"] == 0.77
    assert "is_fitted" not in hardware["v100"]["figures"]
    stacks = read_yaml(files["SOFTWARE_FILE"]).data
    assert set(stacks) == set(software_catalogue())
    assert stacks["torchtitan"]["interval_ratio"] == 0.11
    assert stacks["torchtitan"]["schedules"] == list(software_catalogue()["torchtitan"].schedules), "not fitted: kept"
    first = next(iter(software_catalogue()))
    assert stacks[first]["host_ratio"] == pytest.approx(np.exp(0.4), rel=0.01)
    assert read_yaml(files["COEFFICIENTS_FILE"]).data["wave_share"] == pytest.approx(0.6)
    once = {name: path.read_text() for name, path in files.items()}
    calibration_files.write_calibration(figures, {"torchtitan": 0.11}, {"a100": 0.22}, unseen_interval=0.77)
    assert {name: path.read_text() for name, path in files.items()} == once
