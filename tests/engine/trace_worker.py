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


def trace_in_fork(data: dict[str, Any], rank: int) -> Any:
    """The trace as data; the fork's traceback goes to stderr."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        process = os.fork()
        if process == 0:
            try:
                config = parse(RunConfig, data)
                check_run(config)
                path.write_text(json.dumps(trace_rank(config, rank).to_data()))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        os.waitpid(process, 0)
        return json.loads(path.read_text())


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    print("\n" + json.dumps([trace_in_fork(*case) for case in json.loads(Path(sys.argv[1]).read_text())]))
