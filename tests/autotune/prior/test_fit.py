"""Fitting: a known law is found again, cells that were left out are met, what is shipped is what the tables give."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from autotune.prior.fit import fit
from autotune.prior.predict import Prior
from autotune.prior.rows import MetaRow
from autotune.prior.surface import harden, soften
from autotune.prior.tables import step_law_rows, step_law_task

pytestmark = pytest.mark.unit


def made_rows(shift: float = 0.0) -> list[MetaRow]:
    """Grids whose optimum follows lr = 0.003 n^-0.6 d^0.3, batch = 4e5 d^0.55 (n, d over the reference)."""
    rows = []
    for parameters in (200_000_000, 450_000_000, 1_000_000_000):
        for tokens in (4_000_000_000, 20_000_000_000, 80_000_000_000):
            n, d = math.log(parameters / 4e8), math.log(tokens / 2e10)
            rate, batch = math.log(0.003) - 0.6 * n + 0.3 * d + shift, math.log(4e5) + 0.55 * d
            for u in np.arange(-1.4, 1.8, 0.4):
                for v in np.arange(-1.4, 1.8, 0.7):
                    diverged = u > 1.5
                    rows.append(
                        MetaRow(
                            study="made",
                            trial=len(rows),
                            task=step_law_task(parameters, tokens),
                            hyperparameters={
                                "learning_rate": math.exp(rate + u),
                                "global_batch_tokens": math.exp(batch + v),
                            },
                            loss=None
                            if diverged
                            else 2.5 - 0.1 * n - 0.1 * d + 0.02 * u * u - 0.01 * u * v + 0.02 * v * v,
                            status="diverged" if diverged else "ok",
                        )
                    )
    return rows


def test_a_known_law_is_found_again_also_for_a_size_that_was_left_out() -> None:
    rows = made_rows()
    prior = fit([row for row in rows if row.task.num_parameters < 9e8], [], base=Prior.load())
    best = prior.at(step_law_task(1_000_000_000, 20_000_000_000)).optimum()
    assert float(best["learning_rate"]) == pytest.approx(0.003 * 2.5**-0.6, rel=0.2)
    assert float(best["global_batch_tokens"]) == pytest.approx(4e5, rel=0.25)


def test_softening_keeps_order_and_comes_back() -> None:
    excess = np.array([0.0, 0.003, 0.05, 4.0])
    assert np.allclose(harden(soften(excess)), excess)
    assert (np.diff(soften(excess)) > 0).all()
    assert soften(excess)[-1] < 0.2


def test_a_cell_that_was_left_out_is_met(shared_data: Path) -> None:
    """Differences below 0.003 of one run are noise; the worst law in use is off by 0.05 here."""
    rows = step_law_rows(shared_data / "hpo")
    left_out = step_law_task(429260800, 22_700_000_000)
    prior = fit([row for row in rows if row.task != left_out], [], base=Prior.load())
    best = prior.at(left_out).optimum()
    cell = [row for row in rows if row.task == left_out and row.loss is not None]

    def distance(row: MetaRow) -> float:
        return sum(
            math.log(float(row.hyperparameters[name]) / float(best[name])) ** 2
            for name in ("learning_rate", "global_batch_tokens")
        )

    nearest = min(cell, key=distance)
    assert (nearest.loss or math.inf) - min(row.loss or math.inf for row in cell) < 0.008


def test_what_is_shipped_is_what_the_tables_give(shared_data: Path) -> None:
    prior = Prior.load()
    again = fit(step_law_rows(shared_data / "hpo"), [], base=prior)
    assert np.allclose(again.surface.law, prior.surface.law, atol=0.02)
    task = step_law_task(500_000_000, 15_000_000_000)
    for name in ("learning_rate", "global_batch_tokens"):
        assert float(again.at(task).optimum()[name]) == pytest.approx(float(prior.at(task).optimum()[name]), rel=0.05)
