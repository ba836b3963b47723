"""Fits the prior to published tables and writes it beside this file.

    python -m autotune.prior.fit TABLES_DIR [--output FILE]

Only fitted numbers are written: coefficients, a covariance, positions of inducing points, offsets of recipes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from autotune.prior.level import LossLevel
from autotune.prior.predict import SHIPPED, Prior
from autotune.prior.recipes import Group, fit_recipes, group_rows
from autotune.prior.rows import MetaRow
from autotune.prior.surface import CellRuns, Surface
from autotune.prior.tables import marin_rows, step_law_rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the tables, fit, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", type=Path)
    parser.add_argument("--output", type=Path, default=SHIPPED)
    given = parser.parse_args(arguments)
    prior = fit(step_law_rows(given.tables), marin_rows(given.tables))
    prior.save(given.output)
    print(f"wrote {given.output} ({given.output.stat().st_size / 1000:.0f} kB)")


def fit(reference: Sequence[MetaRow], others: Sequence[MetaRow], *, base: Prior | None = None) -> Prior:
    """Fit the prior.

    Args:
        reference: Runs of the reference recipe over grids of learning rate and batch, at several sizes.
        others: One-factor sweeps of several optimizers; unused with ``base``.
        base: A fitted prior whose recipes are kept: so the surface alone is fitted, in about a second.
    """
    groups = [group for group in group_rows(reference) if np.isfinite(group.losses).sum() >= 10]
    surface = Surface.fit(cell_runs(groups))
    tasks = np.array([group.task for group in groups])
    level = LossLevel.fit(tasks, np.array([group.losses.min() for group in groups]))
    recipes = base.recipes if base else fit_recipes(group_rows(others), surface, groups)
    return Prior(surface, recipes, level)


def cell_runs(groups: Sequence[Group]) -> CellRuns:
    """The runs of several groups as one table. A run that diverged counts as one at the cap of the fit."""
    excess = [np.minimum(group.losses - group.losses.min(), math.e) for group in groups]
    sizes = [len(group.losses) for group in groups]
    points = np.concatenate([group.points for group in groups])
    return CellRuns(
        cell=np.repeat(np.arange(len(groups)), sizes),
        log_rate=points[:, 0],
        log_batch=points[:, 1],
        excess=np.concatenate(excess),
        tasks=np.repeat(np.array([group.task for group in groups]), sizes, axis=0),
    )


if __name__ == "__main__":
    main()
