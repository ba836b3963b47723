"""The legality rules of a plan, each with an id and a scope, as code over whole tables of plans.

A rule of scope ``universal`` holds for every training stack; one of scope ``engine`` says what this engine does not
build. A search filters tables with ``violations``; a run is checked with ``check_run``, a table of one row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from engine.config import RunConfig
from engine.errors import RuleError
from engine.plan import PlanTable, plan_table
from engine.spec import ModelSpec

Scope = Literal["universal", "engine"]
Flags = np.ndarray
"""One bool per row of a table, or one for all rows."""

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
    violated: Callable[[RuleContext, PlanTable], Flags | bool]
    explain: Callable[[RuleContext, dict[str, Any]], tuple[str, str]]


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
    length = len(table["tp"])
    return {
        rule.id: np.broadcast_to(np.asarray(rule.violated(context, table), dtype=bool), (length,))
        for rule in RULES
        if rule.scope in scopes
    }


def explain_row(rule_id: str, context: RuleContext, table: PlanTable, row: int) -> tuple[str, str]:
    """Message and hint for row ``row`` of a table that breaks the rule."""
    values = {name: column[row : row + 1].tolist()[0] for name, column in table.items()}
    return BY_ID[rule_id].explain(context, values)


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


# ------------------------------------------------------------------------------------------------ quantities of a table


def _dp(table: PlanTable) -> np.ndarray:
    return table["dp_replicate"] * table["dp_shard"]


def _world(table: PlanTable) -> np.ndarray:
    return table["tp"] * table["pp"] * table["cp"] * _dp(table)


def _num_stages(table: PlanTable) -> np.ndarray:
    return table["pp"] * table["virtual_stages"]


def _num_micro_batches(table: PlanTable) -> np.ndarray:
    return table["global_batch_size"] // (_dp(table) * table["micro_batch_size"])


def _any_of(column: np.ndarray, values: Collection[str]) -> np.ndarray:
    return np.isin(column, list(values))


def _row_dp(row: dict[str, Any]) -> int:
    return int(row["dp_replicate"] * row["dp_shard"])


def _row_micro_batches(row: dict[str, Any]) -> int:
    return int(row["global_batch_size"] // (_row_dp(row) * row["micro_batch_size"]))


# ------------------------------------------------------------------------------------------------ nearest legal values


def _near(legal: Collection[int], given: int) -> str:
    """The nearest legal values below and above ``given``, as words."""
    below = [value for value in legal if value < given]
    above = [value for value in legal if value > given]
    return " or ".join(str(value) for value in ([max(below)] if below else []) + ([min(above)] if above else []))


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _multiples(step: int, given: int) -> list[int]:
    """The multiples of ``step`` round ``given``, from ``step`` on."""
    below = given // step * step
    return [value for value in (below, below + step) if value > 0]


# --------------------------------------------------------------------------------------------------- universal: tensor


def _kv_heads(context: RuleContext) -> int:
    """Key and value heads that tensor parallelism splits; latent attention makes one pair per query head."""
    model = context.model
    return model.num_heads if model.latent_attention else model.num_kv_heads


def _legal_tp_for_kv(kv_heads: int, num_heads: int) -> list[int]:
    return [d for d in _divisors(num_heads) if kv_heads % d == 0 or d % kv_heads == 0]


def _tensor_widths(model: ModelSpec) -> dict[str, int]:
    """Feed-forward widths split by tp (routed experts have their own degree)."""
    moe = model.moe
    widths = {} if moe else {"ffn_size": model.ffn_size}
    if moe and not all(model.is_moe_layer(layer) for layer in range(model.num_layers)):
        widths["ffn_size"] = model.ffn_size
    if moe and moe.shared_ffn_size:
        widths["moe.shared_ffn_size"] = moe.shared_ffn_size
    return widths


def _explain_tp_ffn(context: RuleContext, row: dict[str, Any]) -> tuple[str, str]:
    widths = {name: width for name, width in _tensor_widths(context.model).items() if width % row["tp"]}
    told = " and ".join(f"{name} {width}" for name, width in widths.items())
    common = int(np.gcd.reduce(list(_tensor_widths(context.model).values())))
    return f"tp {row['tp']} does not divide {told}", f"set tp to {_near(_divisors(common), row['tp'])}"


_TENSOR_RULES = (
    Rule(
        "tp.divides_heads",
        "universal",
        "tp divides the query heads",
        lambda c, t: c.model.num_heads % t["tp"] != 0,
        lambda c, r: (
            f"tp {r['tp']} does not divide the model's {c.model.num_heads} heads",
            f"set tp to {_near(_divisors(c.model.num_heads), r['tp'])}",
        ),
    ),
    Rule(
        "tp.kv_heads",
        "universal",
        "tp divides the key and value heads, or is a multiple of them (each is then held by several ranks)",
        lambda c, t: (_kv_heads(c) % t["tp"] != 0) & (t["tp"] % _kv_heads(c) != 0),
        lambda c, r: (
            f"tp {r['tp']} neither divides the model's {_kv_heads(c)} key and value heads nor is a multiple of them",
            f"set tp to {_near(_legal_tp_for_kv(_kv_heads(c), c.model.num_heads), r['tp'])}",
        ),
    ),
    Rule(
        "tp.divides_ffn",
        "universal",
        "tp divides the width of every dense and shared feed-forward",
        lambda c, t: np.any([width % t["tp"] != 0 for width in _tensor_widths(c.model).values()], axis=0),
        _explain_tp_ffn,
    ),
    Rule(
        "sp.requires_tp",
        "universal",
        "sequence parallelism needs tp > 1",
        lambda c, t: t["sequence_parallel"] & (t["tp"] == 1),
        lambda c, r: ("sequence_parallel is on, but tp is 1", "set sequence_parallel to false or tp to 2 or more"),
    ),
    Rule(
        "sp.divides_sequence",
        "universal",
        "with sequence parallelism, tp divides each rank's part of the sequence",
        lambda c, t: t["sequence_parallel"] & ((t["sequence_length"] % (t["cp"] * t["tp"])) != 0),
        lambda c, r: (
            f"sequence_parallel splits {r['sequence_length']} tokens over cp {r['cp']} * tp {r['tp']} ranks, not evenly",
            f"set sequence_length to {_near(_multiples(r['cp'] * r['tp'], r['sequence_length']), r['sequence_length'])}"
            ", or sequence_parallel to false",
        ),
    ),
    Rule(
        "cp.divides_sequence",
        "universal",
        "with context parallelism, 2 * cp divides the sequence (each rank takes an early and a late part)",
        lambda c, t: (t["cp"] > 1) & (t["sequence_length"] % (2 * t["cp"]) != 0),
        lambda c, r: (
            f"sequence_length {r['sequence_length']} is not a multiple of 2 * cp = {2 * r['cp']}",
            f"set sequence_length to {_near(_multiples(2 * r['cp'], r['sequence_length']), r['sequence_length'])}",
        ),
    ),
)

# ------------------------------------------------------------------------------------------------- universal: pipeline

_VIRTUAL_STAGES = {
    "gpipe": "1",
    "1f1b": "1",
    "interleaved_1f1b": "2 or more",
    "interleaved_zero_bubble": "2 or more",
    "zbv": "2",
    "dualpipev": "2",
}
"""Stages per rank that a schedule can run."""

_INTERLEAVED = ("interleaved_1f1b", "interleaved_zero_bubble")


def _wrong_virtual_stages(context: RuleContext, table: PlanTable) -> Flags:
    stages, schedule = table["virtual_stages"], table["schedule"]
    pipelined = (
        (_any_of(schedule, ("gpipe", "1f1b")) & (stages != 1))
        | (_any_of(schedule, _INTERLEAVED) & (stages < 2))
        | (_any_of(schedule, ("zbv", "dualpipev")) & (stages != 2))
    )
    return np.where(table["pp"] == 1, stages != 1, pipelined)


def _explain_virtual_stages(context: RuleContext, row: dict[str, Any]) -> tuple[str, str]:
    given = f"virtual_stages is {row['virtual_stages']}"
    if row["pp"] == 1:
        return f"{given} without a pipeline (pp is 1)", "set virtual_stages to 1 or pp to 2 or more"
    fitting = [name for name in _VIRTUAL_STAGES if _fits(name, row["virtual_stages"])]
    return (
        f"{given}, the schedule {row['schedule']} runs {_VIRTUAL_STAGES[row['schedule']]} per rank",
        f"set virtual_stages to {_VIRTUAL_STAGES[row['schedule']]}, or the schedule to {' or '.join(fitting)}",
    )


def _fits(schedule: str, virtual_stages: int) -> bool:
    least, exact = _VIRTUAL_STAGES[schedule][0], "more" not in _VIRTUAL_STAGES[schedule]
    return virtual_stages == int(least) if exact else virtual_stages >= int(least)


def _layers_in_stages(context: RuleContext, table: PlanTable) -> np.ndarray:
    num_layers = context.model.num_layers
    sizes = table["layers_per_stage"]
    return np.fromiter((num_layers if s is None else sum(s) for s in sizes), dtype=np.int64, count=len(sizes))


def _explain_layers(context: RuleContext, row: dict[str, Any]) -> tuple[str, str]:
    num_layers, sizes = context.model.num_layers, row["layers_per_stage"]
    if sizes is not None:
        return (
            f"layers_per_stage {list(sizes)} sums to {sum(sizes)}, the model has {num_layers} layers",
            "correct layers_per_stage, or leave it out for an even split",
        )
    stages = row["pp"] * row["virtual_stages"]
    return (
        f"pp {row['pp']} * virtual_stages {row['virtual_stages']} = {stages} stages for {num_layers} layers",
        f"make pp * virtual_stages {num_layers} or less",
    )


def _least_micro_batches(table: PlanTable) -> np.ndarray:
    """Micro-batches per step below which a schedule can't keep its order."""
    needed = np.where(table["schedule"] == "1f1b", table["pp"], 1)
    needed = np.where(table["schedule"] == "dualpipev", 2 * table["pp"], needed)
    return np.where(table["pp"] > 1, needed, 1)


