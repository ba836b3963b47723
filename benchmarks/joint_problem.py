"""A joint problem of plan and hyperparameters with a known answer: which plans and batches of a real plan space, and
which learning rate, are on the front of speed, memory and quality.

Speed and memory are the cost model's, times a factor for every value of every plan axis, drawn at random: the cost
model is as wrong as its validation says, and wrong in the way it is (a machine is slower, an axis costs more). Quality
is a published grid of training runs at the same model size and token budget (``hpo_cells``). Nothing runs; every
trial's values and the whole front are known. The search's own corrector thinks in axes, too, but not in pairs of them.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from hpo_cells import Cell

from autotune.cost.estimate import estimate
from autotune.cost.software import OWN_ENGINE
from autotune.search.forecast import Forecast
from autotune.search.pareto import Box, front_box, hypervolume, hypervolume_history
from autotune.search.sampler import Observation
from autotune.search.uniform import is_enumerated, plan_values
from autotune.space.enumerate import Enumeration
from autotune.space.grammar import load_space
from autotune.space.space import Scalar
from autotune.space.training import TrainingSpace

SEQUENCE = 2048
VOCABULARY = 65536
"""Of the published runs."""
DIRECTIONS = ("maximize", "minimize", "minimize")
NUM_RATES = 60
"""Learning rates of the dense front, at each batch."""

TIME_SD, MEMORY_SD = 0.16, 0.08
"""Standard deviation of log(measured / estimated) over plans. Of runs of families that the fit never saw half are off
by 11 % or more in time (0.16 in standard deviations), and by 6.5 % in memory, the mean over families
(``results/planner_accuracy.json``, ``planner_memory.json``); of the seen families' other runs by 3.7 % and 3 %."""
LEVEL_SHARE, PAIR_SHARE, PLAN_SHARE = 0.45, 0.2, 0.05
"""Shares of that variance that all plans have in common, that every pair of values of two axes has, which no sum over
axes explains, and that every plan has of its own; the rest is the axes'."""
TIME_NOISE, MEMORY_NOISE = 0.01, 0.002
"""Of one trial's measurement, relative."""
QUALITY_NOISE = 0.003
"""Nats, from run to run (residuals of the published grids)."""

AXES = (
    "tp",
    "pp",
    "dp_replicate",
    "dp_shard",
    "ep",
    "micro_batch_size",
    "zero_stage",
    "recompute",
    "global_batch_size",
)
PLAN = {
    "tp": [1, 2, 4, 8],
    "pp": [1, 2, 4],
    "dp_replicate": {"divisors_of": "devices"},
    "dp_shard": {"divisors_of": "devices"},
    "zero_stage": [1, 2, 3],
    "micro_batch_size": [1, 2, 4, 8, 16, 32],
    "recompute": ["none", "full", "every_k"],
    "recompute_period": 2,
    "precision": "bf16",
}


@dataclass(frozen=True)
class Shape:
    """Width and depth of the published runs of one size."""

    hidden: int
    ffn: int
    heads: int
    layers: int


SHAPES: Mapping[str, Shape] = {
    "N215M": Shape(960, 9368, 15, 7),
    "N268M": Shape(1024, 9552, 16, 8),
    "N429M": Shape(1280, 9472, 10, 10),
    "N537M": Shape(1280, 9048, 10, 13),
    "N1074M": Shape(2048, 8192, 16, 16),
}


