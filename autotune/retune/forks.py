"""Shadow forks of a live run: short branches from one of its checkpoints at several learning rates, as children."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.retune.actions import TryLearningRate
from autotune.retune.canary import ArmResult
from autotune.retune.children import end_child, start_child
from engine.atomic import make_folder, write_text
from engine.checkpoint_folders import checkpoint_folders
from engine.config import BranchOptions, CheckpointOptions, EvaluationOptions, LoggingOptions, RunConfig, dump_run
from engine.outcome import read_outcome
from engine.plan import Plan
from engine.telemetry import StepRecord, read_telemetry

FORKS_FOLDER = "forks"
BRANCHES = (sys.executable, "-P", "-m", "engine.branches")
MIN_EVALUATION_TOKENS = 8192
EVALUATION_STEPS = 16
"""Held-out tokens of a fork's evaluation, in training steps' tokens: about as dear as half so many steps."""
START_ALLOWANCE_SECONDS = 300.0


@dataclass(frozen=True)
class TrialCost:
    """What the forks of one trial took."""

    cpu_seconds: float
    wall_seconds: float


def fork_config(config: RunConfig, checkpoint: str, action: TryLearningRate, scale: float) -> RunConfig:
    """The run file of one fork. It runs in one process whatever the plan, which is the same training up to rounding."""
    plan = config.plan
    alone = Plan(
        micro_batch_size=plan.micro_batch_size,
        precision=plan.precision,
        recompute=plan.recompute,
        recompute_period=plan.recompute_period,
    )
    tokens = max(EVALUATION_STEPS * config.tokens_per_step, MIN_EVALUATION_TOKENS)
    return config.changed(
        plan=alone,
        runtime=config.runtime.changed(
            measure_memory=False, init_from=None, stop_after_steps=None, step_delay_seconds=0.0, measure_warmup_steps=0
        ),
        evaluation=EvaluationOptions(max_tokens=min(tokens, config.evaluation.max_tokens)),
        checkpoint=CheckpointOptions(at_end=action.origin == "start"),
        logging=LoggingOptions(),
        branch=BranchOptions(
            checkpoint=checkpoint,
            num_steps=action.num_steps,
            learning_rate_scale=scale,
            anneal_steps=action.anneal_steps,
        ),
    )


class ForkRunner:
    """Runs the forks of one trial, as many at once as there are cores for.

    Args:
        folder: The job's folder.
        config: The job's configuration.
        program: What runs branches: it is given ``--at-once N`` and folders that hold a run file each.
    """

    def __init__(self, folder: Path, config: RunConfig, program: Sequence[str] = BRANCHES) -> None:
        self._folder = folder / FORKS_FOLDER
        self._config = config
        self._program = tuple(program)

    def run(
        self,
        action: TryLearningRate,
        *,
        scale: float,
        checkpoint: str,
        step_seconds: float,
        priority: int,
        wait: Callable[..., object],
    ) -> tuple[list[ArmResult], TrialCost]:
        """Run every arm of the action to its end, and for ``here`` the reference first.

        Args:
            action: The factors to try, and for how long.
            scale: Learning-rate scale in force, which factors are relative to.
            checkpoint: Where to branch off.
            step_seconds: Step time of the live run, for the time limit.
            priority: Nice value.
            wait: Called with a condition and ``timeout_seconds``, returns when the condition holds or time is up;
                whatever it raises ends the forks.
        """
        self.clear()
        factors = (1.0, *action.factors) if action.origin == "here" else action.factors
        for factor in factors:
            config = fork_config(self._config, checkpoint, action, factor * scale)
            write_text(make_folder(self._arm_folder(factor)) / "run.yaml", dump_run(config))
        cpu_before, started = _children_cpu_seconds(), time.monotonic()
        num_threads = self._config.runtime.threads_per_rank
        on_cpu = self._config.runtime.device == "cpu"
        num_at_once = max(1, len(os.sched_getaffinity(0)) // num_threads) if on_cpu else 1
        folders = [str(self._arm_folder(factor)) for factor in factors]
        with (self._folder / "stdout.log").open("wb") as output:
            child = start_child(
                [*self._program, "--at-once", str(num_at_once), *folders],
                output=output,
                num_threads=num_threads,
                priority=priority,
                death_signal=signal.SIGKILL,
            )
            try:
                # Beside the job, forks may be several times slower than it.
                limit = START_ALLOWANCE_SECONDS + 10 * action.num_steps * step_seconds * len(factors)
                wait(lambda: child.poll() is not None, timeout_seconds=limit)
            finally:
                end_child(child, grace_seconds=0.0)
        results = [self._result(factor) for factor in factors]
        return results, TrialCost(_children_cpu_seconds() - cpu_before, time.monotonic() - started)

    def clear(self) -> None:
        """Remove the forks' folders."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def last_checkpoint(self, factor: float) -> str | None:
        """Where the fork of a ``start`` trial ended; None when it did not."""
        paths = checkpoint_folders(self._arm_folder(factor))
        return str(paths[-1]) if paths else None

    def _arm_folder(self, factor: float) -> Path:
        return self._folder / f"x{factor:.4g}"

    def _result(self, factor: float) -> ArmResult:
        folder = self._arm_folder(factor)
        outcome = read_outcome(folder)
        if outcome is None or outcome.kind != "ok":
            kind, detail = (outcome.kind, outcome.detail) if outcome else ("infra", "ended without an outcome")
            return ArmResult(factor=factor, outcome=kind, detail=detail)
        losses = [record.loss for record in read_telemetry(folder) if isinstance(record, StepRecord)]
        return ArmResult(
            factor=factor,
            outcome="ok",
            held_out_loss=outcome.held_out_loss,
            losses=tuple(losses),
        )


def _children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
