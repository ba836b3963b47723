"""One rank of the trainer's tests with several ranks: ``python -m tests.engine.train_worker JOBS.json``.

Each job is ``{"folder", "copy_from", "at_step", "at_rank", "action", "nodes", "other"}``: run the program in ``folder``
(which gets the checkpoints of ``copy_from`` first) and do ``action`` in the middle of a step of one rank. With
``nodes`` each rank takes itself for a node of its own, with the folder ``shared`` or ``apart``. ``other`` is the run
file of the ranks above 0, where it is not that of rank 0. The exit codes of a rank become ``codes<rank>.json`` beside
the jobs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine.control import Stop
from engine.step import Stepper, StepResult
from engine.train import main
from tests.engine.runs import ask


def _actions(folder: Path) -> dict[str, Callable[[], Any]]:
    return {
        "stop": lambda: ask(folder, Stop()),
        "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "allocate": lambda: torch.empty(2**58),
    }


@contextmanager
def _disturbed(job: dict[str, Any], rank: int) -> Iterator[None]:
    plain, count = Stepper.train_step, iter(range(1, 1000))

    def train_step(self: Stepper, *args: Any) -> StepResult:
        if next(count) == job.get("at_step") and rank == job["at_rank"]:
            _actions(Path(job["folder"]))[job["action"]]()
        return plain(self, *args)

    Stepper.train_step = train_step  # type: ignore[method-assign]
    try:
        yield
    finally:
        Stepper.train_step = plain  # type: ignore[method-assign]


def work(jobs_file: Path) -> None:
    """Run all jobs in one process group."""
    rank = int(os.environ["RANK"])
    jobs = json.loads(jobs_file.read_text())
    if len(jobs) > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    codes = []
    for job in jobs:
        if job.get("copy_from"):
            if rank == 0:
                shutil.copytree(Path(job["copy_from"]) / "checkpoints", Path(job["folder"]) / "checkpoints")
            dist.barrier()
        folder = Path(job["folder"])
        flags = ["--folder", str(folder / f"node{rank}")] if job.get("nodes") == "apart" else []
        run = job["other"] if rank and job.get("other") else str(folder / "run.yaml")
        os.environ["LOCAL_WORLD_SIZE"] = "1" if job.get("nodes") else "2"
        with _disturbed(job, rank):
            codes.append(main([run, "--folder", str(folder), "--quiet", *flags]))
        (jobs_file.parent / f"codes{rank}.json").write_text(json.dumps(codes))
    if len(jobs) == 1:
        sys.exit(codes[0])


if __name__ == "__main__":
    work(Path(sys.argv[1]))
