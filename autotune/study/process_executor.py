"""Runs trials as calls of a Python function in worker processes: what one call breaks is one trial's failure.

Workers live on between trials, so that imports are paid once. One that crashes, hangs or is stopped is ended, and the
next trial gets a new one. They end with this process, however it ends.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from autotune.space.objectives import Objective
from autotune.space.space import TrialLimits
from autotune.study.assignment import Assignment
from autotune.study.child import POLL_SECONDS, Stop, end_by_signal
from autotune.study.function_executor import TrialFunction, call
from autotune.study.processes import tree_memory_bytes
from engine.errors import UserError
from engine.outcome import Outcome
from engine.units import format_bytes, format_duration

START_SECONDS = 120.0
"""A worker has so long to import what it needs."""
WATCH_SECONDS = 1.0
READY = "ready"


class ProcessExecutor:
    """Calls a function for each trial in one of several processes.

    Args:
        function: Importable in another process: at the top of a module.
        objectives: The study's.
        num_workers: Processes.

    Raises:
        UserError: The function can't be sent to another process.
    """

    def __init__(self, function: TrialFunction, objectives: Sequence[Objective], num_workers: int) -> None:
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            # This is a worker, and the program that it imports sweeps outside `if __name__ == "__main__"`. It ends
            # without a word: the process that started it tells what to change.
            raise SystemExit(1)
        try:
            self._payload = pickle.dumps((function, tuple(objectives)))
        except Exception as error:
            raise UserError(
                f"the function can't be sent to worker processes: {error}",
                hint="define it at the top of a module, not in another function or as a lambda; or processes=False",
            ) from None
        self._free: queue.Queue[_Worker | None] = queue.Queue()
        for _ in range(num_workers):
            self._free.put(None)

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
        if stop() > Stop.NO:
            return None
        worker = self._free.get()
        try:
            if worker is None or not worker.process.is_alive():
                worker = _Worker.start(self._payload)
            on_start()
            outcome = _run(worker, assignment, limits, stop)
        except BaseException:
            _end(worker)
            self._free.put(None)
            raise
        if worker.process.is_alive():
            self._free.put(worker)
        else:
            _end(worker)
            self._free.put(None)
        return outcome

    def close(self) -> None:
        """End the workers."""
        while True:
            try:
                _end(self._free.get_nowait())
            except queue.Empty:
                return


@dataclass
class _Worker:
    process: Any
    pipe: Connection

    @classmethod
    def start(cls, payload: bytes) -> _Worker:
        """A new worker that is ready.

        Raises:
            UserError: It could not import the function.
        """
        context = multiprocessing.get_context("spawn")  # forking a process with threads may lock up
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, payload, os.getpid()), daemon=True)
        process.start()
        theirs.close()
        worker = cls(process, ours)
        said: Any = None
        try:
            if ours.poll(START_SECONDS):
                said = ours.recv()
        except EOFError:
            pass
        if said == READY:
            return worker
        _end(worker)
        raise UserError(
            f"a worker process could not start: {said or 'it ended before it was ready'}",
            hint="run the sweep below `if __name__ == '__main__':`, and define the function in an importable module",
        )


def _end(worker: _Worker | None) -> None:
    if worker is not None:
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()


def _run(worker: _Worker, assignment: Assignment, limits: TrialLimits, stop: Callable[[], Stop]) -> Outcome:
    started = next_look = time.monotonic()
    try:
        worker.pipe.send(assignment)
        while not worker.pipe.poll(POLL_SECONDS):
            elapsed = time.monotonic() - started
            decided: Outcome | None = None
            if stop() == Stop.NOW:
                decided = Outcome(kind="interrupted", detail="stopped at once")
            elif elapsed > limits.seconds:
                decided = Outcome(kind="hang", detail=f"time limit of {format_duration(limits.seconds)} reached")
            elif limits.memory_bytes and time.monotonic() >= next_look:
                next_look = time.monotonic() + WATCH_SECONDS
                used_bytes = tree_memory_bytes(worker.process.pid, above=limits.memory_bytes)
                if used_bytes > limits.memory_bytes:
                    limit = format_bytes(limits.memory_bytes)
                    decided = Outcome(kind="oom", detail=f"{format_bytes(used_bytes)} in use, the limit is {limit}")
            if decided is not None:
                worker.process.kill()
                worker.process.join()
                return decided.changed(wall_seconds=elapsed)
        return Outcome.model_validate_json(worker.pipe.recv())
    except (EOFError, OSError):
        worker.process.join()
        status = worker.process.exitcode
        if status is not None and status < 0:
            kind, detail = end_by_signal(-status)
            return Outcome(kind=kind, detail=detail)
        return Outcome(kind="user", detail=f"its process ended with exit status {status}")


def _work(pipe: Connection, payload: bytes, parent: int) -> None:
    """A worker: calls of the function, one after another."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal reaches the driver too, which decides
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        function, objectives = pickle.loads(payload)
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
        return
    pipe.send(READY)
    while True:
        try:
            assignment = pipe.recv()
        except EOFError:
            return
        pipe.send(call(function, assignment, objectives).model_dump_json())


def _end_with(parent: int) -> None:
    """End this process when the one that started it is gone."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)
