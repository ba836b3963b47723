"""Every plan of a space, and which rule removes how many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.space.expression import Expression
from autotune.space.space import Dimension
from autotune.space.training import as_columns, choice_column, devices_of, mesh_word, with_derived
from engine.errors import UserError
from engine.plan import MESH_FIELDS, PlanTable
from engine.rule import RuleContext
from engine.rules import violations

MAX_COMBINATIONS = 4_000_000
"""Largest product of plan choices that is enumerated (about 1 GB of columns)."""

NOT_SEARCHED = "redundant"
"""Counted for combinations that differ from another one only in a value that has no effect."""


@dataclass(frozen=True)
class Enumeration:
    """All combinations of the discrete plan dimensions (and the global batch), told apart by legality."""

    table: PlanTable
    """The legal ones, as columns of equal length."""
    num_combinations: int
    """Size of the product of all choices."""
    removed: dict[str, int]
    """Rule id (or ``constraint: ...``, or ``redundant``) -> combinations it removes; one may be removed by several."""

    @property
    def num_legal(self) -> int:
        """Rows of the table."""
        return len(self.table["tp"])

    @property
    def max_devices(self) -> int:
        """Devices of the largest plan."""
        return int(np.max(devices_of(self.table), initial=1))

    def meshes(self) -> dict[str, dict[str, int]]:
        """Mesh word -> degrees, over the legal rows, smallest world first."""
        rows = np.stack([self.table[key] for key in MESH_FIELDS], axis=1) if self.num_legal else np.empty((0, 8), int)
        distinct = sorted(
            {tuple(map(int, row)) for row in np.unique(rows, axis=0)}, key=lambda row: (math.prod(row), row)
        )
        degrees = [dict(zip(MESH_FIELDS, row, strict=True)) for row in distinct]
        return {mesh_word(fields): fields for fields in degrees}


def enumerate_plans(
    dimensions: Sequence[Dimension],
    values: dict[str, Any],
    constraints: Sequence[Expression],
    context: RuleContext,
    *,
    undecided: frozenset[str] = frozenset(),
) -> Enumeration:
    """Enumerate the plan side of a space.

    Args:
        dimensions: Discrete dimensions that a plan rule may read, degrees as single dimensions.
        values: Dotted name -> value of everything else.
        constraints: The space's own; those that read an undecided value are left to each candidate.
        context: Model and machines for the rules.
        undecided: Names of further dimensions, whose ``values`` are but their defaults.

    Raises:
        UserError: More combinations than can be enumerated.
    """
    num_choices = [len(dimension.choices() or ()) for dimension in dimensions]
    num_combinations = math.prod(num_choices)
    if num_combinations > MAX_COMBINATIONS:
        sizes = ", ".join(f"{d.name} {count}" for d, count in zip(dimensions, num_choices, strict=True))
        raise UserError(
            f"the space has {num_combinations} combinations of plan values ({sizes});"
            f" at most {MAX_COMBINATIONS} are taken",
            hint="fix or narrow some plan values",
        )
    columns: dict[str, Any] = dict(values)
    choices = [tuple(dimension.choices() or ()) for dimension in dimensions]
    index = np.indices(num_choices).reshape(len(choices), num_combinations)
    for row, dimension in enumerate(dimensions):
        columns[dimension.name] = choice_column(choices[row])[index[row]]
    columns = with_derived(columns)

    removed: dict[str, int] = {}
    keep = np.ones(num_combinations, dtype=bool)
    for row, dimension in enumerate(dimensions):
        if dimension.when is None or dimension.when.names & undecided:
            continue
        # Where a value is not searched, only the first choice stands for all of them.
        inactive = ~np.broadcast_to(np.asarray(dimension.when(columns), dtype=bool), num_combinations)
        _count(removed, keep, NOT_SEARCHED, inactive & (index[row] > 0))
        default = values[dimension.name]
        columns[dimension.name] = np.where(inactive, default, columns[dimension.name])
    for constraint in constraints:
        if not constraint.names & undecided:
            holds = np.broadcast_to(np.asarray(constraint(columns), dtype=bool), num_combinations)
            _count(removed, keep, f"constraint: {constraint.text}", ~holds)
    table = as_columns(columns, num_combinations)
    for rule, broken in violations(context, table).items():
        _count(removed, keep, rule, np.asarray(broken, dtype=bool))
    return Enumeration({key: column[keep] for key, column in table.items()}, num_combinations, removed)


def _count(removed: dict[str, int], keep: np.ndarray, rule: str, broken: np.ndarray) -> None:
    if broken.any():
        removed[rule] = removed.get(rule, 0) + int(broken.sum())
        keep &= ~broken
