"""Rules that hold for every training stack. ``c`` is the context, ``t`` the table and ``r`` one row of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from engine.plan import PlanTable
from engine.rule import (
    Explain,
    Rule,
    RuleContext,
    Violated,
    divisors,
    explain_few_micro_batches,
    has_dense_layers,
    kv_heads,
    near,
    near_divisor,
    near_multiple,
)
from engine.spec import ModelSpec

FP8_MULTIPLE = 16
"""Both inner dimensions of an fp8 matrix product must be multiples of this (cuBLASLt)."""


def _universal(rule_id: str, summary: str, violated: Violated, explain: Explain) -> Rule:
    return Rule(rule_id, "universal", summary, violated, explain)


# ---------------------------------------------------------------------------------------------------- universal: tensor


def _explain_kv_heads(c: RuleContext, r: SimpleNamespace) -> tuple[str, str]:
    heads = kv_heads(c.model)
    legal = [d for d in divisors(c.model.num_heads) if heads % d == 0 or d % heads == 0]
    return (
        f"tp {r.tp} neither divides the model's {heads} key and value heads nor is a multiple of them",
        f"set tp to {near(legal, r.tp)}",
    )


def _split_widths(model: ModelSpec) -> dict[str, int]:
    """Feed-forward widths that tp splits (routed experts have a degree of their own)."""
    widths = {"ffn_size": model.ffn_size} if has_dense_layers(model) else {}
    if model.moe and model.moe.shared_ffn_size:
        widths["moe.shared_ffn_size"] = model.moe.shared_ffn_size
    return widths


def _explain_ffn(c: RuleContext, r: SimpleNamespace) -> tuple[str, str]:
    widths = _split_widths(c.model)
    told = " and ".join(f"{name} {width}" for name, width in widths.items() if width % r.tp)
    common = int(np.gcd.reduce(list(widths.values())))
    return f"tp {r.tp} does not divide {told}", f"set tp to {near_divisor(common, r.tp)}"


_TENSOR_RULES = (
    _universal(
        "tp.divides_heads",
        "tp divides the query heads",
        lambda c, t: c.model.num_heads % t["tp"] != 0,
        lambda c, r: (
            f"tp {r.tp} does not divide the model's {c.model.num_heads} heads",
            f"set tp to {near_divisor(c.model.num_heads, r.tp)}",
        ),
    ),
    _universal(
        "tp.kv_heads",
        "tp divides the key and value heads, or is a multiple of them (each is then held by several ranks)",
        lambda c, t: (kv_heads(c.model) % t["tp"] != 0) & (t["tp"] % kv_heads(c.model) != 0),
        _explain_kv_heads,
    ),
    _universal(
        "tp.divides_ffn",
        "tp divides the width of every dense and shared feed-forward",
        lambda c, t: np.any([width % t["tp"] != 0 for width in _split_widths(c.model).values()], axis=0),
        _explain_ffn,
    ),
    _universal(
        "sp.requires_tp",
        "sequence parallelism needs tp > 1",
        lambda c, t: t["sequence_parallel"] & (t["tp"] == 1),
        lambda c, r: ("sequence_parallel is on, but tp is 1", "set sequence_parallel to false or tp to 2 or more"),
    ),
    _universal(
        "sp.divides_sequence",
        "with sequence parallelism, cp * tp divides the sequence",
        lambda c, t: t["sequence_parallel"] & (t["sequence_length"] % (t["cp"] * t["tp"]) != 0),
        lambda c, r: (
            f"sequence_parallel can't split sequence_length {r.sequence_length} evenly over cp {r.cp} * tp {r.tp}",
            f"set sequence_length to {near_multiple(r.cp * r.tp, r.sequence_length)}, or sequence_parallel to false",
        ),
    ),
    _universal(
        "cp.divides_sequence",
        "with context parallelism, 2 * cp divides the sequence (each rank takes an early and a late part)",
        lambda c, t: (t["cp"] > 1) & (t["sequence_length"] % (2 * t["cp"]) != 0),
        lambda c, r: (
            f"sequence_length {r.sequence_length} is not a multiple of 2 * cp = {2 * r.cp}",
            f"set sequence_length to {near_multiple(2 * r.cp, r.sequence_length)}",
        ),
    ),
)

# -------------------------------------------------------------------------------------------------- universal: pipeline

INTERLEAVED = ("interleaved_1f1b", "interleaved_zero_bubble")
"""Schedules that run micro-batches in rounds over a rank's stages."""

