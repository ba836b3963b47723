"""The legality rules of a plan, each with an id and a scope, as code over whole tables of plans.

A rule of scope ``universal`` holds for every training stack; one of scope ``engine`` says what this engine does not
build. A search filters tables with ``violations``; a run is checked with ``check_run``, a table of one row. In the
rules, ``c`` is the context, ``t`` the table and ``r`` one row of it, each with the columns of ``_with_derived``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import SimpleNamespace

import numpy as np

from engine.config import RunConfig
from engine.errors import RuleError
from engine.plan import Plan, PlanTable, plan_table
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


def fields_read(rule: Rule, context: RuleContext) -> frozenset[str]:
    """The fields of a plan and its batch that a rule looks at for this model; empty where it can't be broken by a plan,
    or is broken by all."""
    table = _Recorder(_with_derived(plan_table([(Plan(), 1, 1)])))
    rule.violated(context, table)
    return frozenset(field for name in table.read for field in (_DERIVED[name][0] if name in _DERIVED else (name,)))


def broken(rule: Rule, context: RuleContext, table: PlanTable, num_rows: int) -> np.ndarray:
    """Which of ``num_rows`` rows break one rule: ``[n]`` bools. The table needs the rule's ``fields_read`` alone."""
    flags = rule.violated(context, _with_derived(table))
    return np.broadcast_to(np.asarray(flags, bool), (num_rows,))


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


_DERIVED: dict[str, tuple[tuple[str, ...], Callable[[PlanTable], np.ndarray]]] = {
    "dp": (("dp_replicate", "dp_shard"), lambda t: t["dp_replicate"] * t["dp_shard"]),
    "world_size": (
        ("tp", "pp", "cp", "dp_replicate", "dp_shard"),
        lambda t: t["tp"] * t["pp"] * t["cp"] * t["dp"],
    ),
    "num_stages": (("pp", "virtual_stages"), lambda t: t["pp"] * t["virtual_stages"]),
    "batch_unit": (
        ("dp_replicate", "dp_shard", "micro_batch_size"),
        lambda t: t["dp"] * t["micro_batch_size"],
    ),
    "num_micro_batches": (
        ("dp_replicate", "dp_shard", "micro_batch_size", "global_batch_size"),
        lambda t: t["global_batch_size"] // t["batch_unit"],
    ),
}
"""What several rules compute from a table: name -> the fields it is made of, and how."""


def _with_derived(table: PlanTable) -> dict[str, np.ndarray]:
    """The table with what can be derived from its columns: dp, the world, the pipeline's stages and micro-batches."""
    columns = dict(table)
    for name, (fields, formula) in _DERIVED.items():
        if all(field in table for field in fields):
            columns[name] = formula(columns)
    return columns


class _Recorder(dict[str, np.ndarray]):
    """A table that remembers which of its columns were read."""

    def __init__(self, table: PlanTable) -> None:
        super().__init__(table)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> np.ndarray:
        self.read.add(name)
        return super().__getitem__(name)
