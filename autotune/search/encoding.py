"""Chosen values as points of the unit cube, and back: what a surrogate model and its candidates are made of.

Every dimension has one *coordinate* in 0..1: a number by its place in its range (by logarithm where the range is one of
magnitudes), a word by the middle of its share. Models see *columns*: a number's coordinate; a word as one column per
choice, so that every two words are equally far apart; and for a dimension with a condition one more column that says
whether it is there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.space.space import Dimension, Scalar

MAGNITUDES = 8.0
"""Numbers listed as choices are placed by logarithm when the greatest is so many times the least, or more."""
ABSENT = 0.5
"""The coordinate of a dimension that is not searched under the values chosen before it."""
FIDELITY_OCTAVES = 8.0
"""A trial of 2^-8 of the full length lies one unit away from a full one."""


@dataclass(frozen=True)
class Inputs:
    """Columns of points."""

    x: np.ndarray
    """``[n, d]`` in 0..1."""
    groups: np.ndarray
    """``[d]`` ints: columns of one group share a length-scale."""

    def __len__(self) -> int:
        return len(self.x)


@dataclass(frozen=True)
class Axis:
    """One dimension's scale."""

    dimension: Dimension
    places: tuple[float, ...] | None
    """The coordinate of each choice of a list; None for a range."""
    is_ordered: bool
    """Numbers; else words."""
    is_log: bool

    @classmethod
    def of(cls, dimension: Dimension) -> Axis:
        """The scale a dimension is searched on."""
        if dimension.kind != "categorical":
            is_log = dimension.kind == "log_float" or bool(getattr(dimension, "log", False))
            return cls(dimension, None, True, is_log)
        values = [v for v in dimension.values if isinstance(v, int | float) and not isinstance(v, bool)]
        if len(values) < len(dimension.values) or len(values) < 2:
            count = len(dimension.values)
            return cls(dimension, tuple((index + 0.5) / count for index in range(count)), False, False)
        is_log = min(values) > 0 and max(values) >= MAGNITUDES * min(values)
        marks = np.log(values) if is_log else np.array(values, dtype=np.float64)
        return cls(dimension, tuple(((marks - marks.min()) / (marks.max() - marks.min())).tolist()), True, is_log)

    @property
    def is_continuous(self) -> bool:
        """Whether any value between two others is one too."""
        return self.dimension.kind in ("float", "log_float")

    def coordinate(self, value: Scalar) -> float:
        """Of a value of the dimension."""
        dimension = self.dimension
        if self.places is not None:
            return self.places[self._index(value)]
        number, low, high = float(value or 0.0), dimension.low, dimension.high
        if self.is_log:
            number, low, high = math.log(number), math.log(low), math.log(high)
        return (number - low) / (high - low) if high > low else ABSENT

    def value(self, coordinate: float) -> Scalar:
        """The value nearest to a coordinate."""
        dimension = self.dimension
        if self.places is not None:
            return dimension.values[int(np.argmin([abs(place - coordinate) for place in self.places]))]
        low, high = dimension.low, dimension.high
        if self.is_log:
            number = math.exp(math.log(low) + coordinate * (math.log(high) - math.log(low)))
        else:
            number = low + coordinate * (high - low)
        if dimension.kind == "int":
            last = math.floor((high - low) / dimension.step)
            return int(low) + dimension.step * min(max(round((number - low) / dimension.step), 0), last)
        return min(max(number, low), high)

    def columns(self, coordinates: np.ndarray) -> list[np.ndarray]:
        """What a model sees of coordinates ``[n]`` (NaN where the dimension is absent): columns of shape ``[n]``."""
        absent = np.isnan(coordinates)
        filled = np.where(absent, ABSENT, coordinates)
        count = len(self.places or ())
        if self.is_ordered or count <= 2:
            return [filled]
        chosen = np.minimum((filled * count).astype(int), count - 1)
        # Two different words are then at distance 1, as the two ends of a range are.
        return [np.where(absent, 0.0, (chosen == index) * math.sqrt(0.5)) for index in range(count)]

    def _index(self, value: Scalar) -> int:
        for index, choice in enumerate(self.dimension.values):
            if type(choice) is type(value) and choice == value:
                return index
        return self.dimension.values.index(value)


@dataclass(frozen=True)
class Encoding:
    """All dimensions of a space."""

    axes: tuple[Axis, ...]

    @classmethod
    def of(cls, dimensions: Sequence[Dimension]) -> Encoding:
        """The encoding of a space's dimensions, in their order."""
        return cls(tuple(Axis.of(dimension) for dimension in dimensions))

    def coordinates(self, rows: Sequence[Mapping[str, Scalar]]) -> np.ndarray:
        """Of chosen values, ``[n, num_dimensions]``; NaN where a dimension is absent."""
        table = [
            [
                axis.coordinate(row[axis.dimension.name]) if axis.dimension.name in row else math.nan
                for axis in self.axes
            ]
            for row in rows
        ]
        return np.array(table, dtype=np.float64).reshape(len(rows), len(self.axes))

    def values(self, coordinates: np.ndarray) -> dict[str, Scalar]:
        """The values nearest to coordinates ``[num_dimensions]``; without the absent dimensions (NaN)."""
        pairs = zip(self.axes, coordinates.tolist(), strict=True)
        return {axis.dimension.name: axis.value(place) for axis, place in pairs if not math.isnan(place)}

    def snapped(self, coordinates: np.ndarray) -> np.ndarray:
        """Coordinates ``[n, num_dimensions]`` moved to the nearest values there are."""
        result = coordinates.copy()
        for column, axis in enumerate(self.axes):
            if axis.places is not None:
                places = np.array(axis.places)
                nearest = places[np.abs(places - coordinates[:, column, None]).argmin(axis=1)]
                result[:, column] = np.where(np.isnan(coordinates[:, column]), np.nan, nearest)
            elif not axis.is_continuous:
                result[:, column] = [
                    place if math.isnan(place) else axis.coordinate(axis.value(place)) for place in result[:, column]
                ]
        return result

    def columns(self, coordinates: np.ndarray, fidelities: np.ndarray | None = None) -> Inputs:
        """What a model sees.

        Args:
            coordinates: ``[n, num_dimensions]``; NaN where a dimension is absent.
            fidelities: ``[n]``: the share of a full trial that each one is, above 0 and at most 1; None where all are
                full and the model needs no such input.
        """
        columns: list[np.ndarray] = []
        groups: list[int] = []
        group = 0
        for axis, places in zip(self.axes, coordinates.T, strict=True):
            parts = axis.columns(places)
            columns += parts
            groups += [group] * len(parts)
            group += 1
            if axis.dimension.when is not None:
                columns.append((~np.isnan(places)).astype(np.float64))
                groups.append(group)
                group += 1
        if fidelities is not None:
            columns.append(np.clip(1.0 + np.log2(fidelities) / FIDELITY_OCTAVES, 0.0, 1.0))
            groups.append(group)
        x = np.stack(columns, axis=1) if columns else np.zeros((len(coordinates), 0))
        return Inputs(x, np.array(groups, dtype=np.int64))
