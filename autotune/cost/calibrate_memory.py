"""The fit of what stacks keep in memory to measured memory: few figures, each near what the stack's code says.

Most fields of a recipe are counts that follow from the code. The ones in ``FITTED`` are not: transients of the backward
pass, copies of the logits alive at the peak, the allocator's slack. Each is a factor on its prior, within a stated
spread, so a stack with few runs stays near it. The loss is the robust sum of squared errors of the logarithm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from autotune.cost.memory import MemoryTable, memory
from autotune.cost.memory_recipe import RECIPES_FILE, MemoryRecipe, recipe, recipes
from autotune.cost.published import PublishedRun, columns
from autotune.cost.shapes import ModelShape
from autotune.cost.software import software_figures
from engine.atomic import write_text
from engine.units import GIB

FITTED: Mapping[tuple[str, str], tuple[float, float]] = {
    ("megatron", "working_tensors"): (3.0, 0.5),
    ("megatron", "weight_gradient_bytes"): (4.0, 0.5),
    ("megatron", "wide_logit_copies"): (1.0, 0.3),
    ("megatron", "slack_ratio"): (0.05, 0.3),
    ("mlperf", "slack_ratio"): (0.05, 0.3),
    ("deepspeed", "working_tensors"): (3.0, 0.5),
    ("deepspeed", "step_bytes"): (4.0, 0.3),
    ("deepspeed", "context_gib"): (0.5, 0.7),
    ("deepspeed", "slack_ratio"): (0.05, 0.5),
    ("fsdp", "logit_copies"): (2.0, 0.3),
    ("fsdp", "slack_ratio"): (0.05, 0.5),
    ("fsdp_eager_loss", "wide_logit_copies"): (3.0, 0.2),
    ("fsdp_eager_loss", "slack_ratio"): (0.05, 0.5),
}
"""Recipe and field -> prior and its spread (of the logarithm)."""

NOISE = 0.05
"""Spread of a measurement around a right model, of the logarithm; beyond it the loss grows linearly."""


@dataclass(frozen=True)
class MemoryFit:
    """Runs with known memory, ready to be estimated under any figures."""

    shape: ModelShape
    runs: Sequence[PublishedRun]
    names: tuple[str, ...]
    """Recipes."""
    index: np.ndarray
    """``[n]``: the recipe of each run."""

    @classmethod
    def of(cls, runs: Sequence[PublishedRun]) -> MemoryFit:
        """The table of ``runs``."""
        table = columns(runs)
        names = tuple(recipes())
        shape = ModelShape.rows([ModelShape.of(model) for model in table.models], table.model_index)
        index = np.array([names.index(software_figures(run.software).memory_recipe) for run in runs])
        return cls(shape, runs, names, index)

    def recipes(self, theta: np.ndarray) -> list[MemoryRecipe]:
        """Recipes with the fitted figures of ``theta`` (logarithms of factors on the priors, ``[len(FITTED)]``)."""
        found = {name: recipe(name) for name in self.names}
        for (name, field), (prior, _), factor in zip(FITTED, FITTED.values(), np.exp(theta), strict=True):
            found[name] = dataclasses.replace(found[name], **{field: prior * float(factor)})
        return list(found.values())

    def estimate(self, theta: np.ndarray) -> MemoryTable:
        """Memory of all runs."""
        table = columns(self.runs)
        figures = [software_figures(name) for name in table.software]
        fused = np.array([figure.fused_attention for figure in figures])[table.software_index]
        imbalance = np.array([figure.imbalance_ratio for figure in figures])[table.software_index]
        overhead = [cluster.figures.overhead_gib if cluster.figures else 0.0 for cluster in table.clusters]
        return memory(
            self.shape,
            table.plans,
            MemoryRecipe.rows(self.recipes(theta), self.index),
            overhead_bytes=np.array(overhead)[table.cluster_index] * GIB,
            num_states=np.array([2 if run.optimizer == "adamw" else 1 for run in self.runs]),
            fused_attention=fused,
            imbalance_ratio=imbalance,
        )

    def log_bytes(self, theta: np.ndarray) -> np.ndarray:
        """Logarithm of each run's memory, counted as its source counts it. ``[n]``."""
        table = self.estimate(theta)
        kinds = np.array([run.memory_kind or "reserved" for run in self.runs])
        of_kind = [kinds == "allocated", kinds == "reserved"]
        counted = np.select(of_kind, [table.allocated_bytes, table.reserved_bytes], table.memory_bytes)
        return np.asarray(np.log(counted))


def solve(fit: MemoryFit, measured: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Figures that suit some of the runs, ``[len(FITTED)]``.

    Args:
        fit: The runs.
        measured: Logarithms of their memory in bytes, ``[n]``.
        used: Which may be seen, bool ``[n]``.
    """
    spreads = np.array([spread for _, spread in FITTED.values()])

    def residuals(theta: np.ndarray) -> np.ndarray:
        errors = np.where(used, fit.log_bytes(theta) - measured, 0.0) / NOISE
        robust = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors**2) - 1))
        return np.concatenate([robust, theta / spreads])

    found: np.ndarray = least_squares(residuals, np.zeros(len(FITTED)), diff_step=1e-3, max_nfev=30).x
    return found


def held_out(fit: MemoryFit, measured: np.ndarray, folds: Sequence[str]) -> np.ndarray:
    """Logarithms of memory as predicted without the run's fold, ``[n]``."""
    predicted = np.empty(len(measured))
    keys = np.array(folds)
    for fold in sorted(set(folds)):
        out = keys == fold
        predicted[out] = fit.log_bytes(solve(fit, measured, ~out))[out]
    return predicted


def write_recipes(theta: np.ndarray, intervals: Mapping[str, float]) -> None:
    """Write fitted figures into ``memory.yaml``, which keeps all else.

    Args:
        theta: See ``MemoryFit.recipes``.
        intervals: Recipe -> half-width of its interval, relative.
    """
    values = {
        key: prior * factor for key, (prior, _), factor in zip(FITTED, FITTED.values(), np.exp(theta), strict=True)
    }
    values |= {(name, "interval_ratio"): width for name, width in intervals.items()}
    lines, name = [], ""
    for line in RECIPES_FILE.read_text().splitlines():
        if line and line[0].isalpha():
            name = line.rstrip(":")
        field = line.strip().split(":")[0]
        lines.append(f"  {field}: {values[name, field]:.3g}" if (name, field) in values else line)
    write_text(RECIPES_FILE, "\n".join(lines) + "\n")
    recipes.cache_clear()
