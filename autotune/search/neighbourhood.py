"""The plans around a question's best ones, as one table: small enough to be estimated again under every change.

A search over the whole space answers a question exactly; what would help, and what each choice is worth, is told from
this part of it: every combination of the values that the best plans have, and of those next to them. So a gain told
from it is one that a real plan reaches, and a search might find a little more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from autotune.cost.columns import PlanColumns
from autotune.cost.estimate import EstimateTable, Estimator, estimate
from autotune.search.blocks import Blocks, Expander, plan_at
from autotune.search.estimated import EstimatedPlan, describe_estimates
from autotune.search.plan_objectives import objective_costs
from autotune.search.plan_space import DEGREES, INNER_FIELDS, OUTER_FIELDS, PlanSpace, Value
from autotune.search.question import Question
from engine.plan import Plan
from engine.rule import RuleContext

NUM_SEEDS = 10
"""Best plans whose values make up the neighbourhood."""
NUM_WIDENED = 3
"""Of these, the ones that bring the values next to their own too."""
WHOLE_FIELDS = ("layers_per_stage", "etp", "global_batch_size", "sequence_length")
"""Fields with few values, or whose values in a plan are not those of the space."""
MOST_COMBINATIONS = 3_000_000
"""Larger products are cut down to fewer seeds."""
MOST_ROWS = 8000
"""Rows that are kept for estimates under other figures: the best ones, whether they fit or not."""


@dataclass(frozen=True)
class Neighbourhood:
    """Legal plans with their estimates under one question."""

    question: Question
    columns: PlanColumns
    estimates: EstimateTable
    costs: np.ndarray
    """``[n]`` of the question's first objective, lower is better."""

    def __len__(self) -> int:
        return len(self.costs)

    @property
    def fits(self) -> np.ndarray:
        """``[n]`` bools."""
        fits: np.ndarray = self.estimates.memory_bytes_high <= self.question.memory_limit_bytes
        return fits

    def best_row(self, which: np.ndarray | None = None) -> int | None:
        """The best plan that fits, of those in ``which`` (``[n]`` bools); None where there is none."""
        allowed = self.fits if which is None else self.fits & which
        if not allowed.any():
            return None
        return int(np.argmin(np.where(allowed, self.costs, np.inf)))

    def closest_row(self) -> int | None:
        """The plan that needs the least memory."""
        return int(np.argmin(self.estimates.memory_bytes_high))

    def plan(self, row: int) -> EstimatedPlan:
        """A row as plain data."""
        question = self.question
        found = plan_at(self.columns, row, question.model.num_layers)
        return describe_estimates(
            question.model, question.cluster, [found], _taken(self.estimates, row), question.memory_limit_bytes
        )[0]

    def best(self) -> EstimatedPlan | None:
        """The best plan that fits."""
        row = self.best_row()
        return None if row is None else self.plan(row)

    def promising(self) -> Neighbourhood:
        """The best rows alone, fitting or not."""
        if len(self) <= MOST_ROWS:
            return self
        rows = np.argpartition(self.costs, MOST_ROWS)[:MOST_ROWS]
        best = self.best_row()
        if best is not None and best not in rows:
            fitting = np.flatnonzero(self.fits)
            order = fitting[np.argsort(self.costs[fitting])[: MOST_ROWS // 2]]
            rows = np.union1d(rows[: MOST_ROWS // 2], order)
        return self.take(rows)

    def take(self, rows: np.ndarray) -> Neighbourhood:
        """Some rows."""
        return Neighbourhood(self.question, self.columns.take(rows), _taken(self.estimates, rows), self.costs[rows])

    def under(self, question: Question) -> Neighbourhood:
        """The same plans with other machines' figures or another limit."""
        if (
            question.cluster.figures == self.question.cluster.figures
            and question.cluster.links == self.question.cluster.links
        ):
            return replace(self, question=question)
        return estimated(question, self.columns)


def explore(question: Question, space: PlanSpace, *, must_fit: bool = False) -> Neighbourhood | None:
    """Estimate every legal plan of a small space; None where there is none, or with ``must_fit`` none that fits."""
    expander = Expander(space, RuleContext(question.model, question.cluster.num_devices))
    parts = [columns for part in expander.parts() for columns in _plans(expander.blocks(part))]
    if not parts:
        return None
    columns = _joined(parts)
    if must_fit:  # memory alone is told much sooner
        estimator = Estimator.of(question.model, question.cluster, software=question.software)
        if estimator.memory(columns).high_bytes.min() > question.memory_limit_bytes:
            return None
    return estimated(question, columns)


def estimated(question: Question, columns: PlanColumns) -> Neighbourhood:
    """Plans under a question."""
    table = estimate(question.model, question.cluster, columns, software=question.software)
    costs = objective_costs(question.objectives[:1], table.step_seconds, table.memory_bytes, columns, question.prices)
    return Neighbourhood(question, columns, table, costs[:, 0])


def space_around(question: Question, plans: Sequence[Plan], free: Collection[str] = ()) -> PlanSpace:
    """The part of a question's space around some plans, the best first; fields of ``free`` keep all their values."""
    for num_seeds in range(min(NUM_SEEDS, len(plans)), 0, -1):
        space = _around(question.space, plans[:num_seeds], {*WHOLE_FIELDS, *free})
        if space.num_combinations <= MOST_COMBINATIONS:
            break
    return space


def _around(space: PlanSpace, plans: Sequence[Plan], whole: Collection[str]) -> PlanSpace:
    values: dict[str, tuple[Value, ...]] = {}
    for name in (*DEGREES, *OUTER_FIELDS, *INNER_FIELDS):
        if name not in space.values or name in whole:
            continue
        allowed = space.values[name]
        seen = {getattr(plan, name) for plan in plans}
        near = set(allowed)
        if _is_ordered(name):
            near = {allowed[i] for plan in plans[:NUM_WIDENED] for i in _next_to(allowed, getattr(plan, name))}
        elif name == "rank_order":
            near = set()  # three orders would triple the table for next to nothing
        kept = tuple(value for value in allowed if value in seen | near)
        values[name] = kept or allowed
    return space.changed(**values)


def _is_ordered(name: str) -> bool:
    """Whether values of a field have neighbours; of the others (words, switches), all are near."""
    return name in DEGREES or name in ("virtual_stages", "ep", "micro_batch_size", "zero_stage")


def _next_to(allowed: Sequence[Value], value: Value) -> list[int]:
    if value not in allowed:
        return list(range(len(allowed)))
    at = allowed.index(value)
    return [i for i in (at - 1, at, at + 1) if 0 <= i < len(allowed)]


def _plans(blocks: Blocks) -> Iterator[PlanColumns]:
    """All the plans of some blocks, those with the same inner rows together."""
    for kind, rows in enumerate(blocks.classes):
        members = np.flatnonzero(blocks.kind == kind)
        if len(members):
            yield blocks.plans(members, rows).plans


def _joined(parts: Sequence[PlanColumns]) -> PlanColumns:
    lengths = [len(part) for part in parts]

    def join(name: str) -> Any:
        columns = zip((getattr(part, name) for part in parts), lengths, strict=True)
        whole = [np.broadcast_to(column, (size,)) for column, size in columns]
        return np.concatenate(whole)

    return PlanColumns(**{field.name: join(field.name) for field in fields(PlanColumns)})


def _taken(table: EstimateTable, rows: np.ndarray | int) -> EstimateTable:
    """Some rows of a table of estimates."""
    at = np.atleast_1d(np.asarray(rows))

    def take(values: Any) -> Any:
        if isinstance(values, Mapping):
            return {part: take(inner) for part, inner in values.items()}
        return np.asarray(values)[at] if np.ndim(values) else np.broadcast_to(values, at.shape)

    values = {field.name: getattr(table, field.name) for field in fields(table)}
    return EstimateTable(**{name: value if name == "method" else take(value) for name, value in values.items()})
