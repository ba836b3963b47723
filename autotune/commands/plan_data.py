"""The answer of ``autotune plan`` for programs: JSON with stable keys, and rows of plans as CSV."""

from __future__ import annotations

import csv
import io
import math
from typing import Any

from autotune.search.answer import Answer, Change, Choice, Counts, Misfit, Rival, Rung
from autotune.search.compare import Comparison
from autotune.search.estimated import HFU_CONVENTION, MFU_CONVENTION, EstimatedPlan, Figure
from engine.flops import parameter_counts
from engine.plan import Plan

FORMAT = 1
"""Version of the JSON; keys are added within one, never renamed."""

FIGURES = (
    "step_seconds", "tokens_per_second", "memory_bytes", "mfu", "hfu", "dollars_per_billion_tokens",
    "kwh_per_billion_tokens",
)  # fmt: skip
"""Figures of a plan that have columns in the CSV, each with its interval."""
PLAN_FIELDS = tuple(name for name in Plan.model_fields if name not in ("schema_version", "layers_per_stage"))


def answer_data(answer: Answer) -> dict[str, Any]:
    """Everything the planner says, as data."""
    question = answer.question
    counts = parameter_counts(question.model)
    return {
        "format": FORMAT,
        "model": {"name": question.model.name, "parameters": counts.total, "active_parameters": counts.active},
        "cluster": {
            "name": question.cluster.name,
            "device_kind": question.cluster.device_kind,
            "devices_per_node": question.cluster.devices_per_node,
            "num_nodes": question.cluster.num_nodes,
            "num_devices": question.cluster.num_devices,
            "memory_bytes": question.cluster.memory_bytes,
        },
        "sequence_length": question.sequence_length,
        "global_batch_size": question.global_batch_size,
        "batch_tokens": question.batch_tokens,
        "memory_limit_bytes": question.memory_limit_bytes,
        "pins": {name: list(values) for name, values in question.pinned.items()},
        "objectives": list(question.objectives),
        "software": question.software,
        "engine_only": "engine" in question.space.scopes,
        "notes": list(answer.notes),
        "mfu_convention": MFU_CONVENTION,
        "hfu_convention": HFU_CONVENTION,
        "counts": _counts(answer.counts),
        "plans": [
            {"rank": rank, **plan_data(plan), "num_alike": alike, "against_best": _comparison(other)}
            for rank, (plan, other, alike) in enumerate(
                zip(answer.plans, answer.comparisons, answer.num_alike, strict=True), start=1
            )
        ],
        "shares": [vars(share) for share in answer.shares],
        "memory_binds_ratio": answer.memory_binds_ratio,
        "changes": [_change(change) for change in answer.changes],
        "choices": [_choice(choice) for choice in answer.choices],
        "ladder": [_rung(rung) for rung in answer.ladder],
        "replays": [None if plan is None else plan_data(plan) for plan in answer.replays],
        "misfit": None if answer.misfit is None else _misfit(answer.misfit),
        "rival": None if answer.rival is None else _rival(answer.rival),
    }


def plan_data(plan: EstimatedPlan) -> dict[str, Any]:
    """One estimated plan."""
    return {
        "plan": plan.plan.to_data(),
        "num_devices": plan.plan.world_size,
        "num_micro_batches": plan.plan.num_micro_batches(plan.global_batch_size),
        "global_batch_size": plan.global_batch_size,
        "sequence_length": plan.sequence_length,
        "fits": plan.fits,
        "step_seconds": _figure(plan.step_seconds),
        "tokens_per_second": _figure(plan.tokens_per_second),
        "memory_bytes": _figure(plan.memory_bytes),
        "allocated_bytes": plan.allocated_bytes,
        "memory_limit_bytes": plan.memory_limit_bytes,
        "mfu": _figure(plan.mfu),
        "hfu": _figure(plan.hfu),
        "dollars_per_billion_tokens": _figure(plan.dollars_per_billion_tokens),
        "kwh_per_billion_tokens": _figure(plan.kwh_per_billion_tokens),
        "time_seconds": plan.time,
        "hidden_seconds": plan.hidden,
        "memory_parts_bytes": plan.memory,
        "fullest_stage": plan.fullest_stage,
        "method": plan.method,
    }


