"""Why the best plan is best, what binds it, and what would help: from estimates of the plans around it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autotune.cost.columns import WORD_FIELDS, words_of
from autotune.search.answer import Change, Choice, Share
from autotune.search.changes import Variant, variants
from autotune.search.estimated import EstimatedPlan
from autotune.search.neighbourhood import Neighbourhood, explore, space_around
from autotune.search.plan_objectives import SPEED_OBJECTIVES
from autotune.search.words import RESOURCES
from engine.plan import Plan

LEAST_GAIN_RATIO = 0.005
"""Changes that gain less are not told."""
EXPLAINED_CHOICES = (
    "tp", "pp", "cp", "ep", "dp_replicate", "virtual_stages", "micro_batch_size", "zero_stage", "recompute", "schedule",
    "sequence_parallel",
)  # fmt: skip
"""Fields whose values are compared one by one."""


def shares(plan: EstimatedPlan) -> tuple[Share, ...]:
    """What a plan's step is spent on by resource, most first."""
    whole = plan.step_seconds.value
    found = []
    for resource, parts in RESOURCES.items():
        seconds = sum(plan.time[part] for part in parts)
        hidden = sum(plan.hidden.get(part, 0.0) for part in parts)
        found.append(Share(resource, seconds, seconds / whole, hidden))
    return tuple(sorted(found, key=lambda share: -share.seconds))


def memory_binds(around: Neighbourhood) -> float | None:
    """Tokens per second more if devices had any memory; None where that gains nothing to speak of."""
    best = around.best_row()
    if best is None:
        return None
    gain = float(around.costs[best] / around.costs.min()) - 1
    return gain if gain >= LEAST_GAIN_RATIO else None


def what_would_help(around: Neighbourhood, plans: Sequence[Plan]) -> tuple[Change, ...]:
    """Single changes of machines, batch or pins with the best plan under each, most gain first.

    Args:
        around: The plans around the best ones.
        plans: The best plans, best first.
    """
    row = around.best_row()
    if row is None:
        return ()
    promising = around.promising()
    changes = (
        measured(variant, _under(variant, around, promising, plans), around) for variant in variants(around.question)
    )
    useful = (change for change in changes if change is not None and change.gain_ratio >= LEAST_GAIN_RATIO)
    return tuple(sorted(useful, key=lambda change: -change.gain_ratio))


def _under(
    variant: Variant, around: Neighbourhood, promising: Neighbourhood, plans: Sequence[Plan]
) -> Neighbourhood | None:
    """The plans to look at under a change."""
    if variant.kind == "figures":
        return promising.under(variant.question)
    if variant.kind == "memory":
        return around.under(variant.question)
    return explore(variant.question, space_around(variant.question, plans, variant.freed))


def measured(variant: Variant, found: Neighbourhood | None, before: Neighbourhood | None) -> Change | None:
    """A change with the best plan under it, beside the best one before; None where none fits."""
    row = found.best_row() if found is not None else None
    if found is None or row is None:
        return None
    plan, words = found.plan(row), variant.words
    best_row = before.best_row() if before is not None else None
    if before is None or best_row is None:
        return Change(variant.id, words, plan, 0.0, False)
    best = before.plan(best_row)
    gain = float(before.costs[best_row] / found.costs[row]) - 1
    ranks_speed = found.question.objectives[0] in SPEED_OBJECTIVES
    if ranks_speed and plan.plan.world_size != best.plan.world_size:
        each = (1 + gain) * best.plan.world_size / plan.plan.world_size - 1
        words += f": {each * 100:+.1f}% a device".replace("-", "−")
    return Change(variant.id, words, plan, gain, _same_choices(plan.plan, best.plan))


def _same_choices(one: Plan, other: Plan) -> bool:
    """Whether two plans are the same but for the number of data-parallel ranks."""
    return one.changed(dp_shard=1, dp_replicate=1) == other.changed(dp_shard=1, dp_replicate=1)


def choices(around: Neighbourhood) -> tuple[Choice, ...]:
    """For each field that leaves one, the best plan with each of its values."""
    row = around.best_row()
    if row is None:
        return ()
    found: list[Choice] = []
    for name in EXPLAINED_CHOICES:
        column = np.broadcast_to(getattr(around.columns, name), (len(around),))
        values = np.unique(column)
        if len(values) < 2:
            continue
        for value in values:
            best = around.best_row(column == value)
            plan = None if best is None else around.plan(best)
            loss = 0.0 if best is None else float(around.costs[best] / around.costs[row]) - 1
            found.append(Choice(name, _word(name, int(value)), plan, loss))
    return tuple(found)


def _word(name: str, value: int) -> int | str | bool:
    if name in WORD_FIELDS:
        return words_of(name)[value]
    return bool(value) if name == "sequence_parallel" else value
