"""Shadow forks of a live run: short branches from one of its checkpoints at several learning rates, as children."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from autotune.retune.actions import TryLearningRate
from autotune.retune.canary import ArmResult
from autotune.retune.children import LOW_PRIORITY, end_child, start_child
from engine.atomic import make_folder, write_text
from engine.config import BranchOptions, CheckpointOptions, EvaluationOptions, LoggingOptions, RunConfig, dump_run
from engine.outcome import read_outcome
from engine.plan import Plan
from engine.telemetry import StepRecord, read_telemetry

FORKS_FOLDER = "forks"
ENGINE = (sys.executable, "-P", "-m", "engine.train")
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
        checkpoint=CheckpointOptions(at_end=False),
        logging=LoggingOptions(),
        branch=BranchOptions(
            checkpoint=checkpoint,
            num_steps=action.num_steps,
            learning_rate_scale=scale,
            anneal_steps=action.anneal_steps,
        ),
    )


class ForkRunner:
    """Runs the forks of one trial, as many at once as there are cores for, at low priority.

    Args:
        folder: The job's folder.
        config: The job's configuration.
        engine: The program that trains: it is given a run file and ``--folder``.
    """

    def __init__(self, folder: Path, config: RunConfig, engine: Sequence[str] = ENGINE) -> None:
        self._folder = folder / FORKS_FOLDER
        self._config = config
        self._engine = tuple(engine)

    def run(
        self,
        action: TryLearningRate,
        *,
        scale: float,
        checkpoint: str,
        step_seconds: float,
        wait: Callable[[Callable[[], bool]], object],
    ) -> tuple[list[ArmResult], TrialCost]:
        """Run the reference and every arm of the action to their ends.

        Args:
            action: The factors to try, and for how long.
            scale: Learning-rate scale in force, which factors are relative to.
            checkpoint: Where to branch off.
            step_seconds: Step time of the live run, for the time limit.
            wait: Waits until a condition holds; whatever it raises ends the forks.
        """
        shutil.rmtree(self._folder, ignore_errors=True)
        used = _children_cpu_seconds()
        started = time.monotonic()
        # Forks run beside the job: several times slower than it at worst.
        deadline = started + (START_ALLOWANCE_SECONDS + 10 * action.num_steps * step_seconds) * (
            1 + len(action.factors)
        )
        num_threads = self._config.runtime.threads_per_rank
        num_at_once = max(1, len(os.sched_getaffinity(0)) // num_threads)
        if self._config.runtime.device == "cuda":
            num_at_once = 1
        waiting = [1.0, *action.factors]
        running: dict[float, subprocess.Popen[bytes]] = {}

        def advance() -> bool:
            for factor, child in list(running.items()):
                if child.poll() is not None:
                    del running[factor]
            while waiting and len(running) < num_at_once:
                factor = waiting.pop(0)
                running[factor] = self._start(
                    stack, fork_config(self._config, checkpoint, action, factor * scale), factor
                )
            return not running or time.monotonic() > deadline

        with ExitStack() as stack:
            wait(advance)
        results = [self._result(factor) for factor in (1.0, *action.factors)]
        shutil.rmtree(self._folder, ignore_errors=True)
        return results, TrialCost(_children_cpu_seconds() - used, time.monotonic() - started)

    def _start(self, stack: ExitStack, config: RunConfig, factor: float) -> subprocess.Popen[bytes]:
        folder = make_folder(self._arm_folder(factor))
        write_text(folder / "run.yaml", dump_run(config))
        output = stack.enter_context((folder / "stdout.log").open("wb"))
        child = start_child(
            [*self._engine, str(folder / "run.yaml"), "--folder", str(folder)],
            output=output,
            num_threads=config.runtime.threads_per_rank,
            priority=LOW_PRIORITY,
            death_signal=signal.SIGKILL,
        )
        stack.callback(end_child, child, grace_seconds=0.0)
        return child

    def _arm_folder(self, factor: float) -> Path:
        return self._folder / f"x{factor:.4g}"

    def _result(self, factor: float) -> ArmResult:
        folder = self._arm_folder(factor)
        outcome = read_outcome(folder)
        if outcome is None or outcome.kind != "ok":
            kind, detail = (outcome.kind, outcome.detail) if outcome else ("hang", "did not end in time")
            return ArmResult(factor=factor, outcome=kind, detail=detail)
        losses = [record.loss for record in read_telemetry(folder) if isinstance(record, StepRecord)]
        return ArmResult(
            factor=factor,
            outcome="ok",
            held_out_loss=outcome.held_out_loss,
            losses=tuple(loss for loss in losses if loss is not None),
        )


def _children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
