"""From a question to its answer: search, explanation, what would help."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autotune.cost.replayed import replay_rows
from autotune.cost.software import software_figures
from autotune.search.advice import choices, memory_binds, shares, what_would_help
from autotune.search.answer import Answer, Counts
from autotune.search.compare import compare
from autotune.search.estimated import EstimatedPlan, describe_estimates
from autotune.search.exact import PlanRows, Progress, SearchResult, search
from autotune.search.ladder import climb
from autotune.search.misfit import explain_misfit, refuse_empty_space
from autotune.search.neighbourhood import explore, space_around
from autotune.search.plan_objectives import OBJECTIVES, SPEED_OBJECTIVES, PlanObjective
from autotune.search.question import Question
from autotune.search.rival import RivalPlan, judge
from autotune.search.words import value_words
from engine.errors import UserError
from engine.plan import Plan, plan_table

DISTINCT_FIELDS = ("tp", "pp", "cp", "ep", "etp")
"""The plans of an answer differ in one of these: near-twins tell nothing new."""

ALIKE_FIELDS = ("tp", "pp", "ep", "etp")
"""Plans that differ in none of these and are tied are told as one: context for data parallelism, and the like."""
FOUND_FOR_ONE_SHOWN = 3
"""Plans that are looked for, for each that is shown: the others are like one of those."""

NUM_SEEDS = 10
"""Best plans around which it is looked for what would help."""
SMALL_SPACE = 500_000
"""Combinations up to which estimating all plans takes less time than finding out which of them need none."""

VALIDATED_SCHEDULES = ("1f1b", "interleaved_1f1b")
"""Schedules of the published runs that estimates are held against."""

ROUGH_FIGURES = "figures of a CPU are rough until 'autotune profile' has measured it; give its file to --cluster"
"""Said of plans for CPU devices of the catalogue."""


def solve(
    question: Question,
    *,
    top: int = 10,
    ladder: bool = False,
    rival: RivalPlan | None = None,
    replay: bool = False,
    advise: bool = True,
    max_seconds: float | None = None,
    progress: Progress | None = None,
) -> Answer:
    """Answer a question.

    Args:
        question: What is asked.
        top: Plans of the answer.
        ladder: Whether to climb from data parallelism alone to the best plan.
        rival: A plan to hold against the best.
        replay: Whether to replay the pipeline schedules of the answer's plans.
        advise: Whether to say what would help and what each choice is worth.
        max_seconds: The search ends after about so long, with a bound on what it may have missed.
        progress: Told the share of the search that is done.

    Raises:
        UserError: No plan is legal, with the rule that is in the way and its numbers.
    """
    started = time.perf_counter()
    result = look(question, max(FOUND_FOR_ONE_SHOWN * top, NUM_SEEDS), max_seconds, progress)
    counts = _counts(result, question.objectives[0])
    if not result.fits and not len(result.closest):
        if counts.gap_ratio == math.inf:
            raise UserError("the search ended before it found a plan", hint="give it more --time, or pin some choices")
        refuse_empty_space(question, result.counts)
    found = ranked_plans(question, result)
    is_front = len(question.objectives) > 1
    num_alike: tuple[int, ...] = ()
    if is_front:
        plans = spread(found, top, question.objectives)
    elif question.objectives[0] in SPEED_OBJECTIVES:
        plans, num_alike = grouped(found, top)
    else:
        plans = found[:top]
    notes = (*question.notes, *(schedule_notes(question, plans[0].plan) if plans else ()))
    if question.cluster.is_rough:
        notes = (*notes, ROUGH_FIGURES)
    if is_front and len(found) > top:
        told = "the best by each objective, the knee, and some evenly between"
        notes = (*notes, f"the front has {len(found)} plans, {top} are shown (--top): {told}")
    answer = Answer(
        question=question,
        counts=counts,
        plans=plans,
        comparisons=tuple(compare(plans[0], plan) for plan in plans),
        num_alike=num_alike or (0,) * len(plans),
        shares=shares(plans[0]) if plans else (),
        notes=notes,
    )
    if not plans:
        misfit = explain_misfit(question, described(question, result.closest))
        answer = replace(answer, misfit=misfit)
    elif advise:
        seeds = [plan.plan for plan in found[:NUM_SEEDS]]
        nearby = space_around(question, seeds)
        around = explore(question, nearby)
        assert around is not None, "the best plan is in its own neighbourhood"
        answer = replace(
            answer,
            memory_binds_ratio=memory_binds(around),
            changes=what_would_help(around, seeds),
            choices=choices(around, nearby, seeds),
        )
    if ladder:
        answer = replace(answer, ladder=climb(question, plans[0] if plans else None, best_of))
    if rival is not None:
        answer = replace(answer, rival=judge(question, rival, plans[0] if plans else None))
    if replay:
        answer = replace(answer, replays=_replayed(question, plans))
    seconds = time.perf_counter() - started
    return replace(answer, counts=replace(answer.counts, seconds=seconds))


def schedule_notes(question: Question, plan: Plan) -> Iterator[str]:
    """What must be known of a plan's pipeline schedule: that its stack doesn't run it, that nothing measured it."""
    if plan.pp == 1:
        return
    words, stack = value_words(plan.schedule), software_figures(question.software)
    if plan.schedule not in stack.schedules:
        runs = "has no pipelines" if not stack.schedules else f"does not run the schedule {words}"
        yield f"the stack {question.software} {runs}; it is in the answer because it is pinned"
    if plan.schedule not in VALIDATED_SCHEDULES:
        yield f"no published run validates estimates of the schedule {words}"


def look(
    question: Question, top: int, max_seconds: float | None = None, progress: Progress | None = None
) -> SearchResult:
    """The exact search for a question's best plans."""
    return search(
        question.model,
        question.cluster,
        question.space,
        objectives=question.objectives,
        max_memory_bytes=question.memory_limit_bytes,
        top=top,
        distinct=DISTINCT_FIELDS,
        software=question.software,
        prices=question.prices,
        prune=question.space.num_combinations > SMALL_SPACE,
        max_seconds=max_seconds,
        progress=progress,
    )


def best_of(question: Question) -> tuple[EstimatedPlan | None, EstimatedPlan | None, str]:
    """The best plan of a question; where none fits, the one that needs the least memory; where none is legal, the rule
    that removed the most."""
    result = look(question, 1)
    plans = described(question, result.top[question.objectives[0]])
    closest = described(question, result.closest)
    removed = result.counts.removed
    rule = max(removed, key=lambda name: removed[name]) if removed else ""
    return (plans[0] if plans else None), (closest[0] if closest else None), rule


def ranked_plans(question: Question, result: SearchResult) -> tuple[EstimatedPlan, ...]:
    """The best plans by the one objective, or the whole front of several, sorted by the first."""
    first = question.objectives[0]
    if len(question.objectives) == 1:
        return described(question, result.top[first])
    plans = described(question, result.front)
    values = result.front.values[:, result.objectives.index(first)]
    order = np.argsort(-values if OBJECTIVES[first].direction == "maximize" else values, kind="stable")
    return tuple(plans[row] for row in order)


def grouped(found: Sequence[EstimatedPlan], number: int) -> tuple[tuple[EstimatedPlan, ...], tuple[int, ...]]:
    """The best plans without those that are tied with a better one and like it, and how many each stands for."""
    leaders: list[EstimatedPlan] = []
    alike: list[int] = []
    for plan in found:
        for i, leader in enumerate(leaders):
            is_like = all(getattr(plan.plan, name) == getattr(leader.plan, name) for name in ALIKE_FIELDS)
            if is_like and compare(leader, plan).is_tie:
                alike[i] += 1
                break
        else:
            if len(leaders) < number:
                leaders.append(plan)
                alike.append(0)
    return tuple(leaders), tuple(alike)


def spread(
    front: Sequence[EstimatedPlan], number: int, objectives: Sequence[PlanObjective]
) -> tuple[EstimatedPlan, ...]:
    """Some plans of a front in its order: the first one, the best by each objective, the knee (the one nearest to
    having the best of all, each objective from its best to its worst counted from 0 to 1), and evenly between."""
    if len(front) <= number:
        return tuple(front)
    costs = np.array([[plan.cost(name) for name in objectives] for plan in front])
    width = np.ptp(costs, axis=0)
    knee = np.linalg.norm((costs - costs.min(axis=0)) / np.where(width > 0, width, 1), axis=1).argmin()
    even = np.linspace(0, len(front) - 1, number).round().astype(int)
    wanted = [0, *costs.argmin(axis=0)[1:], knee]
    # Of even steps those are left out that lie next to a plan taken already.
    far = sorted(even, key=lambda at: -min(abs(at - other) for other in wanted))
    rows = list(dict.fromkeys(int(at) for at in (*wanted, *far)))[:number]
    return tuple(front[row] for row in sorted(rows))


def described(question: Question, rows: PlanRows) -> tuple[EstimatedPlan, ...]:
    """Rows of a search as plain data."""
    batches = zip(rows.plans, rows.global_batch_sizes, rows.sequence_lengths, strict=True)
    limit = question.memory_limit_bytes
    return tuple(describe_estimates(question.model, question.cluster, batches, rows.estimates, limit))


def _replayed(question: Question, plans: Sequence[EstimatedPlan]) -> tuple[EstimatedPlan | None, ...]:
    """The plans again, each pipeline by its schedule's actions; None for a plan without a pipeline."""
    rows = [(plan.plan, plan.global_batch_size, plan.sequence_length) for plan in plans]
    table = replay_rows(question.model, question.cluster, plan_table(rows), software=question.software)
    again = describe_estimates(question.model, question.cluster, rows, table, question.memory_limit_bytes)
    return tuple(plan if plan.plan.pp > 1 else None for plan in again)


def _counts(result: SearchResult, first: PlanObjective) -> Counts:
    counts = result.counts
    return Counts(
        num_combinations=counts.combinations,
        num_redundant=counts.redundant,
        removed=counts.removed,
        num_not_fitting=counts.not_fitting,
        num_fitting=counts.legal - counts.not_fitting,
        num_estimated=counts.evaluated,
        gap_ratio=result.gaps.get(first, 0.0),
        seconds=0.0,
    )
