"""Trials that grow: a candidate goes on from its checkpoint under a new number, once, within the budget."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.apply.select import front_trials, pick
from autotune.study.assignment import Assignment
from autotune.study.growth import CHECKPOINTS_FOLDER, goes_on
from autotune.study.merge import merge_studies
from autotune.study.record import record_of
from autotune.study.runner import run_trial
from autotune.study.study import Nothing, Study, load_snapshot
from engine.errors import UserError
from engine.outcome import Outcome, write_outcome
from engine.telemetry import TelemetryWriter
from reports.info import get_statuses
from tests.engine.records import step_record

OpenStudy = Callable[..., Study]

RUNGS = "fidelity={rungs: [0.25, 1], eta: 2}"


def trained(study: Study, assignment: Assignment, loss: float | None = None) -> None:
    """Train an assignment in no time: telemetry, a checkpoint where it stops early, an outcome."""
    config = assignment.config
    assert config is not None
    rate = config.hyperparameters.learning_rate
    final = 2.0 + abs(rate - 1e-3) * 100 if loss is None else loss
    checkpoints = assignment.folder / CHECKPOINTS_FOLDER
    begun = int(next(checkpoints.glob("step-*")).name[5:]) if checkpoints.exists() else 0
    end = config.runtime.stop_after_steps or config.num_steps
    writer = TelemetryWriter(assignment.folder)
    for step in range(begun + 1, end + 1):
        loss = final + (step / config.num_steps) ** -0.5 - 1
        writer.write(step_record(step, loss, tokens=step * config.tokens_per_step))
    writer.flush()
    if end < config.num_steps:
        (checkpoints / f"step-{end}").mkdir(parents=True, exist_ok=True)
    told = final + (end / config.num_steps) ** -0.5 - 1
    outcome = Outcome(kind="ok", tokens_per_second=100.0, held_out_loss=told, corpus_hash="text", num_steps=end)
    write_outcome(assignment.folder, outcome)
    assert study.tell(assignment, outcome)


def asked(study: Study) -> Assignment:
    assignment = study.ask()
    assert isinstance(assignment, Assignment)
    assignment.folder.mkdir(parents=True, exist_ok=True)
    return assignment


def worked(study: Study) -> list[Assignment]:
    """Everything that the study hands out, trained."""
    done = []
    while isinstance(assignment := study.ask(), Assignment):
        assignment.folder.mkdir(parents=True, exist_ok=True)
        trained(study, assignment)
        done.append(assignment)
    assert assignment in (Nothing.DONE, Nothing.EXHAUSTED)
    return done


@pytest.mark.unit
def test_the_budget_counts_full_trainings_and_the_best_grow(open_study: OpenStudy) -> None:
    study = open_study("s", RUNGS, num_trials=6, sampler="random")
    done = worked(study)
    assert sum(assignment.cost for assignment in done) <= 6 + 1e-9
    begun = [a for a in done if a.continues is None]
    grown = [a for a in done if a.continues is not None]
    assert len(begun) > 6, "more candidates than full trainings"
    assert all(a.share == 0.25 for a in begun)
    assert all(a.share == 1.0 for a in grown)
    rows = {row.number: row for row in study.snapshot().trials}
    losses = sorted((rows[a.number].values or {})["quality"] for a in begun)
    best = min(grown, key=lambda a: (rows[a.continues].values or {})["quality"])  # type: ignore[index]
    assert (rows[best.continues].values or {})["quality"] == losses[0]  # type: ignore[index]


@pytest.mark.unit
def test_a_growth_continues_the_same_run_from_its_checkpoint(open_study: OpenStudy) -> None:
    study = open_study("s", RUNGS, num_trials=4, sampler="random")
    by_number: dict[int, Assignment] = {}
    for assignment in worked(study):
        by_number[assignment.number] = assignment
        if assignment.continues is None:
            continue
        before = by_number[assignment.continues]
        assert assignment.seed == before.seed
        assert assignment.config is not None
        assert before.config is not None
        assert before.config.runtime.stop_after_steps == round(0.25 * before.config.num_steps)
        assert assignment.config.runtime.stop_after_steps is None
        assert not (before.folder / CHECKPOINTS_FOLDER).exists(), "moved on"
        assert not (assignment.folder / CHECKPOINTS_FOLDER).exists(), "nothing will continue a full training"
        same = ("model", "hyperparameters", "workload", "plan")
        assert all(getattr(assignment.config, name) == getattr(before.config, name) for name in same)
    assert any(a.continues is not None for a in by_number.values())


@pytest.mark.unit
def test_only_full_trainings_are_chosen_from(open_study: OpenStudy) -> None:
    study = open_study("s", RUNGS, num_trials=4, sampler="random")
    worked(study)
    snapshot = study.snapshot()
    assert {row.share for row in front_trials(snapshot)} == {1.0}
    part = next(row for row in snapshot.trials if row.share < 1)
    assert get_statuses(snapshot)[part.number] == "partial"
    with pytest.raises(UserError, match="25 % of its training"):
        pick(snapshot, str(part.number))
    # Who reads the storage with Optuna's own tools sees them as infeasible.
    best = study._table._study.best_trials
    assert {trial.number for trial in best} <= {row.number for row in snapshot.trials if row.share == 1}


@pytest.mark.unit
def test_a_growth_whose_driver_died_is_taken_over_with_its_checkpoint(open_study: OpenStudy) -> None:
    study = open_study("s", RUNGS, num_trials=3, sampler="random")
    while (assignment := asked(study)).continues is None:
        trained(study, assignment)
    assert (assignment.folder / CHECKPOINTS_FOLDER).exists()
    study.release(assignment)
    again = open_study("s", RUNGS, num_trials=3, sampler="random")
    taken = asked(again)
    assert (taken.number, taken.attempt, taken.continues) == (assignment.number, 2, assignment.continues)
    assert (taken.folder / CHECKPOINTS_FOLDER).exists()
    trained(again, taken)


@pytest.mark.unit
def test_the_checkpoint_that_a_candidate_may_go_on_from_is_kept_until_it_does(open_study: OpenStudy) -> None:
    study = open_study("s", "fidelity={rungs: [0.2, 0.5, 1], eta: 2}", num_trials=3, sampler="random")
    done = worked(study)
    went_on = {assignment.continues for assignment in done}
    for assignment in done:
        is_kept = (assignment.folder / CHECKPOINTS_FOLDER).exists()
        assert is_kept == (assignment.share < 1 and assignment.number not in went_on)
    assert {assignment.share for assignment in done} == {0.2, 0.5, 1.0}


@pytest.mark.unit
def test_killed_drivers_neither_lose_nor_double_a_part(open_study: OpenStudy) -> None:
    dice = random.Random(0)
    study = open_study("s", RUNGS, num_trials=4, sampler="random")
    for _ in range(200):
        assignment = study.ask()
        if not isinstance(assignment, Assignment):
            break
        if dice.random() < 0.3:  # killed while it ran, and opened again
            study.release(assignment)
            study.close()
            study = open_study("s", RUNGS, num_trials=4, sampler="random")
            continue
        assignment.folder.mkdir(parents=True, exist_ok=True)
        trained(study, assignment)
    rows = study.snapshot().trials
    assert all(row.outcome is not None for row in rows)
    assert 3.5 <= sum(row.cost for row in rows) <= 4 + 1e-9
    continued = [row.continues for row in rows if row.continues is not None]
    assert len(continued) == len(set(continued))
    assert any(row.attempts > 1 for row in rows)


@pytest.mark.unit
def test_a_growth_that_two_drivers_chose_is_run_once_though_one_died_at_once(open_study: OpenStudy) -> None:
    study = open_study("s", RUNGS, num_trials=3, sampler="random")
    while (assignment := asked(study)).continues is None:
        trained(study, assignment)
    record = record_of(study._table.all()[assignment.number])
    lease = replace(study._held.new_lease(1), released=True)
    double = study._table.create(lease, record=record, parameters=assignment.parameters)
    trained(study, assignment)
    assert double not in [later.number for later in worked(study)]
    left = record_of(study._table.all()[double])
    assert left is not None
    assert left.role == "surplus"


@pytest.mark.unit
def test_parts_of_a_candidate_that_both_studies_tried_are_repeats(open_study: OpenStudy, tmp_path: Path) -> None:
    fixed = ("space.plan={micro_batch_size: [1, 2]}", "space.hyperparameters={global_batch_size: 8}")
    studies = [open_study(name, RUNGS, *fixed, num_trials=2, sampler="random") for name in "ab"]
    for index, study in enumerate(studies):
        while isinstance(assignment := study.ask(), Assignment):
            assignment.folder.mkdir(parents=True, exist_ok=True)
            trained(study, assignment, loss=2.0 + index)
        study.close()
    merge_studies([study.folder for study in studies], tmp_path / "studies" / "c")
    merged = load_snapshot(tmp_path / "studies" / "c")
    rows = merged.trials
    assert merged.num_trials_asked == math.ceil(merged.spent)
    assert [row.repeat_of is not None for row in rows] == [row.origin.startswith("b/") for row in rows]
    assert {row.origin[0] for row in front_trials(load_snapshot(tmp_path / "studies" / "c"))} == {"a"}


@pytest.mark.unit
def test_a_checkpoint_at_the_end_of_the_next_part_is_not_gone_on_from(open_study: OpenStudy) -> None:
    """A plan that can't split the narrower model trains the model itself, twice to the same step."""
    whole = asked(open_study("s", "fidelity=off", num_trials=1, sampler="random")).config
    assert whole is not None
    part = whole.changed(runtime=whole.runtime.changed(stop_after_steps=2))
    assert goes_on(part, whole)
    assert not goes_on(part, part)


