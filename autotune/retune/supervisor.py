"""Starts the engine, alone or under torchrun, with the retuner beside it; forwards signals; restarts what should go on.

The engine keeps its cores; the retuner and its forks run on the others, or, where there are none, on the same ones at
lower priority. Both end when this process does.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from autotune.retune.children import end_child, start_child
from autotune.retune.recovery import revive
from engine.config import RunConfig, load_run
from engine.control import PLANNED_STOP_EXIT_CODE
from engine.outcome import OUTCOME_FILE, read_outcome
from engine.telemetry import AckRecord, EventRecord, StepRecord, TelemetryReader

ENGINE = (sys.executable, "-P", "-m", "engine.train")
ENGINE_LOG = "stdout.log"
RETUNER_LOG = "retuner.log"
POLL_SECONDS = 0.5
RETUNER_RESTARTS = 5
"""A retuner that dies is started again so many times, after waits that double from one second."""
STUCK_STARTS = 3
"""Starts in a row without a step done, after which a run that asks to be started again is given up."""
ENGINE_GRACE_SECONDS = 60.0
RETUNER_GRACE_SECONDS = 5.0

Records = Sequence[StepRecord | EventRecord | AckRecord]


@dataclass(frozen=True)
class Rendezvous:
    """This machine's place among several, as torchrun takes it."""

    num_nodes: int
    node_rank: int
    endpoint: str
    run_id: str
    ranks_per_node: int


class Supervisor:
    """Runs one job on this machine to its end.

    Args:
        folder: The job's folder, with its run file.
        every: How often the retuner looks, as written by people; None for no retuning.
        rendezvous: Set when the job spans several machines.
        on_records: Called with new telemetry, as it comes.
        engine: The program that trains, given a run file and ``--folder``.
        branches: The program that trains forks of the job; None for the engine's.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every: str | None = None,
        rendezvous: Rendezvous | None = None,
        on_records: Callable[[Records], None] = lambda _: None,
        engine: Sequence[str] = ENGINE,
        branches: Sequence[str] | None = None,
    ) -> None:
        self._folder = folder
        self._config: RunConfig = load_run(folder / "run.yaml")[0]
        self._rendezvous = rendezvous
        is_first_node = rendezvous is None or rendezvous.node_rank == 0
        self._every = every if is_first_node else None
        self._on_records = on_records
        self._engine = tuple(engine)
        self._branches = branches
        self._reader = TelemetryReader(folder)
        self._signals: list[int] = []
        self._last_step = 0
        self._exit_code: int | None = None
        num_ranks = rendezvous.ranks_per_node if rendezvous else self._config.plan.world_size
        self._cores = _split_cores(self._config, num_ranks)

    def run(self) -> int:
        """Run the engine, and start it again whenever it should go on.

        Returns:
            The engine's exit code at last; 128 plus the signal when this process was asked to end.
        """
        self._read_records()
        num_stuck = 0
        with self._catch_signals():
            while True:
                step_before = self._last_step
                exit_code = self._run_once()
                if self._signals:
                    return 128 + self._signals[0]
                num_stuck = num_stuck + 1 if self._last_step <= step_before else 0
                if num_stuck >= STUCK_STARTS or not self._goes_on(exit_code):
                    return exit_code

    def _goes_on(self, exit_code: int) -> bool:
        if exit_code == PLANNED_STOP_EXIT_CODE:
            return True
        outcome = read_outcome(self._folder)
        if exit_code == 0 or outcome is None or self._every is None:
            return False
        if not revive(self._folder, self._config, outcome):
            return False
        (self._folder / OUTCOME_FILE).unlink(missing_ok=True)
        return True

    def _run_once(self) -> int:
        """One life of the engine."""
        self._exit_code = None
        with ExitStack() as stack:
            output = stack.enter_context((self._folder / ENGINE_LOG).open("ab"))
            # SIGTERM: the engine takes a checkpoint, torchrun passes it on to the ranks.
            engine = start_child(
                self._engine_command(),
                output=output,
                cores=self._cores[0],
                num_threads=self._config.runtime.threads_per_rank,
                death_signal=signal.SIGTERM,
            )
            stack.callback(end_child, engine, grace_seconds=ENGINE_GRACE_SECONDS)
            retuner = _Retuner(self._folder, self._every, self._branches, self._cores[1]) if self._every else None
            if retuner:
                stack.callback(retuner.stop)
            num_forwarded = 0
            while engine.poll() is None:
                while num_forwarded < len(self._signals):  # a second one makes the engine end at once
                    engine.send_signal(self._signals[num_forwarded])
                    num_forwarded += 1
                if retuner:
                    retuner.tend()
                self._read_records()
                try:
                    engine.wait(POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        self._read_records()
        return self._told_exit_code(engine.returncode)

    def _told_exit_code(self, status: int) -> int:
        """What the ranks said in their end record: torchrun's own exit status is 1 whatever theirs were."""
        if self._exit_code is not None:
            return self._exit_code
        return status if status >= 0 else 128 - status

    def _read_records(self) -> None:
        records = self._reader.poll()
        for record in records:
            if isinstance(record, StepRecord):
                self._last_step = record.step
            elif isinstance(record, EventRecord) and record.kind == "end":
                self._exit_code = record.data.get("exit_code")
        if records:
            self._on_records(records)

    def _engine_command(self) -> list[str]:
        arguments = [str(self._folder / "run.yaml"), "--folder", str(self._folder)]
        world = self._config.plan.world_size
        if world == 1:
            return [*self._engine, *arguments]
        program = list(self._engine[1:]) if self._engine[0] == sys.executable else list(self._engine)
        where = self._rendezvous
        if where is None:
            launch = ["--standalone", f"--nproc-per-node={world}"]
        else:
            # The static rendezvous keeps node ranks as they were given, so that rank 0 is where the retuner is.
            launch = [
                f"--nnodes={where.num_nodes}",
                f"--node-rank={where.node_rank}",
                "--rdzv-backend=static",
                f"--rdzv-endpoint={where.endpoint}",
                f"--rdzv-id={where.run_id}",
                f"--nproc-per-node={where.ranks_per_node}",
            ]
        return [
            sys.executable,
            "-P",
            "-m",
            "torch.distributed.run",
            f"--log-dir={os.devnull}",  # else each launch makes a folder in /tmp, which stays when it is killed
            *launch,
            *_as_torchrun_program(program),
            *arguments,
        ]

    @contextmanager
    def _catch_signals(self) -> Iterator[None]:
        def handle(number: int, _: FrameType | None) -> None:
            self._signals.append(number)

        previous: dict[int, Any] = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


