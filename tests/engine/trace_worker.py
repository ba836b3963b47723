"""Dry-runs many ranks, each in a fork of this process: python tests/engine/trace_worker.py CASES.json.

Cases: a list of (run as data, rank). Prints a list of traces as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

from engine.config import RunConfig
from engine.rules import check_run
from engine.schema import parse
from engine.trace_run import trace_rank

Case = tuple[dict[str, Any], int]
"""A run as data, and the rank."""


def start(case: Case, path: Path) -> int:
    """Begin a dry run in a fork, which writes the trace as data; the fork's traceback goes to stderr."""
    process = os.fork()
    if process:
        return process
    try:
        config = parse(RunConfig, case[0])
        check_run(config)
        path.write_text(json.dumps(trace_rank(config, case[1]).to_data()))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def traces(cases: list[Case]) -> list[Any]:
    """The traces as data, as many at a time as there are CPUs."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{number}.json" for number in range(len(cases))]
        step = len(os.sched_getaffinity(0))
        for first in range(0, len(cases), step):
            some = slice(first, first + step)
            for process in [start(*one) for one in zip(cases[some], paths[some], strict=True)]:
                os.waitpid(process, 0)
            found += [json.loads(path.read_text()) for path in paths[some]]
    return found


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    print("\n" + json.dumps(traces(json.loads(Path(sys.argv[1]).read_text()))))
