"""Reads the data once before the first trial: mistakes are told at once, and trials find the tokens in the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import engine
from engine.config import RunConfig, dump_run
from engine.errors import USER_ERROR_EXIT_CODE, UserError


@dataclass(frozen=True)
class CorpusFacts:
    """What the trials will train on."""

    corpus_hash: str
    num_documents: int
    num_bytes: int
    vocab_size: int


def check_data(run: RunConfig) -> CorpusFacts:
    """Have the engine read a run's data, in a process of its own.

    Args:
        run: Any run of the study; they all share their data.

    Raises:
        UserError: The engine's own words about what is wrong with the data.
    """
    with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(dump_run(run), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "engine.train", str(path), "--check", "--json"]
        child = subprocess.run(command, env=engine_environment(), capture_output=True, text=True, check=False)
    if child.returncode == 0:
        found = json.loads(child.stdout)
        return CorpusFacts(**{key: found[key] for key in CorpusFacts.__dataclass_fields__})
    message, _, hint = child.stderr.strip().removeprefix("error: ").partition("\nhint: ")
    if child.returncode == USER_ERROR_EXIT_CODE:
        raise UserError(message, hint=hint or None)
    last = (child.stderr.strip().splitlines() or ["no message"])[-1]
    raise UserError(f"the engine could not read the data: {last}", hint="autotune doctor says what is missing")


def engine_environment() -> dict[str, str]:
    """This process's environment, in which ``engine`` is the one this process uses, wherever it was started."""
    root = str(Path(engine.__file__).resolve().parents[1])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONSAFEPATH": "1"}
