"""One trial of the engine: a child process with limits, to a typed Outcome."""

from __future__ import annotations

import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.space.space import TrialLimits
from autotune.study.assignment import Assignment
from autotune.study.child import (
    LACKED_MEMORY,
    OWN_SIGNALS,
    STDOUT_FILE,
    Stop,
    end_by_signal,
    end_recorded,
    last_line,
    run_child,
    start_child,
)
from autotune.study.command_runner import program_evidence
from autotune.study.devices import Devices
from engine.atomic import make_folder, write_text
from engine.config import RunConfig, dump_run, load_run
from engine.control import PLANNED_STOP_EXIT_CODE, ChangeRequest, TakeCheckpoint, send_request
from engine.errors import USER_ERROR_EXIT_CODE, UserError
from engine.outcome import (
    FAILURES_FOLDER,
    OUTCOME_FILE,
    Outcome,
    OutcomeKind,
    read_failures,
    read_outcome,
    write_outcome,
)
from engine.telemetry import AckRecord, EventRecord, StepRecord, TelemetryReader
from engine.units import format_duration

RUN_FILE = "run.yaml"
CHECKPOINT_PATIENCE_SECONDS = 600.0
"""A checkpoint that was asked for may take so long: until then a trial that is silent does not hang."""


def engine_command(config: RunConfig, folder: Path) -> list[str]:
    """The command that trains ``config`` with results in ``folder``. ``-P`` and PYTHONSAFEPATH keep a user's own folder
    named ``engine`` from standing in for ours."""
    program = ["-m", "engine.train", str(folder / RUN_FILE), "--folder", str(folder)]
    return launch_command(program, config.plan.world_size)


def launch_command(program: Sequence[str], num_ranks: int) -> list[str]:
    """The command that runs a program (``-m NAME ...``) as one process, or as several under torchrun."""
    if num_ranks == 1:
        return [sys.executable, "-P", *program]
    launch = ["--standalone", f"--nproc-per-node={num_ranks}"]
    launch.append(f"--log-dir={os.devnull}")  # else each launch makes a folder in /tmp, which stays when it is killed
    return [sys.executable, "-P", "-m", "torch.distributed.run", *launch, *program]


def run_trial(
    config: RunConfig,
    folder: Path,
    *,
    limits: TrialLimits,
    devices: Devices | None = None,
    stop: Callable[[], Stop] = lambda: Stop.NO,
    command: Sequence[str] | None = None,
) -> Outcome:
    """Run one trial to its end. The calling thread must not end before: the child dies with it.

    A trial that reaches its time limit while it makes progress ends as ``interrupted`` with the limit in ``detail``: it
    is too slow, which is the candidate's own fault and teaches the sampler like any other failure. One that is asked to
    end by ``stop`` is ``interrupted`` too, but the caller knows and runs it again.

    Args:
        config: What to run; written to ``run.yaml``.
        folder: The trial's folder. Checkpoints in it are kept, and continued from; an earlier outcome is removed.
        limits: Time, memory (null: nine tenths of the machine's), heartbeat, and how often it writes a checkpoint.
        devices: Devices to use alone; None for all.
        stop: Asked again and again whether to end early.
        command: Run this instead of the engine; it gets no further arguments.

    Returns:
        The outcome, also in ``outcome.json``. Failures of the trial are outcomes, never exceptions.

    Raises:
        UserError: The folder can't be written.
    """
    folder = make_folder(folder).absolute()
    end_recorded(folder)
    (folder / OUTCOME_FILE).unlink(missing_ok=True)
    shutil.rmtree(folder / FAILURES_FOLDER, ignore_errors=True)
    write_text(folder / RUN_FILE, dump_run(config))
    watch = _Watch(folder, limits)
    program = list(command or engine_command(config, folder))
    ended = run_child(lambda mark, output: _start(config, folder, mark, devices, program, output), folder, watch, stop)
    outcome = ended.decided or _told_by_child(folder, ended.status)
    if outcome.kind == "infra" and ended.lacked_memory:
        outcome = outcome.changed(kind="oom", detail=LACKED_MEMORY)
    outcome = _completed(outcome, watch, ended.wall_seconds)
    write_outcome(folder, outcome)
    return outcome


def evidence(assignment: Assignment) -> Outcome | None:
    """The outcome that a trial whose driver died left in its folder; None when it has to be run (again): nothing whole
    is there, it was interrupted or hit by a fault of the machine, or the folder belongs to another configuration."""
    if assignment.program is not None:
        return program_evidence(assignment, assignment.program)
    outcome = read_outcome(assignment.folder)
    if outcome is None or outcome.kind in ("interrupted", "infra"):
        return None
    try:
        return outcome if load_run(assignment.folder / RUN_FILE)[0] == assignment.config else None
    except UserError:
        return None


@dataclass
class _Watch:
    """What is known of a running trial from its telemetry."""

    folder: Path
    limits: TrialLimits

    def __post_init__(self) -> None:
        self._reader = TelemetryReader(self.folder)
        self._reader.poll()  # what an earlier attempt wrote is not progress of this one
        self.started = self.last_sign = time.monotonic()
        self.has_begun = False
        self.num_steps = 0
        self.num_tokens = 0
        self._last_checkpoint = math.inf
        """When the last one was written or given up; the first is due that long after the first step."""
        self._awaited: ChangeRequest | None = None
        self._asked = 0.0

    def poll(self) -> None:
        """Read new telemetry, and have a checkpoint written when it is time."""
        records = self._reader.poll()
        if records:
            self.has_begun = True
            self.last_sign = time.monotonic()
            self.num_steps, self.num_tokens = records[-1].step, records[-1].tokens
        if self.limits.checkpoint_seconds is not None and self.has_begun:
            self._keep_checkpoint(records, self.limits.checkpoint_seconds)

    def _keep_checkpoint(self, records: Sequence[StepRecord | EventRecord | AckRecord], every_seconds: float) -> None:
        now = time.monotonic()
        if math.isinf(self._last_checkpoint) and any(isinstance(record, StepRecord) for record in records):
            self._last_checkpoint = now
        if self._awaited is not None:
            answers = [record.change_id for record in records if isinstance(record, AckRecord)]
            if self._awaited.change_id in answers or now - self._asked > CHECKPOINT_PATIENCE_SECONDS:
                self._awaited, self._last_checkpoint = None, now
        elif records and now - self._last_checkpoint >= every_seconds:  # who is silent is not pardoned
            change = TakeCheckpoint(keep=False)
            self._awaited = ChangeRequest(change=change, reason="to go on from, should the machine die")
            self._asked = now
            send_request(self.folder, self._awaited)

    def verdict(self) -> Outcome | None:
        """Hang or time limit, once reached. Until the first record only the time limit counts: the first trial prepares
        the corpus."""
        now = time.monotonic()
        elapsed, silent = now - self.started, now - self.last_sign
        at = f"at step {self.num_steps}" if self.has_begun else "before its first step"
        patience = self.limits.heartbeat_seconds + (CHECKPOINT_PATIENCE_SECONDS if self._awaited else 0.0)
        if self.has_begun and silent > patience:
            return Outcome(kind="hang", detail=f"no sign of life for {format_duration(silent)} {at}")
        if elapsed > self.limits.seconds:
            limit = f"time limit of {format_duration(self.limits.seconds)} reached {at}"
            if not self.has_begun or silent > elapsed / 2:
                return Outcome(kind="hang", detail=f"{limit}, silent for {format_duration(silent)}")
            return Outcome(kind="interrupted", detail=f"{limit}: too slow")
        return None


def _start(
    config: RunConfig, folder: Path, mark: str, devices: Devices | None, command: list[str], output: int
) -> subprocess.Popen[bytes]:
    # torchrun passes SIGTERM on to its ranks; a single process needs no such courtesy.
    death_signal = signal.SIGTERM if config.plan.world_size > 1 else signal.SIGKILL
    return start_child(
        command,
        folder,
        mark=mark,
        devices=devices,
        threads_per_rank=config.runtime.threads_per_rank,
        death_signal=death_signal,
        stdout=output,
        stderr=subprocess.STDOUT,
    )


def _told_by_child(folder: Path, status: int) -> Outcome:
    """The outcome of a child that ended by itself: the most telling of its ranks' failures, its own word, or its exit
    status. A signal from outside or an interruption that nobody here asked for is a fault of the machine."""
    kind: OutcomeKind
    outcome = read_outcome(folder)
    if outcome is not None and outcome.kind == "ok":
        return outcome
    causes = [(failure.kind, failure.detail) for failure in read_failures(folder)]
    causes += [(outcome.kind, outcome.detail)] if outcome is not None else []
    for kind, detail in causes:
        if kind not in ("infra", "interrupted"):
            return (outcome or Outcome(kind=kind)).changed(kind=kind, detail=detail)
    last_said = last_line(folder / STDOUT_FILE)
    kind = "infra"
    if status < 0:
        kind, detail = end_by_signal(-status)
    elif crash := _crash_of_rank(last_said):
        kind, detail = "user", crash
    elif outcome is not None and outcome.kind == "interrupted":
        detail = f"ended from outside: {outcome.detail}"
    elif causes:
        detail = causes[0][1]
    elif status == USER_ERROR_EXIT_CODE:
        kind, detail = "user", last_said
    elif status == PLANNED_STOP_EXIT_CODE:
        detail = "stopped at a checkpoint on another's request"
    else:
        detail = f"exit status {status} without an outcome: {last_said}"
    return (outcome or Outcome(kind=kind)).changed(kind=kind, detail=detail)


def _crash_of_rank(line: str) -> str:
    """What the line says in which torchrun tells a rank's end, if it crashed by itself; else nothing. SIGABRT tells
    nothing there: collectives end a rank with it when they lose another."""
    found = re.match(r"exitcode\s*:\s*-(\d+)", line)
    if found is None or int(found[1]) not in {*OWN_SIGNALS} - {signal.SIGABRT}:
        return ""
    return f"a rank crashed with {signal.Signals(int(found[1])).name}"


def _completed(outcome: Outcome, watch: _Watch, wall_seconds: float) -> Outcome:
    """Fill in what only the watcher knows."""
    return outcome.changed(
        num_steps=outcome.num_steps or watch.num_steps,
        num_tokens=outcome.num_tokens or watch.num_tokens,
        wall_seconds=wall_seconds if outcome.wall_seconds is None else outcome.wall_seconds,
    )
