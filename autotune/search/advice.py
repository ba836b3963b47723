"""Why the best plan is best, what binds it, and what would help: from estimates of the plans around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autotune.cost.columns import WORD_FIELDS, words_of
from autotune.search.answer import Change, Choice, Share
from autotune.search.changes import Variant, variants
from autotune.search.estimated import EstimatedPlan
from autotune.search.neighbourhood import Neighbourhood, explore, space_around
from autotune.search.plan_objectives import SPEED_OBJECTIVES
from autotune.search.plan_space import PlanSpace
from autotune.search.question import Question
from autotune.search.words import RESOURCES
from engine.plan import Plan

MOST_FURTHER = 20_000
"""Combinations that are looked at for the values of a field that plans near the best don't have."""
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


def choices(around: Neighbourhood, explored: PlanSpace, plans: Sequence[Plan]) -> tuple[Choice, ...]:
    """For each field that leaves one, the best plan with each of its values.

    Args:
        around: The plans looked at.
        explored: The space of them. Where it is part of the question's space, losses are upper bounds: a plan that
            was not looked at may be better.
        plans: The best plans, best first.
    """
    row, space = around.best_row(), around.question.space
    if row is None:
        return ()
    is_exact = explored.num_combinations == space.num_combinations
    found: list[Choice] = []
    for name in EXPLAINED_CHOICES:
        seen = _by_value(name, around, around.costs[row], is_exact)
        others = np.setdiff1d(space.codes[name], explored.codes[name])
        further = _further_around(around.question, name, others, plans) if len(others) else None
        seen += _by_value(name, further, around.costs[row], is_exact) if further else []
        if len(seen) > 1:
            told = {choice.value for choice in seen}
            words = [_word(name, int(code)) for code in others]
            seen += [Choice(name, word, None, 0.0, False, False) for word in words if word not in told]
            found += sorted(seen, key=lambda choice: (not choice.is_looked_at, space.values[name].index(choice.value)))
    return tuple(found)


def _by_value(name: str, looked_at: Neighbourhood, least_cost: float, is_exact: bool) -> list[Choice]:
    """The best plan with each value of a field."""
    column = np.broadcast_to(getattr(looked_at.columns, name), (len(looked_at),))
    found = []
    for code in np.unique(column):
        row, word = looked_at.best_row(column == code), _word(name, int(code))
        if row is None:
            found.append(Choice(name, word, None, 0.0, is_exact=is_exact))
        else:
            loss = float(looked_at.costs[row] / least_cost) - 1
            found.append(Choice(name, word, looked_at.plan(row), loss, is_exact=is_exact or loss <= 0))
    return found


def _further_around(question: Question, name: str, codes: np.ndarray, plans: Sequence[Plan]) -> Neighbourhood | None:
    """Plans around the best ones but for a field that has other values; None where none is legal."""
    values = [value for value, code in zip(question.space.values[name], question.space.codes[name], strict=True)
              if code in codes]  # fmt: skip
    other = replace(question, space=question.space.changed(**{name: values}))
    return explore(other, space_around(other, plans, most=MOST_FURTHER)) if len(other.space.degrees) else None


def _word(name: str, value: int) -> int | str | bool:
    if name in WORD_FIELDS:
        return words_of(name)[value]
    return bool(value) if name == "sequence_parallel" else value
