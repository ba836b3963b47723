"""A trial's child process as a whole: started, watched and ended with all it starts, in any session.

It dies with this process (on Linux by the kernel's parent-death signal; elsewhere the next driver ends it by its
recorded mark).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from autotune.space.space import TrialLimits
from autotune.specs.machine import memory_limit_bytes
from autotune.study.devices import Devices
from autotune.study.preflight import engine_environment
from autotune.study.processes import MARK, end_marked, new_mark, recorded_mark, tree_memory_bytes
from engine.outcome import Outcome, OutcomeKind
from engine.units import format_bytes

STDOUT_FILE = "stdout.log"

MEMORY_SHARE = 0.9
"""Part of the machine's memory that trials may use."""
POLL_SECONDS = 0.1
WATCH_SECONDS = 0.5
"""Time between looks at memory and telemetry."""
STOP_GRACE_SECONDS = 20.0
"""A child that is asked to end gets so long for its checkpoint."""

OWN_SIGNALS = (
    signal.SIGABRT,
    signal.SIGSEGV,
    signal.SIGBUS,
    signal.SIGFPE,
    signal.SIGILL,
    signal.SIGTRAP,
    signal.SIGSYS,
)
"""What a process ends with by a fault of its own; any other signal comes from outside."""

LACKED_MEMORY = "the system ran out of memory and killed a process of the trial"

_LAUNCH = str(Path(__file__).with_name("launch.py"))


class Stop(IntEnum):
    """How urgently a trial is asked to end."""

    NO = 0
    SOON = 1
    """At a checkpoint, within the grace time."""
    NOW = 2


class Watch(Protocol):
    """What is known of a running child."""

    @property
    def limits(self) -> TrialLimits:
        """Its limits."""

    def poll(self) -> None:
        """Look for news."""

    def verdict(self) -> Outcome | None:
        """How it ends now for a limit other than memory; None when it may go on."""


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    decided: Outcome | None
    """The outcome that was decided here; None when it ended by itself."""
    status: int
    """Its exit status; negative for a signal."""
    lacked_memory: bool
    """The kernel killed a process for lack of memory meanwhile."""
    wall_seconds: float


def run_child(
    start: Callable[[str, int], subprocess.Popen[bytes]], folder: Path, watch: Watch, stop: Callable[[], Stop]
) -> Ended:
    """Run a child to its end. The calling thread must not end before: the child dies with it.

    Args:
        start: Starts it with a mark and a file descriptor for what it prints.
        folder: The trial's folder; what it prints is added to ``stdout.log``.
        watch: What is known of it.
        stop: Asked again and again whether to end early.
    """
    mark = new_mark(folder)
    started = time.time()
    kills_before = _num_kernel_oom_kills()
    with open(folder / STDOUT_FILE, "ab") as output:
        child = start(mark, output.fileno())
    try:
        decided = _supervise(child, watch, stop)
    finally:
        end_marked(mark)
        child.wait()
    lacked_memory = _num_kernel_oom_kills() > kills_before
    return Ended(decided, child.returncode, lacked_memory, time.time() - started)


def end_by_signal(number: int) -> tuple[OutcomeKind, str]:
    """Kind and detail of a process that was ended by a signal: its own failure, or a fault of the machine.

    Args:
        number: Of the signal.
    """
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number in OWN_SIGNALS:
        return "user", f"it crashed with {name}"
    return "infra", f"ended by {name} from outside"


def end_recorded(folder: Path) -> int:
    """End what an earlier start in ``folder`` left running (its driver was killed).

    Returns:
        Processes that were killed.
    """
    mark = recorded_mark(folder)
    return end_marked(mark) if mark else 0


def start_child(
    command: Sequence[str],
    folder: Path,
    *,
    mark: str,
    devices: Devices | None,
    death_signal: signal.Signals,
    stdout: int,
    stderr: int,
    threads_per_rank: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program as trials are: on its devices' cores, with its share of threads, tied to the calling thread,
    marked.

    Args:
        command: The program.
        folder: Its working folder.
        mark: What all its processes carry (``processes.new_mark``).
        devices: Devices to use alone; None for all.
        death_signal: What it gets when the calling thread ends.
        stdout: As for ``Popen``.
        stderr: As for ``Popen``.
        threads_per_rank: CPU threads of each of its processes; None leaves that to the program.
        environment: Of the program; None for the engine's.
    """
    cpus = ",".join(map(str, devices.cpus)) if devices else ""
    environment = {
        **(engine_environment() if environment is None else environment),
        MARK: mark,
        "PYTHONUNBUFFERED": "1",
    }
    if threads_per_rank is not None:
        environment["OMP_NUM_THREADS"] = str(threads_per_rank)
    if devices is not None and devices.visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = devices.visible
    launcher = [sys.executable, "-I", "-S", _LAUNCH, str(os.getpid()), str(int(death_signal)), cpus or "-"]
    return subprocess.Popen(
        [*launcher, *command],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,  # Ctrl-C in the terminal reaches the driver alone, which decides
    )


def _supervise(child: subprocess.Popen[bytes], watch: Watch, stop: Callable[[], Stop]) -> Outcome | None:
    """Wait for the child's end.

    Returns:
        The outcome when it was decided here; None when the child ended by itself.
    """
    limit_bytes = watch.limits.memory_bytes or int(memory_limit_bytes() * MEMORY_SHARE)
    next_look = 0.0
    while child.poll() is None:
        asked = stop()
        if asked == Stop.NOW:
            return Outcome(kind="interrupted", detail="stopped at once")
        if asked == Stop.SOON:
            return _end_gently(child, stop)
        if time.monotonic() >= next_look:
            watch.poll()
            used_bytes = tree_memory_bytes(child.pid, above=limit_bytes)
            if used_bytes > limit_bytes:
                limit = format_bytes(limit_bytes)
                return Outcome(kind="oom", detail=f"{format_bytes(used_bytes)} in use, the trial's limit is {limit}")
            if verdict := watch.verdict():
                return verdict
            next_look = time.monotonic() + WATCH_SECONDS
        try:
            child.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    watch.poll()
    return None


def _end_gently(child: subprocess.Popen[bytes], stop: Callable[[], Stop]) -> Outcome | None:
    """Ask the child to end at a checkpoint. None when it had ended well just before."""
    child.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + STOP_GRACE_SECONDS
    while child.poll() is None and time.monotonic() < deadline and stop() != Stop.NOW:
        try:
            child.wait(POLL_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    return None if child.returncode == 0 else Outcome(kind="interrupted", detail="stopped")


def last_line(path: Path) -> str:
    """What a child said last: its error message when there is one, else a rank's end as torchrun tells it."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 8192))
        text = file.read().decode("utf-8", errors="replace")
    lines = [" ".join(line.split()) for line in text.splitlines() if any(map(str.isalnum, line))]
    telling = [line for start in ("error:", "exitcode") for line in lines if line.startswith(start)]
    return (telling or lines[-1:] or ["no output"])[0][:500]


def _num_kernel_oom_kills() -> int:
    """Processes that the kernel has killed for lack of memory so far: in this control group, else on this machine."""
    for path in ("/sys/fs/cgroup/memory.events", "/proc/vmstat"):
        try:
            lines = Path(path).read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        for line in lines:
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0
