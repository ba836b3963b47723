"""Memory of plans: parameter counts, the moments of the peak, what divides what, and measured runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autotune.cost.activations import layer_activations
from autotune.cost.columns import PlanColumns, encode
from autotune.cost.estimate import MEMORY_PARTS
from autotune.cost.memory import MemoryTable, memory, memory_of_ranks, rank_share
from autotune.cost.memory_recipe import MemoryRecipe, recipe, recipes
from autotune.cost.parameters import layer_share
from autotune.cost.shapes import ModelShape
from autotune.cost.software import software_catalogue
from engine.config import RunConfig
from engine.context import open_context
from engine.errors import UserError
from engine.flops import layer_parameters, parameter_counts
from engine.hf_config import load_model
from engine.measure import Meter
from engine.plan import Plan, plan_table
from engine.schema import parse
from engine.spec import LatentAttentionSpec, ModelSpec, MoESpec
from engine.step import Stepper

pytestmark = pytest.mark.unit

GIB = 2**30

LLAMA_70B = ModelSpec(
    num_layers=80, hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128, ffn_size=28672, vocab_size=128256
)
LLAMA_8B = ModelSpec(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336, vocab_size=128256
)
MIXTRAL = ModelSpec(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336, vocab_size=32000,
    moe=MoESpec(num_experts=8, experts_per_token=2, ffn_size=14336),
)  # fmt: skip
GPT = ModelSpec(
    num_layers=48, hidden_size=6144, num_heads=64, num_kv_heads=64, head_dim=96, ffn_size=24576, vocab_size=51200,
    norm="layernorm", positions="learned", mlp="plain", activation="gelu", tied_embeddings=True, qkv_bias=True,
    attention_out_bias=True, mlp_bias=True,
)  # fmt: skip
LATENT = ModelSpec(
    num_layers=12, hidden_size=1024, num_heads=16, num_kv_heads=16, head_dim=64, ffn_size=4096, vocab_size=8192,
    latent_attention=LatentAttentionSpec(
        query_rank=384, kv_rank=128, nope_head_dim=64, rope_head_dim=32, value_head_dim=64
    ),
    moe=MoESpec(num_experts=16, experts_per_token=4, ffn_size=512, shared_ffn_size=512, num_dense_layers=3),
)  # fmt: skip


def columns(model: ModelSpec, *plans: Plan, batch: int = 256, length: int = 4096) -> PlanColumns:
    return encode(plan_table((plan, batch, length) for plan in plans), model.num_layers)


def estimate(
    model: ModelSpec, *plans: Plan, stack: str = "megatron", batch: int = 256, length: int = 4096, **options: Any
) -> MemoryTable:
    c = columns(model, *plans, batch=batch, length=length)
    return memory(ModelShape.of(model), c, recipe(stack), overhead_bytes=GIB, **options)


def of_ranks(model: ModelSpec, plan: Plan, stack: str = "megatron", batch: int = 256) -> dict[str, np.ndarray]:
    """Parts of every pipeline rank, ``[pp]``."""
    c = columns(model, plan, batch=batch)
    parts, _ = memory_of_ranks(
        ModelShape.of(model), c, recipe(stack), np.arange(plan.pp)[:, None],
        num_states=2, fused_attention=True, dropout=0, imbalance_ratio=0.0,
    )  # fmt: skip
    return {name: part[:, 0] for name, part in parts.items()}


def num_parameters(model: ModelSpec, plan: Plan) -> np.ndarray:
    """Parameters that each pipeline rank's device holds, from its optimizer states without sharding."""
    return of_ranks(model, plan)["optimizer"] / 8


# ---------------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("model", [LLAMA_70B, MIXTRAL, LATENT], ids=["dense", "experts", "latent"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(pp=1, zero_stage=0),
        Plan(pp=4, zero_stage=0),
        Plan(pp=5, zero_stage=0),
        Plan(pp=2, virtual_stages=3, schedule="interleaved_1f1b", zero_stage=0),
        Plan(pp=2, virtual_stages=2, schedule="zbv", zero_stage=0),
        Plan(pp=4, virtual_stages=2, schedule="dualpipev", zero_stage=0),
    ],
    ids=lambda plan: f"{plan.schedule}-{plan.pp}x{plan.virtual_stages}",
)
def test_all_ranks_together_hold_the_model(model: ModelSpec, plan: Plan) -> None:
    counts = parameter_counts(model)
    assert num_parameters(model, plan).sum() == pytest.approx(counts.total - counts.final_norm, rel=1e-12)


