"""The legality rules of a plan, each with an id and a scope, as code over whole tables of plans.

A rule of scope ``universal`` holds for every training stack; one of scope ``engine`` says what this engine does not
build. A search filters tables with ``violations``; a run is checked with ``check_run``, a table of one row. In the
rules, ``c`` is the context, ``t`` the table and ``r`` one row of it, each with the columns of ``_with_derived``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from engine.config import RunConfig
from engine.errors import RuleError
from engine.plan import PlanTable, plan_table
from engine.spec import ModelSpec

Scope = Literal["universal", "engine"]

FP8_MULTIPLE = 16
"""Both inner dimensions of an fp8 matrix product must be multiples of this (cuBLASLt)."""


@dataclass(frozen=True)
class RuleContext:
    """What a plan is judged against.

    Args:
        model: The architecture, with the vocabulary it is trained with.
        num_devices: Devices there are; None when unknown.
        dropout: The hyperparameter of that name.
    """

    model: ModelSpec
    num_devices: int | None = None
    dropout: float = 0.0


Violated = Callable[[RuleContext, PlanTable], "np.ndarray | bool"]
Explain = Callable[[RuleContext, SimpleNamespace], tuple[str, str]]


@dataclass(frozen=True)
class Rule:
    """One legality rule.

    Args:
        id: Its name in messages, counts and tests.
        scope: ``universal`` (no stack could run it) or ``engine`` (this one does not).
        summary: What must hold, one line.
        violated: Which rows of a table break it: ``[n]`` bools, or one bool for all rows.
        explain: Message with the numbers, and hint with the nearest legal values, for a row that breaks it.
    """

    id: str
    scope: Scope
    summary: str
    violated: Violated
    explain: Explain


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
    context = RuleContext(config.model, num_devices, config.hyperparameters.dropout)
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


def _universal(rule_id: str, summary: str, violated: Violated, explain: Explain) -> Rule:
    return Rule(rule_id, "universal", summary, violated, explain)


def _near(legal: Collection[int], given: int) -> str:
    """The nearest legal values below and above ``given``, as words."""
    below = [value for value in legal if value < given]
    above = [value for value in legal if value > given]
    return " or ".join(str(value) for value in ([max(below)] if below else []) + ([min(above)] if above else []))


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _near_divisor(number: int, given: int) -> str:
    return _near(_divisors(number), given)


def _near_multiple(step: int, given: int) -> str:
    below = given // step * step
    return _near([value for value in (below, below + step) if value > 0], given)


# ---------------------------------------------------------------------------------------------------- universal: tensor


def _kv_heads(model: ModelSpec) -> int:
    """Key and value heads that tensor parallelism splits; latent attention makes one pair per query head."""
    return model.num_heads if model.latent_attention else model.num_kv_heads


def _explain_kv_heads(c: RuleContext, r: SimpleNamespace) -> tuple[str, str]:
    heads = _kv_heads(c.model)
    legal = [d for d in _divisors(c.model.num_heads) if heads % d == 0 or d % heads == 0]
    return (
        f"tp {r.tp} neither divides the model's {heads} key and value heads nor is a multiple of them",
        f"set tp to {_near(legal, r.tp)}",
    )


def _has_dense_layers(model: ModelSpec) -> bool:
    return not all(model.is_moe_layer(layer) for layer in range(model.num_layers))


def _split_widths(model: ModelSpec) -> dict[str, int]:
    """Feed-forward widths that tp splits (routed experts have a degree of their own)."""
    widths = {"ffn_size": model.ffn_size} if _has_dense_layers(model) else {}
    if model.moe and model.moe.shared_ffn_size:
        widths["moe.shared_ffn_size"] = model.moe.shared_ffn_size
    return widths


def _explain_ffn(c: RuleContext, r: SimpleNamespace) -> tuple[str, str]:
    widths = _split_widths(c.model)
    told = " and ".join(f"{name} {width}" for name, width in widths.items() if width % r.tp)
    common = int(np.gcd.reduce(list(widths.values())))
    return f"tp {r.tp} does not divide {told}", f"set tp to {_near_divisor(common, r.tp)}"


_TENSOR_RULES = (
    _universal(
        "tp.divides_heads",
        "tp divides the query heads",
        lambda c, t: c.model.num_heads % t["tp"] != 0,
        lambda c, r: (
            f"tp {r.tp} does not divide the model's {c.model.num_heads} heads",
            f"set tp to {_near_divisor(c.model.num_heads, r.tp)}",
        ),
    ),
    _universal(
        "tp.kv_heads",
        "tp divides the key and value heads, or is a multiple of them (each is then held by several ranks)",
        lambda c, t: (_kv_heads(c.model) % t["tp"] != 0) & (t["tp"] % _kv_heads(c.model) != 0),
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
            f"set sequence_length to {_near_multiple(r.cp * r.tp, r.sequence_length)}, or sequence_parallel to false",
        ),
    ),
    _universal(
        "cp.divides_sequence",
        "with context parallelism, 2 * cp divides the sequence (each rank takes an early and a late part)",
        lambda c, t: (t["cp"] > 1) & (t["sequence_length"] % (2 * t["cp"]) != 0),
        lambda c, r: (
            f"sequence_length {r.sequence_length} is not a multiple of 2 * cp = {2 * r.cp}",
            f"set sequence_length to {_near_multiple(2 * r.cp, r.sequence_length)}",
        ),
    ),
)

# -------------------------------------------------------------------------------------------------- universal: pipeline

_INTERLEAVED = ("interleaved_1f1b", "interleaved_zero_bubble")

_VIRTUAL_STAGES = {
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
    for schedule, (least, most) in _VIRTUAL_STAGES.items():
        outside = (stages < least) | (stages > (most or np.inf))
        wrong |= (t["pp"] > 1) & (t["schedule"] == schedule) & outside
    return wrong


def _explain_virtual_stages(c: RuleContext, r: SimpleNamespace) -> tuple[str, str]:
    if r.pp == 1:
        return (
            f"virtual_stages is {r.virtual_stages} without a pipeline (pp is 1)",
            "set virtual_stages to 1 or pp to 2 or more",
        )
    least, most = _VIRTUAL_STAGES[r.schedule]
    wanted = f"{least}" if most else f"{least} or more"
    others = [s for s, (a, b) in _VIRTUAL_STAGES.items() if a <= r.virtual_stages <= (b or r.virtual_stages)]
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


def _explain_few(c: RuleContext, r: SimpleNamespace, needed: int) -> tuple[str, str]:
    """Message and hint for a pipeline with fewer than ``needed`` micro-batches."""
    return (
        f"the schedule {r.schedule} with pp {r.pp} needs {needed} or more micro-batches per step, global_batch_size"
        f" {r.global_batch_size} makes {r.num_micro_batches} on each data-parallel rank",
        f"set global_batch_size to {needed * r.batch_unit} or more, or lower pp, dp or micro_batch_size",
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
    _universal(
        "batch.divides",
        "the global batch is dp * micro_batch_size * a whole number",
        lambda c, t: t["global_batch_size"] % t["batch_unit"] != 0,
        lambda c, r: (
            f"global_batch_size {r.global_batch_size} is not a multiple of dp {r.dp} * micro_batch_size"
            f" {r.micro_batch_size} = {r.batch_unit}",
            f"set global_batch_size to {_near_multiple(r.batch_unit, r.global_batch_size)}",
        ),
    ),
    _universal(
        "pp.micro_batches",
        "dualpipev needs at least 2 * pp micro-batches",
        lambda c, t: (t["pp"] > 1) & (t["schedule"] == "dualpipev") & (t["num_micro_batches"] < 2 * t["pp"]),
        lambda c, r: _explain_few(c, r, 2 * r.pp),
    ),
    _universal(
        "schedule.whole_rounds",
        "interleaved schedules need whole rounds: micro-batches divisible by max(1, micro-batches // pp)",
        lambda c, t: (
            (t["pp"] > 1)
            & np.isin(t["schedule"], _INTERLEAVED)
            & (t["num_micro_batches"] % np.maximum(t["num_micro_batches"] // t["pp"], 1) != 0)
        ),
        lambda c, r: (
            f"{r.num_micro_batches} micro-batches don't make whole rounds of {r.schedule} with pp {r.pp}",
            f"set global_batch_size to {_near_multiple(r.pp * r.batch_unit, r.global_batch_size)}",
        ),
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
    _expert_rule(
        "ep.divides_experts",
        "ep divides the routed experts",
        lambda c, t: _moe(c).num_experts % t["ep"] != 0,
        lambda c, r: (
            f"ep {r.ep} does not divide the model's {_moe(c).num_experts} experts",
            f"set ep to {_near_divisor(_moe(c).num_experts, r.ep)}",
        ),
    ),
    _expert_rule(
        "ep.degrees",
        "ep * etp divides dp * cp * tp: experts are spread over the same ranks",
        lambda c, t: (t["dp"] * t["cp"] * t["tp"]) % (t["ep"] * t["etp"]) != 0,
        lambda c, r: (
            f"ep {r.ep} * etp {r.etp} does not divide dp {r.dp} * cp {r.cp} * tp {r.tp} = {r.dp * r.cp * r.tp}",
            f"set ep * etp to {_near_divisor(r.dp * r.cp * r.tp, r.ep * r.etp)}",
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

# -------------------------------------------------------------------------------------------- engine: models not built


def _model_rule(feature: str, summary: str, lacking: Callable[[ModelSpec], str], change: str) -> Rule:
    """A rule about the architecture alone: ``lacking`` names what the engine does not build, or is empty."""
    return Rule(
        f"engine.{feature}",
        "engine",
        summary,
        lambda c, t: bool(lacking(c.model)),
        lambda c, r: (f"the engine does not build {lacking(c.model)}", change),
    )


def _unbuilt_routing(model: ModelSpec) -> str:
    moe = model.moe
    if moe is None:
        return ""
    unbuilt = {
        "sigmoid scores": moe.scoring != "softmax",
        f"routing limited to {moe.groups_per_token} of {moe.num_groups} groups": moe.num_groups > 1,
        "a selection bias": moe.selection_bias,
        "a router bias": moe.router_bias,
    }
    told = [name for name, present in unbuilt.items() if present]
    return f"routers with {', '.join(told)}" if told else ""


def _dense_among_experts(model: ModelSpec) -> str:
    if model.moe is None or not _has_dense_layers(model):
        return ""
    return (
        f"dense layers among experts (num_dense_layers {model.moe.num_dense_layers},"
        f" layer_period {model.moe.layer_period})"
    )


_ANOTHER_MODEL = "choose a model without it; plans for such a model can be searched, but not trained here"

_MODEL_RULES = (
    _model_rule(
        "mla",
        "attention is grouped-query attention",
        lambda m: "multi-head latent attention" if m.latent_attention else "",
        _ANOTHER_MODEL,
    ),
    _model_rule(
        "attention_sinks",
        "attention has no sinks",
        lambda m: "attention sinks" if m.attention_sinks else "",
        _ANOTHER_MODEL,
    ),
    _model_rule(
        "rope_scaling",
        "rotary positions are not scaled",
        lambda m: f"scaled rotary positions {m.rope_scaling}" if m.rope_scaling else "",
        "set model.rope_scaling to null (it matters for sequences beyond the original length)",
    ),
    _model_rule(
        "qk_norm",
        "query and key heads are not normalised",
        lambda m: "norms of query and key heads" if m.qk_norm else "",
        "set model.qk_norm to false, or choose a model without it",
    ),
    _model_rule(
        "shared_experts",
        "there are no shared experts",
        lambda m: f"shared experts (width {m.moe.shared_ffn_size})" if m.moe and m.moe.shared_ffn_size else "",
        _ANOTHER_MODEL,
    ),
    _model_rule("dense_first", "in a mixture of experts, each layer is one", _dense_among_experts, _ANOTHER_MODEL),
    _model_rule("router", "routers are softmax over all experts, without biases", _unbuilt_routing, _ANOTHER_MODEL),
    _model_rule(
        "expert_bias",
        "experts have no biases",
        lambda m: "experts with biases" if m.moe and m.moe.expert_bias else "",
        _ANOTHER_MODEL,
    ),
    _model_rule(
        "plain_experts",
        "experts are gated",
        lambda m: "experts with a plain feed-forward" if m.moe and m.mlp == "plain" else "",
        "set model.mlp to gated",
    ),
    _model_rule(
        "activation",
        "the activation is silu, gelu, gelu_tanh or relu",
        lambda m: f"the activation {m.activation}" if m.activation == "clamped_swiglu" else "",
        "set model.activation to silu, gelu, gelu_tanh or relu",
    ),
    _model_rule(
        "mtp",
        "there are no multi-token-prediction layers",
        lambda m: f"multi-token prediction (num_mtp_layers {m.num_mtp_layers})" if m.num_mtp_layers else "",
        "set model.num_mtp_layers to 0",
    ),
    Rule(
        "engine.sliding_window",
        "engine",
        "the attention window is not shorter than the sequence",
        lambda c, t: t["sequence_length"] > (c.model.sliding_window or np.inf),
        lambda c, r: (
            f"the engine does not build attention windows, sequence_length {r.sequence_length} exceeds the window of"
            f" {c.model.sliding_window} tokens",
            f"set sequence_length to {c.model.sliding_window} or less, or model.sliding_window to null",
        ),
    ),
)

# --------------------------------------------------------------------------------------------- engine: plans not built


def _plan_rule(feature: str, summary: str, violated: Violated, told: str, change: str) -> Rule:
    """A rule about what the engine's plans lack; ``told`` and ``change`` are format strings of ``c`` and ``r``."""
    return Rule(
        f"engine.{feature}",
        "engine",
        summary,
        violated,
        lambda c, r: (f"the engine does not build {told.format(c=c, r=r)}", change.format(c=c, r=r)),
    )


