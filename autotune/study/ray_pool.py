"""Runs trials on a Ray cluster. Ray Tune places them and keeps their workers; what is tried, what counts and what is
run again is decided by the study and its driver, as everywhere: Tune's own retries and restoring are off.

Tune takes trials from a searcher. Ours hands out what the driver's threads wait for, and gives them the answers.
"""

from __future__ import annotations

import itertools
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.space.space import TrialLimits
from autotune.specs.cluster import ClusterSpec
from autotune.study.assignment import Assignment
from autotune.study.child import STOP_GRACE_SECONDS, Stop
from autotune.study.executor import CommandOf, Patience
from autotune.study.ray_cluster import Bundles, RayCluster, joined
from engine.atomic import make_folder
from engine.errors import UserError
from engine.outcome import Outcome

if TYPE_CHECKING:
    from autotune.study.ray_worker import RayTask

POLL_SECONDS = 0.1
WAIT_TOLD_SECONDS = 30.0
"""Waiting so long for devices is worth a word; to start a worker takes a few seconds by itself."""
IDLE_SECONDS = 3.0
"""Tune keeps workers, and the devices they hold, for the next trial; after so long without one it lets go of them."""
CLOSE_SECONDS = 60.0
"""Tune gets so long to end; a cluster that is gone may never answer it."""
SILENT_SECONDS = 15.0
"""A worker that was asked to end gets so long beyond the grace time of its trial, then it counts as lost."""


@dataclass
class _Waiting:
    """A driver's thread that waits for a task."""

    task: RayTask
    started: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    answer: str | None = None
    """None at the end: the worker was lost."""


class Mailbox:
    """Between the driver's threads and the thread that runs Tune."""

    def __init__(self) -> None:
        self.is_closed = False
        self.error: BaseException | None = None
        self._tasks: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._first: _Waiting | None = None
        self._running: dict[str, _Waiting] = {}

    @property
    def num_started(self) -> int:
        """Trials that run."""
        return sum(waiting.started.is_set() for waiting in list(self._running.values()))

    def put(self, waiting: _Waiting) -> None:
        """Have a task done."""
        self._tasks.put(waiting)

    def close(self) -> None:
        """No more tasks come."""
        self.is_closed = True
        self._tasks.put(None)

    def wait_for_task(self) -> bool:
        """Wait until there is a task; False when the mailbox was closed."""
        while not self.is_closed and (self._first is None or self._first.ended.is_set()):
            self._first = self._tasks.get()
        return not self.is_closed

    def take(self, trial_id: str) -> RayTask | None:
        """The next task for Tune. None while there is none: at once when trials run, whose ends Tune has to notice,
        else after ``IDLE_SECONDS``."""
        while not self.is_closed:
            try:
                waiting = self._first or self._tasks.get(block=not self._running, timeout=IDLE_SECONDS)
            except queue.Empty:
                return None
            self._first = None
            if waiting is not None and not waiting.ended.is_set():
                self._running[trial_id] = waiting
                return waiting.task
        return None

    @property
    def is_idle(self) -> bool:
        """Whether no trial runs or waits for devices."""
        return not self._running

    def start(self, trial_id: str) -> None:
        """A worker has begun with a task."""
        if (waiting := self._running.get(trial_id)) is not None:
            waiting.started.set()

    def end(self, trial_id: str, answer: str | None) -> None:
        """A task has its answer, or lost its worker."""
        if (waiting := self._running.pop(trial_id, None)) is not None:
            waiting.answer = answer
            waiting.ended.set()

    def __getstate__(self) -> dict[str, Any]:
        """Tune saves what it is given; nothing of ours is ever restored from that."""
        return {}


