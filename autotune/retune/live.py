"""The live run as the retuner sees it: its telemetry as it comes, and requests with their answers."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from autotune.retune.policy import HeldCheckpoint
from autotune.twin.health import Finding, find_divergence, find_persistent_spike
from autotune.twin.twin import Twin
from engine.atomic import make_folder
from engine.config import RunConfig
from engine.control import Change, ChangeRequest, send_request
from engine.outcome import read_outcome
from engine.telemetry import AckRecord, EventRecord, TelemetryReader

HELD_FOLDER = "held"
SLOWER_FOLDER = "slower_start"
NUM_HELD = 3
"""Checkpoints held beside the earliest one."""
POLL_SECONDS = 0.25
CHECK_STEPS = 8
"""The run is looked at for divergence each so many steps."""

PARDON_STEPS = 64
"""After a rollback, or when nothing could be done, the run is not looked at for divergence for so many steps."""


class RunEndedError(Exception):
    """The run has ended: there is nothing left to retune."""


class RunSickError(Exception):
    """The run went so wrong that it must be brought back at once.

    Args:
        finding: What is wrong.
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.describe())
        self.finding = finding


class LiveRun:
    """Follows one run and talks to it.

    Args:
        folder: The run's folder.
        config: Its configuration.
    """

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.folder = folder
        self.twin = Twin(config)
        self.is_running = False
        self._reader = TelemetryReader(folder)
        self._acks: dict[str, AckRecord] = {}
        self._created = time.time()
        self._checked_step = 0
        self._pid = 0

    @property
    def step(self) -> int:
        """Steps done."""
        return self.twin.step

    def poll(self) -> None:
        """Take in what is new.

        Raises:
            RunEndedError: The run has ended.
        """
        records = self._reader.poll()
        self.twin.update(records)
        ended_at = None
        for record in records:
            if isinstance(record, AckRecord):
                self._acks[record.change_id] = record
            elif isinstance(record, EventRecord) and record.kind in ("start", "end"):
                self.is_running = record.kind == "start"
                self._pid = record.data.get("pid", 0)
                ended_at = None if self.is_running else record.time
        if self.is_running:
            return
        # After an end from before this process the run may be continued: its new start is waited for.
        if (ended_at is not None and ended_at > self._created) or self.is_complete():
            raise RunEndedError

    def shares_cores(self) -> bool:
        """Whether this process may run where the job's first rank runs."""
        try:
            return bool(os.sched_getaffinity(self._pid) & os.sched_getaffinity(0))
        except OSError:
            return True

    def is_complete(self) -> bool:
        """Whether the run has been trained to its end."""
        outcome = read_outcome(self.folder)
        return outcome is not None and outcome.kind == "ok"

    def wait(
        self, condition: Callable[[], bool], *, timeout_seconds: float | None = None, poll_seconds: float = POLL_SECONDS
    ) -> bool:
        """Follow the run until ``condition`` holds.

        Returns:
            Whether it holds; False after the timeout.

        Raises:
            RunEndedError: The run has ended.
            RunSickError: It diverged, or a spike does not go away.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            self.poll()
            self.check_health()
            if condition():
                return True
            if deadline is not None and time.monotonic() > deadline:
                return False
            time.sleep(poll_seconds)

    def check_health(self) -> None:
        """Look for what can't wait, each ``CHECK_STEPS`` steps.

        Raises:
            RunSickError: Found.
        """
        if not len(self.twin.history) or self.step - self._checked_step < CHECK_STEPS:
            return
        self._checked_step = self.step
        for finding in (*find_divergence(self.twin.history), *find_persistent_spike(self.twin.history)):
            raise RunSickError(finding)

    def acknowledge_sickness(self) -> None:
        """Say that what is wrong was dealt with as far as can be: look again after ``PARDON_STEPS`` steps."""
        self._checked_step = self.step + PARDON_STEPS - CHECK_STEPS

    def request(self, change: Change, reason: str) -> AckRecord | None:
        """Ask for a change and wait for the answer.

        Returns:
            The acknowledgement; None when the run did not answer in time, and the request was withdrawn.

        Raises:
            RunEndedError: The run has ended.
        """
        request = ChangeRequest(change=change, reason=reason)
        path = send_request(self.folder, request)
        times = self.twin.history.step_seconds[-32:]
        deadline = time.monotonic() + max(60.0, 30.0 * float(times.max()) if len(times) else 0.0)
        while time.monotonic() < deadline:
            self.poll()
            if request.change_id in self._acks:
                return self._acks.pop(request.change_id)
            time.sleep(POLL_SECONDS / 5)
        path.unlink(missing_ok=True)
        return None


def put_aside(checkpoint: str, folder: Path) -> HeldCheckpoint:
    """Copy a checkpoint into ``folder`` by hard links, so that the trainer's pruning can't take it."""
    source = Path(checkpoint)
    target = make_folder(folder) / source.name
    temporary = target.with_name(f".{target.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(source, temporary, copy_function=_link)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    return HeldCheckpoint.at(target)


def hold_checkpoint(folder: Path, checkpoint: str) -> HeldCheckpoint:
    """Put a checkpoint of the run aside to go back to; the earliest and the newest ``NUM_HELD`` others are kept."""
    held = put_aside(checkpoint, folder / HELD_FOLDER)
    for one in held_checkpoints(folder)[1:-NUM_HELD]:
        shutil.rmtree(one.path, ignore_errors=True)
    return held


def held_checkpoints(folder: Path) -> list[HeldCheckpoint]:
    """The checkpoints put aside to go back to, earliest step first."""
    return [HeldCheckpoint.at(path) for path in sorted((folder / HELD_FOLDER).glob("step-*"))]


def discard_held_after(folder: Path, step: int) -> None:
    """Remove held checkpoints of later steps: the run went back, and their line of history was given up."""
    for one in held_checkpoints(folder):
        if one.step > step:
            shutil.rmtree(one.path, ignore_errors=True)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
