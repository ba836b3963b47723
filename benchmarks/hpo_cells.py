"""Test functions for hyperparameter search, made of published grids of pretraining runs (Step Law, arXiv 2503.04715).

    cells = load_dense(Path("../shared"))
    cells[0].loss(learning_rate, batch_tokens)

Each cell is one model size and token budget, trained over a near full grid of learning rates and batches. Between its
nodes the logarithm of the loss is interpolated by monotone cubics (pchip) over the logarithms of both, so that it is
never below the best node. Missing nodes are filled from their neighbours, never better than the best plus 1e-4. Not a
benchmark itself: others import it. The tables lie in the reference data beside the checkout, and are no part of it.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import PchipInterpolator

from autotune.prior.tables import step_law_task
from autotune.prior.task import Task

Floats = NDArray[np.float64]
FILL_MARGIN = 1e-4
"""A node that was not run is at least so much worse than the best node, nats."""


@dataclass(frozen=True)
class Cell:
    """One size and token budget, as a function of learning rate and batch."""

    name: str
    task: Task
    rates: Floats
    """Learning rates of the grid, rising, ``[r]``."""
    batches: Floats
    """Batches of the grid in tokens, rising, ``[b]``."""
    losses: Floats
    """Final loss in nats per token, ``[r, b]``; nowhere missing."""
    measured: NDArray[np.bool_]
    """Whether the node was run, ``[r, b]``."""
    step_seconds: Floats | None = field(default=None)
    """Seconds of one step by batch, ``[b]``, where the table has them; comparable inside a cell only."""

    @property
    def best(self) -> float:
        """Loss of the best node."""
        return float(self.losses.min())

    @property
    def box(self) -> dict[str, tuple[float, float]]:
        """Hyperparameter -> lowest and highest value of the grid."""
        return {
            "learning_rate": (float(self.rates[0]), float(self.rates[-1])),
            "global_batch_tokens": (float(self.batches[0]), float(self.batches[-1])),
        }

    @cached_property
    def _by_batch(self) -> PchipInterpolator:
        return PchipInterpolator(np.log2(self.batches), np.log(self.losses), axis=1)

    def loss(self, learning_rate: ArrayLike, batch_tokens: ArrayLike) -> Floats:
        """Loss at ``[n]`` points; points outside the box are moved to its border."""
        rate, batch = np.broadcast_arrays(np.asarray(learning_rate, dtype=float), np.asarray(batch_tokens, dtype=float))
        x = np.clip(np.log2(rate.ravel()), np.log2(self.rates[0]), np.log2(self.rates[-1]))
        y = np.clip(np.log2(batch.ravel()), np.log2(self.batches[0]), np.log2(self.batches[-1]))
        columns = self._by_batch(y)  # [r, n]: every learning rate of the grid at each point's batch
        values = [float(PchipInterpolator(np.log2(self.rates), columns[:, i])(x[i])) for i in range(x.size)]
        return np.exp(np.array(values)).reshape(rate.shape)

    def regret(self, learning_rate: ArrayLike, batch_tokens: ArrayLike) -> Floats:
        """Loss above the best node."""
        return self.loss(learning_rate, batch_tokens) - self.best

    def iter_time(self, batch_tokens: ArrayLike) -> Floats:
        """Seconds of one step, between the grid's batches by interpolation of logarithms."""
        assert self.step_seconds is not None, f"{self.name} has no measured times"
        curve = PchipInterpolator(np.log2(self.batches), np.log(self.step_seconds))
        batch = np.clip(np.asarray(batch_tokens, dtype=float), self.batches[0], self.batches[-1])
        return np.exp(np.asarray(curve(np.log2(batch)), dtype=float))


def snapped_rate(learning_rate: float) -> float:
    """The grid's learning rate (half octaves of powers of two), which files give in several roundings."""
    return float(2.0 ** (round(2 * math.log2(learning_rate)) / 2))


def load_dense(shared: Path) -> list[Cell]:
    """The dense cells, by size and tokens.

    Args:
        shared: Folder of the reference data, with ``data/hpo/steplaw_dense.csv``.
    """
    return _load(shared / "data" / "hpo" / "steplaw_dense.csv")


def load_moe(shared: Path) -> list[Cell]:
    """The cells of mixtures of experts, with measured step times (``Cell.iter_time``)."""
    return _load(shared / "data" / "hpo" / "steplaw_moe.csv")


def _load(path: Path) -> list[Cell]:
    if not path.is_file():
        raise SystemExit(f"{path} is not there: this benchmark needs the reference data beside the checkout")
    groups: dict[str, list[dict[str, str]]] = defaultdict(list)
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            groups[row["cell"]].append(row)
    cells = [_cell(name, rows) for name, rows in groups.items()]
    return sorted(cells, key=lambda cell: (cell.task.num_active_parameters, cell.task.total_tokens))


def _cell(name: str, rows: list[dict[str, str]]) -> Cell:
    first = rows[0]
    nodes: dict[tuple[float, float], float] = {}
    times: dict[float, list[float]] = defaultdict(list)
    for row in rows:
        rate, batch = snapped_rate(float(row["lr"])), float(row["bs_tokens"])
        nodes[rate, batch] = float(row["smooth_loss"])
        if "iter_time_s" in row:
            times[batch].append(float(row["iter_time_s"]))
    rates = np.array(sorted({rate for rate, _ in nodes}))
    batches = np.array(sorted({batch for _, batch in nodes}))
    losses = np.array([[nodes.get((rate, batch), np.nan) for batch in batches] for rate in rates])
    measured = np.isfinite(losses)
    task = step_law_task(int(first["N"]), int(first["D"]), int(first.get("Na") or first["N"]), moe="Na" in first)
    seconds = _medians(batches, times) if times else None
    return Cell(name, task, rates, batches, _filled(losses), measured, seconds)


def _medians(batches: Iterable[float], times: Mapping[float, list[float]]) -> Floats:
    return np.array([float(np.median(times[batch])) for batch in batches])


def _filled(losses: Floats) -> Floats:
    """Missing nodes as the mean of the neighbours that are known, outwards until none is missing."""
    filled, best = losses.copy(), np.nanmin(losses)
    while np.isnan(filled).any():
        known = np.pad(filled, 1, constant_values=np.nan)
        stack = np.stack([known[:-2, 1:-1], known[2:, 1:-1], known[1:-1, :-2], known[1:-1, 2:]])
        count = np.isfinite(stack).sum(axis=0)
        mean = np.where(count > 0, np.nansum(stack, axis=0) / np.maximum(count, 1), np.nan)
        filled = np.where(np.isnan(filled), np.maximum(mean, best + FILL_MARGIN), filled)
    return filled