_PLAN_RULES = (
    _plan_rule(
        "dp_replicate",
        "data parallelism shards parameters",
        lambda c, t: t["dp_replicate"] > 1,
        "replicated data parallelism (dp_replicate {r.dp_replicate})",
        "set dp_replicate to 1 and multiply dp_shard by {r.dp_replicate}",
    ),
    _plan_rule(
        "cp",
        "the sequence is not split between ranks",
        lambda c, t: t["cp"] > 1,
        "context parallelism (cp {r.cp})",
        "set cp to 1 and use tp, pp or dp_shard",
    ),
    _plan_rule(
        "ep",
        "experts are not spread over ranks",
        lambda c, t: t["ep"] > 1,
        "expert parallelism (ep {r.ep})",
        "set ep to 1",
    ),
    _plan_rule(
        "moe_tp",
        "tensor parallelism splits every expert",
        lambda c, t: (t["tp"] != t["etp"]) & (c.model.moe is not None),
        "whole experts on each tensor-parallel rank (tp {r.tp}, etp {r.etp})",
        "set etp to {r.tp}",
    ),
    _plan_rule(
        "schedule",
        "pipelines run 1f1b with one stage per rank",
        lambda c, t: (t["pp"] > 1) & ((t["schedule"] != "1f1b") | (t["virtual_stages"] > 1)),
        "the pipeline schedule {r.schedule} with virtual_stages {r.virtual_stages}",
        "set schedule to 1f1b and virtual_stages to 1",
    ),
    Rule(
        "engine.micro_batches",
        "engine",
        "1f1b has at least pp micro-batches (other stacks take fewer)",
        lambda c, t: (t["pp"] > 1) & (t["schedule"] == "1f1b") & (t["num_micro_batches"] < t["pp"]),
        lambda c, r: _explain_few(c, r, r.pp),
    ),
    _plan_rule(
        "zero_stage",
        "sharding is ZeRO stage 2 or 3",
        lambda c, t: (t["dp_shard"] > 1) & (t["zero_stage"] < 2),
        "zero_stage {r.zero_stage} over dp_shard {r.dp_shard}",
        "set zero_stage to 2 or 3",
    ),
    _plan_rule(
        "recompute",
        "recompute is none, full or every_k",
        lambda c, t: t["recompute"] == "selective",
        "selective recompute",
        "set recompute to none, full or every_k",
    ),
    _plan_rule(
        "offload",
        "nothing is kept in host memory",
        lambda c, t: (
            (t["offload_parameters_ratio"] > 0)
            | (t["offload_optimizer_ratio"] > 0)
            | (t["offload_activations_ratio"] > 0)
        ),
        "offload (parameters {r.offload_parameters_ratio:g}, optimizer {r.offload_optimizer_ratio:g}, activations"
        " {r.offload_activations_ratio:g})",
        "set the offload ratios to 0; sharding or recompute save memory too",
    ),
    _plan_rule(
        "precision",
        "precision is bf16, fp32 or fp64",
        lambda c, t: np.isin(t["precision"], ("fp16", "fp8")),
        "precision {r.precision}",
        "set precision to bf16, fp32 or fp64",
    ),
    _plan_rule(
        "gradient_compression",
        "gradients are not compressed",
        lambda c, t: t["gradient_compression"] != "none",
        "gradient_compression {r.gradient_compression}",
        "set gradient_compression to none",
    ),
    _plan_rule(
        "overlap",
        "overlap is on for dp and pp, off for tp",
        lambda c, t: ~t["overlap_dp"] | t["overlap_tp"] | ~t["overlap_pp"],
        "overlap_dp {r.overlap_dp}, overlap_tp {r.overlap_tp}, overlap_pp {r.overlap_pp}",
        "set overlap_dp and overlap_pp to true and overlap_tp to false",
    ),
    _plan_rule(
        "rank_order",
        "ranks are ordered tp-cp-dp-pp",
        lambda c, t: t["rank_order"] != "tp-cp-dp-pp",
        "rank_order {r.rank_order}",
        "set rank_order to tp-cp-dp-pp",
    ),
    _plan_rule(
        "kv_replication",
        "tp is at most the number of key and value heads",
        lambda c, t: t["tp"] > _kv_heads(c.model),
        "key and value heads held by several ranks: tp {r.tp} exceeds {c.model.num_kv_heads} heads",
        "set tp to {c.model.num_kv_heads} or less",
    ),
    _plan_rule(
        "vocab_padding",
        "with vocab_parallel, tp divides the vocabulary",
        lambda c, t: t["vocab_parallel"] & (c.model.vocab_size % t["tp"] != 0),
        "a vocabulary of {c.model.vocab_size} split over tp {r.tp}, which does not divide it",
        "set vocab_parallel to false, or pad model.vocab_size to a multiple of {r.tp}",
    ),
    _plan_rule(
        "tied_pp",
        "tied embeddings stand on one pipeline stage",
        lambda c, t: (t["pp"] > 1) & c.model.tied_embeddings,
        "tied embeddings over pipeline stages (pp {r.pp})",
        "set pp to 1, or model.tied_embeddings to false",
    ),
    _plan_rule(
        "dropout_tp",
        "dropout is off with tensor parallelism",
        lambda c, t: (t["tp"] > 1) & (c.dropout > 0),
        "dropout {c.dropout:g} with tensor parallelism (tp {r.tp})",
        "set dropout to 0 or tp to 1",
    ),
)

RULES: tuple[Rule, ...] = (*_TENSOR_RULES, *_PIPELINE_RULES, *_OTHER_RULES, *_MODEL_RULES, *_PLAN_RULES)
"""Every rule: universal ones first, each before those whose numbers only make sense once it holds."""

BY_ID = {rule.id: rule for rule in RULES}
"""The rules by id."""