def test_a_tied_head_is_held_again_by_the_last_stage() -> None:
    counts = parameter_counts(GPT)
    assert num_parameters(GPT, Plan(zero_stage=0)).sum() == pytest.approx(counts.total - counts.final_norm)
    again = GPT.vocab_size * GPT.hidden_size
    assert num_parameters(GPT, Plan(pp=4, zero_stage=0)).sum() == pytest.approx(
        counts.total - counts.final_norm + again
    )
    # The ends of a V lie on one rank.
    v = Plan(pp=4, virtual_stages=2, schedule="zbv", zero_stage=0)
    assert num_parameters(GPT, v).sum() == pytest.approx(counts.total - counts.final_norm)


def test_tensor_parallelism_divides_matrices_and_not_norms() -> None:
    one, eight = (num_parameters(LLAMA_70B, Plan(tp=tp, zero_stage=0))[0] for tp in (1, 8))
    norms = 2 * LLAMA_70B.hidden_size * LLAMA_70B.num_layers
    assert eight == pytest.approx((one - norms) / 8 + norms, rel=1e-12)
    whole = num_parameters(LLAMA_70B, Plan(tp=8, vocab_parallel=False, zero_stage=0))[0]
    assert whole - eight == pytest.approx(2 * LLAMA_70B.vocab_size * LLAMA_70B.hidden_size * 7 / 8)


def test_key_and_value_heads_are_repeated_beyond_their_number() -> None:
    eight, sixteen = (num_parameters(LLAMA_70B, Plan(tp=tp, zero_stage=0))[0] for tp in (8, 16))
    kv = 2 * LLAMA_70B.hidden_size * LLAMA_70B.head_dim * LLAMA_70B.num_layers  # one head of each: no less a rank
    norms = 2 * LLAMA_70B.hidden_size * LLAMA_70B.num_layers
    assert sixteen == pytest.approx((eight - norms - kv) / 2 + norms + kv, rel=1e-12)


def test_experts_are_divided_by_ep_and_etp_and_never_by_tp() -> None:
    shape = ModelShape.of(MIXTRAL)
    experts = layer_parameters(MIXTRAL, 0).experts
    for plan, parts in (
        (Plan(tp=4, dp_shard=2), 1),
        (Plan(tp=4, dp_shard=2, ep=8), 8),
        (Plan(tp=4, dp_shard=2, ep=2, etp=4), 8),
    ):
        _, _, held = layer_share(shape, columns(MIXTRAL, plan))
        assert np.asarray(held)[0] == experts / parts
    _, without_routed, _ = layer_share(ModelShape.of(LATENT), columns(LATENT, Plan(tp=2)))
    layer = layer_parameters(LATENT, 5)
    downs = LATENT.hidden_size * (384 + 128 + 32)
    split = layer.attention + layer.ffn - downs  # shared experts are split over tp
    assert np.asarray(without_routed)[0] == pytest.approx(split / 2 + layer.norms + layer.router + downs)


def test_uneven_stages() -> None:
    plan = Plan(pp=4, layers_per_stage=(19, 21, 21, 19), zero_stage=0)
    layer = layer_parameters(LLAMA_70B, 0).total
    held = num_parameters(LLAMA_70B, plan)
    vocabulary = LLAMA_70B.vocab_size * LLAMA_70B.hidden_size
    np.testing.assert_allclose(held, [19 * layer + vocabulary, 21 * layer, 21 * layer, 19 * layer + vocabulary])


def test_leading_dense_layers_are_the_first_stages() -> None:
    share = rank_share(ModelShape.of(LATENT), columns(LATENT, Plan(pp=2)), np.array([[0], [1]]))
    np.testing.assert_allclose(share.blocks.dense_layers[:, 0], [3, 0])
    np.testing.assert_allclose(share.blocks.moe_layers[:, 0], [3, 6])


def test_zero_shards_states_then_gradients_then_parameters() -> None:
    n = num_parameters(LLAMA_8B, Plan(zero_stage=0))[0]
    plans = [Plan(dp_shard=8, zero_stage=stage, precision="bf16") for stage in (0, 1, 2, 3)]
    parts = [of_ranks(LLAMA_8B, plan, batch=8) for plan in plans]  # one micro-batch
    of = {name: [float(p[name][0]) for p in parts] for name in ("parameters", "gradients", "optimizer")}
    # Megatron's distributed optimizer: 18 bytes a parameter, and 6 + 12 / d under ZeRO-1.
    assert of["parameters"] == pytest.approx([6 * n, 2 * n + 4 * n / 8, 2 * n + 4 * n / 8, 6 * n / 8])
    assert of["gradients"] == pytest.approx([4 * n, 4 * n, 4 * n / 8, 4 * n / 8])
    assert of["optimizer"] == pytest.approx([8 * n, n, n, n])