class _Retuner:
    """The retuner's process, kept alive within bounds."""

    def __init__(self, folder: Path, every: str, branches: Sequence[str] | None, cores: Sequence[int]) -> None:
        self._folder = folder
        self._command = [sys.executable, "-P", "-m", "autotune.retune.controller", str(folder), "--every", every]
        if branches is not None:
            self._command += ["--branches", shlex.join(branches)]
        self._cores = cores
        self._num_restarts = 0
        self._start_at = time.monotonic()
        self._child: subprocess.Popen[bytes] | None = None

    def tend(self) -> None:
        """Start the process when it is due."""
        if self._child is None:
            if time.monotonic() >= self._start_at:
                with (self._folder / RETUNER_LOG).open("ab") as log:
                    self._child = start_child(self._command, output=log, cores=self._cores)
            return
        if self._child.poll() is None or self._child.returncode == 0 or self._num_restarts >= RETUNER_RESTARTS:
            return
        self._start_at = time.monotonic() + 2.0**self._num_restarts
        self._num_restarts += 1
        self._child = None

    def stop(self) -> None:
        """End the process, with its forks."""
        if self._child is not None:
            end_child(self._child, grace_seconds=RETUNER_GRACE_SECONDS)


def _split_cores(config: RunConfig, num_ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cores of the engine, and of the retuner with its forks. Empty: not pinned."""
    usable = sorted(os.sched_getaffinity(0))
    wanted = num_ranks * config.runtime.threads_per_rank
    if config.runtime.device != "cpu" or wanted >= len(usable):
        return (), ()
    return tuple(usable[:wanted]), tuple(usable[wanted:])


def _as_torchrun_program(program: list[str]) -> list[str]:
    """Torchrun starts Python itself: of ``-P -m engine.train`` it takes ``-m engine.train``."""
    return [word for word in program if word != "-P"]