def plans_csv(answer: Answer) -> str:
    """The ranked plans, one a row: choices, figures with intervals, parts."""
    rows = []
    for rank, plan in enumerate(answer.plans, start=1):
        row: dict[str, Any] = {"rank": rank, "tie": answer.comparisons[rank - 1].is_tie}
        row |= {name: getattr(plan.plan, name) for name in PLAN_FIELDS}
        row["layers_per_stage"] = " ".join(map(str, plan.plan.layers_per_stage or ()))
        row |= {"num_devices": plan.plan.world_size, "global_batch_size": plan.global_batch_size}
        row["sequence_length"] = plan.sequence_length
        for name in FIGURES:
            figure: Figure | None = getattr(plan, name)
            low_value_high = ("", "", "") if figure is None else (figure.value, figure.low, figure.high)
            row |= dict(zip((name, f"{name}_low", f"{name}_high"), low_value_high, strict=True))
        row |= {f"time_{part}_seconds": seconds for part, seconds in plan.time.items()}
        row |= {f"memory_{part}_bytes": size for part, size in plan.memory.items()}
        rows.append(row)
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def _figure(figure: Figure | None) -> dict[str, float] | None:
    return None if figure is None else figure._asdict()


def _counts(counts: Counts) -> dict[str, Any]:
    return {
        "combinations": counts.num_combinations,
        "redundant": counts.num_redundant,
        "removed": dict(counts.removed),
        "not_fitting": counts.num_not_fitting,
        "fitting": counts.num_fitting,
        "estimated": counts.num_estimated,
        "gap_ratio": counts.gap_ratio if math.isfinite(counts.gap_ratio) else None,
        "seconds": counts.seconds,
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "seconds": comparison.seconds,
        "ratio": comparison.ratio,
        "uncertainty_seconds": comparison.uncertainty_seconds,
        "tie": comparison.is_tie,
        "time_seconds": comparison.time,
        "memory_bytes": comparison.memory_bytes,
        "memory_parts_bytes": comparison.memory,
        "choices": {name: list(pair) for name, pair in comparison.choices.items()},
    }


def _change(change: Change) -> dict[str, Any]:
    return {
        "id": change.id,
        "words": change.words,
        "gain_ratio": change.gain_ratio,
        "keeps_plan": change.keeps_plan,
        "best": None if change.plan is None else plan_data(change.plan),
    }


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "name": choice.name,
        "value": choice.value,
        "loss_ratio": choice.loss_ratio if choice.plan is not None else None,
        "looked_at": choice.is_looked_at,
        "exact": choice.is_exact,
        "best": None if choice.plan is None else plan_data(choice.plan),
    }


def _rung(rung: Rung) -> dict[str, Any]:
    return {
        "id": rung.id,
        "words": rung.words,
        "gain_ratio": rung.gain_ratio,
        "reason": rung.reason,
        "best": None if rung.plan is None else plan_data(rung.plan),
    }


def _misfit(misfit: Misfit) -> dict[str, Any]:
    return {
        "closest": plan_data(misfit.closest),
        "excess_bytes": misfit.closest.excess_bytes,
        "largest_part": misfit.largest_part,
        "fixes": [_change(change) for change in misfit.fixes],
        "tried": list(misfit.tried),
    }


def _rival(rival: Rival) -> dict[str, Any]:
    return {
        "source": rival.source,
        "plan": rival.plan.to_data(),
        "estimated": None if rival.estimated is None else plan_data(rival.estimated),
        "against_best": None if rival.comparison is None else _comparison(rival.comparison),
        "broken_rules": list(rival.broken_rules),
        "notes": list(rival.notes),
    }