def _explain_micro_batches(context: RuleContext, row: dict[str, Any]) -> tuple[str, str]:
    needed = row["pp"] * (2 if row["schedule"] == "dualpipev" else 1)
    batch = needed * _row_dp(row) * row["micro_batch_size"]
    return (
        f"{_row_micro_batches(row)} micro-batches per step and data-parallel rank, the schedule {row['schedule']} with pp"
        f" {row['pp']} needs {needed} or more",
        f"set global_batch_size to {batch} or more, or lower pp, dp or micro_batch_size",
    )


def _rounds(micro_batches: np.ndarray, pp: np.ndarray) -> np.ndarray:
    """Rounds of an interleaved schedule: it works on whole rounds of about ``pp`` micro-batches."""
    return np.maximum(micro_batches // pp, 1)


def _explain_interleaved(context: RuleContext, row: dict[str, Any]) -> tuple[str, str]:
    given = _row_micro_batches(row)
    per_micro_batch = _row_dp(row) * row["micro_batch_size"]
    legal = [m * per_micro_batch for m in _multiples(row["pp"], given)]
    return (
        f"{given} micro-batches don't make whole rounds of the schedule {row['schedule']} with pp {row['pp']}",
        f"set global_batch_size to {_near(legal, row['global_batch_size'])}",
    )


_PIPELINE_RULES = (
    Rule(
        "schedule.virtual_stages",
        "universal",
        "each schedule runs its own number of stages per rank; one without a pipeline",
        _wrong_virtual_stages,
        _explain_virtual_stages,
    ),
    Rule(
        "pp.layers",
        "universal",
        "each stage has a layer, and layers_per_stage sums to the model's layers",
        lambda c, t: (_num_stages(t) > c.model.num_layers) | (_layers_in_stages(c, t) != c.model.num_layers),
        _explain_layers,
    ),
    Rule(
        "batch.divides",
        "universal",
        "the global batch is dp * micro_batch_size * a whole number",
        lambda c, t: t["global_batch_size"] % (_dp(t) * t["micro_batch_size"]) != 0,
        lambda c, r: (
            f"global_batch_size {r['global_batch_size']} is not a multiple of dp {_row_dp(r)} * micro_batch_size"
            f" {r['micro_batch_size']} = {_row_dp(r) * r['micro_batch_size']}",
            "set global_batch_size to "
            + _near(_multiples(_row_dp(r) * r["micro_batch_size"], r["global_batch_size"]), r["global_batch_size"]),
        ),
    ),
    Rule(
        "pp.micro_batches",
        "universal",
        "1f1b needs at least pp micro-batches, dualpipev 2 * pp",
        lambda c, t: _num_micro_batches(t) < _least_micro_batches(t),
        _explain_micro_batches,
    ),
    Rule(
        "schedule.whole_rounds",
        "universal",
        "interleaved schedules need whole rounds: micro-batches divisible by max(1, micro-batches // pp)",
        lambda c, t: (
            (t["pp"] > 1)
            & _any_of(t["schedule"], _INTERLEAVED)
            & (_num_micro_batches(t) % _rounds(_num_micro_batches(t), t["pp"]) != 0)
        ),
        _explain_interleaved,
    ),
)

# ---------------------------------------------------------------------------------------- universal: experts and others


def _num_experts(context: RuleContext) -> int:
    return context.model.moe.num_experts if context.model.moe else 1


def _expert_ffn(context: RuleContext) -> int:
    return context.model.moe.ffn_size if context.model.moe else 0


def _fp8_sizes(context: RuleContext, table: dict[str, Any] | PlanTable) -> dict[str, Any]:
    """Inner dimensions of the block's matrix products on one rank, from a table or from one row of it."""
    model, tp = context.model, table["tp"]
    sizes = {
        "hidden_size": model.hidden_size + 0 * tp,
        "tokens per micro-batch": table["micro_batch_size"] * table["sequence_length"] // table["cp"],
    }
    if model.latent_attention:
        latent = model.latent_attention
        sizes["kv_rank"] = latent.kv_rank + 0 * tp
        sizes["value heads * value_head_dim / tp"] = model.num_heads * latent.value_head_dim // tp
        if latent.query_rank:
            sizes["query_rank"] = latent.query_rank + 0 * tp
    else:
        sizes["query heads * head_dim / tp"] = model.num_heads * model.head_dim // tp
    for name, width in _tensor_widths(model).items():
        sizes[f"{name} / tp"] = width // tp
    if model.moe:
        sizes["moe.ffn_size / etp"] = model.moe.ffn_size // table["etp"]
    return sizes


def _explain_fp8(context: RuleContext, row: dict[str, Any]) -> tuple[str, str]:
    wrong = {name: size for name, size in _fp8_sizes(context, row).items() if size % FP8_MULTIPLE}
    told = ", ".join(f"{name} = {size}" for name, size in wrong.items())
    return (
        f"fp8 needs dimensions that are multiples of {FP8_MULTIPLE}: {told}",
        "set precision to bf16, lower tp, or choose a sequence_length that is a multiple of"
        f" {FP8_MULTIPLE * row['cp']}",
    )


_OTHER_RULES = (
    Rule(
        "ep.requires_moe",
        "universal",
        "ep and etp above 1 need a mixture of experts",
        lambda c, t: ((t["ep"] > 1) | (t["etp"] > 1)) & (c.model.moe is None),
        lambda c, r: (f"ep is {r['ep']} and etp {r['etp']}, but the model has no experts", "set ep and etp to 1"),
    ),
    Rule(
        "ep.divides_experts",
        "universal",
        "ep divides the routed experts",
        lambda c, t: (_num_experts(c) % t["ep"] != 0) & (c.model.moe is not None),
        lambda c, r: (
            f"ep {r['ep']} does not divide the model's {_num_experts(c)} experts",
            f"set ep to {_near(_divisors(_num_experts(c)), r['ep'])}",
        ),
    ),
    Rule(
        "ep.degrees",
        "universal",
        "ep * etp divides dp * cp * tp: experts are spread over the same ranks",
        lambda c, t: ((_dp(t) * t["cp"] * t["tp"]) % (t["ep"] * t["etp"]) != 0) & (c.model.moe is not None),
        lambda c, r: (
            f"ep {r['ep']} * etp {r['etp']} does not divide dp {_row_dp(r)} * cp {r['cp']} * tp {r['tp']}"
            f" = {_row_dp(r) * r['cp'] * r['tp']}",
            f"set ep * etp to {_near(_divisors(_row_dp(r) * r['cp'] * r['tp']), r['ep'] * r['etp'])}",
        ),
    ),
    Rule(
        "etp.values",
        "universal",
        "etp is 1 or tp",
        lambda c, t: (t["etp"] != 1) & (t["etp"] != t["tp"]) & (c.model.moe is not None),
        lambda c, r: (
            f"etp {r['etp']} is neither 1 nor tp {r['tp']}",
            f"set etp to {' or '.join(str(value) for value in sorted({1, r['tp']}))}",
        ),
    ),
    Rule(
        "etp.divides_ffn",
        "universal",
        "etp divides the width of an expert",
        lambda c, t: (_expert_ffn(c) % t["etp"] != 0) & (c.model.moe is not None),
        lambda c, r: (f"etp {r['etp']} does not divide the experts' width {_expert_ffn(c)}", "set etp to 1"),
    ),
    Rule(
        "recompute.period",
        "universal",
        "recompute_period is at most the number of layers",
        lambda c, t: (t["recompute"] == "every_k") & (t["recompute_period"] > c.model.num_layers),
        lambda c, r: (
            f"recompute_period {r['recompute_period']} exceeds the model's {c.model.num_layers} layers",
            f"set recompute_period to {c.model.num_layers} or less, or recompute to none",
        ),
    ),
    Rule(
        "fp8.dims",
        "universal",
        f"with fp8, the dimensions of the matrix products are multiples of {FP8_MULTIPLE}",
        lambda c, t: (
            (t["precision"] == "fp8") & np.any([size % FP8_MULTIPLE != 0 for size in _fp8_sizes(c, t).values()], axis=0)
        ),
        _explain_fp8,
    ),
    Rule(
        "positions.max",
        "universal",
        "learned positions reach as far as the sequence",
        lambda c, t: (t["sequence_length"] > c.model.max_positions) & (c.model.positions == "learned"),
        lambda c, r: (
            f"sequence_length {r['sequence_length']} exceeds the model's {c.model.max_positions} learned positions",
            f"set sequence_length to {c.model.max_positions} or less, or raise model.max_positions",
        ),
    ),
    Rule(
        "world.devices",
        "universal",
        "tp * pp * cp * dp is at most the number of devices",
        lambda c, t: False if c.num_devices is None else _world(t) > c.num_devices,
        lambda c, r: (
            f"tp {r['tp']} * pp {r['pp']} * cp {r['cp']} * dp {_row_dp(r)} ="
            f" {r['tp'] * r['pp'] * r['cp'] * _row_dp(r)} ranks, there are {c.num_devices} devices",
            f"lower a degree so that the product is {c.num_devices} or less",
        ),
    ),
)

# ------------------------------------------------------------------------------------------- engine: models not built


def _model_rule(feature: str, summary: str, lacking: Callable[[ModelSpec], str], change: str) -> Rule:
    """A rule about the architecture alone: ``lacking`` says what the engine does not build, or is empty."""
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
    wanted = {
        "sigmoid scores": moe.scoring != "softmax",
        f"routing limited to {moe.groups_per_token} of {moe.num_groups} groups": moe.num_groups > 1,
        "a selection bias": moe.selection_bias,
        "a router bias": moe.router_bias,
        f"routed_scaling {moe.routed_scaling:g}": moe.routed_scaling != 1.0,
    }
    told = [name for name, present in wanted.items() if present]
    return f"routers with {', '.join(told)}" if told else ""


def _dense_layers_text(model: ModelSpec) -> str:
    moe = model.moe
    if moe is None or all(model.is_moe_layer(layer) for layer in range(model.num_layers)):
        return ""
    return f"dense layers among experts (num_dense_layers {moe.num_dense_layers}, layer_period {moe.layer_period})"


_ANOTHER_MODEL = "choose a model without it; plans of such models can be searched, but not trained here"

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
        "remove model.rope_scaling (it matters for sequences beyond the original length only)",
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
    _model_rule("dense_first", "in a mixture of experts, each layer is one", _dense_layers_text, _ANOTHER_MODEL),
    _model_rule("router", "routers are softmax over all experts, without biases", _unbuilt_routing, _ANOTHER_MODEL),
    _model_rule(
        "expert_bias",
        "experts have no biases",
        lambda m: "experts with biases" if m.moe and m.moe.expert_bias else "",
        _ANOTHER_MODEL,
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
        lambda m: f"multi-token prediction ({m.num_mtp_layers} layers)" if m.num_mtp_layers else "",
        "set model.num_mtp_layers to 0",
    ),
    Rule(
        "engine.sliding_window",
        "engine",
        "the attention window is not shorter than the sequence",
        lambda c, t: t["sequence_length"] > (c.model.sliding_window or np.inf),
        lambda c, r: (
            f"the engine does not build attention windows: {c.model.sliding_window} tokens, shorter than sequence_length"
            f" {r['sequence_length']}",
            f"set sequence_length to {c.model.sliding_window} or less, or model.sliding_window to null",
        ),
    ),
)

