"""What this engine does not build (yet). ``c`` is the context, ``t`` the table and ``r`` one row of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from engine.errors import UserError
from engine.rope import scaling_of
from engine.rule import Rule, Violated, explain_few_micro_batches
from engine.spec import ModelSpec

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


def _is_plain_swiglu(model: ModelSpec) -> bool:
    return model.activation == "clamped_swiglu" and model.mlp == "plain"


def _unbuilt_rope_scaling(model: ModelSpec) -> str:
    try:
        scaling_of(model)
    except UserError as error:
        return f"{error.message} ({error.hint})"
    return ""


_MODEL_RULES = (
    _model_rule(
        "latent_attention",
        "latent attention has no norms of query and key heads",
        lambda m: "norms of query and key heads in latent attention" if m.latent_attention and m.qk_norm else "",
        "set model.qk_norm to false",
    ),
    _model_rule(
        "rope_scaling",
        "rotary positions are plain, or scaled in a known way",
        _unbuilt_rope_scaling,
        "correct or remove model.rope_scaling",
    ),
    _model_rule(
        "activation",
        "clamped_swiglu is the activation of gated feed-forwards",
        lambda m: "a plain feed-forward with clamped_swiglu" if _is_plain_swiglu(m) else "",
        "set model.mlp to gated, or model.activation to silu, gelu, gelu_tanh or relu",
    ),
    _model_rule(
        "mtp",
        "there are no multi-token-prediction layers",
        lambda m: f"multi-token prediction (num_mtp_layers {m.num_mtp_layers})" if m.num_mtp_layers else "",
        "set model.num_mtp_layers to 0; where model is a config.json: num_nextn_predict_layers to 0 there",
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
        "expert_replicas",
        "copies go to the experts that are busiest when experts are placed",
        lambda c, t: (t["expert_replicas"] > 0) & (t["expert_placement_steps"] == 0) & (t["ep"] > 1),
        "copies of experts that are never placed (expert_replicas {r.expert_replicas})",
        "set expert_placement_steps to 10 or more, or expert_replicas to 0",
    ),
    _plan_rule(
        "expert_mesh",
        "experts lie on whole parts of dp_shard * cp * tp, or on whole multiples of it",
        lambda c, t: (
            (t["ep"] > 1)
            & (t["dp_shard"] * t["cp"] * t["tp"] % (t["ep"] * t["etp"]) != 0)
            & (t["ep"] * t["etp"] % (t["dp_shard"] * t["cp"] * t["tp"]) != 0)
        ),
        "experts over ep {r.ep} * etp {r.etp} beside dp_shard {r.dp_shard} * cp {r.cp} * tp {r.tp}",
        "make one of the two products divide the other",
    ),
    _plan_rule(
        "token_split",
        "with whole experts (etp 1), tp divides the tokens that a rank has of a sequence",
        lambda c, t: (
            (c.model.moe is not None)
            & (t["tp"] > 1)
            & (t["etp"] == 1)
            & (t["sequence_length"] // t["cp"] % t["tp"] != 0)
        ),
        "whole experts with sequences of {r.sequence_length} tokens over cp {r.cp} and tp {r.tp}",
        "make sequence_length a multiple of cp * tp, or set etp to {r.tp}",
    ),
    Rule(
        "engine.micro_batches",
        "engine",
        "1f1b has at least pp micro-batches (torch's requirement; other stacks take fewer)",
        lambda c, t: (t["pp"] > 1) & (t["schedule"] == "1f1b") & (t["num_micro_batches"] < t["pp"]),
        lambda c, r: explain_few_micro_batches(c, r, r.pp),
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
        "all_reduce",
        "all_reduce topology has gradients of whole parameters to sum",
        lambda c, t: (
            (t["all_reduce"] == "topology")
            & ((t["dp"] * t["cp"] == 1) | ((t["zero_stage"] >= 2) & (t["dp_shard"] * t["cp"] > 1)))
        ),
        "all_reduce topology where no gradients of whole parameters are summed (dp_replicate {r.dp_replicate}, dp_shard"
        " {r.dp_shard}, cp {r.cp}, zero_stage {r.zero_stage})",
        "set all_reduce to native, or zero_stage to 0 or 1 with several data-parallel ranks",
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
        "overlap is on for pp, off for tp",
        lambda c, t: t["overlap_tp"] | ~t["overlap_pp"],
        "overlap_tp {r.overlap_tp}, overlap_pp {r.overlap_pp}",
        "set overlap_pp to true and overlap_tp to false",
    ),
    _plan_rule(
        "vocab_rows",
        "with vocab_parallel, every tensor-parallel rank has rows of the vocabulary",
        lambda c, t: t["vocab_parallel"] & ((t["tp"] - 1) * -(-c.model.vocab_size // t["tp"]) >= c.model.vocab_size),
        "tensor-parallel ranks without any of a vocabulary's {c.model.vocab_size} rows (tp {r.tp})",
        "set vocab_parallel to false, or tp to a smaller degree",
    ),
)


ENGINE_RULES = (*_MODEL_RULES, *_PLAN_RULES)
