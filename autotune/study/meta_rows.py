"""A study's finished trials as rows that the prior learns from."""

from __future__ import annotations

import numpy as np

from autotune.prior.rows import MetaRow
from autotune.prior.task import Task
from autotune.search.quality import hyperparameter_columns
from autotune.search.warm_start import task_of
from autotune.space.command import CommandSpace
from autotune.space.command_grammar import space_of_data
from autotune.study.runner import RUN_FILE
from autotune.study.snapshot import StudySnapshot, TrialRow
from engine.config import RunConfig, load_run
from engine.errors import UserError
from engine.parametrization import is_standard

QUALITY_KINDS = ("ok", "nan", "diverged")
"""Ends that tell something of the hyperparameters; the others tell of the machine or of the plan."""


def meta_rows(snapshot: StudySnapshot) -> list[MetaRow]:
    """Rows of the trials whose end says something of their hyperparameters.

    Those of a user's own program or function count where a ``task`` says what they train, and learning rate and batch
    are among their values. Repeats are left out, and so are trials whose run file is gone, those cut short before the
    end of their schedule, and those under muP relative to another size: their learning rate is not that of what was
    trained.

    Raises:
        UserError: The study's ``task`` is not known.
    """
    trials = [row for row in snapshot.trials if row.repeat_of is None and row.share == 1]
    if "model" in snapshot.space or not snapshot.space.get("task"):
        rows = [_row(snapshot, row) for row in trials]
    else:
        space = space_of_data(snapshot.space, snapshot.name)
        rows = [_own_row(snapshot, space, task_of(space), row) for row in trials]
    return [row for row in rows if row is not None]


def _row(study: StudySnapshot, trial: TrialRow) -> MetaRow | None:
    outcome = trial.outcome
    if outcome is None or outcome.kind not in QUALITY_KINDS or trial.folder is None:
        return None
    if outcome.kind == "ok" and outcome.held_out_loss is None:
        return None
    try:
        run, _ = load_run(trial.folder / RUN_FILE)
    except UserError:
        return None
    if run.runtime.stop_after_steps is not None and run.runtime.stop_after_steps < run.num_steps:
        return None  # cut short in the middle of its schedule
    if not is_standard(run.hyperparameters, run.model):
        return None
    return MetaRow(
        study=study.name,
        folder=str(study.folder.absolute()),
        trial=trial.number,
        task=Task.of_run(run),
        hyperparameters=hyperparameters_of(run),
        loss=outcome.held_out_loss if outcome.kind == "ok" else None,
        status=outcome.kind,
    )


def _own_row(study: StudySnapshot, space: CommandSpace, task: Task, trial: TrialRow) -> MetaRow | None:
    outcome = trial.outcome
    if outcome is None or outcome.kind not in QUALITY_KINDS:
        return None
    loss = (trial.values or {}).get(space.quality_name)
    columns = hyperparameter_columns(space, {name: np.array([value]) for name, value in trial.parameters.items()})
    known = {name: column[0].item() for name, column in columns.items() if column[0] is not None}
    if (outcome.kind == "ok" and loss is None) or not {"learning_rate", "global_batch_tokens"} <= known.keys():
        return None
    return MetaRow(
        study=study.name,
        folder=str(study.folder.absolute()),
        trial=trial.number,
        task=task,
        hyperparameters=known,
        loss=loss if outcome.kind == "ok" else None,
        status=outcome.kind,
    )


def hyperparameters_of(run: RunConfig) -> dict[str, float | str]:
    """A run's hyperparameters by the prior's names."""
    hyper = run.hyperparameters
    return {
        "learning_rate": hyper.learning_rate,
        "global_batch_tokens": float(run.tokens_per_step),
        "weight_decay": hyper.weight_decay,
        "warmup_ratio": hyper.warmup_ratio,
        "beta1": hyper.beta1,
        "beta2": hyper.beta2,
        "schedule": hyper.schedule,
        "min_lr_ratio": hyper.min_lr_ratio,
        "decay_ratio": hyper.decay_ratio,
    }
