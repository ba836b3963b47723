"""The plans of a space as models see them: columns of numbers, what the cost model says, which of them train alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from autotune.search.encoding import Inputs
from autotune.search.forecast import NUMERICS, Forecast
from autotune.space.enumerate import Enumeration
from autotune.space.space import Scalar
from autotune.space.training import TrainingSpace

MAX_ROWS = 3000
"""Plans that are looked at: by the layers of the estimated front, then at random."""
TIME_QUANTILE = 1.2816
"""An estimate's interval holds four in five runs: its half-width in standard deviations."""
UNKNOWN_SD = 1.0
"""Of the logarithm of speed or memory, where no cost model speaks."""
OUTSIDE_PLAN = {"global_batch_size": "hyperparameters", "sequence_length": "workload"}
"""Columns of a plan table that are no plan fields -> their section."""


@dataclass(frozen=True)
class Feature:
    """A column of a plan table as numbers."""

    name: str
    choices: tuple[Any, ...]
    """Values in the table."""
    is_number: bool

    @classmethod
    def of(cls, name: str, column: np.ndarray) -> Feature | None:
        """None for a column that is the same in all plans."""
        choices = tuple(sorted(set(column.tolist()), key=lambda value: (value is None, str(type(value)), value)))
        if len(choices) < 2:
            return None
        return cls(name, choices, all(isinstance(v, int | float) and not isinstance(v, bool) for v in choices))

    def columns(self, values: np.ndarray) -> np.ndarray:
        """Of values ``[n]``, ``[n, k]`` in 0..1: numbers by magnitude, words as a column a choice."""
        return self.slope(values) if self.is_number else self.indicators(values)

    def basis(self, values: np.ndarray) -> np.ndarray:
        """Of values ``[n]``, ``[n, k]``: columns whose weighted sums are what the feature may do, together of variance
        1: half of it a slope over magnitudes where there are some, the rest each choice's own."""
        if not self.is_number or len(self.choices) == 2:
            return _scaled(self.indicators(values))
        return math.sqrt(0.5) * np.hstack([_scaled(self.slope(values)), _scaled(self.indicators(values))])

    def slope(self, values: np.ndarray) -> np.ndarray:
        """``[n, 1]`` in 0..1."""
        low, high = (math.log2(1.0 + float(v)) for v in (self.choices[0], self.choices[-1]))
        return np.asarray(((np.log2(1.0 + values.astype(np.float64)) - low) / (high - low))[:, None])

    def indicators(self, values: np.ndarray) -> np.ndarray:
        """``[n, k]``: which choice it is."""
        return np.stack([_equal(values, word) for word in self.choices], axis=1).astype(np.float64)


def _equal(values: np.ndarray, word: Any) -> np.ndarray:
    return np.array([value == word for value in values.tolist()], dtype=bool)


@dataclass(frozen=True)
class Estimated:
    """What is said of a quantity before any trial, as logarithms, ``[r]`` each."""

    log: np.ndarray
    sd: np.ndarray


@dataclass(frozen=True)
class PlanRows:
    """Plans worth looking at, ``r`` of them. Made by ``of``."""

    space: TrainingSpace
    enumeration: Enumeration
    features: tuple[Feature, ...]
    index: np.ndarray
    """``[r]``: rows of the enumeration's table."""
    estimates: Mapping[str, Estimated]
    """``speed`` and ``memory``."""
    log_capacity: np.ndarray | None
    """``[r]``: logarithm of the live bytes at which a device is full; None without a cost model."""
    group: np.ndarray
    """``[r]``: plans with equal numbers train alike."""
    inputs: Inputs = field(repr=False)
    basis: np.ndarray = field(repr=False)
    """``[r, p]``: columns whose weighted sums are what all features may do, together of variance 1."""

    @classmethod
    def of(cls, space: TrainingSpace, enumeration: Enumeration, forecast: Forecast | None) -> PlanRows:
        """The plans of an enumeration (the forecast's own, where there is one)."""
        enumeration = forecast.enumeration if forecast else enumeration
        ranks = forecast.ranks if forecast else np.zeros(enumeration.num_legal, dtype=np.int64)
        shuffled = np.random.default_rng(0).permutation(len(ranks))
        index = shuffled[np.argsort(ranks[shuffled], kind="stable")][:MAX_ROWS]
        table = {name: column[index] for name, column in enumeration.table.items()}
        features = tuple(f for f in (Feature.of(name, column) for name, column in table.items()) if f)
        parts = [f.columns(table[f.name]) for f in features]
        x = np.concatenate([*parts, np.zeros((len(index), 0))], axis=1)
        bases = [f.basis(table[f.name]) for f in features] or [x]
        basis = np.concatenate(bases, axis=1) / math.sqrt(max(len(features), 1))
        codes = [np.unique(table[name].astype(str), return_inverse=True)[1] for name in NUMERICS]
        group = np.unique(np.stack(codes), axis=1, return_inverse=True)[1].reshape(-1)
        unknown = Estimated(np.zeros(len(index)), np.full(len(index), UNKNOWN_SD))
        estimates = {"speed": unknown, "memory": unknown}
        if forecast:
            for name in estimates:
                p = forecast.predicted[name]
                log = np.log(p.value[index])
                estimates[name] = Estimated(log, (np.log(p.high[index]) - log) / TIME_QUANTILE)
        capacity = np.log(forecast.capacity_bytes[index]) if forecast else None
        inputs = Inputs(x, np.zeros(x.shape[1], dtype=np.int64))
        return cls(space, enumeration, features, index, estimates, capacity, group, inputs, basis)

    def __len__(self) -> int:
        return len(self.index)

    def find(self, parameters: Sequence[Mapping[str, Scalar]]) -> np.ndarray:
        """Places of tried candidates among the ``r`` plans, ``[n]``; -1 for one that is not among them."""
        places = []
        for chosen in parameters:
            values = self.space.names(chosen)
            places.append(self._places.get(tuple(values[_dotted(f.name)] for f in self.features), -1))
        return np.array(places, dtype=np.int64)

    def column(self, name: str) -> np.ndarray:
        """A column of the plan table, ``[r]``."""
        return np.asarray(self.enumeration.table[name][self.index])

    @cached_property
    def world_size(self) -> np.ndarray:
        """``[r]``: devices in use."""
        degrees = [self.column(name).astype(np.int64) for name in ("tp", "pp", "cp", "dp_replicate", "dp_shard")]
        return np.asarray(np.prod(degrees, axis=0))

    @cached_property
    def _places(self) -> dict[tuple[Any, ...], int]:
        columns = [self.column(f.name).tolist() for f in self.features]
        rows = zip(*columns, strict=True) if columns else [()] * len(self)
        return {row: place for place, row in enumerate(rows)}


def _dotted(name: str) -> str:
    return f"{OUTSIDE_PLAN.get(name, 'plan')}.{name}"


def _scaled(columns: np.ndarray) -> np.ndarray:
    """Columns of one feature, centred, of variance 1 together."""
    centred = columns - columns.mean(axis=0)
    return np.asarray(centred / max(math.sqrt(float(centred.var(axis=0).sum())), 1e-9))
