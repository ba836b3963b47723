"""The legality rules of a plan, each with an id and a scope, as code over whole tables of plans.

A rule of scope ``universal`` holds for every training stack; one of scope ``engine`` says what this engine does not
build. A search filters tables with ``violations``; a run is checked with ``check_run``, a table of one row. In the
rules, ``c`` is the context, ``t`` the table and ``r`` one row of it, each with the columns of ``_with_derived``.
"""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace

import numpy as np

from engine.config import RunConfig
from engine.errors import RuleError
from engine.plan import PlanTable, plan_table
from engine.rule import Rule, RuleContext, Scope
from engine.rules_engine import ENGINE_RULES
from engine.rules_universal import UNIVERSAL_RULES

RULES: tuple[Rule, ...] = (*UNIVERSAL_RULES, *ENGINE_RULES)
"""Every rule, in the order in which they are told."""

BY_ID = {rule.id: rule for rule in RULES}
"""Rule id -> rule."""


def violations(
    context: RuleContext, table: PlanTable, scopes: Collection[Scope] = ("universal", "engine")
) -> dict[str, np.ndarray]:
    """Which rows break which rule.

    Args:
        context: What the plans are judged against.
        table: ``n`` plans with their batches, as made by ``engine.plan.plan_table``.
        scopes: Rules of these scopes are applied.

    Returns:
        For each rule id ``[n]`` bools, true where the row breaks it, in the order of ``RULES``.
    """
    table = _with_derived(table)
    shape = table["tp"].shape
    rules = (rule for rule in RULES if rule.scope in scopes)
    return {rule.id: np.broadcast_to(np.asarray(rule.violated(context, table), bool), shape) for rule in rules}


def explain_row(rule_id: str, context: RuleContext, table: PlanTable, row: int) -> tuple[str, str]:
    """Message and hint for row ``row`` of a table that breaks the rule."""
    values = {name: column[row : row + 1].tolist()[0] for name, column in _with_derived(table).items()}
    return BY_ID[rule_id].explain(context, SimpleNamespace(**values))


def check_run(config: RunConfig, num_devices: int | None = None) -> None:
    """Refuse a run whose plan breaks a rule.

    Raises:
        RuleError: Every broken rule with its numbers and the nearest legal values; ``rule`` is the first one's id.
    """
    context = RuleContext(config.model, num_devices)
    table = plan_table([(config.plan, config.hyperparameters.global_batch_size, config.workload.sequence_length)])
    broken = [rule_id for rule_id, flags in violations(context, table).items() if flags[0]]
    if broken:
        texts = {rule_id: explain_row(rule_id, context, table, 0) for rule_id in broken}
        raise RuleError(
            broken[0],
            "; ".join(f"{message} [{rule_id}]" for rule_id, (message, _) in texts.items()),
            hint="; ".join(dict.fromkeys(hint for _, hint in texts.values())),
        )


def _with_derived(table: PlanTable) -> dict[str, np.ndarray]:
    """The table with what several rules compute from it: dp, the world, the pipeline's stages and micro-batches."""
    dp = table["dp_replicate"] * table["dp_shard"]
    return {
        **table,
        "dp": dp,
        "world_size": table["tp"] * table["pp"] * table["cp"] * dp,
        "num_stages": table["pp"] * table["virtual_stages"],
        "batch_unit": dp * table["micro_batch_size"],
        "num_micro_batches": table["global_batch_size"] // (dp * table["micro_batch_size"]),
    }
