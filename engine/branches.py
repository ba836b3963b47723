"""Run several branches of a run at the price of one start: python -P -m engine.branches [--at-once N] FOLDER...

Each folder holds a ``run.yaml`` and gets what ``engine.train`` writes. The modules are imported once; then one forked
process per folder trains, at most N at a time. Nothing is computed before forking, so no thread and no device exists
that a fork could not take along.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import engine.trainer  # noqa: F401  (imported for the forks to come)
from engine import train

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> int:
    """The program; 0 when every branch ended well, else 1. What became of each is in its ``outcome.json``."""
    parser = argparse.ArgumentParser(prog="engine.branches", description=__doc__)
    parser.add_argument("folders", metavar="FOLDER", type=Path, nargs="+", help="folder with a run.yaml")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="how many train at the same time")
    arguments = parser.parse_args(argv)
    waiting: list[Path] = list(arguments.folders)
    num_running, all_ok = 0, True
    while waiting or num_running:
        if waiting and num_running < arguments.at_once:
            _fork(waiting.pop(0))
            num_running += 1
            continue
        _, status = os.wait()
        num_running -= 1
        all_ok = all_ok and status == 0
    return 0 if all_ok else 1


def _fork(folder: Path) -> None:
    parent = os.getpid()
    if os.fork():
        return
    exit_code = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == parent:
            log = os.open(folder / "stdout.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            exit_code = train.main([str(folder / "run.yaml"), "--folder", str(folder), "--quiet"])
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(exit_code)  # never back into the loop of the parent


if __name__ == "__main__":
    sys.exit(main())
