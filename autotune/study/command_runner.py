"""One trial of a user's own program: a child process with limits, to a typed Outcome.

The program says what it measured by a JSON file, ``{"loss": 2.31, "tokens_per_second": 1.2e5}``, at the path in the
environment variable ``AUTOTUNE_RESULT``. Where it knows how it failed it may say ``{"failure": "diverged", "detail":
"loss of 12"}`` instead. Whatever else happens is told from its exit status and its last line.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from autotune.space.objectives import Objective
from autotune.space.program import FAILURE, Program
from autotune.space.space import TrialLimits
from autotune.study.assignment import Assignment
from autotune.study.child import (
    LACKED_MEMORY,
    STDOUT_FILE,
    Ended,
    Stop,
    end_by_signal,
    end_recorded,
    last_line,
    run_child,
    start_child,
)
from autotune.study.devices import Devices
from autotune.study.growth import with_checkpoint
from autotune.study.measured import outcome_of_measured
from engine.atomic import make_folder, write_json
from engine.errors import UserError
from engine.outcome import OUTCOME_FILE, Outcome, OutcomeKind, read_outcome, write_outcome
from engine.units import format_duration

RESULT_VARIABLE = "AUTOTUNE_RESULT"
"""Environment variable with the path that the program writes its result to."""
RESULT_FILE = "result.json"
TRIAL_FILE = "trial.json"
"""What the trial is: arguments, values, seed."""
MAX_RESULT_BYTES = 1_000_000
MEMORY_ERRORS = ("MemoryError", "OutOfMemoryError")
"""Exceptions, by the last word of their names, that Python programs end with when memory is lacking."""


def run_program(
    assignment: Assignment,
    program: Program,
    *,
    limits: TrialLimits,
    devices: Devices | None = None,
    stop: Callable[[], Stop] = lambda: Stop.NO,
) -> Outcome:
    """Run a trial of a program to its end. The calling thread must not end before: the program dies with it.

    Args:
        assignment: The trial. An earlier outcome and result in its folder are removed, everything else is kept.
        program: What it starts.
        limits: Time and memory (null: nine tenths of the machine's).
        devices: Devices to use alone; None for all.
        stop: Asked again and again whether to end early.

    Returns:
        The outcome, also in ``outcome.json``. Failures of the trial are outcomes, never exceptions.

    Raises:
        UserError: The folder can't be written.
    """
    folder = make_folder(assignment.folder).absolute()
    end_recorded(folder)
    for name in (OUTCOME_FILE, RESULT_FILE):
        (folder / name).unlink(missing_ok=True)
    write_json(folder / TRIAL_FILE, _description(assignment, program))
    outcome = with_checkpoint(_run(folder, program, limits, devices, stop), assignment)
    write_outcome(folder, outcome)
    return outcome


def program_evidence(assignment: Assignment, program: Program) -> Outcome | None:
    """The outcome that a trial whose driver died left in its folder; None when it has to be run (again)."""
    outcome = read_outcome(assignment.folder)
    if outcome is None or outcome.kind in ("interrupted", "infra"):
        return None
    try:
        found = json.loads((assignment.folder / TRIAL_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return outcome if found == _description(assignment, program) else None


def find_executable(program: Program) -> str:
    """The file of a program's first argument: a path relative to its folder, or a name on the search path.

    Raises:
        UserError: There is none.
    """
    name = program.template.arguments[0]
    path = str(program.folder / name) if os.sep in name else name
    found = shutil.which(path)
    if found is None:
        raise UserError(
            f"the command's program {name!r} can't be run",
            hint=f"correct its path (relative to {program.folder}) or make it executable"
            if os.sep in name
            else "install it, or give its path",
        )
    return os.path.abspath(found)


def _description(assignment: Assignment, program: Program) -> dict[str, Any]:
    return {
        "number": assignment.number,
        "seed": assignment.seed,
        "parameters": dict(assignment.parameters),
        "arguments": program.arguments(assignment.folder),
    }


def _run(
    folder: Path, program: Program, limits: TrialLimits, devices: Devices | None, stop: Callable[[], Stop]
) -> Outcome:
    try:
        arguments = [find_executable(program), *program.arguments(folder)[1:]]
    except UserError as error:
        return Outcome(kind="user", detail=error.message)
    environment = {**os.environ, RESULT_VARIABLE: str(folder / RESULT_FILE)}
    watch = _OutputWatch(folder / STDOUT_FILE, limits)
    try:
        ended = run_child(
            lambda mark, output: start_child(
                arguments,
                program.folder,
                mark=mark,
                devices=devices,
                # Launchers of several processes pass SIGTERM on; a single process needs no such courtesy.
                death_signal=signal.SIGTERM if program.num_devices > 1 else signal.SIGKILL,
                stdout=output,
                stderr=output,
                environment=environment,
            ),
            folder,
            watch,
            stop,
        )
    except FileNotFoundError:
        return Outcome(kind="user", detail=f"the folder {program.folder} that the command runs in does not exist")
    outcome = ended.decided or _told(folder, ended, program.objectives)
    if outcome.kind != "ok" and ended.decided is None and stop() > Stop.NO:
        outcome = Outcome(kind="interrupted", detail="stopped")
    return outcome.changed(wall_seconds=ended.wall_seconds)


def _told(folder: Path, ended: Ended, objectives: tuple[Objective, ...]) -> Outcome:
    """The outcome of a program that ended by itself."""
    result = _read_result(folder / RESULT_FILE)
    if isinstance(result, Mapping) and FAILURE in result:
        return _own_word(result)
    if ended.status != 0:
        if ended.lacked_memory:
            return Outcome(kind="oom", detail=LACKED_MEMORY)
        if ended.status < 0:
            kind, detail = end_by_signal(-ended.status)
            return Outcome(kind=kind, detail=detail)
        line = last_line(folder / STDOUT_FILE)
        is_memory = line.partition(":")[0].rpartition(".")[2] in MEMORY_ERRORS
        return Outcome(kind="oom" if is_memory else "user", detail=f"exit status {ended.status}: {line}")
    if isinstance(result, _NoResult):
        return Outcome(kind="user", detail=f"it ended well, but {result.reason}")
    return outcome_of_measured(result, objectives)


@dataclass(frozen=True)
class _NoResult:
    reason: str


def _read_result(path: Path) -> Any:
    """What the program wrote, or why that is nothing. It has ended, so the file is as whole as it gets."""
    try:
        if path.stat().st_size > MAX_RESULT_BYTES:
            return _NoResult(f"its result is larger than {MAX_RESULT_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return _NoResult(f"it wrote no result to the path in {RESULT_VARIABLE}")
    except (OSError, UnicodeDecodeError) as error:
        return _NoResult(f"its result can't be read: {error}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        return _NoResult(f"its result is not JSON ({error}): {text[:60]!r}")


def _own_word(result: Mapping[str, Any]) -> Outcome:
    kind, detail = result[FAILURE], str(result.get("detail", ""))
    kinds = [name for name in get_args(OutcomeKind) if name not in ("ok", "interrupted")]
    if kind not in kinds:
        return Outcome(kind="user", detail=f"it reports the failure {kind!r}; known are {', '.join(kinds)}")
    return Outcome(kind=kind, detail=" ".join(detail.split())[:500])


@dataclass
class _OutputWatch:
    """What a program prints is its only sign of life."""

    path: Path
    limits: TrialLimits
    _started: float = field(default_factory=time.monotonic)
    _last_sign: float = field(default_factory=time.monotonic)
    _num_bytes: int | None = None

    def poll(self) -> None:
        """See ``Watch``."""
        num_bytes = self.path.stat().st_size
        if self._num_bytes is not None and num_bytes != self._num_bytes:
            self._last_sign = time.monotonic()
        self._num_bytes = num_bytes

    def verdict(self) -> Outcome | None:
        """See ``Watch``: past the time limit it is too slow, or hangs when it was silent for most of the time."""
        now = time.monotonic()
        elapsed, silent = now - self._started, now - self._last_sign
        if elapsed <= self.limits.seconds:
            return None
        limit = f"time limit of {format_duration(self.limits.seconds)} reached"
        if silent > elapsed / 2:
            return Outcome(kind="hang", detail=f"{limit}, nothing printed for {format_duration(silent)}")
        return Outcome(kind="interrupted", detail=f"{limit}: too slow")
