"""The equality matrix: every axis of parallelism, every pair and some triples, against one process on the whole batch.

    python benchmarks/parallel_matrix.py [--only TEXT] [--again]

Each cell trains three steps in fp64 with plain SGD on 2 to 8 gloo ranks. It is *equal* when loss, every gathered
gradient, the norm before clipping, the parameters at the end and a held-out loss are within 1e-10 of the largest value
that one process gives; a plan that the engine does not run is *refused* by a rule, which is named. Takes about half an
hour on two cores; interrupted and started again it goes on where it was, unless the engine has changed meanwhile.

Writes ``benchmarks/results/parallel_matrix.json``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

from rich.progress import Progress

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from engine.atomic import write_json  # noqa: E402
from tests.engine.parallel.launch import result, run_cases  # noqa: E402
from tests.engine.parallel.matrix import AXES, TOLERANCE, Cell, cells, difference  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "parallel_matrix.json"
CELLS_PER_START = 16
"""Cells that share one process group: what an interruption loses at most."""


def engine_hash() -> str:
    """Of the sources that decide what the cells give."""
    digest = hashlib.sha256()
    for folder in ("engine", "tests/engine/parallel"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def known(again: bool) -> dict[str, dict[str, Any]]:
    """What an earlier start found with the same engine."""
    if again or not RESULT.is_file():
        return {}
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    return found["cells"] if found.get("engine") == engine_hash() else {}


def batches(pending: Sequence[Cell]) -> Iterator[list[Cell]]:
    """Cells of one world size, so many at a time."""
    for world_size in sorted({cell.world_size for cell in pending}):
        some = [cell for cell in pending if cell.world_size == world_size]
        yield from (some[first : first + CELLS_PER_START] for first in range(0, len(some), CELLS_PER_START))


def run(some: list[Cell]) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Outcomes of cells of one world size. One that fails ends its process group; the others start another."""
    while some:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            run_cases([cell.case for cell in some if cell.case], some[0].world_size, folder)
            for position, cell in enumerate(some):
                assert cell.case is not None
                try:
                    worst = difference(cell.case, result(cell.case, folder))
                except AssertionError as error:
                    yield cell, {"outcome": "failed", "why": str(error)[-2000:]}
                    some = some[position + 1 :]
                    break
                equal = worst.ratio <= TOLERANCE
                yield cell, {"outcome": "equal" if equal else "different", "ratio": worst.ratio, "where": worst.where}
            else:
                return


def told(outcome: dict[str, Any]) -> str:
    """An outcome in a few words."""
    if outcome["outcome"] in ("refused", "no pair"):
        return f"{outcome['outcome']}: {outcome['why']}"
    if outcome["outcome"] == "different":
        return f"different by {outcome['ratio']:.1e} in {outcome['where']}"
    return str(outcome["outcome"])


def summary(every: Sequence[Cell], outcomes: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The result file."""
    ratios = [one["ratio"] for one in outcomes.values() if one["outcome"] == "equal"]
    counts = {kind: sum(one["outcome"] == kind for one in outcomes.values()) for kind in OUTCOMES}
    lines = [
        f"{counts['equal']} cells are equal to one process (largest difference {max(ratios, default=0):.1e} of the"
        f" largest value), {counts['refused']} are refused, {counts['different']} differ, {counts['failed']} failed,"
        f" {len(every) - len(outcomes)} were not run. A number is of variants: schedules, accumulation, recompute.",
        "",
        "| | " + " | ".join(AXES) + " |",
        "|---" * (len(AXES) + 1) + "|",
    ]
    of_axes: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for cell in every:
        if cell.name in outcomes:
            of_axes.setdefault(cell.axes, []).append(outcomes[cell.name])
    for row, first in enumerate(AXES):
        entries = []
        for column, second in enumerate(AXES):
            axes = (first,) if row == column else (first, second)
            entries.append(_words(of_axes.get(axes, [])) if row <= column else "")
        lines.append(f"| **{first}** | " + " | ".join(entries) + " |")
    triples = [axes for axes in of_axes if axes not in set(_pairs())]
    lines += ["", "Further combinations: " + ", ".join(f"{'*'.join(a)} {_words(of_axes[a])}" for a in triples) + "."]
    return {
        "title": "Equality with one process",
        "setup": "fp64, SGD, 2 to 8 gloo ranks on two CPU cores; no GPU.",
        "engine": engine_hash(),
        "lines": lines,
        "cells": outcomes,
    }


OUTCOMES = ("equal", "refused", "different", "failed", "no pair")


def _pairs() -> Iterator[tuple[str, ...]]:
    for first, second in combinations_with_replacement(AXES, 2):
        yield (first,) if first == second else (first, second)


def _words(outcomes: Sequence[dict[str, Any]]) -> str:
    """Outcomes of the variants of one combination: each once, with how many if several."""
    words = [told(one) for one in outcomes]
    each = {word: words.count(word) for word in words}
    return ", ".join(word if count == 1 else f"{word} ({count})" for word, count in each.items()) or "not run"


def main() -> int:
    """Run what is missing; exit code 1 if a cell differs or failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="cells with this text in their name")
    parser.add_argument("--again", action="store_true", help="forget what an earlier start found")
    arguments = parser.parse_args()
    every = cells()
    outcomes = known(arguments.again)
    outcomes = {cell.name: outcomes[cell.name] for cell in every if cell.name in outcomes}
    wanted = [cell for cell in every if arguments.only in cell.name and cell.name not in outcomes]
    for cell in wanted:
        if cell.refused:
            kind = "refused" if "." in cell.refused else "no pair"  # a rule's id, or one setting with two values
            outcomes[cell.name] = {"outcome": kind, "why": cell.refused}
    pending = [cell for cell in wanted if not cell.refused]
    with Progress() as progress:
        task = progress.add_task("cells", total=len(pending))
        for some in batches(pending):
            for cell, outcome in run(some):
                outcomes[cell.name] = outcome
                progress.console.print(f"{cell.name}: {told(outcome)}", highlight=False, markup=False)
                progress.advance(task)
            write_json(RESULT, summary(every, outcomes))
    write_json(RESULT, summary(every, outcomes))
    print(f"{summary(every, outcomes)['lines'][0]}\n{RESULT}")
    return int(any(one["outcome"] in ("different", "failed") for one in outcomes.values()))


if __name__ == "__main__":
    raise SystemExit(main())
