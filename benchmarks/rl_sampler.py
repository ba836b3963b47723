"""The learned agent against our default sampler and against random proposals, at equal numbers of trials.

Problems: learning rate and batch of published grids (quality alone, without a prior and with one that never saw the
cell), ZDT1, and an imagined training run with conditions and failures. Training of the agent is counted.

    python benchmarks/rl_sampler.py [--shared ../shared] [--seeds 20] [--trials 50]

Writes ``benchmarks/results/rl_sampler.json``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hpo_cells
import numpy as np
from problems import conditional, zdt
from search_loop import Function, feasible_values, search
from search_quality import loss_of, space_of, without_size

from autotune.prior.predict import TaskPrior
from autotune.search.pareto import front_box, hypervolume
from autotune.search.reinforce import ReinforceSampler
from autotune.search.sampler import Sampler
from autotune.search.samplers import make_sampler
from autotune.space.space import Scalar, Space
from engine.atomic import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "rl_sampler.json"
CHECKPOINTS = (1, 5, 10, 25, 50)
CELLS = (1, 5, 9)
"""Which of the dense cells, by size."""


@dataclass(frozen=True)
class Case:
    """A problem, and what is known of it."""

    name: str
    space: Space
    function: Function
    best: float | None
    """Best value, with one objective."""
    prior: TaskPrior | None = None


def main() -> int:
    """Run, print the table, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared", help="reference data")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--trials", type=int, default=50)
    options = parser.parse_args()
    result: dict[str, Any] = {"num_seeds": options.seeds, "after": CHECKPOINTS, "cases": {}}
    with tempfile.TemporaryDirectory() as cache:
        makers: Mapping[str, Callable[[], Sampler]] = {
            "agent": lambda: ReinforceSampler(cache=Path(cache)),
            "default": lambda: make_sampler("joint"),
            "random": lambda: make_sampler("random"),
        }
        for case in cases(options.shared):
            searches = {}
            rows = {}
            for name, make in makers.items():
                begun = time.process_time()
                sampler = make()
                searches[name] = [
                    search(
                        sampler, case.space, case.function, seed=seed, num_trials=options.trials, task_prior=case.prior
                    )
                    for seed in range(options.seeds)
                ]
                rows[name] = {"cpu_seconds": round(time.process_time() - begun, 1)}
            for name, losses in losses_of(
                case, {n: [feasible_values(s, case.space.objectives) for s in all_] for n, all_ in searches.items()}
            ):
                rows[name] |= {
                    "mean_loss": losses.mean(axis=0).round(5).tolist(),
                    "standard_error": (losses.std(axis=0, ddof=1) / np.sqrt(len(losses))).round(5).tolist(),
                }
            result["cases"][case.name] = rows
    lines = table(result)
    facts = {"title": "A learned agent as a sampler", "setup": "one CPU core, no GPU", "lines": lines}
    write_json(RESULT, {**facts, **result})
    print("\n".join(lines))
    return 0


def cases(shared: Path) -> list[Case]:
    """All problems."""
    first, second = zdt(1), conditional()
    found = [Case(p.name, p.space, p.function, None) for p in (first, second)]
    cells = hpo_cells.load_dense(shared)
    for index in CELLS:
        cell = cells[index]
        found.append(Case(cell.name, space_of(cell), function_of(cell), cell.best))
        found.append(
            Case(f"{cell.name}, prior", space_of(cell), function_of(cell), cell.best, without_size(cell, shared))
        )
    return found


def function_of(cell: hpo_cells.Cell) -> Function:
    """A cell as a function of parameters."""

    def function(parameters: Mapping[str, Scalar]) -> dict[str, float]:
        return {"quality": loss_of(cell, parameters)}

    return function


def losses_of(case: Case, values: Mapping[str, list[np.ndarray]]) -> list[tuple[str, np.ndarray]]:
    """Method -> ``[seeds, checkpoints]``: regret, or the share of the common front's hypervolume that is missing."""
    directions = [objective.direction for objective in case.space.objectives]
    if case.best is not None:
        return [
            (name, np.array([[np.nanmin(v[:count, 0]) - case.best for count in CHECKPOINTS] for v in runs]))
            for name, runs in values.items()
        ]
    everything = np.concatenate([v for runs in values.values() for v in runs])
    box = front_box(everything, directions)
    whole = hypervolume(everything, directions, box)
    return [
        (name, np.array([[1 - hypervolume(v[:count], directions, box) / whole for count in CHECKPOINTS] for v in runs]))
        for name, runs in values.items()
    ]


def table(result: Mapping[str, Any]) -> list[str]:
    """The table for people, as Markdown."""
    lines = [
        f"Mean loss over {result['num_seeds']} seeds ± its standard error: regret in nats per token on the grids, else"
        " the share of the common front's hypervolume that is missing. CPU seconds of all searches of a row; the"
        " agent's training is among them. One agent is trained for each problem: what another training would give is in"
        " no error here.",
        "",
        f"| problem | sampler | {' | '.join(f'after {count}' for count in CHECKPOINTS)} | CPU s |",
        f"|---|---|{'---|' * len(CHECKPOINTS)}---|",
    ]
    for name, rows in result["cases"].items():
        for method, row in rows.items():
            pairs = zip(row["mean_loss"], row["standard_error"], strict=True)
            cells = " | ".join(f"{mean:.4f} ± {error:.4f}" for mean, error in pairs)
            lines.append(f"| {name} | {method} | {cells} | {row['cpu_seconds']:.0f} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