@pytest.mark.unit
def test_a_lost_checkpoint_begins_the_training_anew(open_study: OpenStudy, tmp_path: Path) -> None:
    study = open_study("s", RUNGS, num_trials=3, sampler="random")
    while True:
        assignment = asked(study)
        if assignment.continues is not None:
            break
        trained(study, assignment)
        for checkpoint in (assignment.folder / CHECKPOINTS_FOLDER).iterdir():
            checkpoint.rmdir()
        (assignment.folder / CHECKPOINTS_FOLDER).rmdir()
    assert not (assignment.folder / CHECKPOINTS_FOLDER).exists()
    trained(study, assignment)


@pytest.mark.unit
def test_several_drivers_grow_a_candidate_once(open_study: OpenStudy) -> None:
    one, two = (open_study("s", RUNGS, num_trials=8, sampler="random") for _ in range(2))
    cost = 0.0
    busy: list[tuple[Study, Assignment]] = []
    ended = 0
    while ended < 2 or busy:
        ended = 0
        for study in (one, two):
            handed = study.ask()
            if isinstance(handed, Assignment):
                handed.folder.mkdir(parents=True, exist_ok=True)
                busy.append((study, handed))
                cost += handed.cost
            ended += not isinstance(handed, Assignment)
        if len(busy) > 1 or ended:
            for study, assignment in busy:
                trained(study, assignment)
            busy.clear()
    continued = [r.of for t in one._table.all() if (r := record_of(t)) is not None and r.role == "growth"]
    assert len(continued) == len(set(continued)) > 0
    assert cost <= 8 + 1e-9


