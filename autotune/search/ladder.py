"""The ladder: from data parallelism alone to the best plan, one freedom of the search after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from autotune.search.answer import Rung
from autotune.search.estimated import EstimatedPlan
from autotune.search.plan_space import PlanSpace, Value
from autotune.search.question import Question

BASE: dict[str, tuple[Value, ...]] = {
    "tp": (1,),
    "pp": (1,),
    "cp": (1,),
    "cp_attention": ("ring",),
    "ep": (1,),
    "etp": (1,),
    "dp_replicate": (1,),
    "zero_stage": (0,),
    "schedule": ("1f1b",),
    "virtual_stages": (1,),
    "layers_per_stage": ("even",),
    "micro_batch_size": (1,),
    "recompute": ("none",),
    "sequence_parallel": (False,),
    "overlap_dp": (False,),
    "overlap_tp": (False,),
    "overlap_pp": (False,),
    "rank_order": ("tp-cp-dp-pp",),
}
"""Data parallelism alone, without overlap: what a first script does."""
ENGINE_BASE: dict[str, tuple[Value, ...]] = BASE | {"overlap_pp": (True,)}
"""The least that this project's engine does: its pipelines overlap."""


@dataclass(frozen=True)
class Step:
    """A freedom that a rung adds."""

    id: str
    words: str
    fields: tuple[str, ...]


BestOf = Callable[[Question], tuple[EstimatedPlan | None, EstimatedPlan | None, str]]
"""The best plan of a question; where none fits, the one that needs the least memory; where none is legal, the rule that
removed the most."""

STEPS = (
    Step("data_parallel", "data parallel only", ()),
    Step("zero", "+ ZeRO stages", ("zero_stage", "dp_replicate")),
    Step("overlap_dp", "+ its overlap", ("overlap_dp",)),
    Step("tensor_parallel", "+ tensor parallel", ("tp", "etp")),
    Step("pipeline", "+ pipeline, 1F1B", ("pp", "overlap_pp")),
    Step("expert_parallel", "+ expert parallel", ("ep",)),
    Step("context_parallel", "+ context parallel", ("cp", "cp_attention")),
    Step("schedule", "+ schedules, virtual stages", ("schedule", "virtual_stages", "layers_per_stage")),
    Step("recompute", "+ recompute", ("recompute", "recompute_period")),
    Step("micro_batch", "+ micro-batch", ("micro_batch_size",)),
    Step("sequence_parallel", "+ sequence parallel", ("sequence_parallel",)),
    Step("overlap_tp", "+ tensor overlap", ("overlap_tp",)),
    Step("rank_order", "+ rank order", ("rank_order",)),
    Step("fewer_devices", "+ fewer devices", ("devices",)),
)
"""The rungs in the order in which a team usually comes by them; each rung's gain depends on what came before it."""


def climb(question: Question, best: EstimatedPlan | None, best_of: BestOf) -> tuple[Rung, ...]:
    """The ladder of a question.

    Args:
        question: The question; its pins hold on every rung.
        best: Its best plan, which the last rung leads to; None where none fits.
        best_of: Searches for a rung.
    """
    base = ENGINE_BASE if "engine" in question.space.scopes else BASE
    rungs: list[Rung] = []
    free: set[str] = set()
    last: EstimatedPlan | None = None
    for step in STEPS:
        if step.fields and not any(_is_gained(question.space, base, name) for name in step.fields):
            continue  # the space leaves no choice here
        free |= set(step.fields)
        space = _restricted(question.space, base, free)
        if best is not None and space == question.space:
            found: EstimatedPlan | None = best
            closest: EstimatedPlan | None = None
            rule = ""
        else:
            found, closest, rule = best_of(replace(question, space=space))
        if found is not None:
            ranking = question.objectives[0]
            gain = last.cost(ranking) / found.cost(ranking) - 1 if last is not None else None
            rungs.append(Rung(step.id, step.words, found, gain, ""))
            last = found
        elif closest is not None:
            rungs.append(Rung(step.id, step.words, closest, None, _excess_words(closest)))
        else:
            rungs.append(Rung(step.id, step.words, None, None, f"no legal plan ({rule})"))
    return tuple(rungs)


def _excess_words(plan: EstimatedPlan) -> str:
    times = plan.memory_bytes.value / plan.memory_limit_bytes
    return f"out of memory, {times:.2g} times what there is" if times > 1 else "out of memory with its margin"


def _held(space: PlanSpace, base: Mapping[str, tuple[Value, ...]], name: str) -> tuple[Value, ...] | None:
    """The values of a field before its freedom is gained: the base's, where the user did not pin others."""
    if name in space.pinned or name not in space.values:
        return space.values.get(name)
    return base.get(name, space.values[name])


def _is_gained(space: PlanSpace, base: Mapping[str, tuple[Value, ...]], name: str) -> bool:
    """Whether a freedom leaves more of the space."""
    if name == "devices":
        return len(space.device_counts) > 1 and name not in space.pinned
    return space.values.get(name) != _held(space, base, name)


def _restricted(space: PlanSpace, base: Mapping[str, tuple[Value, ...]], free: set[str]) -> PlanSpace:
    """What a rung may choose from. Before it may leave devices idle, all are used."""
    held = {name: _held(space, base, name) for name in base if name not in free and name in space.values}
    if "devices" not in free and _is_gained(space, base, "devices"):
        held["device_counts"] = (max(space.device_counts),)
    return space.changed(**{name: values for name, values in held.items() if values is not None})