VIRTUAL_STAGES = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved_1f1b": (2, None),
    "interleaved_zero_bubble": (2, None),
    "zbv": (2, 2),
    "dualpipev": (2, 2),
}
"""Schedule -> least and most stages per rank that it runs."""


def _wrong_virtual_stages(c: RuleContext, t: PlanTable) -> np.ndarray:
    stages = t["virtual_stages"]
    wrong: np.ndarray = (t["pp"] == 1) & (stages != 1)
    for schedule, (least, most) in VIRTUAL_STAGES.items():
        outside = (stages < least) | (stages > (most or np.inf))
        wrong |= (t["pp"] > 1) & (t["schedule"] == schedule) & outside
    return wrong


def _explain_virtual_stages(c: RuleContext, r: SimpleNamespace) -> tuple[str, str]:
    if r.pp == 1:
        return (
            f"virtual_stages is {r.virtual_stages} without a pipeline (pp is 1)",
            "set virtual_stages to 1 or pp to 2 or more",
        )
    least, most = VIRTUAL_STAGES[r.schedule]
    wanted = f"{least}" if most else f"{least} or more"
    others = [s for s, (a, b) in VIRTUAL_STAGES.items() if a <= r.virtual_stages <= (b or r.virtual_stages)]
    return (
        f"virtual_stages is {r.virtual_stages}, the schedule {r.schedule} runs {wanted} per rank",
        f"set virtual_stages to {wanted}, or schedule to {' or '.join(others)}",
    )


def _layers_in_stages(c: RuleContext, t: PlanTable) -> np.ndarray:
    num_layers, sizes = c.model.num_layers, t["layers_per_stage"]
    return np.fromiter((num_layers if s is None else sum(s) for s in sizes), dtype=np.int64, count=len(sizes))


def _explain_layers(c: RuleContext, r: SimpleNamespace) -> tuple[str, str]:
    num_layers, sizes = c.model.num_layers, r.layers_per_stage
    if sizes is not None and sum(sizes) != num_layers:
        return (
            f"layers_per_stage {list(sizes)} sums to {sum(sizes)}, the model has {num_layers} layers",
            "correct layers_per_stage, or leave it out for an even split",
        )
    return (
        f"pp {r.pp} * virtual_stages {r.virtual_stages} = {r.num_stages} stages for {num_layers} layers",
        f"make pp * virtual_stages {num_layers} or less",
    )


_PIPELINE_RULES = (
    _universal(
        "schedule.virtual_stages",
        "each schedule runs its own number of stages per rank; without a pipeline it is one",
        _wrong_virtual_stages,
        _explain_virtual_stages,
    ),
    _universal(
        "pp.layers",
        "each stage has a layer, and layers_per_stage sums to the model's layers",
        lambda c, t: (t["num_stages"] > c.model.num_layers) | (_layers_in_stages(c, t) != c.model.num_layers),
        _explain_layers,
    ),
)

# ---------------------------------------------------------------------------------------- universal: experts and others