class RayExecutor:
    """See ``Executor``; made by ``open_ray``.

    Args:
        cluster: Where trials run.
        scratch: Folder for what Tune writes; nobody reads it.
        command: Stands in for the engine.
    """

    def __init__(self, cluster: RayCluster, scratch: Path, command: CommandOf | None = None) -> None:
        self._cluster = cluster
        self._command = command
        self._mailbox = Mailbox()
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._serve, args=(scratch,), name="ray-tune", daemon=True)
        self._thread.start()

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
        from autotune.study.ray_worker import RayTask, read_answer

        patience = Patience(on_waiting, WAIT_TOLD_SECONDS)
        bundles = self._bundles(assignment, stop, patience)
        if bundles is None:
            return None
        stop_file = make_folder(assignment.folder).absolute() / f"stop-{next(self._numbers)}"
        stop_file.write_text("", encoding="ascii")
        try:
            command = tuple(self._command(assignment)) if self._command else None
            waiting = _Waiting(RayTask(assignment, limits, command, stop_file, self._cluster, bundles))
            self._mailbox.put(waiting)
            while not waiting.started.wait(POLL_SECONDS) and not waiting.ended.is_set():
                self._check()
                if not self._mailbox.num_started:
                    patience.wears()
                if stop() > Stop.NO:
                    waiting.ended.set()
                    return None
            on_start()
            return self._end_of(waiting, stop) or read_answer(waiting.answer or "")
        finally:
            stop_file.unlink(missing_ok=True)

    def close(self) -> None:
        """End Tune; Ray itself belongs to who joined it."""
        self._mailbox.close()
        self._thread.join(CLOSE_SECONDS)

    def _bundles(self, assignment: Assignment, stop: Callable[[], Stop], patience: Patience) -> Bundles | None:
        """Where a trial fits. Nodes that were lost may come back, so it is waited for."""
        max_nodes = None if assignment.config is not None else 1  # torchrun is the engine's
        while (bundles := self._cluster.bundles(assignment.num_devices, max_nodes)) is None:
            if stop() > Stop.NO:
                return None
            patience.wears()
            time.sleep(POLL_SECONDS)
        return bundles

    def _end_of(self, waiting: _Waiting, stop: Callable[[], Stop]) -> Outcome | None:
        """Wait for the end of a task, and pass on that it shall stop. None when it has its answer."""
        told, give_up = Stop.NO, float("inf")
        while not waiting.ended.wait(POLL_SECONDS):
            self._check()
            asked = stop()
            if asked > told:
                waiting.task.stop_file.write_text(asked.name, encoding="ascii")
                give_up = time.monotonic() + SILENT_SECONDS + (STOP_GRACE_SECONDS if asked == Stop.SOON else 0.0)
                told = asked
            if time.monotonic() > give_up:
                return Outcome(kind="interrupted", detail="stopped; its worker did not answer")
        if waiting.answer is None:
            return Outcome(kind="infra", detail="its Ray worker or node was lost")
        return None

    def _check(self) -> None:
        if self._mailbox.error is not None:
            raise UserError(
                f"the Ray cluster can't be used any more: {self._mailbox.error}",
                hint="bring it back; the same command goes on where it was",
            )

    def _serve(self, scratch: Path) -> None:
        from autotune.study.ray_tune import serve

        try:
            serve(self._mailbox, self._cluster, scratch)
            error: BaseException = RuntimeError("Ray Tune has ended")
        except BaseException as raised:
            error = raised
        self._mailbox.error = error


@contextmanager
def open_ray(
    address: str | None,
    spec: ClusterSpec,
    folder: Path,
    *,
    num_devices: int,
    num_workers: int,
    command: CommandOf | None = None,
) -> Iterator[RayExecutor]:
    """An executor on a Ray cluster that was found fit for a study.

    Args:
        address: ``auto`` or ``HOST:PORT``; None to start Ray on this machine, ended with the block.
        spec: The devices trials are planned for.
        folder: The study's; all nodes have to see it.
        num_devices: Devices of the largest trial.
        num_workers: Trials at a time.
        command: Stands in for the engine.

    Raises:
        UserError: The cluster can't be joined, is too small, or does not see the folder.
    """
    with joined(address, spec) as cluster:
        cluster.require(num_devices, num_workers)
        cluster.check_nodes(make_folder(folder).absolute())
        scratch = Path(tempfile.mkdtemp(prefix="paretune-ray-"))
        executor = RayExecutor(cluster, scratch, command)
        try:
            yield executor
        finally:
            executor.close()
            shutil.rmtree(scratch, ignore_errors=True)