# --------------------------------------------------------------------------------------------- engine: plans not built


def _plan_rule(
    feature: str, summary: str, violated: Callable[[RuleContext, PlanTable], Flags | bool], told: str, change: str
) -> Rule:
    """A rule about what the engine's plans lack; ``told`` and ``change`` are filled in from the row and ``context``."""
    return Rule(
        f"engine.{feature}",
        "engine",
        summary,
        violated,
        lambda c, r: (f"the engine does not build {told.format(context=c, **r)}", change.format(context=c, **r)),
    )


_PLAN_RULES = (
    _plan_rule(
        "dp_replicate",
        "data parallelism shards parameters",
        lambda c, t: t["dp_replicate"] > 1,
        "replicated data parallelism (dp_replicate {dp_replicate})",
        "set dp_replicate to 1 and multiply dp_shard by {dp_replicate}",
    ),
    _plan_rule(
        "cp",
        "the sequence is not split between ranks",
        lambda c, t: t["cp"] > 1,
        "context parallelism (cp {cp})",
        "set cp to 1 and use tp, pp or dp_shard",
    ),
    _plan_rule(
        "ep",
        "experts are not split between ranks",
        lambda c, t: (t["ep"] > 1) | (t["etp"] > 1),
        "expert parallelism (ep {ep}, etp {etp})",
        "set ep and etp to 1",
    ),
    _plan_rule(
        "moe_tp",
        "a mixture of experts runs without tensor parallelism",
        lambda c, t: (t["tp"] > 1) & (c.model.moe is not None),
        "tensor parallelism for a mixture of experts (tp {tp})",
        "set tp to 1 and use pp or dp_shard",
    ),
    _plan_rule(
        "schedule",
        "pipelines run 1f1b with one stage per rank",
        lambda c, t: (t["pp"] > 1) & ((t["schedule"] != "1f1b") | (t["virtual_stages"] > 1)),
        "the pipeline schedule {schedule} with virtual_stages {virtual_stages}",
        "set schedule to 1f1b and virtual_stages to 1",
    ),
    _plan_rule(
        "zero_stage",
        "sharding is ZeRO stage 2 or 3",
        lambda c, t: (t["dp_shard"] > 1) & (t["zero_stage"] < 2),
        "zero_stage {zero_stage} over dp_shard {dp_shard}",
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
        "offload (parameters {offload_parameters_ratio:g}, optimizer {offload_optimizer_ratio:g}, activations"
        " {offload_activations_ratio:g})",
        "set the offload ratios to 0; sharding or recompute save memory too",
    ),
    _plan_rule(
        "precision",
        "precision is bf16, fp32 or fp64",
        lambda c, t: _any_of(t["precision"], ("fp16", "fp8")),
        "precision {precision}",
        "set precision to bf16, fp32 or fp64",
    ),
    _plan_rule(
        "gradient_compression",
        "gradients are not compressed",
        lambda c, t: t["gradient_compression"] != "none",
        "gradient_compression {gradient_compression}",
        "set gradient_compression to none",
    ),
    _plan_rule(
        "overlap",
        "overlap is on for dp and pp, off for tp",
        lambda c, t: ~t["overlap_dp"] | t["overlap_tp"] | ~t["overlap_pp"],
        "overlap_dp {overlap_dp}, overlap_tp {overlap_tp}, overlap_pp {overlap_pp}",
        "set overlap_dp and overlap_pp to true and overlap_tp to false",
    ),
    _plan_rule(
        "rank_order",
        "ranks are ordered tp-cp-dp-pp",
        lambda c, t: t["rank_order"] != "tp-cp-dp-pp",
        "rank_order {rank_order}",
        "set rank_order to tp-cp-dp-pp",
    ),
    _plan_rule(
        "kv_replication",
        "tp is at most the number of key and value heads",
        lambda c, t: t["tp"] > _kv_heads(c),
        "key and value heads held by several ranks: tp {tp} exceeds {context.model.num_kv_heads} heads",
        "set tp to {context.model.num_kv_heads} or less",
    ),
    _plan_rule(
        "vocab_padding",
        "with vocab_parallel, tp divides the vocabulary",
        lambda c, t: t["vocab_parallel"] & (c.model.vocab_size % t["tp"] != 0),
        "a vocabulary of {context.model.vocab_size} split over tp {tp}, which does not divide it",
        "set vocab_parallel to false, or pad model.vocab_size to a multiple of {tp}",
    ),
    _plan_rule(
        "tied_pp",
        "tied embeddings stand on one pipeline stage",
        lambda c, t: (t["pp"] > 1) & c.model.tied_embeddings,
        "tied embeddings over pipeline stages (pp {pp})",
        "set pp to 1, or model.tied_embeddings to false",
    ),
    _plan_rule(
        "dropout_tp",
        "dropout is off with tensor parallelism",
        lambda c, t: (t["tp"] > 1) & (c.dropout > 0),
        "dropout {context.dropout:g} with tensor parallelism (tp {tp})",
        "set dropout to 0 or tp to 1",
    ),
)

RULES: tuple[Rule, ...] = (*_TENSOR_RULES, *_PIPELINE_RULES, *_OTHER_RULES, *_MODEL_RULES, *_PLAN_RULES)
"""Every rule: universal ones first, each before those whose numbers only make sense once it holds."""

BY_ID = {rule.id: rule for rule in RULES}
"""The rules by id."""
