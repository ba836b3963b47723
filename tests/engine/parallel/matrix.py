"""The equality matrix: which combinations of axes must train as one process does, and what one process gives.

Axes combine by multiplying degrees and joining settings. A cell is a plan, equal to one process or refused by a rule.
Dense cells train a model with tied embeddings, cells with experts one with the global auxiliary loss; both have a
vocabulary that no degree divides, and valid tokens spread unevenly over sequences. One global batch serves all cells,
so that one process is the reference of all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any

from engine.plan import Plan, plan_table
from engine.rule import RuleContext
from engine.rules import violations
from tests.engine.parallel.cases import LENGTH, MODELS, run_config, train
from tests.engine.parallel.compare import EVERYTHING, Difference, largest_difference
from tests.engine.parallel.launch import Case

TOLERANCE = 1e-10
"""Of the largest reference value."""
GLOBAL_BATCH = 48
"""Sequences: three times the micro-batches that the longest schedule needs, on four data-parallel ranks."""
MAX_WORLD = 8

AXES: dict[str, dict[str, Any]] = {
    "dp2": {"dp_replicate": 2},
    "zero1": {"dp_shard": 2, "zero_stage": 1},
    "zero2": {"dp_shard": 2, "zero_stage": 2},
    "zero3": {"dp_shard": 2, "zero_stage": 3},
    "hybrid": {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 3},
    "tp2": {"tp": 2},
    "tp2+sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "vpp2": {"pp": 2, "virtual_stages": 2},
    "cp2": {"cp": 2},
    "ep2": {"ep": 2},
}
"""The axes by name: degrees and settings of a plan."""
DEGREES = ("dp_replicate", "dp_shard", "tp", "pp", "cp", "ep")
ALTERNATIVES = (("zero1", "zero2", "zero3", "hybrid"), ("tp2", "tp2+sp"), ("pp2", "vpp2"))
"""Axes that set one thing differently, so cannot be combined."""
TRIPLES = (
    ("zero3", "tp2", "pp2"), ("zero3", "tp2+sp", "pp2"), ("zero2", "tp2+sp", "vpp2"), ("zero1", "tp2", "pp2"),
    ("zero1", "tp2+sp", "vpp2"), ("dp2", "tp2+sp", "pp2"), ("dp2", "tp2", "vpp2"), ("zero3", "cp2", "tp2+sp"),
    ("zero2", "cp2", "tp2"), ("zero1", "cp2", "tp2+sp"), ("zero3", "cp2", "pp2"), ("zero1", "cp2", "vpp2"),
    ("cp2", "tp2+sp", "pp2"), ("cp2", "tp2", "vpp2"), ("zero3", "ep2", "tp2+sp"), ("zero1", "ep2", "tp2"),
    ("zero2", "ep2", "pp2"), ("zero3", "ep2", "vpp2"), ("ep2", "tp2+sp", "pp2"), ("ep2", "cp2", "tp2+sp"),
    ("ep2", "cp2", "pp2"), ("zero3", "ep2", "cp2"), ("hybrid", "tp2+sp"), ("hybrid", "ep2"), ("hybrid", "pp2"),
)  # fmt: skip
"""Combinations of three axes on up to eight ranks (hybrid sharding is two by itself)."""
SCHEDULES = {
    "pp2": ("gpipe", "1f1b"),
    "vpp2": ("interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"),
}
LEAST_MICRO_BATCHES = {"dualpipev": 4}
"""A schedule's fewest micro-batches over two pipeline ranks; 2 for the others, 1 without a pipeline."""

SGD: dict[str, Any] = {
    "global_batch_size": GLOBAL_BATCH, "optimizer": "sgd", "beta1": 0.0, "weight_decay": 0.0, "clip_norm": None,
}  # fmt: skip
HYPERPARAMETERS = {
    "matrix-dense": SGD,
    "matrix-moe": SGD | {"router_aux_loss_coefficient": 0.05, "router_z_loss_coefficient": 0.01},
}
"""By model: plain SGD without clipping, since Adam and clipping hide faults of scale."""


@dataclass(frozen=True)
class Cell:
    """One combination of axes, or why it is none."""

    name: str
    """Axes, and what varies within them."""
    axes: tuple[str, ...]
    case: Case | None = None
    """What to run."""
    refused: str = ""
    """Id of the rule that refuses the plan, or the setting that two axes set differently."""

    @property
    def world_size(self) -> int:
        """Ranks the cell needs."""
        assert self.case is not None
        return Plan(**self.case.plan).world_size