@dataclass(frozen=True)
class Problem:
    """One cell on one cluster, with one draw of how wrong the cost model is."""

    name: str
    cell: Cell
    space: TrainingSpace
    enumeration: Enumeration
    forecast: Forecast
    speed: np.ndarray
    """``[n]``: true tokens per second of every legal plan."""
    memory: np.ndarray
    """``[n]``: true bytes."""
    is_full: np.ndarray
    """``[n]``: whether it runs out of memory."""
    seed: int

    @classmethod
    def of(cls, cell: Cell, cluster: str, seed: int) -> Problem:
        """Draw a problem."""
        space, enumeration = load(cell, cluster)
        rng = np.random.default_rng([seed, 7])
        estimates = estimate(space.model, space.cluster, enumeration.table, software=OWN_ENGINE)
        tokens = enumeration.table["global_batch_size"] * SEQUENCE
        speed = tokens / estimates.step_seconds * np.exp(_errors(enumeration, TIME_SD, rng))
        memory_error = np.exp(_errors(enumeration, MEMORY_SD, rng))
        memory = estimates.allocated_bytes * memory_error
        is_full = estimates.memory_bytes * memory_error > space.cluster.memory_bytes
        forecast = Forecast.make(space, enumeration)
        return cls(f"{cell.name} on {cluster}", cell, space, enumeration, forecast, speed, memory, is_full, seed)

    @cached_property
    def rows(self) -> dict[tuple[str, ...], int]:
        """Values of a plan and batch -> row of the legal plans."""
        columns = [self.enumeration.table[name] for name in AXES]
        return {tuple(map(str, row)): index for index, row in enumerate(zip(*columns, strict=True))}

    def row(self, chosen: Mapping[str, Scalar]) -> int | None:
        """Of chosen values; None for an illegal plan."""
        values = self.space.names(chosen)
        dotted = [f"{'hyperparameters' if name == 'global_batch_size' else 'plan'}.{name}" for name in AXES]
        return self.rows.get(tuple(str(values[name]) for name in dotted))

    def plan(self, row: int) -> dict[str, Scalar]:
        """Plan and batch of a row of the forecast's plans."""
        told = [d for d in self.space.dimensions if is_enumerated(d)]
        return self.space.active(
            {d.name: None for d in self.space.dimensions} | plan_values(self.forecast.enumeration, row, told)
        )

    def true(self, chosen: Mapping[str, Scalar]) -> np.ndarray:
        """Noise-free speed, memory and quality of a legal candidate, ``[3]``; NaN where it runs out of memory."""
        row = self.row(chosen)
        assert row is not None, f"illegal: {chosen}"
        if self.is_full[row]:
            return np.full(3, np.nan)
        batch = float(self.enumeration.table["global_batch_size"][row]) * SEQUENCE
        loss = self.cell.loss(float(chosen["hyperparameters.learning_rate"] or 0), batch)
        return np.array([self.speed[row], self.memory[row], float(loss)])

    def observe(self, number: int, chosen: Mapping[str, Scalar], quality_noise: float) -> Observation:
        """A trial with measuring noise."""
        rng = np.random.default_rng([self.seed, 11, number])
        sds = np.array([TIME_NOISE, MEMORY_NOISE, 0.0])
        values = self.true(chosen) * np.exp(sds * rng.standard_normal(3))
        values[2] += quality_noise * rng.standard_normal()
        if np.isnan(values).any():
            return Observation(number, "failed", dict(chosen), failure="oom")
        named = dict(zip(("speed", "memory", "quality"), values.tolist(), strict=True))
        return Observation(number, "ok", dict(chosen), named)

    @cached_property
    def dense(self) -> np.ndarray:
        """Values ``[m, 3]`` of every legal plan at the best learning rate of its batch."""
        batches = self.enumeration.table["global_batch_size"]
        rates = np.geomspace(self.cell.rates[0], self.cell.rates[-1], NUM_RATES)
        rates = np.unique(np.concatenate([rates, self.cell.rates]))
        best = {b: float(self.cell.loss(rates, float(b) * SEQUENCE).min()) for b in np.unique(batches)}
        values = np.stack([self.speed, self.memory, [best[b] for b in batches]], axis=1)
        return values[~self.is_full]

    @cached_property
    def box(self) -> Box:
        """The range of the dense front."""
        return front_box(self.dense, DIRECTIONS)

    @cached_property
    def volume(self) -> float:
        """Of the dense front."""
        return hypervolume(self.dense, DIRECTIONS, self.box)

    def history(self, trials: list[dict[str, Scalar]]) -> np.ndarray:
        """Share of the dense front's volume after each trial, by true values."""
        return hypervolume_history(np.array([self.true(t) for t in trials]), DIRECTIONS, self.box) / self.volume


def load(cell: Cell, cluster: str) -> tuple[TrainingSpace, Enumeration]:
    """The space of a cell on a cluster."""
    shape = SHAPES[cell.name.split("_")[0]]
    model = {
        "name": cell.name.lower().replace(".", "-"), "family": "llama", "num_layers": shape.layers,
        "hidden_size": shape.hidden, "num_heads": shape.heads, "num_kv_heads": shape.heads,
        "head_dim": shape.hidden // shape.heads, "ffn_size": shape.ffn, "vocab_size": VOCABULARY,
        "max_positions": SEQUENCE,
    }  # fmt: skip
    batches = [int(batch) // SEQUENCE for batch in cell.batches]
    document = {
        "model": model,
        "cluster": cluster,
        "workload": {
            "data": {"paths": ["python-stdlib"], "tokenizer": "bytes"},
            "sequence_length": SEQUENCE,
            "total_tokens": cell.task.total_tokens,
        },
        "objectives": ["speed", "memory", "quality"],
        "space": {
            "plan": PLAN,
            "hyperparameters": {
                "global_batch_size": batches,
                "learning_rate": {"log_float": [float(cell.rates[0]), float(cell.rates[-1])]},
            },
            "constraints": ["plan.world_size == devices"],
        },
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "joint.yaml"
        path.write_text(json.dumps(document))
        return load_space(path)


def _errors(enumeration: Enumeration, sd: float, rng: np.random.Generator) -> np.ndarray:
    """Logarithms of measured / estimated for every plan."""
    table = enumeration.table
    axes, columns = [], []
    for name in AXES:
        values, place = np.unique(table[name].astype(str), return_inverse=True)
        if len(values) < 2:
            continue
        # Half a slope over the axis, half an effect of each value's own.
        order = np.argsort([float(v) if v.replace(".", "").isdigit() else i for i, v in enumerate(values)])
        slope = np.empty(len(values))
        slope[order] = np.linspace(-1.0, 1.0, len(values)) * rng.standard_normal()
        effect = (slope + rng.standard_normal(len(values)))[place]
        axes.append(_standardised(effect) * abs(rng.standard_normal()))
        columns.append(place)
    pairs = []
    for one, other in itertools.combinations(columns, 2):
        _, place = np.unique(one * (other.max() + 1) + other, return_inverse=True)
        pairs.append(_standardised(rng.standard_normal(place.max() + 1)[place]) * abs(rng.standard_normal()))
    parts = (
        (LEVEL_SHARE, rng.standard_normal()),
        (1 - LEVEL_SHARE - PAIR_SHARE - PLAN_SHARE, np.sum(axes, axis=0) / np.sqrt(len(axes))),
        (PAIR_SHARE, np.sum(pairs, axis=0) / np.sqrt(len(pairs))),
        (PLAN_SHARE, rng.standard_normal(enumeration.num_legal)),
    )
    return np.asarray(sd * sum(np.sqrt(share) * part for share, part in parts))


def _standardised(effect: np.ndarray) -> np.ndarray:
    return np.asarray((effect - effect.mean()) / max(float(effect.std()), 1e-9))
