"""The run file of our own engine for a chosen trial: the trial's run, with settings for a run that has to survive."""

from __future__ import annotations

from autotune.study.runner import RUN_FILE
from autotune.study.snapshot import StudySnapshot, TrialRow
from engine.config import RunConfig, load_run
from engine.errors import UserError
from engine.schema import parse
from engine.spec import Workload

NUM_EVALUATIONS = 20
"""A long run is evaluated so many times over its tokens, so that its progress can be seen and forecast."""
TRAINED_PER_EVALUATED = 8
"""A short run is evaluated less often: between evaluations it trains on so many times the tokens of one. An evaluation
token costs about a third of a training token (no backward pass), so this is about 4 % of the run."""
NUM_CHECKPOINTS = 50
"""A real run is checkpointed so many times, within ``CHECKPOINT_STEPS``."""
CHECKPOINT_STEPS = (10, 1000)
"""Fewest and most steps between checkpoints: the most that a crash may cost."""
MAX_NAME = 116
"""Letters of the study's name that fit into a run's name beside the trial's number."""


def run_file(
    snapshot: StudySnapshot, trial: TrialRow, *, how: str, total_tokens: int | None = None, seed: int | None = None
) -> RunConfig:
    """The configuration of a production run.

    What decides speed, memory and quality (model, data, plan, hyperparameters) is the trial's. What only a trial needs
    (memory tracking, an early end, no checkpoints) is set for a run that has to survive.

    Args:
        snapshot: The study.
        trial: A trial with a result.
        how: How it was picked, for ``origin``.
        total_tokens: Tokens to train on; None for as many as the trial.
        seed: Seed of the run; None for the trial's.

    Raises:
        UserError: The trial's run file is missing or damaged, or ``total_tokens`` is 0.
    """
    if trial.folder is None:
        raise UserError(f"trial {trial.number} has no folder", hint="pick another trial")
    try:
        run, _ = load_run(trial.folder / RUN_FILE)
    except UserError as error:
        raise UserError(
            f"the run file of trial {trial.number} cannot be used: {error.message}",
            hint="pick another trial, or run the sweep again to make new ones",
            where=error.where,
        ) from None
    if total_tokens is not None:
        run = run.changed(workload=parse(Workload, run.workload.to_data() | {"total_tokens": total_tokens}))
    fewest, most = CHECKPOINT_STEPS
    pause = max(run.workload.total_tokens // NUM_EVALUATIONS, TRAINED_PER_EVALUATED * run.evaluation.max_tokens)
    pause_steps = -(-pause // run.tokens_per_step)
    return run.changed(
        name=f"{snapshot.name[:MAX_NAME]}-{trial.number}",
        runtime=run.runtime.changed(
            seed=run.runtime.seed if seed is None else seed, measure_memory=False, stop_after_steps=None
        ),
        evaluation=run.evaluation.changed(
            every_tokens=pause_steps * run.tokens_per_step if pause_steps < run.num_steps else None
        ),
        checkpoint=run.checkpoint.changed(
            every_steps=min(max(run.num_steps // NUM_CHECKPOINTS, fewest), most), keep=3, at_end=True
        ),
        branch=None,
        origin=_origin(snapshot, trial, how),
    )


def _origin(snapshot: StudySnapshot, trial: TrialRow, how: str) -> dict[str, str]:
    """Where the run comes from and what to expect of it."""
    origin = {"study": snapshot.name, "trial": str(trial.number), "picked": how}
    for objective in snapshot.objectives:
        if trial.values is not None:
            origin[f"measured_{objective.name}"] = objective.text(trial.values[objective.name])
    return origin