def cell(
    axes: tuple[str, ...], schedule: str = "", accumulation: int = 3, recompute: bool = False, **settings: Any
) -> Cell:
    """The cell of some axes.

    Args:
        axes: Names of ``AXES``.
        schedule: Of a pipeline.
        accumulation: Micro-batches a step, in multiples of what the schedule needs at least.
        recompute: Whether every layer is computed again in the backward pass.
        settings: Further fields of the plan; told in the name.
    """
    words = [schedule, f"m{accumulation}", "recompute" if recompute else "", *(f"{k}={v}" for k, v in settings.items())]
    name = " ".join(["*".join(axes), *filter(None, words)])
    for group in ALTERNATIVES:
        if len(set(group) & set(axes)) > 1:
            return Cell("*".join(axes), axes, refused="one setting: " + " or ".join(sorted(set(group) & set(axes))))
    plan: dict[str, Any] = {"zero_stage": 0, "dp_replicate": 1, "dp_shard": 1}
    for axis in axes:
        for field, value in AXES[axis].items():
            plan[field] = plan.get(field, 1) * value if field in DEGREES else value
    plan |= settings
    experts = "ep" in plan
    if experts:  # on ranks that the other axes bring, beside which there is a second rank for each expert
        axis = "dp_shard" if plan["zero_stage"] else "dp_replicate"
        plan[axis] *= 2 if plan.get("tp", 1) * plan.get("cp", 1) < 4 else 1
    if schedule:
        plan["schedule"] = schedule
    if recompute:
        plan["recompute"] = "full"
    dp = plan["dp_replicate"] * plan["dp_shard"]
    num_micro_batches = accumulation * (LEAST_MICRO_BATCHES.get(schedule, 2) if schedule else 1)
    plan["micro_batch_size"] = max(GLOBAL_BATCH // (dp * num_micro_batches), 1)
    model = "matrix-moe" if experts else "matrix-dense"
    case = Case(name, plan, model, hyperparameters=HYPERPARAMETERS[model])
    return Cell(name, axes, case, _refusing_rule(case))


def _refusing_rule(case: Case) -> str:
    """The first rule that refuses the plan; empty for a legal one."""
    table = plan_table([(Plan(**case.plan), GLOBAL_BATCH, LENGTH)])
    found = violations(RuleContext(MODELS[case.model]), table)
    return next((rule for rule, flags in found.items() if flags[0]), "")


def cells() -> list[Cell]:
    """The whole matrix: single axes, pairs with a pipeline under every schedule, accumulation and recompute, other
    pairs, and some triples."""
    found = []
    for axes in [*((axis,) for axis in AXES), *combinations(AXES, 2)]:
        schedules = next((names for axis, names in SCHEDULES.items() if axis in axes), ())
        if len(axes) == 1 or schedules:
            variants = [(s, m, r) for s in schedules or ("",) for m in (1, 3) for r in (False, True)]
            found += [cell(axes, *variant) for variant in variants]
        else:
            found.append(cell(axes))
        if "ep2" in axes and {"tp2", "tp2+sp"} & set(axes):
            found.append(cell(axes, etp=2))
        if "cp2" in axes and not schedules:
            found.append(cell(axes, cp_attention="all_gather"))
    for index, axes in enumerate(TRIPLES):
        schedules = next((names for axis, names in SCHEDULES.items() if axis in axes), ("",))
        found.append(cell(axes, schedules[index % len(schedules)], recompute=bool(index % 2)))
    return list({one.name: one for one in found}.values())


def sample() -> list[Cell]:
    """Cells for the tests: every axis, every schedule, and the combinations that are most often wrong elsewhere."""
    single = [cell((axis,), recompute=axis in ("zero2", "cp2", "ep2")) for axis in AXES if axis not in SCHEDULES]
    schedules = [cell((axis,), name, recompute=True) for axis, names in SCHEDULES.items() for name in names]
    pairs = [
        cell(("zero1", "tp2+sp")),
        cell(("hybrid", "tp2+sp")),
        cell(("dp2", "vpp2"), "interleaved_zero_bubble"),  # gradients of a split backward pass
        cell(("zero1", "vpp2"), "zbv"),
        cell(("zero3", "vpp2"), "dualpipev", recompute=True),
        cell(("zero2", "pp2"), "1f1b"),
        cell(("tp2+sp", "pp2"), "1f1b", recompute=True),
        cell(("tp2+sp", "vpp2"), "zbv"),  # tied embeddings, a split vocabulary
        cell(("cp2", "tp2+sp"), recompute=True),
        cell(("cp2", "zero3"), cp_attention="all_gather"),
        cell(("cp2", "vpp2"), "interleaved_1f1b"),
        cell(("ep2", "zero3"), recompute=True),
        cell(("ep2", "zero1")),
        cell(("ep2", "tp2+sp")),
        cell(("ep2", "tp2"), etp=2),
        cell(("ep2", "cp2")),
        cell(("ep2", "pp2"), "1f1b", recompute=True),
        cell(("ep2", "vpp2"), "zbv"),
    ]
    triples = [
        cell(("zero3", "tp2+sp", "pp2"), "1f1b"),
        cell(("zero2", "ep2", "vpp2"), "interleaved_zero_bubble"),
        cell(("ep2", "tp2+sp", "pp2"), "1f1b"),
        cell(("zero3", "ep2", "cp2"), recompute=True),
    ]
    return [*single, *schedules, *pairs, *triples]


@cache
def reference(model: str) -> dict[str, Any]:
    """What one process gives on whole batches."""
    plan = {"precision": "fp64", "micro_batch_size": GLOBAL_BATCH}
    return train(run_config(model, plan, HYPERPARAMETERS[model]))


def difference(case: Case, given: dict[str, Any]) -> Difference:
    """How far what a cell gave is from one process."""
    return largest_difference(given, reference(case.model), EVERYTHING)
