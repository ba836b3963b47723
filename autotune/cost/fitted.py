"""Which runs the shipped calibration was fitted to, so that a figure on them is told to be in-sample."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from autotune.cost.published import PublishedRun
from engine.atomic import write_text
from engine.yaml_file import read_yaml

FITTED_FILE = Path(__file__).with_name("fitted_runs.yaml")
_LENGTH = 10


def fingerprint(run: PublishedRun) -> str:
    """What tells a run from all others without naming it: a digest of its inputs and of what was measured."""
    figures = tuple(f"{figure:.5g}" if figure else "" for figure in (run.step_seconds, run.memory_gb))
    return hashlib.sha256(repr((run.inputs, figures)).encode()).hexdigest()[:_LENGTH]


@functools.cache
def fitted_fingerprints() -> frozenset[str]:
    """Of the runs that the shipped figures were fitted to; empty where the calibration says none."""
    if not FITTED_FILE.exists():
        return frozenset()
    return frozenset(read_yaml(FITTED_FILE).data["fingerprints"].split())


def num_fitted(runs: Sequence[PublishedRun]) -> int:
    """How many of the runs the shipped figures were fitted to."""
    known = fitted_fingerprints()
    return sum(fingerprint(run) in known for run in runs)


def write_fitted(runs: Iterable[PublishedRun]) -> None:
    """Record the runs that a calibration was fitted to."""
    words = sorted({fingerprint(run) for run in runs})
    lines = [" ".join(words[start : start + 10]) for start in range(0, len(words), 10)]
    write_text(
        FITTED_FILE,
        "# Digests of the published runs that the shipped figures were fitted to (autotune/cost/fitted.py).\n"
        "fingerprints: >\n" + "".join(f"  {line}\n" for line in lines),
    )