def test_gradients_of_several_micro_batches_are_whole_where_they_are_reduced_once() -> None:
    """Only ZeRO-3 without a pipeline pays for a reduction in each micro-batch."""
    second, third = (Plan(dp_shard=8, zero_stage=stage, precision="bf16") for stage in (2, 3))
    one, several = (of_ranks(LLAMA_8B, second, batch=batch)["gradients"] for batch in (8, 16))
    assert several == pytest.approx(8 * one)
    one, several = (of_ranks(LLAMA_8B, third, batch=batch)["gradients"] for batch in (8, 16))
    assert several == pytest.approx(one)


def test_what_is_offloaded_or_compressed_needs_room_too() -> None:
    n = num_parameters(LLAMA_8B, Plan(zero_stage=0))[0]
    plan = Plan(dp_shard=8, zero_stage=1, precision="bf16")
    kept, offloaded = (of_ranks(LLAMA_8B, plan.changed(offload_parameters_ratio=ratio)) for ratio in (0.0, 1.0))
    assert offloaded["parameters"] == 0
    layer = layer_parameters(LLAMA_8B, 0).total
    assert offloaded["buffers"] - kept["buffers"] >= 2 * layer  # in bf16, at least one
    sparse = of_ranks(LLAMA_8B, plan.changed(gradient_compression="topk"))
    assert sparse["buffers"] - kept["buffers"] == pytest.approx(4 * n)


def test_experts_are_sharded_over_their_own_ranks() -> None:
    """Experts spread over all ranks have nobody to share their states with."""
    experts = parameter_counts(MIXTRAL).layers.experts
    spread, together = (
        of_ranks(MIXTRAL, Plan(dp_shard=8, ep=ep, zero_stage=1, precision="bf16"))["optimizer"][0] for ep in (8, 1)
    )
    assert spread == pytest.approx(together)  # a share of an eighth, whole, or all of them, each to an eighth
    assert together == pytest.approx((num_parameters(MIXTRAL, Plan(zero_stage=0))[0] - experts + experts) / 8 * 8)
    wide = of_ranks(MIXTRAL, Plan(dp_shard=16, ep=8, zero_stage=1, precision="bf16"))["optimizer"][0]
    assert wide == pytest.approx(spread / 2)


def test_context_parallel_ranks_share_the_states_too() -> None:
    alone, shared = (of_ranks(LLAMA_8B, Plan(cp=cp, zero_stage=1, precision="bf16"))["optimizer"][0] for cp in (1, 4))
    assert shared == pytest.approx(alone / 4)


# ---------------------------------------------------------------------------------------------------------- activations


def test_activations_are_those_of_korthikanti() -> None:
    """34 bytes a token and hidden unit with dropout and sequence parallelism, 5 more a score without recompute."""
    plan = Plan(tp=8, sequence_parallel=True, micro_batch_size=4, precision="fp16")
    selective = plan.changed(recompute="selective")
    c = columns(GPT, plan, selective, length=2048)
    kept = np.asarray(
        layer_activations(
            ModelShape.of(GPT), c, recipe("megatron"), fused_attention=0.0, dropout=1.0, imbalance_ratio=0.0
        ).dense
    )
    tokens = 4 * 2048
    assert kept[1] == pytest.approx(34 * tokens * GPT.hidden_size / 8)
    scores = 5 * GPT.num_heads * tokens * 2048 / 8
    maxima = 4 * tokens * GPT.num_heads / 8
    assert kept[0] == pytest.approx(34 * tokens * GPT.hidden_size / 8 + scores + maxima)


def test_what_lessens_activations() -> None:
    plan = Plan(tp=8, dp_shard=8, precision="bf16")
    kept = estimate(
        LLAMA_70B,
        plan,
        plan.changed(sequence_parallel=True),
        plan.changed(recompute="every_k", recompute_period=2),
        plan.changed(recompute="full"),
        plan.changed(recompute="full", sequence_parallel=True),
        plan.changed(offload_activations_ratio=0.5),
        plan.changed(precision="fp8"),
    ).parts["activations"]
    none, split, half, full, full_split, offloaded, fp8 = kept
    assert none > half > full > full_split
    assert none > max(split, offloaded, fp8)


