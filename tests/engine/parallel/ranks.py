"""The ranks of a world: copies of one process that has imported everything, which takes longer than most cases.

Usage: ``python -m tests.engine.parallel.ranks WORKER FOLDER WORLD_SIZE``, started by ``launch.py``. Each rank calls the
module WORKER's ``main(FOLDER)`` and leaves what it prints in ``FOLDER/world<size>-rank<r>.log``.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NoReturn


def main(worker: str, folder: Path, world_size: int) -> None:
    """Start all ranks and wait for them."""
    module = import_module(worker)
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            run_rank(module.main, folder, rank, world_size)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def run_rank(run: Callable[[Path], None], folder: Path, rank: int, world_size: int) -> NoReturn:
    """Be a rank until the end of the process."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    with (folder / f"world{world_size}-rank{rank}.log").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        run(folder)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # taking down many groups, gloo's threads sometimes abort


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
