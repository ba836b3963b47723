"""From a study to rows for the prior."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.study.meta_rows import meta_rows
from autotune.study.snapshot import StudySnapshot, TrialRow
from engine.config import RunConfig, dump_run
from engine.outcome import Outcome
from engine.spec import Hyperparameters, ModelSpec, Workload

pytestmark = pytest.mark.unit

RUN = RunConfig(
    model=ModelSpec(
        num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=128, vocab_size=264
    ),
    workload=Workload(sequence_length=128, total_tokens=60_000),
    hyperparameters=Hyperparameters(global_batch_size=16, learning_rate=2e-3, schedule="wsd", beta2=0.98),
)


def trial(folder: Path, number: int, kind: Any = "ok", run: RunConfig = RUN, **fields: Any) -> TrialRow:
    place = folder / str(number)
    place.mkdir()
    (place / "run.yaml").write_text(dump_run(run), encoding="utf-8")
    outcome = Outcome(kind=kind, held_out_loss=3.5 if kind == "ok" else None)
    defaults: dict[str, Any] = {"state": "finished", "parameters": {}, "values": None, "feasible": True}
    return TrialRow(number=number, outcome=outcome, folder=place, **{**defaults, **fields})


def snapshot(folder: Path, *trials: TrialRow) -> StudySnapshot:
    return StudySnapshot(name="mine", folder=folder, objectives=(), trials=trials)


def test_a_trial_becomes_a_row_with_task_and_hyperparameters(tmp_path: Path) -> None:
    (row,) = meta_rows(snapshot(tmp_path, trial(tmp_path, 3)))
    assert (row.study, row.trial, row.loss, row.status) == ("mine", 3, 3.5, "ok")
    assert row.folder == str(tmp_path)
    layers = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64
    assert row.task.num_parameters == layers  # neither embedding nor head
    assert (row.task.total_tokens, row.task.sequence_length, row.task.family) == (60_000, 128, "dense")
    assert row.hyperparameters["global_batch_tokens"] == 16 * 128
    assert row.hyperparameters["learning_rate"] == 2e-3
    assert row.hyperparameters["schedule"] == "wsd"


def test_trials_of_a_program_count_by_what_its_task_says(tmp_path: Path) -> None:
    space: dict[str, Any] = {
        "objectives": [{"name": "loss", "direction": "minimize"}],
        "space": {"lr": {"log_float": [1e-4, 1e-1]}, "batch": [8, 16], "beta1": 0.9},
        "task": {
            "num_parameters": 1_000_000, "total_tokens": 20_000_000, "sequence_length": 64,
            "roles": {"learning_rate": "lr", "global_batch_size": "batch", "quality": "loss"},
        },
    }  # fmt: skip
    rows = [
        TrialRow(0, "finished", {"lr": 2e-3, "batch": 16}, Outcome(kind="ok"), {"loss": 3.0}, True),
        TrialRow(1, "finished", {"lr": 9e-2, "batch": 8}, Outcome(kind="diverged"), None, False),
    ]
    study = replace(snapshot(tmp_path, *rows), space=space)
    first, second = meta_rows(study)
    assert (first.loss, first.status, first.task.num_parameters) == (3.0, "ok", 1_000_000)
    assert first.hyperparameters == {"learning_rate": 2e-3, "global_batch_tokens": 1024.0, "beta1": 0.9}
    assert (second.loss, second.status) == (None, "diverged")
    del space["task"]["roles"]["global_batch_size"]
    assert meta_rows(replace(study, space=space)) == []


def test_divergence_tells_of_the_hyperparameters_and_a_lost_machine_does_not(tmp_path: Path) -> None:
    trials = [trial(tmp_path, number, kind) for number, kind in enumerate(("diverged", "nan", "oom", "infra", "hang"))]
    assert [(row.trial, row.loss, row.status) for row in meta_rows(snapshot(tmp_path, *trials))] == [
        (0, None, "diverged"),
        (1, None, "nan"),
    ]


def test_learning_rates_that_are_relative_to_another_width_are_left_out(tmp_path: Path) -> None:
    def under_mup(base: int) -> RunConfig:
        hyper = RUN.hyperparameters.changed(parametrization="mup", base_hidden_size=base)
        return RUN.changed(hyperparameters=hyper)

    trials = [trial(tmp_path, 0, run=under_mup(32)), trial(tmp_path, 1, run=under_mup(64))]
    assert [row.trial for row in meta_rows(snapshot(tmp_path, *trials))] == [1]


def test_repeats_trials_cut_short_and_those_without_a_run_file_are_left_out(tmp_path: Path) -> None:
    short = RUN.changed(runtime=RUN.runtime.changed(stop_after_steps=3))
    trials = [trial(tmp_path, 0, repeat_of=1), trial(tmp_path, 1, run=short), trial(tmp_path, 2)]
    (tmp_path / "2" / "run.yaml").unlink()
    assert meta_rows(snapshot(tmp_path, *trials)) == []
