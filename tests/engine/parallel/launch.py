"""Starts one process group and runs many cases in it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Case:
    """One thing to run under one plan."""

    name: str
    plan: dict[str, Any]
    model: str = "llama"
    function: str = "train"
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


def run_cases(cases: list[Case], world_size: int, folder: Path, worker: str = "tests.engine.parallel.worker") -> None:
    """Run all cases on ``world_size`` ranks; results and errors are left in ``folder`` (see ``result``)."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.engine.parallel.ranks", worker, str(folder), str(world_size)]
    with (folder / f"world{world_size}.log").open("w") as log:
        ranks = subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)
    try:
        ranks.wait(timeout=600)  # a machine may be busy with other things
    finally:
        with suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)


def result(case: Case, folder: Path) -> dict[str, Any]:
    """What a case gave, or an assertion with its ranks' tracebacks."""
    path = folder / f"{case.name}.pt"
    if not path.is_file():
        told = sorted(folder.glob(f"{case.name}.rank*.txt"))
        text = "\n".join(file.read_text() for file in told) or "not reached: an earlier case failed"
        raise AssertionError(f"case {case.name}:\n{text}")
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded
