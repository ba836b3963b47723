"""A plan that the user brings, held against the best."""

from __future__ import annotations

from typing import NamedTuple

from autotune.cost.columns import encode
from autotune.cost.estimate import estimate
from autotune.search.answer import Rival
from autotune.search.compare import compare
from autotune.search.estimated import EstimatedPlan, describe_estimates
from autotune.search.plan_space import NOT_PRICED
from autotune.search.question import Question
from engine.plan import Plan, plan_table
from engine.rule import RuleContext
from engine.rules import explain_row, violations


class RivalPlan(NamedTuple):
    """A plan from a file."""

    source: str
    plan: Plan
    global_batch_size: int | None
    """Of the run file it comes from; None for a plan file."""
    left_out: frozenset[str] = frozenset()
    """Fields that a plan file does not set. Precision is then the question's, others their default."""


def judge(question: Question, rival: RivalPlan, best: EstimatedPlan | None) -> Rival:
    """Estimate a rival at the question's batch, and compare it with the best plan.

    Args:
        question: The question that ``best`` answers.
        rival: The plan.
        best: The best plan; None where nothing fits.

    Raises:
        UserError: The cost model has no figures for its precision on these machines.
    """
    batch = question.global_batch_size
    plan, notes = _completed(question, rival)
    row = (plan, batch, question.sequence_length)
    table = plan_table([row])
    context = RuleContext(question.model, question.cluster.num_devices)
    broken = [rule for rule, flags in violations(context, table, question.space.scopes).items() if flags[0]]
    messages = []
    for rule in broken:
        message, hint = explain_row(rule, context, table, 0)
        messages.append(f"{message} [{rule}]; {hint}")
    if rival.global_batch_size not in (None, batch):
        notes.append(f"its run has a batch of {rival.global_batch_size} sequences; it is estimated with {batch}")
    if not broken and plan.world_size < question.cluster.num_devices:
        notes.append(f"it uses {plan.world_size} of {question.cluster.num_devices} devices")
    ignored = [name for name in NOT_PRICED if getattr(plan, name) != Plan.model_fields[name].default]
    if ignored:
        notes.append(f"no estimate depends on its {' and '.join(ignored)}")
    if broken:
        return Rival(rival.source, plan, None, None, tuple(messages), tuple(notes))
    columns = encode(table, question.model.num_layers)
    estimates = estimate(question.model, question.cluster, columns, software=question.software)
    limit = question.memory_limit_bytes
    found = describe_estimates(question.model, question.cluster, [row], estimates, limit)[0]
    return Rival(rival.source, plan, found, None if best is None else compare(best, found), (), tuple(notes))


def _completed(question: Question, rival: RivalPlan) -> tuple[Plan, list[str]]:
    """The plan with what its file leaves out, and what was said about it."""
    plan = rival.plan
    if "precision" in rival.left_out:
        plan = plan.changed(precision=question.space.values["precision"][0])
    matters = {
        "precision": True,
        "micro_batch_size": True,
        "recompute": True,
        "zero_stage": plan.dp_shard * plan.cp > 1,
        "sequence_parallel": plan.tp > 1,
        "overlap_tp": plan.tp > 1,
        "schedule": plan.pp > 1,
        "virtual_stages": plan.pp > 1,
    }
    assumed = [name for name, does in matters.items() if does and name in rival.left_out]
    data = plan.to_data()
    told = ", ".join(f"{name}={str(data[name]).lower()}" for name in assumed)
    return plan, [f"not in its file, so assumed: {told}"] if assumed else []
