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
        if dimension.is_range:
            return cls(dimension, None, True, dimension.is_log)
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
        return self.dimension.is_real

    def coordinate(self, value: Scalar) -> float:
        """Of a value of the dimension."""
        if self.places is not None:
            return self.places[self._index(value)]
        low, high = self._range()
        number = math.log(float(value or 0.0)) if self.is_log else float(value or 0.0)
        return (number - low) / (high - low) if high > low else ABSENT

    def value(self, coordinate: float) -> Scalar:
        """The value nearest to a coordinate."""
        if self.places is not None:
            return self.dimension.values[int(np.argmin([abs(place - coordinate) for place in self.places]))]
        number = float(self._numbers(np.array([coordinate]))[0])
        return int(number) if self.dimension.is_whole else self.dimension.nearest(number)

    def nearest(self, coordinates: np.ndarray) -> np.ndarray:
        """The values nearest to coordinates ``[n]``: floats with NaN where that is NaN, or objects for words."""
        if self.places is None:
            return self._numbers(coordinates)
        present = ~np.isnan(coordinates)
        result = np.full(len(coordinates), np.nan) if self.is_ordered else np.full(len(coordinates), None)
        choices = np.array(self.dimension.values, dtype=result.dtype)
        result[present] = choices[self._choice(coordinates[present])]
        return result

    def snapped(self, coordinates: np.ndarray) -> np.ndarray:
        """Coordinates ``[n]`` moved to the nearest values; NaN stays."""
        if self.is_continuous:
            return coordinates
        result = coordinates.copy()
        present = ~np.isnan(coordinates)
        if self.places is not None:
            result[present] = np.array(self.places)[self._choice(coordinates[present])]
        else:
            low, high = self._range()
            numbers = self._numbers(coordinates[present])
            result[present] = ((np.log(numbers) if self.is_log else numbers) - low) / (high - low or 1.0)
        return result

    def spacing(self, coordinates: np.ndarray) -> np.ndarray:
        """About how far it is from coordinates ``[n]`` to the next value of a list or of whole numbers, ``[n]``."""
        if self.places is not None:
            return np.full(len(coordinates), 1.0 / max(len(self.places) - 1, 1))
        low, high = self._range()
        numbers = self._numbers(coordinates)
        step = np.log1p(self.dimension.step / numbers) if self.is_log else self.dimension.step
        return np.asarray(np.minimum(np.full(len(coordinates), step / max(high - low, 1e-9)), 1.0))

    def _choice(self, coordinates: np.ndarray) -> np.ndarray:
        """Index of the choice nearest to each coordinate, ``[n]``."""
        return np.asarray(np.abs(np.array(self.places) - coordinates[:, None]).argmin(axis=1))

    def _numbers(self, coordinates: np.ndarray) -> np.ndarray:
        """The nearest values of a range, as floats ``[n]``."""
        dimension, (low, high) = self.dimension, self._range()
        numbers = low + coordinates * (high - low)
        if self.is_log:
            numbers = np.exp(numbers)
        if dimension.is_whole:
            last = math.floor((dimension.high - dimension.low) / dimension.step)
            steps = np.clip(np.round((numbers - dimension.low) / dimension.step), 0, last)
            return np.asarray(dimension.low + dimension.step * steps)
        return np.asarray(np.clip(numbers, dimension.low, dimension.high))

    def _range(self) -> tuple[float, float]:
        """The ends of a range, on the scale that it is searched on."""
        low, high = self.dimension.low, self.dimension.high
        return (math.log(low), math.log(high)) if self.is_log else (low, high)

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

    def value_columns(self, coordinates: np.ndarray) -> dict[str, np.ndarray]:
        """Dimension name -> the values nearest to coordinates ``[n, num_dimensions]``, ``[n]``: floats (NaN where the
        dimension is absent), or objects for words (None there)."""
        return {
            axis.dimension.name: axis.nearest(places) for axis, places in zip(self.axes, coordinates.T, strict=True)
        }

    def snapped(self, coordinates: np.ndarray) -> np.ndarray:
        """Coordinates ``[n, num_dimensions]`` moved to the nearest values there are."""
        columns = [axis.snapped(places) for axis, places in zip(self.axes, coordinates.T, strict=True)]
        return np.stack(columns, axis=1) if columns else coordinates

    def columns(self, coordinates: np.ndarray) -> Inputs:
        """What a model sees.

        Args:
            coordinates: ``[n, num_dimensions]``; NaN where a dimension is absent.
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
        x = np.stack(columns, axis=1) if columns else np.zeros((len(coordinates), 0))
        return Inputs(x, np.array(groups, dtype=np.int64))
