"""Proposals for a sweep: Optuna's samplers over a space, and uniform draws from its legal candidates."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from optuna import Trial
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, TPESampler

from autotune.space.enumerate import Enumeration
from autotune.space.space import MESH, Dimension, Scalar, Space, mesh_word
from engine.plan import MESH_FIELDS

MAX_EXHAUSTIVE = 20_000
"""A discrete space of at most so many combinations is gone through without repeats; else draws are independent."""


def derive_seed(seed: int, *parts: str | int) -> int:
    """A seed from 0 to 2^31 - 1 that is a pure function of its arguments, on every machine and Python."""
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


def num_startup_trials(num_trials: int | None) -> int:
    """Trials drawn uniformly before the sampler models anything: a quarter of the budget, from 5 to 20."""
    return 10 if num_trials is None else min(20, max(5, num_trials // 4))


def make_sampler(seed: int, num_startup: int) -> BaseSampler:
    """Tree-structured Parzen estimators: several objectives, constraints, conditions; trials that still run count as
    bad, so that parallel proposals spread out. Deterministic given the seed and the trials so far."""
    return TPESampler(seed=seed, n_startup_trials=num_startup)


def distribution_of(dimension: Dimension) -> BaseDistribution:
    """The dimension in Optuna's terms."""
    if dimension.kind == "categorical":
        return CategoricalDistribution(dimension.values)
    if dimension.kind == "int":
        values = dimension.choices()
        assert values is not None
        return IntDistribution(int(dimension.low), int(values[-1] or 0), step=dimension.step)
    return FloatDistribution(dimension.low, dimension.high, log=dimension.kind == "log_float")


def suggest(trial: Trial, space: Space) -> dict[str, Scalar]:
    """Let the study's sampler choose a value for every active dimension.

    Returns:
        Dimension name -> value.
    """
    chosen: dict[str, Scalar] = {}
    for dimension in space.dimensions:
        if not space.is_active(dimension, chosen):
            continue
        distribution = distribution_of(dimension)
        if isinstance(distribution, CategoricalDistribution):
            chosen[dimension.name] = trial.suggest_categorical(dimension.name, distribution.choices)
        elif isinstance(distribution, IntDistribution):
            chosen[dimension.name] = trial.suggest_int(
                dimension.name, distribution.low, distribution.high, step=distribution.step
            )
        else:
            assert isinstance(distribution, FloatDistribution)
            chosen[dimension.name] = trial.suggest_float(
                dimension.name, distribution.low, distribution.high, log=distribution.log
            )
    return chosen


def uniform_draws(
    space: Space, enumeration: Enumeration, seed: int, ranks: np.ndarray | None = None
) -> Iterator[dict[str, Scalar]]:
    """Candidates drawn at random: plans from the legal ones, everything else from its range.

    A small discrete space is gone through once in random order, and then the iterator ends; else it is endless.

    Args:
        space: The space.
        enumeration: Its legal plans.
        seed: Of the draws.
        ranks: ``[num_legal]`` ints, 0 for the most promising plans. A small space is gone through in this order; in an
            endless one a plan is half as likely as one of the rank before. None draws plans uniformly.
    """
    rng = np.random.default_rng(seed)
    ranks = np.zeros(enumeration.num_legal, dtype=np.int64) if ranks is None else ranks
    from_table = [d for d in space.dimensions if _is_enumerated(d)]
    others = [d for d in space.dimensions if not _is_enumerated(d)]
    choices = [dimension.choices() for dimension in others]
    rows = enumeration.num_legal
    if all(options is not None for options in choices):
        sizes = [len(options or ()) for options in choices]
        if rows * math.prod(sizes) <= MAX_EXHAUSTIVE:
            cells = list(itertools.product(range(rows), *map(range, sizes)))
            order = rng.permutation(len(cells))
            by_rank = np.argsort(ranks[[cells[index][0] for index in order]], kind="stable")
            for index in order[by_rank]:
                row, *picks = cells[index]
                values = {d.name: (d.choices() or ())[pick] for d, pick in zip(others, picks, strict=True)}
                yield _active(space, _row(enumeration, row, from_table) | values)
            return
    cumulative = np.cumsum(0.5**ranks)
    while True:
        values = {dimension.name: _draw(dimension, rng) for dimension in others}
        row = int(np.searchsorted(cumulative, rng.uniform(0, cumulative[-1]), side="right"))
        yield _active(space, _row(enumeration, min(row, rows - 1), from_table) | values)


def _is_enumerated(dimension: Dimension) -> bool:
    is_plan = dimension.name.startswith("plan.") or dimension.name == "hyperparameters.global_batch_size"
    return is_plan and dimension.choices() is not None


def _row(enumeration: Enumeration, row: int, dimensions: list[Dimension]) -> dict[str, Scalar]:
    """The values that a legal plan has in the dimensions."""
    table = enumeration.table
    values: dict[str, Scalar] = {}
    for dimension in dimensions:
        if dimension.name == MESH:
            values[MESH] = mesh_word({key: int(table[key][row]) for key in MESH_FIELDS})
        else:
            value: Any = table[dimension.name.partition(".")[2]][row]
            values[dimension.name] = value.item() if isinstance(value, np.generic) else value
    return values


def _draw(dimension: Dimension, rng: np.random.Generator) -> Scalar:
    choices = dimension.choices()
    if choices is not None:
        return choices[int(rng.integers(len(choices)))]
    if dimension.kind == "log_float":
        value = math.exp(rng.uniform(math.log(dimension.low), math.log(dimension.high)))
    else:
        value = float(rng.uniform(dimension.low, dimension.high))
    return min(max(value, dimension.low), dimension.high)


def _active(space: Space, values: dict[str, Scalar]) -> dict[str, Scalar]:
    """Only the dimensions that are searched given those before them, in order."""
    chosen: dict[str, Scalar] = {}
    for dimension in space.dimensions:
        if space.is_active(dimension, chosen):
            chosen[dimension.name] = values[dimension.name]
    return chosen