def test_more_micro_batches_in_flight_on_earlier_ranks() -> None:
    kept = of_ranks(LLAMA_70B, Plan(pp=8, tp=8, precision="bf16"))["activations"]
    assert (np.diff(kept[:-1]) < 0).all()
    few = of_ranks(LLAMA_70B, Plan(pp=8, tp=8, precision="bf16"), batch=2)["activations"]
    assert few[0] < kept[0]
    assert few[-1] == pytest.approx(kept[-1])


def test_experts_keep_a_copy_of_a_token_for_each_choice() -> None:
    def kept(experts_per_token: int, imbalance_ratio: float = 0.0) -> float:
        moe = MoESpec(num_experts=8, experts_per_token=experts_per_token, ffn_size=14336)
        return float(
            estimate(
                MIXTRAL.changed(moe=moe), Plan(dp_shard=8, ep=8, precision="bf16"), imbalance_ratio=imbalance_ratio
            ).parts["activations"][0]
        )

    one, two, three = (kept(k) for k in (1, 2, 3))
    assert three - two == pytest.approx(two - one)
    assert kept(2, imbalance_ratio=0.5 * 8 / 7) == pytest.approx(three)


def test_fused_attention_keeps_no_scores() -> None:
    plan = Plan(tp=8, precision="bf16")
    fused, unfused = (
        estimate(GPT, plan, length=2048, fused_attention=fused).parts["activations"][0] for fused in (True, False)
    )
    assert unfused - fused == pytest.approx(GPT.num_layers * 2 * GPT.num_heads / 8 * 2048 * 2048)


def test_logits_are_split_with_the_vocabulary() -> None:
    plan = Plan(tp=4, precision="bf16")
    split, whole = estimate(LLAMA_8B, plan, plan.changed(vocab_parallel=False)).parts["logits"]
    assert whole == pytest.approx(4 * split)
    assert split > 0


# --------------------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("stack", list(recipes()))
def test_parts_add_up(stack: str) -> None:
    plans = [
        Plan(tp=tp, pp=pp, dp_shard=4, zero_stage=stage, recompute=recompute, precision=precision)
        for tp in (1, 8)
        for pp in (1, 4)
        for stage in (0, 1, 2, 3)
        for recompute in ("none", "full", "selective")
        for precision in ("fp32", "bf16", "fp8")
    ]
    for batch in (16, 256):
        table = estimate(MIXTRAL, *plans, stack=stack, batch=batch)
        assert tuple(table.parts) == tuple(MEMORY_PARTS)
        np.testing.assert_allclose(np.sum(list(table.parts.values()), axis=0), table.memory_bytes)
        assert all((part >= 0).all() for part in table.parts.values())
        assert (table.allocated_bytes <= table.reserved_bytes).all()
        assert (table.reserved_bytes < table.memory_bytes).all()
        assert ((table.low_bytes < table.memory_bytes) & (table.memory_bytes < table.high_bytes)).all()


def test_the_fullest_of_all_ranks_is_told() -> None:
    for plan in (Plan(pp=8, tp=4), Plan(pp=4, tp=8, recompute="full"), Plan(pp=10, dp_shard=2)):
        plan = plan.changed(precision="bf16")
        total = np.sum(list(of_ranks(LLAMA_70B, plan).values()), axis=0)
        table = estimate(LLAMA_70B, plan)
        assert table.allocated_bytes[0] == pytest.approx(total.max())
        assert table.fullest_stage[0] == total.argmax()


def test_rows_of_several_models_and_stacks_are_each_as_alone() -> None:
    models = [LLAMA_8B, MIXTRAL, GPT, LATENT]
    plans = [Plan(tp=2, pp=2, precision="bf16"), Plan(dp_shard=4, ep=4), Plan(pp=2, tp=4), Plan(tp=2, dp_shard=2)]
    stacks = ["megatron", "fsdp", "deepspeed", "paretune"]
    table = plan_table((plan, 64, 2048) for plan in plans)
    together = memory(
        ModelShape.rows([ModelShape.of(model) for model in models], np.arange(4)),
        encode(table, np.array([model.num_layers for model in models])),
        MemoryRecipe.rows([recipe(stack) for stack in stacks], np.arange(4)),
        overhead_bytes=np.full(4, GIB),
        fused_attention=np.array([True, True, False, True]),
    )
    for row, (model, plan, stack) in enumerate(zip(models, plans, stacks, strict=True)):
        alone = estimate(model, plan, stack=stack, batch=64, length=2048, fused_attention=stack != "deepspeed")
        assert together.memory_bytes[row] == pytest.approx(alone.memory_bytes[0])
        assert together.fullest_stage[row] == alone.fullest_stage[0]


