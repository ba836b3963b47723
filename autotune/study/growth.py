"""Trials that grow, in a study: the run of each rung, the checkpoint it goes on from, the curve it leaves, and how much
of the budget all of them use.

A candidate that goes on is a new number (role ``growth``) that continues the one before, with the same seed and, as
long as the model has the same width, from its checkpoint. The folder of checkpoints is moved from the earlier trial's
folder to the later one's, in one step: whoever is killed, it is whole in one of the two. Where it is lost the trial
begins anew, which costs time but changes no result.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from optuna.trial import FrozenTrial, TrialState

from autotune.search.curves import Curve
from autotune.space.fidelity import Fidelity
from autotune.study.assignment import Assignment
from autotune.study.record import Record, record_of
from engine.atomic import make_folder, write_json
from engine.checkpoint_folders import CHECKPOINTS_FOLDER
from engine.config import RunConfig
from engine.errors import UserError
from engine.outcome import Outcome
from engine.proxy import proxy_run
from engine.rules import check_run
from engine.schedule import learning_rate_at
from engine.telemetry import StepRecord, TelemetryReader

CARRIED_FILE = "carried.json"
"""In a trial's folder: the checkpoints it was given."""
NUM_SCHEDULE_POINTS = 512
"""Places at which a schedule is summed up."""


def run_at(run: RunConfig, fidelity: Fidelity, rung: int, num_devices: int) -> RunConfig:
    """The run that trains a candidate up to a rung.

    Args:
        run: Its full training.
        fidelity: The rungs.
        rung: Which.
        num_devices: Devices there are. Where the plan can't split the narrower model, the model itself is trained.
    """
    stage = fidelity.stages[rung]
    if stage.width_ratio < 1:
        narrower = proxy_run(run, stage.width_ratio)
        try:
            check_run(narrower, num_devices)
            run = narrower
        except UserError:
            pass
    if stage.tokens_ratio == 1:
        return run
    stop = max(1, round(stage.tokens_ratio * run.num_steps))
    return run.changed(runtime=run.runtime.changed(stop_after_steps=stop)) if stop < run.num_steps else run


def goes_on(before: RunConfig, now: RunConfig) -> bool:
    """Whether a run is to continue another's checkpoint: everything but its end is the same. That is, too, where the
    plan could not split the narrower model of a rung of as many tokens: then nothing is left, and it begins anew."""
    if before.runtime.stop_after_steps == now.runtime.stop_after_steps:
        return False
    return (before.model, before.hyperparameters, before.workload) == (now.model, now.hyperparameters, now.workload)


def carry_checkpoint(earlier: Path, later: Path) -> None:
    """Move the checkpoints of a trial's folder to that of the trial that continues it, unless it has some already, and
    note what they are."""
    source, target = earlier / CHECKPOINTS_FOLDER, later / CHECKPOINTS_FOLDER
    if source.is_dir() and not target.exists():
        write_json(make_folder(later) / CARRIED_FILE, _listing(source))
        os.rename(source, target)


def _listing(folder: Path) -> list[list[str | int]]:
    """Names, sizes and times of all files below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    found = [(path, path.stat()) for path in files]
    return [[str(path.relative_to(folder)), status.st_size, status.st_mtime_ns] for path, status in found]


def with_checkpoint(outcome: Outcome, assignment: Assignment) -> Outcome:
    """The outcome of a program or function, unless it left no checkpoint where it has to (none but what it was given):
    then the next rung would do more than is counted, unnoticed."""
    if outcome.kind != "ok" or not assignment.leaves_checkpoint:
        return outcome
    left = _listing(assignment.folder / CHECKPOINTS_FOLDER)
    if left and left != _carried(assignment.folder):
        return outcome
    detail = f"it left nothing in {CHECKPOINTS_FOLDER!r} of its trial's folder to go on from ('fidelity.resumes')"
    return outcome.changed(kind="user", detail=detail)


def _carried(folder: Path) -> Any:
    try:
        return json.loads((folder / CARRIED_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def drop_checkpoint(folder: Path) -> None:
    """Remove the checkpoints of a trial that nothing will continue."""
    shutil.rmtree(folder / CHECKPOINTS_FOLDER, ignore_errors=True)


def curve_of(run: RunConfig, fidelity: Fidelity, folders: Sequence[Path]) -> Curve:
    """The training loss from the first step on.

    Args:
        run: The run of the last rung reached.
        fidelity: The rungs.
        folders: Of the numbers that trained it, in order; steps that were done twice count as they were last.
    """
    steps: dict[int, StepRecord] = {}
    for folder in folders:
        for record in TelemetryReader(folder).poll():
            if isinstance(record, StepRecord) and record.loss is not None:
                steps[record.step] = record
    hyper, total = run.hyperparameters, run.workload.total_tokens
    shares = np.linspace(0, 1, NUM_SCHEDULE_POINTS + 1)
    rates = np.array([learning_rate_at(hyper, share * total, total) for share in shares])
    warm = shares > hyper.warmup_ratio
    sums = np.cumsum(np.where(warm, rates, 0.0))
    progress = sums / sums[-1] if sums[-1] > 0 else shares
    kept = [steps[step] for step in sorted(steps) if steps[step].tokens > hyper.warmup_ratio * total]
    return Curve.of(
        np.interp([record.tokens / total for record in kept], shares, progress).tolist(),
        [record.loss for record in kept if record.loss is not None],
        np.interp(fidelity.rungs, shares, progress).tolist(),
    )


def links_of(number: int, record: Record, trials: Sequence[FrozenTrial]) -> list[int]:
    """The numbers that trained a candidate, from the one that began it to ``number``.

    Args:
        number: The last.
        record: Its record.
        trials: All numbers of the study in order.
    """
    numbers = [number]
    while record.role == "growth" and record.of is not None:
        numbers.insert(0, record.of)
        before = record_of(trials[record.of])
        assert before is not None, "what is continued was decided"
        record = before
    return numbers


def is_first(record: Record, lower: Sequence[FrozenTrial]) -> bool:
    """Whether a growth is to be run: of several drivers that chose it at once the lowest number does.

    Args:
        record: The growth's.
        lower: All numbers below its own.
    """
    return all(record_of(trial) != record for trial in lower)


def num_spent(trials: Sequence[FrozenTrial], first_cost: float) -> float:
    """What the numbers of a study use of its budget, in full trainings: trials, growths, and numbers that are being
    chosen and may become trials. Since whoever chooses counts all lower numbers, it is never more than the budget.

    Args:
        trials: Numbers in order.
        first_cost: Of a trial's beginning.
    """
    spent = 0.0
    for trial in trials:
        record = record_of(trial)
        if record is None:
            spent += first_cost if trial.state == TrialState.RUNNING else 0.0
        elif record.role in ("trial", "growth"):
            spent += record.cost
    return spent
