"""How good the prior's first proposal is on problems it never saw, against published laws.

    OMP_NUM_THREADS=1 python benchmarks/warm_start.py [--shared ../shared]

Needs the published tables in the reference data beside the checkout. **Grids** (Step Law's, see ``hpo_cells``): regret
of the first proposal, the loss there above the best node of the cell's grid. The prior's surface is fitted again
without the cell, without all cells of its size, and to the small sizes alone (below 300M parameters, judged on 429M and
more). The law published for these grids was fitted to all of them. **Recipes** (Marin's sweep of AdamW and ten other
optimizers): the learning rate beside the tuned batch, on the sweep's own learning rates, with the recipes fitted to the
other model sizes; and the same for a user whose recipe no table has, before and after adding runs of the smallest size.
Ratios have paired bootstrap intervals over cells. Writes ``benchmarks/results/warm_start.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bootstrap
import numpy as np
import scipy
from hpo_cells import Cell, load_dense, load_moe
from numpy.typing import NDArray
from scipy.interpolate import PchipInterpolator

from autotune.prior.fit import fit
from autotune.prior.predict import Prior
from autotune.prior.recipes import fit_recipes, group_rows
from autotune.prior.rows import MetaRow
from autotune.prior.tables import marin_rows, step_law_rows
from autotune.prior.task import Task
from engine.atomic import write_json

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "warm_start.json"
SMALL, LARGE = 3e8, 4e8
FAILED_EXCESS = 0.5
"""What a diverged run of the one-factor sweeps counts as, nats above the best."""
Floats = NDArray[np.float64]
Law = Callable[[Task], tuple[float, float]]

LAWS: dict[str, Law] = {
    "Step Law": lambda t: (
        1.79 * t.num_parameters**-0.713 * t.total_tokens**0.307,
        0.58 * t.total_tokens**0.571,
    ),
    "DeepSeek": lambda t: (
        0.3118 * (6.0 * t.num_parameters * t.total_tokens) ** -0.125,
        0.2920 * (6.0 * t.num_parameters * t.total_tokens) ** 0.3271,
    ),
    "Porian": lambda t: (3.7 * t.num_parameters**-0.36, 0.7576 * t.num_parameters**0.703),
    "1e-3, 0.5M tokens": lambda t: (1e-3, 5e5),
    "3e-4, 0.5M tokens": lambda t: (3e-4, 5e5),
}
"""Name -> learning rate and batch in tokens, from parameters (all, without embedding) and tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=ROOT.parent / "shared")
    arguments = parser.parse_args()
    started = time.process_time()
    dense, moe = load_dense(arguments.shared), load_moe(arguments.shared)
    tables = arguments.shared / "data" / "hpo"
    rows, shipped = step_law_rows(tables), Prior.load()
    grids = grid_report(dense, moe, rows, shipped)
    recipes = recipe_report(marin_rows(tables), shipped)
    data = {
        "title": "First proposal without a trial",
        "setup": f"{len(dense)} dense and {len(moe)} mixture-of-experts cells of Step Law's grids; Marin's sweep",
        "lines": lines(grids, recipes),
        "grids": grids,
        "recipes": recipes,
        "num_bootstrap": bootstrap.NUM_DRAWS,
        "seed": 0,
        "cpu_seconds": round(time.process_time() - started, 1),
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "scipy": scipy.__version__},
    }
    print("\n".join(data["lines"]))
    write_json(RESULT, data)


