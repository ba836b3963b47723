"""Candidates drawn at random: legal plans, and everything else from its range."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from autotune.search.sampler import SearchState
from autotune.search.seeds import derive_seed
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
        is_fresh = is_new(state)
        draws = uniform_draws(state.space, state.enumeration, state.seed, _ranks(state))
        unseen = (chosen for chosen in draws if tuple(chosen.items()) not in seen_choices)
        return next((chosen for chosen in itertools.islice(unseen, MAX_DRAWS) if is_fresh(chosen)), None)


class SobolSampler:
    """The points of a scrambled Sobol sequence by the proposal's number; a candidate at random where a point is illegal
    or known already, as in a small discrete space."""

    def propose(self, state: SearchState) -> dict[str, Scalar] | None:
        """See ``Sampler``."""
        from scipy.stats.qmc import Sobol

        grid = _Grid.of(state.space, state.enumeration, _ranks(state))
        sequence = Sobol(1 + len(grid.others), scramble=True, rng=derive_seed(state.study_seed, "sobol"))
        if state.number:
            sequence.fast_forward(state.number)
        chosen = grid.point(sequence.random(1)[0])
        return chosen if is_new(state)(chosen) else UniformSampler().propose(state)


def is_new(state: SearchState) -> Callable[[Mapping[str, Scalar]], bool]:
    """What tells whether chosen values are a legal candidate that is none of the observations."""
    ran = (observation for observation in state.observations if observation.state != "refused")
    keys = {observation.key or state.space.candidate(observation.parameters).key for observation in ran}

    def is_fresh(chosen: Mapping[str, Scalar]) -> bool:
        candidate = state.space.candidate(chosen)
        return candidate.is_legal and candidate.key not in keys

    return is_fresh


def _ranks(state: SearchState) -> np.ndarray | None:
    return state.forecast.ranks if state.forecast else None


@dataclass(frozen=True)
class _Grid:
    """A space as the unit cube of the legal plans (one coordinate) and everything else."""

    space: Space
    enumeration: Enumeration | None
    from_table: tuple[Dimension, ...]
    """What a legal plan tells."""
    others: tuple[Dimension, ...]
    ranks: np.ndarray
    """``[num_legal]`` ints, 0 for the most promising plans."""
    weights: np.ndarray
    """Of the plans among equals, ``[num_legal]``, by what is searched by its logarithm."""
    cumulative: np.ndarray
    """Weights of the plans, summed up: one is half as likely as one of the rank before."""

    @classmethod
    def of(cls, space: Space, enumeration: Enumeration | None, ranks: np.ndarray | None) -> Self:
        """All plans are alike without ranks."""
        ranks = np.zeros(enumeration.num_legal if enumeration else 1, dtype=np.int64) if ranks is None else ranks
        from_table = tuple(d for d in space.dimensions if enumeration and is_enumerated(d))
        others = tuple(d for d in space.dimensions if d not in from_table)
        weights = np.ones(len(ranks))
        for dimension in from_table:
            if enumeration is not None and dimension.is_log:
                numbers = enumeration.table[dimension.name.partition(".")[2]]
                is_searched = (numbers >= dimension.low) & (numbers <= dimension.high)  # else it has its default
                weights = weights * np.where(is_searched, _log_share(np.where(is_searched, numbers, 1)), 1.0)
        return cls(space, enumeration, from_table, others, ranks, weights, np.cumsum(0.5**ranks * weights))

    def point(self, unit: np.ndarray) -> dict[str, Scalar]:
        """The chosen values at ``unit``, ``[1 + number of others]``, each from 0 to 1: first the plan's coordinate."""
        row = int(np.searchsorted(self.cumulative, unit[0] * self.cumulative[-1], side="right"))
        values = {d.name: _quantile(d, float(u)) for d, u in zip(self.others, unit[1:], strict=True)}
        return self.chosen(min(row, len(self.cumulative) - 1), values)

    def order(self, cells: Sequence[tuple[int, ...]], rng: np.random.Generator) -> np.ndarray:
        """Cells of a discrete space (a plan's row, and a pick of each other dimension) in random order, ``[n]``: every
        beginning is like independent draws of the cells by their weights, without the repeats."""
        logarithmic = [(index, d) for index, d in enumerate(self.others, start=1) if d.is_log]
        if not logarithmic and (self.weights == self.weights[0]).all():
            return rng.permutation(len(cells))
        table = np.array(cells)
        weights = self.weights[table[:, 0]]
        for index, dimension in logarithmic:
            weights = weights * _log_share(dimension.low + table[:, index])
        return np.argsort(rng.exponential(size=len(cells)) / weights, kind="stable")

    def chosen(self, row: int, values: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """The plan of a row with values of everything else."""
        return self.space.active({**plan_values(self.enumeration, row, self.from_table), **values})


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
    grid = _Grid.of(space, enumeration, ranks)
    choices = [dimension.choices() for dimension in grid.others]
    if all(options is not None for options in choices):
        sizes = [len(options or ()) for options in choices]
        if len(grid.ranks) * math.prod(sizes) <= MAX_EXHAUSTIVE:
            cells = list(itertools.product(range(len(grid.ranks)), *map(range, sizes)))
            order = grid.order(cells, rng)
            by_rank = np.argsort(grid.ranks[[cells[index][0] for index in order]], kind="stable")
            for index in order[by_rank]:
                row, *picks = cells[index]
                yield grid.chosen(
                    row, {d.name: (d.choices() or ())[pick] for d, pick in zip(grid.others, picks, strict=True)}
                )
            return
    while True:
        yield grid.point(rng.uniform(size=1 + len(grid.others)))


def is_enumerated(dimension: Dimension) -> bool:
    """Whether a training space's legal plans tell the dimension's values."""
    is_plan = dimension.name.startswith("plan.") or dimension.name == "hyperparameters.global_batch_size"
    return is_plan and dimension.choices() is not None


def plan_values(enumeration: Enumeration | None, row: int, dimensions: Sequence[Dimension]) -> dict[str, Scalar]:
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


def _log_share(numbers: np.ndarray) -> np.ndarray:
    """How much of a logarithmic scale lies nearer to whole numbers ``[n]`` than to their neighbours, ``[n]``."""
    return np.asarray(np.log((numbers + 0.5) / (numbers - 0.5)))


def _quantile(dimension: Dimension, u: float) -> Scalar:
    """The value below which a share ``u`` of the dimension lies."""
    choices = dimension.choices()
    if dimension.kind == "log_int":  # see _log_share
        low, high = math.log(dimension.low - 0.5), math.log(dimension.high + 0.5)
        return min(max(round(math.exp(low + u * (high - low))), int(dimension.low)), int(dimension.high))
    if choices is not None:
        return choices[min(int(u * len(choices)), len(choices) - 1)]
    if dimension.is_log:
        low, high = math.log(dimension.low), math.log(dimension.high)
        value = math.exp(low + u * (high - low))
    else:
        value = dimension.low + u * (dimension.high - dimension.low)
    return dimension.nearest(value)
