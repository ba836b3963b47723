"""Runs of a benchmark, one JSON line each, so that what is interrupted goes on. Not a benchmark itself: others import
it. A log knows nothing of the code that made it: after a change of what is measured, begin another."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Runs so far; a torn line is left out."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            continue


def add(path: Path, run: dict[str, Any]) -> None:
    """Append a run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(run) + "\n")
