"""Rows of a table that are equal in some columns, found once, so that a formula is computed once for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

_DENSE = 1 << 20
"""Range of values up to which a look-up table replaces a sort."""


class Codes(NamedTuple):
    """A column with its values numbered."""

    codes: np.ndarray
    """[n] int64: which of the values that occur each row has."""
    size: int
    """Values that occur."""


class Distinct(NamedTuple):
    """The distinct rows of some columns."""

    first: np.ndarray
    """[m] a row of each kind."""
    kind: np.ndarray
    """[n] which kind each row is: ``column[first][kind]`` equals ``column``."""


class Columns:
    """Integer columns of one length.

    Args:
        columns: Name -> ``[n]`` integers, or a number that all rows have.
    """

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        self._columns = {name: np.asarray(column) for name, column in columns.items()}
        self._codes = cache(self._number)

    def distinct(self, names: Sequence[str]) -> Distinct:
        """The distinct rows of the columns ``names``."""
        key, size = np.zeros(1, dtype=np.int64), 1
        for name in names:
            if self._columns[name].ndim == 0:
                continue
            codes, count = self._codes(name)
            if count == 1 and key.size == codes.size:
                continue
            if size * count > _DENSE:
                key, size = number(key)
            key, size = key * count + codes, size * count
        return _first(key, size)

    def _number(self, name: str) -> Codes:
        return number(self._columns[name])


def number(column: np.ndarray) -> Codes:
    """Number the values of a column of integers, from the smallest."""
    low = int(column.min())
    span = int(column.max()) - low + 1
    if span == 1:
        return Codes(np.zeros(column.shape, dtype=np.int64), 1)
    if span > _DENSE:
        values, codes = np.unique(column, return_inverse=True)
        return Codes(codes, len(values))
    offsets = column - low
    present = np.zeros(span, dtype=bool)
    present[offsets] = True
    numbers = np.cumsum(present) - 1
    return Codes(numbers[offsets], int(numbers[-1]) + 1)


def _first(key: np.ndarray, size: int) -> Distinct:
    """The distinct values of a column of integers below ``size``."""
    if size > max(_DENSE, 4 * len(key)):
        _, first, kind = np.unique(key, return_index=True, return_inverse=True)
        return Distinct(first, kind)
    row = np.full(size, -1, dtype=np.int64)
    row[key] = np.arange(len(key))
    present = row >= 0
    numbers = np.cumsum(present) - 1
    return Distinct(row[present], numbers[key])
