"""Candidates drawn at random: legal plans, and everything else from its range."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from autotune.search.sampler import SearchState
from autotune.space.enumerate import Enumeration
from autotune.space.space import Dimension, Scalar, Space
from autotune.space.training import MESH, mesh_word
from engine.plan import MESH_FIELDS

MAX_EXHAUSTIVE = 20_000
"""A discrete space of at most so many combinations is gone through without repeats; else draws are independent."""
MAX_DRAWS = 2000
"""Draws without anything new after which a space counts as used up."""


class UniformSampler:
    """Candidates at random, none of them tried before; plans that the cost model puts first come first."""

    def propose(self, state: SearchState) -> dict[str, Scalar] | None:
        """See ``Sampler``. None when ``MAX_DRAWS`` draws gave nothing new."""
        seen_choices = {tuple(observation.parameters.items()) for observation in state.observations}
        candidates = (state.space.candidate(o.parameters) for o in state.observations)
        seen_keys = {candidate.key for candidate in candidates if candidate.is_legal}
        ranks = state.forecast.ranks if state.forecast else None
        draws = uniform_draws(state.space, state.enumeration, state.seed, ranks)
        fresh = (chosen for chosen in draws if tuple(chosen.items()) not in seen_choices)
        for chosen in itertools.islice(fresh, MAX_DRAWS):
            candidate = state.space.candidate(chosen)
            if candidate.is_legal and candidate.key not in seen_keys:
                return chosen
        return None


def uniform_draws(
    space: Space, enumeration: Enumeration | None, seed: int, ranks: np.ndarray | None = None
) -> Iterator[dict[str, Scalar]]:
    """Candidates drawn at random: plans from the legal ones, everything else from its range.

    A small discrete space is gone through once in random order, and then the iterator ends; else it is endless.

    Args:
        space: The space.
        enumeration: Its legal plans; None for a space without plans.
        seed: Of the draws.
        ranks: ``[num_legal]`` ints, 0 for the most promising plans. A small space is gone through in this order; in an
            endless one a plan is half as likely as one of the rank before. None draws plans uniformly.
    """
    rng = np.random.default_rng(seed)
    rows = enumeration.num_legal if enumeration else 1
    ranks = np.zeros(rows, dtype=np.int64) if ranks is None else ranks
    from_table = [d for d in space.dimensions if enumeration and _is_enumerated(d)]
    others = [d for d in space.dimensions if d not in from_table]
    choices = [dimension.choices() for dimension in others]
    if all(options is not None for options in choices):
        sizes = [len(options or ()) for options in choices]
        if rows * math.prod(sizes) <= MAX_EXHAUSTIVE:
            cells = list(itertools.product(range(rows), *map(range, sizes)))
            order = rng.permutation(len(cells))
            by_rank = np.argsort(ranks[[cells[index][0] for index in order]], kind="stable")
            for index in order[by_rank]:
                row, *picks = cells[index]
                values = {d.name: (d.choices() or ())[pick] for d, pick in zip(others, picks, strict=True)}
                yield space.active(_row(enumeration, row, from_table) | values)
            return
    cumulative = np.cumsum(0.5**ranks)
    while True:
        values = {dimension.name: _draw(dimension, rng) for dimension in others}
        row = int(np.searchsorted(cumulative, rng.uniform(0, cumulative[-1]), side="right"))
        yield space.active(_row(enumeration, min(row, rows - 1), from_table) | values)


def _is_enumerated(dimension: Dimension) -> bool:
    is_plan = dimension.name.startswith("plan.") or dimension.name == "hyperparameters.global_batch_size"
    return is_plan and dimension.choices() is not None


def _row(enumeration: Enumeration | None, row: int, dimensions: list[Dimension]) -> dict[str, Scalar]:
    """The values that a legal plan has in the dimensions."""
    if enumeration is None:
        return {}
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