def grid_report(dense: Sequence[Cell], moe: Sequence[Cell], rows: Sequence[MetaRow], shipped: Prior) -> dict[str, Any]:
    """Regrets of every law and protocol, and ratios to the published law."""
    cells = [*dense, *moe]
    reference = dataclasses.replace(shipped.recipes, anchors=shipped.recipes.anchors[-1:])
    base = dataclasses.replace(shipped, recipes=reference)  # nothing of other recipes

    def without(dropped: Callable[[Task], bool]) -> Prior:
        return fit([row for row in rows if not dropped(row.task)], [], base=base)

    def first(prior: Prior, cell: Cell, task: Task | None = None) -> float:
        best = prior.at(task or cell.task).optimum()
        return float(cell.regret(float(best["learning_rate"]), float(best["global_batch_tokens"])))

    regrets: dict[str, dict[str, float]] = {
        name: {c.name: float(c.regret(*law(c.task))) for c in cells} for name, law in LAWS.items()
    }
    regrets["cell left out"], regrets["cell left out, as the command asks"] = {}, {}
    for cell in cells:
        prior = without(lambda task, own=cell.task: task == own)
        regrets["cell left out"][cell.name] = first(prior, cell)
        asked = cell.task.changed(min_lr_ratio=0.1)  # the command's defaults, and what is known of other recipes
        prior = dataclasses.replace(prior, recipes=shipped.recipes)
        regrets["cell left out, as the command asks"][cell.name] = first(prior, cell, asked)
    regrets["size left out"] = {}
    for size in sorted({_size(cell.task) for cell in cells}):
        prior = without(lambda task, own=size: _size(task) == own)
        regrets["size left out"] |= {cell.name: first(prior, cell) for cell in cells if _size(cell.task) == size}
    small = without(lambda task: task.num_parameters >= SMALL)
    regrets["small to large"] = {c.name: first(small, c) for c in dense if c.task.num_parameters >= LARGE}
    sets = {"dense": [c.name for c in dense], "mixture of experts": [c.name for c in moe]}
    sets["small to large"] = list(regrets["small to large"])
    summary = {}
    for name, members in sets.items():
        law = np.array([regrets["Step Law"][member] for member in members])
        for rule, values in regrets.items():
            held_out_singly = rule.endswith(("left out", "asks"))
            if (name == "small to large" and held_out_singly) or not set(members) <= set(values):
                continue
            summary[f"{name}: {rule}"] = compared(np.array([values[member] for member in members]), law)
    return {"summary": summary, "regrets": regrets}


def _size(task: Task) -> tuple[int, int]:
    return task.num_parameters, task.num_active_parameters


def compared(regrets: Floats, law: Floats) -> dict[str, float | list[float] | int]:
    """Mean and worst regret, and the ratio of means to the law's with its paired 95 % bootstrap interval."""
    bases = bootstrap.means(law)
    low, high = bootstrap.interval(bootstrap.means(regrets)[bases > 0] / bases[bases > 0])
    return {
        "mean": float(regrets.mean()),
        "median": float(np.median(regrets)),
        "worst": float(regrets.max()),
        "ratio": float(regrets.mean() / law.mean()),
        "ratio_95": [float(low), float(high)],
        "num_cells": len(law),
    }


@dataclasses.dataclass(frozen=True)
class RateSweep:
    """Loss over learning rate at an otherwise tuned configuration."""

    task: Task
    batch_tokens: float
    rates: Floats
    losses: Floats

    def regret(self, rate: float) -> float:
        """Loss above the best of the sweep, its learning rates interpolated; beyond them that at the border."""
        excess = np.minimum(self.losses - self.losses.min(), FAILED_EXCESS)
        x = np.clip(math.log(rate), math.log(self.rates[0]), math.log(self.rates[-1]))
        return max(float(PchipInterpolator(np.log(self.rates), excess)(x)), 0.0)


def rate_sweeps(rows: Sequence[MetaRow]) -> list[RateSweep]:
    """The sweeps over learning rate: runs that share every other hyperparameter with the best run of their group."""
    groups: dict[tuple[Any, ...], list[MetaRow]] = {}
    for row in rows:
        groups.setdefault((row.task.optimizer, row.task.num_parameters, row.task.total_tokens), []).append(row)
    sweeps = []
    for members in groups.values():
        best = min(members, key=lambda row: math.inf if row.loss is None else row.loss)
        others = {name: value for name, value in best.hyperparameters.items() if name != "learning_rate"}
        found: dict[float, float] = {}
        for row in members:
            if {name: v for name, v in row.hyperparameters.items() if name != "learning_rate"} == others:
                rate = float(row.hyperparameters["learning_rate"])
                found[rate] = min(found.get(rate, math.inf), row.loss if row.loss is not None else 7.0)
        if len(found) >= 2 and best.loss is not None:
            rates = np.array(sorted(found))
            batch = float(best.hyperparameters["global_batch_tokens"])
            sweeps.append(RateSweep(best.task, batch, rates, np.array([found[rate] for rate in rates])))
    return sweeps


