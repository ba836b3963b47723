"""Plans, their parts and resources in words, short enough for tables and the same everywhere."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from engine.plan import Plan

TIME_NAMES = {
    "matmul": "matrix products",
    "attention": "attention",
    "memory_bound": "memory-bound work",
    "recompute": "recompute",
    "host": "host",
    "tp": "tensor network",
    "cp": "context network",
    "ep": "expert network",
    "pp": "pipeline sends",
    "bubble": "bubble",
    "dp": "data network",
    "optimizer": "optimizer",
    "offload": "offload",
    "straggler": "stragglers",
}
"""Part of the step time (``autotune.cost.estimate.TIME_PARTS``) -> its name in tables and sentences."""

MEMORY_NAMES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "logits": "logits and loss",
    "buffers": "buffers",
    "overhead": "overhead",
}
"""Part of the memory (``MEMORY_PARTS``) -> its name."""

RESOURCES = {
    "compute": ("matmul", "attention", "memory_bound", "recompute", "optimizer"),
    "host": ("host",),
    "tensor network": ("tp",),
    "context network": ("cp",),
    "expert network": ("ep",),
    "data network": ("dp",),
    "bubble": ("bubble", "pp"),
    "offload": ("offload",),
    "stragglers": ("straggler",),
}
"""What can bind -> the parts of the step time that it takes."""

CHOICE_NAMES = {
    "tp": "tensor parallel",
    "pp": "pipeline ranks",
    "dp": "data parallel",
    "dp_replicate": "replicas",
    "dp_shard": "sharded over",
    "cp": "context parallel",
    "ep": "expert parallel",
    "etp": "tensor parallel in experts",
    "schedule": "schedule",
    "virtual_stages": "stages per rank",
    "layers_per_stage": "layers per stage",
    "micro_batch_size": "micro-batch",
    "zero_stage": "ZeRO stage",
    "sequence_parallel": "sequence parallel",
    "vocab_parallel": "vocabulary split",
    "recompute": "recompute",
    "recompute_period": "recompute one layer in",
    "precision": "precision",
    "gradient_compression": "gradient compression",
    "rank_order": "rank order",
    "cp_attention": "keys over context ranks",
    "devices": "devices",
}
"""Field of Plan -> words."""

_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "interleaved 1F1B",
    "interleaved_zero_bubble": "interleaved zero bubble",
    "zbv": "ZBV",
    "dualpipev": "DualPipeV",
}
_KEY_EXCHANGES = {"ring": "ring attention", "all_gather": "keys gathered"}
_RECOMPUTE = {"none": "no recompute", "full": "full recompute", "selective": "selective recompute"}


def choice_words(name: str, values: Sequence[Any]) -> str:
    """``tp 8``, ``micro-batch 1 or 2``."""
    told = " or ".join(value_words(value) for value in values)
    return f"{name if name in ('tp', 'pp', 'dp', 'cp', 'ep', 'etp') else CHOICE_NAMES.get(name, name)} {told}"


def value_words(value: Any) -> str:
    """A value of a field of Plan."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        runs = [(size, len(list(run))) for size, run in itertools.groupby(value)]
        return " ".join(f"{number}×{size}" for size, number in runs)
    return _SCHEDULES.get(value, str(value)) if isinstance(value, str) else f"{value:g}"


def layout_words(plan: Plan) -> str:
    """The parallel degrees, those of 1 left out: ``tp8 pp4x5 dp16``; stages per rank after the x."""
    stages = f"x{plan.virtual_stages}" if plan.virtual_stages > 1 else ""
    degrees = [("tp", plan.tp, ""), ("cp", plan.cp, ""), ("pp", plan.pp, stages), ("dp", plan.dp, "")]
    degrees += [("ep", plan.ep, ""), ("etp", plan.etp, "")]
    return " ".join(f"{axis}{degree}{more}" for axis, degree, more in degrees if degree > 1) or "one device"


def settings(plan: Plan) -> dict[str, str]:
    """What else makes up a plan, by field: only what has an effect in it."""
    told = {"micro_batch_size": f"micro-batch {plan.micro_batch_size}"}
    if plan.dp * plan.cp > 1:  # context ranks hold the same parameters: shards are spread over them too
        num_shards = plan.dp_shard * plan.cp
        over = f" over {num_shards}" if plan.dp_replicate > 1 and num_shards > 1 else ""
        stage = plan.zero_stage if num_shards > 1 else 0
        told["zero_stage"] = f"ZeRO-{stage}{over}" if stage else "no ZeRO"
    if plan.recompute == "every_k":
        told["recompute"] = f"recompute 1 layer in {plan.recompute_period}"
    else:
        told["recompute"] = _RECOMPUTE[plan.recompute]
    if plan.pp > 1:
        told["schedule"] = _SCHEDULES[plan.schedule]
        if plan.layers_per_stage is not None:
            told["layers_per_stage"] = f"stages of {value_words(plan.layers_per_stage)} layers"
    if plan.tp > 1:
        told["sequence_parallel"] = "sequence parallel" if plan.sequence_parallel else "no sequence parallel"
        told["overlap_tp"] = "tp overlapped" if plan.overlap_tp else ""
        told["vocab_parallel"] = "" if plan.vocab_parallel else "whole vocabulary"
    for part in ("parameters", "optimizer", "activations"):
        ratio = getattr(plan, f"offload_{part}_ratio")
        told[f"offload_{part}_ratio"] = f"{ratio:.0%} of {part} offloaded" if ratio else ""
    if plan.cp > 1:
        told["cp_attention"] = _KEY_EXCHANGES[plan.cp_attention]
    told["expert_capacity_factor"] = f"capacity {plan.expert_capacity_factor:g}" if plan.expert_capacity_factor else ""
    told["expert_replicas"] = f"{plan.expert_replicas} copies of experts" if plan.expert_replicas else ""
    steps = plan.expert_placement_steps
    told["expert_placement_steps"] = f"experts placed every {steps} steps" if steps else ""
    told["all_reduce"] = "routed all-reduce" if plan.all_reduce == "topology" else ""
    told["overlap_dp"] = "dp not overlapped" if plan.dp * plan.cp > 1 and not plan.overlap_dp else ""
    told["overlap_pp"] = "pp not overlapped" if plan.pp > 1 and not plan.overlap_pp else ""
    compression = plan.gradient_compression
    told["gradient_compression"] = f"{compression} gradients" if compression != "none" else ""
    is_default = plan.rank_order == Plan.model_fields["rank_order"].default
    told["rank_order"] = "" if is_default else f"ranks {plan.rank_order}"
    told["precision"] = plan.precision
    return {name: text for name, text in told.items() if text}


def shared_settings(plans: Sequence[Plan]) -> dict[str, str]:
    """Settings that all of several plans have in common; empty for a single plan."""
    if len(plans) < 2:
        return {}
    first, *others = [settings(plan) for plan in plans]
    return {name: text for name, text in first.items() if all(other.get(name) == text for other in others)}


def settings_words(plan: Plan, shared: dict[str, str] | None = None) -> str:
    """The settings in one line, without those that ``shared`` names."""
    return ", ".join(text for name, text in settings(plan).items() if name not in (shared or {}))