@pytest.mark.unit
def test_when_nothing_new_is_left_those_begun_are_trained_to_the_end(open_study: OpenStudy) -> None:
    fixed = ("space.plan={micro_batch_size: [1, 2, 4]}", "space.hyperparameters={global_batch_size: 8}")
    study = open_study("s", RUNGS, *fixed, num_trials=20, sampler="random")
    done = worked(study)
    assert [a.share for a in done].count(0.25) == [a.share for a in done].count(1.0) == 3


@pytest.mark.unit
def test_a_diverged_candidate_does_not_grow(open_study: OpenStudy) -> None:
    study = open_study("s", RUNGS, num_trials=3, sampler="random")
    bad = asked(study)
    study.tell(bad, Outcome(kind="diverged", detail="loss 9"))
    assert all(assignment.continues != bad.number for assignment in worked(study))


@pytest.mark.unit
def test_repeats_are_full_trainings(open_study: OpenStudy) -> None:
    study = open_study("s", RUNGS, num_trials=3, sampler="random")
    worked(study)
    number = pick(study.snapshot(), "knee").number
    study.plan_repeats(number, 1)
    repeat = asked(study)
    assert (repeat.repeat_of, repeat.share) == (number, 1.0)
    assert repeat.config is not None
    assert repeat.config.runtime.stop_after_steps is None


@pytest.mark.unit
def test_a_proxy_is_narrower_and_the_model_begins_anew(open_study: OpenStudy) -> None:
    study = open_study("s", "fidelity={rungs: [0.5, 1], widths: [0.5, 1], eta: 2}", num_trials=3, sampler="random")
    done = worked(study)
    narrow = next(a for a in done if a.continues is None)
    whole = next(a for a in done if a.continues is not None)
    assert narrow.config is not None
    assert whole.config is not None
    assert narrow.config.model.hidden_size == whole.config.model.hidden_size // 2
    assert narrow.config.hyperparameters.parametrization == "mup"
    assert whole.config.hyperparameters.parametrization == "standard"
    assert (narrow.share, narrow.cost, whole.cost) == (0.125, 0.125, 1.0)


@pytest.mark.dist
@pytest.mark.timeout(240)
def test_a_training_in_two_parts_equals_one_without_a_break(open_study: OpenStudy, tmp_path: Path) -> None:
    changes = ("workload.total_tokens=8192", "workload.sequence_length=64", "evaluation.max_tokens=2048")
    study = open_study("s", "fidelity={rungs: [0.5, 1], eta: 2}", *changes, num_trials=1, sampler="random")
    results: dict[str, Any] = {}
    for part in ("first", "second"):
        assignment = asked(study)
        assert assignment.config is not None
        outcome = run_trial(assignment.config, assignment.folder, limits=study.space.limits)
        assert outcome.kind == "ok", outcome.detail
        assert study.tell(assignment, outcome)
        results[part] = assignment, outcome
    assert study.ask() is Nothing.DONE
    assignment, outcome = results["second"]
    assert "resumed at step" in (assignment.folder / "stdout.log").read_text()
    whole = run_trial(assignment.config, tmp_path / "whole", limits=study.space.limits)
    assert whole.held_out_loss == outcome.held_out_loss
    assert results["first"][1].num_steps * 2 == outcome.num_steps == whole.num_steps