def _fp8_sizes(model: ModelSpec, t: PlanTable) -> dict[str, Any]:
    """Inner dimensions of the block's matrix products on one rank, for columns or for one row of a table."""
    tp = t["tp"]
    sizes: dict[str, Any] = {
        "hidden_size": model.hidden_size,
        "tokens per micro-batch": t["micro_batch_size"] * t["sequence_length"] // t["cp"],
    }
    latent = model.latent_attention
    if latent:
        sizes["kv_rank"] = latent.kv_rank
        sizes["query_rank"] = latent.query_rank or 0
        sizes["heads * value_head_dim / tp"] = model.num_heads * latent.value_head_dim // tp
    else:
        sizes["heads * head_dim / tp"] = model.num_heads * model.head_dim // tp
    sizes |= {f"{name} / tp": width // tp for name, width in _split_widths(model).items()}
    if model.moe:
        sizes["moe.ffn_size / etp"] = model.moe.ffn_size // t["etp"]
    return sizes


def _wrong_fp8(c: RuleContext, t: PlanTable) -> np.ndarray:
    wrong = np.zeros(t["tp"].shape, dtype=bool)
    for size in _fp8_sizes(c.model, t).values():
        wrong |= (t["precision"] == "fp8") & (size % FP8_MULTIPLE != 0)
    return wrong


def _explain_fp8(c: RuleContext, r: SimpleNamespace) -> tuple[str, str]:
    sizes = {name: size for name, size in _fp8_sizes(c.model, vars(r)).items() if size % FP8_MULTIPLE}
    return (
        f"fp8 needs dimensions that are multiples of {FP8_MULTIPLE}: "
        + ", ".join(f"{name} = {size}" for name, size in sizes.items()),
        f"set precision to bf16, lower tp, or make sequence_length a multiple of {FP8_MULTIPLE * r.cp}",
    )


def _expert_rule(
    rule_id: str, summary: str, violated: Callable[[RuleContext, PlanTable], np.ndarray], explain: Explain
) -> Rule:
    """A rule that says something about mixtures of experts alone."""
    return _universal(rule_id, summary, lambda c, t: False if c.model.moe is None else violated(c, t), explain)


def _moe(c: RuleContext) -> Any:
    """The experts of a model that has some."""
    return c.model.moe


_OTHER_RULES = (
    _universal(
        "ep.requires_moe",
        "ep and etp above 1 need a mixture of experts",
        lambda c, t: ((t["ep"] > 1) | (t["etp"] > 1)) & (c.model.moe is None),
        lambda c, r: (f"ep is {r.ep} and etp {r.etp}, but the model has no experts", "set ep and etp to 1"),
    ),
    _universal(
        "capacity.requires_moe",
        "expert_capacity_factor is for mixtures of experts",
        lambda c, t: (t["expert_capacity_factor"] != None) & (c.model.moe is None),  # noqa: E711 (of each row)
        lambda c, r: (
            f"expert_capacity_factor is {r.expert_capacity_factor:g}, but the model has no experts",
            "set expert_capacity_factor to null",
        ),
    ),
    _expert_rule(
        "ep.divides_experts",
        "ep divides the routed experts",
        lambda c, t: _moe(c).num_experts % t["ep"] != 0,
        lambda c, r: (
            f"ep {r.ep} does not divide the model's {_moe(c).num_experts} experts",
            f"set ep to {near_divisor(_moe(c).num_experts, r.ep)}",
        ),
    ),
    _expert_rule(
        "ep.degrees",
        "ep * etp divides dp * cp * tp: experts are spread over the same ranks",
        lambda c, t: (t["dp"] * t["cp"] * t["tp"]) % (t["ep"] * t["etp"]) != 0,
        lambda c, r: (
            f"ep {r.ep} * etp {r.etp} does not divide dp {r.dp} * cp {r.cp} * tp {r.tp} = {r.dp * r.cp * r.tp}",
            f"set ep * etp to {near_divisor(r.dp * r.cp * r.tp, r.ep * r.etp)}, or raise dp_shard, cp or tp until"
            f" dp * cp * tp is a multiple of {r.ep * r.etp}",
        ),
    ),
    _expert_rule(
        "etp.values",
        "etp is 1 or tp",
        lambda c, t: (t["etp"] != 1) & (t["etp"] != t["tp"]),
        lambda c, r: (
            f"etp {r.etp} is neither 1 nor tp {r.tp}",
            f"set etp to {' or '.join(str(value) for value in sorted({1, r.tp}))}",
        ),
    ),
    _expert_rule(
        "etp.divides_ffn",
        "etp divides the width of an expert",
        lambda c, t: _moe(c).ffn_size % t["etp"] != 0,
        lambda c, r: (f"etp {r.etp} does not divide the experts' width {_moe(c).ffn_size}", "set etp to 1"),
    ),
    _universal(
        "ep.placement",
        "placing experts anew and copies of them need ep > 1 and a mixture of experts",
        lambda c, t: (
            ((t["expert_placement_steps"] > 0) | (t["expert_replicas"] > 0)) & ((t["ep"] == 1) | (c.model.moe is None))
        ),
        lambda c, r: (
            f"expert_placement_steps is {r.expert_placement_steps} and expert_replicas {r.expert_replicas}, but"
            + (f" ep is {r.ep}" if c.model.moe else " the model has no experts"),
            "set expert_placement_steps and expert_replicas to 0" + (", or ep to 2 or more" if c.model.moe else ""),
        ),
    ),
    _expert_rule(
        "ep.replicas",
        "ep divides the copies of experts, of which there are at most as many as put every expert on every rank",
        lambda c, t: (
            (t["ep"] > 1)
            & ((t["expert_replicas"] % t["ep"] != 0) | (t["expert_replicas"] > _moe(c).num_experts * (t["ep"] - 1)))
        ),
        lambda c, r: (
            f"{r.expert_replicas} expert_replicas beside {_moe(c).num_experts} experts can't be spread over ep {r.ep}"
            f" ranks, as many on each and none twice on one",
            f"set expert_replicas to {near(range(0, _moe(c).num_experts * (r.ep - 1) + 1, r.ep), r.expert_replicas)}",
        ),
    ),
    _universal(
        "recompute.period",
        "recompute_period is at most the number of layers",
        lambda c, t: (t["recompute"] == "every_k") & (t["recompute_period"] > c.model.num_layers),
        lambda c, r: (
            f"recompute_period {r.recompute_period} exceeds the model's {c.model.num_layers} layers",
            f"set recompute_period to {c.model.num_layers} or less, or recompute to none",
        ),
    ),
    _universal(
        "fp8.dims",
        f"with fp8, the dimensions of the matrix products are multiples of {FP8_MULTIPLE}",
        _wrong_fp8,
        _explain_fp8,
    ),
    _universal(
        "positions.max",
        "learned positions reach as far as the sequence",
        lambda c, t: (t["sequence_length"] > c.model.max_positions) & (c.model.positions == "learned"),
        lambda c, r: (
            f"sequence_length {r.sequence_length} exceeds the model's {c.model.max_positions} learned positions",
            f"set sequence_length to {c.model.max_positions} or less, or raise model.max_positions",
        ),
    ),
    _universal(
        "world.devices",
        "tp * pp * cp * dp is at most the number of devices",
        lambda c, t: t["world_size"] > (np.inf if c.num_devices is None else c.num_devices),
        lambda c, r: (
            f"tp {r.tp} * pp {r.pp} * cp {r.cp} * dp {r.dp} = {r.world_size} ranks, there are {c.num_devices} devices",
            f"lower a degree so that the product is {c.num_devices} or less",
        ),
    ),
)

# ----------------------------------------------------------------------------------------------------- universal: batch

_BATCH_RULES = (
    _universal(
        "batch.divides",
        "the global batch is dp * micro_batch_size * a whole number",
        lambda c, t: t["global_batch_size"] % t["batch_unit"] != 0,
        lambda c, r: (
            f"global_batch_size {r.global_batch_size} is not a multiple of dp {r.dp} * micro_batch_size"
            f" {r.micro_batch_size} = {r.batch_unit}",
            f"set global_batch_size to {near_multiple(r.batch_unit, r.global_batch_size)}",
        ),
    ),
    _universal(
        "pp.micro_batches",
        "dualpipev needs at least 2 * pp micro-batches",
        lambda c, t: (t["pp"] > 1) & (t["schedule"] == "dualpipev") & (t["num_micro_batches"] < 2 * t["pp"]),
        lambda c, r: explain_few_micro_batches(c, r, 2 * r.pp),
    ),
    _universal(
        "schedule.whole_rounds",
        "interleaved schedules need whole rounds: micro-batches divisible by max(1, micro-batches // pp)",
        lambda c, t: (
            (t["pp"] > 1)
            & np.isin(t["schedule"], INTERLEAVED)
            & (t["num_micro_batches"] % np.maximum(t["num_micro_batches"] // t["pp"], 1) != 0)
        ),
        lambda c, r: (
            f"{r.num_micro_batches} micro-batches don't make whole rounds of {r.schedule} with pp {r.pp}",
            f"set global_batch_size to {near_multiple(r.pp * r.batch_unit, r.global_batch_size)}",
        ),
    ),
)


UNIVERSAL_RULES = (*_TENSOR_RULES, *_PIPELINE_RULES, *_OTHER_RULES, *_BATCH_RULES)
"""The batch, which is the easiest to change, comes last."""
