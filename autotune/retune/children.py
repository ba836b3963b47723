"""Child processes that end with their parent, in a session of their own, on given cores and at a given priority."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO

from autotune.study import launch
from autotune.study.preflight import engine_environment

LOW_PRIORITY = 5
"""Nice value of what runs on the same cores as the job: it yields, yet ends while its result is of use."""


def start_child(
    command: Sequence[str],
    *,
    output: IO[bytes],
    cores: Sequence[int] = (),
    num_threads: int = 1,
    priority: int = 0,
    death_signal: int = signal.SIGTERM,
) -> subprocess.Popen[bytes]:
    """Start a program of ours. The calling thread must outlive it: when that ends, the kernel ends the child.

    Args:
        command: Program and arguments.
        output: Where its output goes.
        cores: CPU cores it is pinned to, with its children; none leaves it where this process may run.
        num_threads: Threads of its OpenMP pool.
        priority: Nice value.
        death_signal: What it is sent when this process dies.
    """
    launcher = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), str(int(death_signal))]
    environment = engine_environment() | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(num_threads)}
    child = subprocess.Popen(
        [*launcher, ",".join(map(str, cores)) or "-", *command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C in the terminal reaches the parent alone, which decides
    )
    if priority:
        os.setpriority(os.PRIO_PROCESS, child.pid, priority)
    return child


def end_child(child: subprocess.Popen[bytes], *, grace_seconds: float) -> None:
    """Ask a child to end, and end its whole session when it has not after the grace time."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()
