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

WIDTHS = (
    (10, 3, True), (10, 1, True), (10, 1, False), (5, 1, False), (2, 1, False), (1, 1, False), (3, 0, False),
    (1, 0, False),
)  # fmt: skip
"""How wide a neighbourhood is, the widest first: best plans whose values make it up; of these, the ones that bring the
values next to their own too; and whether small choices take all their values."""
BATCH_FIELDS = ("global_batch_size", "sequence_length")
SMALL_CHOICES = (
    "layers_per_stage", "etp", "sequence_parallel", "vocab_parallel", "recompute_period", "overlap_dp", "overlap_tp",
    "overlap_pp",
)  # fmt: skip
"""Fields that change little."""
ORDERED = (*DEGREES, "virtual_stages", "ep", "micro_batch_size", "zero_stage")
"""Fields whose values have neighbours; of the others, all are near."""
MOST_COMBINATIONS = 400_000
"""The widest neighbourhood with no more combinations is taken."""
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


def space_around(
    question: Question, plans: Sequence[Plan], free: Collection[str] = (), most: int = MOST_COMBINATIONS
) -> PlanSpace:
    """The part of a question's space around some plans, the best first; fields of ``free`` keep all their values. A
    small space is taken whole."""
    if question.space.num_combinations <= most:
        return question.space
    for num_seeds, num_widened, is_wide in WIDTHS:
        space = _around(question.space, plans[:num_seeds], num_widened, () if is_wide else SMALL_CHOICES, free)
        if space.num_combinations <= most:
            break
    return space


def _around(
    space: PlanSpace, plans: Sequence[Plan], num_widened: int, closed: Collection[str], free: Collection[str]
) -> PlanSpace:
    values: dict[str, tuple[Value, ...]] = {}
    for name in (*DEGREES, *OUTER_FIELDS, *INNER_FIELDS):
        if name not in space.values or name in (*BATCH_FIELDS, *free):
            continue
        allowed = space.values[name]
        seen = {_value_of(plan, name) for plan in plans}
        if name in ORDERED:
            near = {allowed[i] for plan in plans[:num_widened] for i in _next_to(allowed, _value_of(plan, name))}
        else:  # three orders of the ranks would triple the table for next to nothing
            near = set() if name in (*closed, "rank_order") else set(allowed)
        values[name] = tuple(value for value in allowed if value in seen | near) or allowed
    return space.changed(**values)


def _value_of(plan: Plan, name: str) -> Value:
    """A field of a plan as the space writes it."""
    if name == "layers_per_stage":
        return "even" if plan.layers_per_stage is None else "light_ends"
    if name == "etp":
        return 1 if plan.etp == 1 else "tp"
    value: Value = getattr(plan, name)
    return value


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
