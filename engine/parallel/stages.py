"""Which pipeline stages a rank holds."""

from __future__ import annotations

from engine.plan import Plan

V_SHAPED = ("zbv", "dualpipev")
"""Schedules whose micro-batches go down the ranks and come back up: the first rank holds the last stage too."""


def rank_stages(plan: Plan, pp_rank: int) -> tuple[int, ...]:
    """Stages of a pipeline rank, ascending: one in each round over the ranks, every second round backwards where the
    schedule is V-shaped."""
    rounds = range(plan.virtual_stages)
    back = plan.pp - 1 - pp_rank if plan.schedule in V_SHAPED else pp_rank
    return tuple(number * plan.pp + (back if number % 2 else pp_rank) for number in rounds)


def stage_rank(plan: Plan, stage: int) -> int:
    """The pipeline rank that holds a stage."""
    number, place = divmod(stage, plan.pp)
    return plan.pp - 1 - place if number % 2 and plan.schedule in V_SHAPED else place
