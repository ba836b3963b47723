"""What runs trials: the contract of executors, and the one that runs them as child processes of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autotune.space.space import TrialLimits
from autotune.specs.cluster import ClusterSpec
from autotune.specs.machine import memory_limit_bytes
from autotune.study.assignment import Assignment
from autotune.study.child import MEMORY_SHARE, Stop
from autotune.study.command_runner import run_program
from autotune.study.devices import DevicePool
from autotune.study.runner import run_trial
from engine.errors import UserError
from engine.outcome import Outcome

WAIT_TOLD_SECONDS = 3.0
"""Waiting so long for devices that others hold is worth a word."""

EXECUTORS = ("local", "ray")
"""Names of executors: this machine's processes, or a Ray cluster."""

CommandOf = Callable[[Assignment], Sequence[str]]
"""What to run as a trial, in place of the engine."""


class Executor(Protocol):
    """Places trials and runs them; what is tried next, what counts and what is run again is the study's and the
    driver's business. Called from several threads at once, one for each trial."""

    def run(
        self,
        assignment: Assignment,
        limits: TrialLimits,
        *,
        stop: Callable[[], Stop],
        on_start: Callable[[], None],
        on_waiting: Callable[[], None],
    ) -> Outcome | None:
        """Wait for the devices of a trial and run it to its end.

        Args:
            assignment: The trial.
            limits: Its limits. No memory limit: the trial's share of its machine's, by devices.
            stop: Asked again and again whether to end early.
            on_start: Called once the trial has its devices.
            on_waiting: Called once when it has been waiting for devices that others hold.

        Returns:
            Its outcome. Failures are outcomes: a worker that was lost is ``infra``, a trial that ``stop`` ended is
            ``interrupted``. None when ``stop`` ended the wait for devices.
        """

    def close(self) -> None:
        """Let go of what belongs to the executor. No trial runs any more."""


@contextmanager
def open_executor(
    name: str,
    cluster: ClusterSpec,
    folder: Path,
    *,
    address: str | None = None,
    num_devices: int = 1,
    num_workers: int = 1,
) -> Iterator[Executor]:
    """The executor of a study, closed with the block.

    Args:
        name: ``local`` or ``ray``.
        cluster: The devices trials are planned for.
        folder: The study's.
        address: Ray cluster to join, ``auto`` or ``HOST:PORT``; None to start one on this machine.
        num_devices: Devices of the largest trial.
        num_workers: Trials at a time.

    Raises:
        UserError: Unknown name, an address without Ray, or the Ray cluster can't be used.
    """
    if name not in EXECUTORS:
        raise UserError(f"there is no executor {name!r}", hint=f"use one of {', '.join(EXECUTORS)}")
    if name == "local":
        if address is not None:
            raise UserError("--address names a Ray cluster", hint="add --executor ray, or leave --address out")
        yield LocalExecutor(DevicePool(cluster))
        return
    from autotune.study.ray_pool import open_ray

    with open_ray(address, cluster, folder, num_devices=num_devices, num_workers=num_workers) as executor:
        yield executor


@dataclass
class LocalExecutor:
    """Runs each trial as a child process on devices of its own of this machine."""

    pool: DevicePool
    command: CommandOf | None = None
    """Stands in for the engine."""

    def run(
        self,
        assignment: Assignment,
        limits: TrialLimits,
        *,
        stop: Callable[[], Stop],
        on_start: Callable[[], None],
        on_waiting: Callable[[], None],
    ) -> Outcome | None:
        """See ``Executor``."""
        patience = Patience(on_waiting, WAIT_TOLD_SECONDS)

        def should_stop() -> bool:
            if not self.pool.num_held:
                patience.wears()
            return stop() > Stop.NO

        devices = self.pool.acquire(assignment.num_devices, should_stop)
        if devices is None:
            return None
        try:
            on_start()
            limits = with_memory_share(limits, assignment.num_devices, self.pool.num_devices)
            if assignment.program is not None:
                return run_program(assignment, assignment.program, limits=limits, devices=devices, stop=stop)
            assert assignment.config is not None, "a run of the engine or a program"
            command = self.command(assignment) if self.command else None
            return run_trial(
                assignment.config, assignment.folder, limits=limits, devices=devices, stop=stop, command=command
            )
        finally:
            self.pool.release(devices)

    def close(self) -> None:
        """Nothing is held between trials."""


class Patience:
    """Tells once that a wait for what others hold has become long.

    Args:
        tell: Called then.
        seconds: How long that is.
    """

    def __init__(self, tell: Callable[[], None], seconds: float) -> None:
        self._tell = tell
        self._ends = time.monotonic() + seconds
        self._is_told = False

    def wears(self) -> None:
        """Called again and again while others hold it."""
        if not self._is_told and time.monotonic() > self._ends:
            self._is_told = True
            self._tell()


def with_memory_share(limits: TrialLimits, num_devices: int, num_all_devices: int) -> TrialLimits:
    """The limits with a memory limit: the one that was set, else the trial's share of this machine's, by devices."""
    if limits.memory_bytes is not None:
        return limits
    share = min(1.0, num_devices / num_all_devices)
    return limits.changed(memory_bytes=int(memory_limit_bytes() * MEMORY_SHARE * share))