def test_known_setups() -> None:
    """By hand: 16 bytes a parameter over 8 devices, the activations of per-operation recompute, gathered layers."""
    table = estimate(
        LLAMA_8B,
        Plan(dp_shard=8, zero_stage=3, precision="bf16", recompute="selective"),
        stack="fsdp",
        batch=8,
        length=8192,
    )
    states = sum(float(table.parts[name][0]) for name in ("parameters", "gradients", "optimizer"))
    assert states == pytest.approx(16 * 8.03e9 / 8, rel=0.001)
    assert 33e9 < table.reserved_bytes[0] < 45e9  # TorchTitan measures 36 to 42
    # 405B on 128 stages of 8 x 16 devices: 405.9e9 / 128 parameters of 2 + 4 bytes, and 12 over 8 replicas.
    large = ModelSpec(
        num_layers=126, hidden_size=16384, num_heads=128, num_kv_heads=8, head_dim=128, ffn_size=53248,
        vocab_size=128256,
    )  # fmt: skip
    parts = of_ranks(large, Plan(tp=8, pp=16, dp_shard=8, zero_stage=1, precision="bf16", sequence_parallel=True))
    states = sum(float(parts[name].sum()) for name in ("parameters", "gradients", "optimizer")) * 8
    assert states == pytest.approx(405.85e9 * (6 + 12 / 8), rel=0.001)


def test_every_shipped_architecture(shared_data: Path) -> None:
    for path in sorted((shared_data / "model_configs").glob("*.json")):
        model = load_model(path)
        ep = math.gcd(model.moe.num_experts, 64) if model.moe else 1
        plan = Plan(dp_shard=512, ep=ep, zero_stage=3, precision="bf16", recompute="full")
        table = estimate(model, plan, plan.changed(recompute="none"), batch=512, length=1024, stack="fsdp")
        floor = 16 * parameter_counts(model).total / 512
        assert floor < table.memory_bytes[0] < table.memory_bytes[1], path.name
        assert table.memory_bytes[0] < 80 * GIB, path.name


# -------------------------------------------------------------------------------------------------------------- recipes


def test_every_stack_has_a_recipe() -> None:
    for name, figures in software_catalogue().items():
        assert recipe(figures.memory_recipe), name
    assert recipe("paretune", "cpu") is recipe("paretune_cpu")
    assert recipe("fsdp", "cpu") is recipe("fsdp")
    with pytest.raises(UserError, match="unknown memory recipe 'fdsp'"):
        recipe("fdsp")


# --------------------------------------------------------------------------------------------------- against the engine

TINY = {
    "num_layers": 4, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_size": 256,
    "vocab_size": 512, "max_positions": 64,
}  # fmt: skip
PLAIN = {"mlp": "plain", "norm": "layernorm", "positions": "learned", "activation": "gelu"}
EXPERTS = {"moe": {"num_experts": 4, "experts_per_token": 2, "ffn_size": 128}}


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ({}, {"micro_batch_size": 2}),
        ({}, {"micro_batch_size": 8}),
        ({}, {"micro_batch_size": 8, "recompute": "full", "precision": "bf16"}),
        ({}, {"micro_batch_size": 4, "recompute": "every_k", "recompute_period": 2}),
        ({"vocab_size": 64}, {"micro_batch_size": 8, "precision": "bf16"}),
        (PLAIN, {"micro_batch_size": 4}),
        (EXPERTS, {"micro_batch_size": 4, "precision": "bf16"}),
    ],
)
def test_live_memory_of_the_engine(model: dict[str, Any], plan: dict[str, Any]) -> None:
    """The tracker's peak of a step within 5 %."""
    config = parse(
        RunConfig,
        {
            "model": TINY | model,
            "workload": {"sequence_length": 64, "total_tokens": 64 * 8 * 2},
            "hyperparameters": {"global_batch_size": 8},
            "plan": plan,
        },
    )
    context = open_context(config.plan, config.runtime)
    stepper = Stepper.build(config, context, config.model.vocab_size)
    tokens = torch.randint(0, config.model.vocab_size, (8, 64))
    meter = Meter(config.runtime, context)
    for last in (False, True):
        meter.run_step(stepper, lambda: stepper.train_step(tokens, tokens, 1e-3), is_last=last)
    measured = meter.results(all_ranks=False)["peak_memory_bytes"]
    told = memory(
        ModelShape.of(config.model),
        columns(config.model, config.plan, batch=8, length=64),
        recipe("paretune", "cpu"),
        overhead_bytes=0,
    )
    assert told.allocated_bytes[0] == pytest.approx(measured, rel=0.05)