def recipe_report(rows: Sequence[MetaRow], shipped: Prior) -> dict[str, Any]:
    """Regrets of the learning rate by recipe, each model size left out in turn; and what a user's own runs teach."""
    sizes = sorted({row.task.num_parameters for row in rows})
    reference = shipped.recipes.anchors[-1]
    blank = dataclasses.replace(shipped, recipes=dataclasses.replace(shipped.recipes, anchors=(reference,)))
    smallest = [row for row in rows if row.task.optimizer == "adamw" and row.task.num_parameters == sizes[0]]
    taught = blank.conditioned(smallest)
    out: list[dict[str, Any]] = []
    for size in sizes:
        kept = group_rows([row for row in rows if row.task.num_parameters != size])
        recipes = fit_recipes(kept, shipped.surface, ())
        held_out = dataclasses.replace(
            shipped, recipes=dataclasses.replace(recipes, anchors=(*recipes.anchors, reference))
        )
        for sweep in rate_sweeps([row for row in rows if row.task.num_parameters == size]):
            given = {"global_batch_tokens": sweep.batch_tokens}

            def rate_of(prior: Prior, sweep: RateSweep = sweep, given: dict[str, float] = given) -> float:
                return float(prior.at(sweep.task).optimum(given)["learning_rate"])

            entry: dict[str, Any] = {
                "optimizer": sweep.task.optimizer,
                "num_parameters": size,
                "total_tokens": sweep.task.total_tokens,
                "best_rate": float(sweep.rates[sweep.losses.argmin()]),
                "rate": rate_of(held_out),
                "regret": sweep.regret(rate_of(held_out)),
                "law_regret": sweep.regret(LAWS["Step Law"](sweep.task)[0]),
            }
            if sweep.task.optimizer == "adamw" and size > sizes[0]:
                entry["own_before"] = sweep.regret(rate_of(blank))
                entry["own_after"] = sweep.regret(rate_of(taught))
            out.append(entry)
    adamw = [entry for entry in out if entry["optimizer"] == "adamw"]
    own = [entry for entry in adamw if "own_after" in entry]
    return {
        "adamw": compared(_column(adamw, "regret"), _column(adamw, "law_regret")),
        "adamw_law": compared(_column(adamw, "law_regret"), _column(adamw, "law_regret")),
        "all_optimizers": compared(_column(out, "regret"), _column(out, "law_regret")),
        "all_optimizers_law": compared(_column(out, "law_regret"), _column(out, "law_regret")),
        "own_runs": compared(_column(own, "own_after"), _column(own, "own_before")),
        "own_runs_before": compared(_column(own, "own_before"), _column(own, "own_before")),
        "sweeps": out,
    }


def _column(entries: Sequence[dict[str, Any]], name: str) -> Floats:
    return np.array([entry[name] for entry in entries])


def lines(grids: dict[str, Any], recipes: dict[str, Any]) -> list[str]:
    """The result as Markdown."""

    def row(name: str, figures: dict[str, Any]) -> str:
        low, high = figures["ratio_95"]
        return (
            f"| {name} | {figures['num_cells']} | {figures['mean']:.4f} | {figures['median']:.4f} |"
            f" {figures['worst']:.4f} |"
            f" {figures['ratio']:.2f} ({low:.2f} to {high:.2f}) |"
        )

    head = ["| rule | cells | mean regret | median | worst | mean over the law's (95 %) |", "|---|---|---|---|---|---|"]
    return [
        "Regret of the first proposal on the grids, nats per token (differences below 0.003 of one run are noise):",
        "",
        *head,
        *(row(name, figures) for name, figures in grids["summary"].items()),
        "",
        "Learning rate by recipe (Marin's sweep), model size left out; beside the tuned batch:",
        "",
        *head,
        row("AdamW: prior", recipes["adamw"]),
        row("AdamW: Step Law", recipes["adamw_law"]),
        row("eleven optimizers: prior", recipes["all_optimizers"]),
        row("eleven optimizers: Step Law", recipes["all_optimizers_law"]),
        row("unknown recipe, without own runs", recipes["own_runs_before"]),
        row("unknown recipe, own runs at 130M added", recipes["own_runs"]),
    ]


if __name__ == "__main__":
    main()
