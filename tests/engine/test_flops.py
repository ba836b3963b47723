"""Training FLOPs against a count of every matrix product, and the shares that parameter counts are made of."""

from __future__ import annotations

from typing import Any

import pytest

from engine.flops import (
    layer_parameters,
    parameter_counts,
    recomputed_flops_per_token,
    training_flops_per_token,
)
from engine.spec import ModelSpec

pytestmark = pytest.mark.unit

MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "ffn_size": 48,
    "vocab_size": 100,
}
MOE: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2, "ffn_size": 16, "shared_ffn_size": 8}
LENGTH = 16


def spec(**changes: Any) -> ModelSpec:
    return ModelSpec(**(MODEL | changes))


def test_flops_of_a_dense_model_by_hand() -> None:
    attention = 32 * (32 + 2 * 16) + 32 * 32
    weights = 2 * (attention + 3 * 32 * 48) + 100 * 32
    scores_and_values = 2 * 2 * 32
    assert training_flops_per_token(spec(), LENGTH) == 6 * (weights + scores_and_values * (LENGTH + 1) / 2)
    assert training_flops_per_token(spec(), LENGTH, causal=False) == 6 * (weights + scores_and_values * LENGTH)


def test_recompute_adds_a_forward_pass_of_what_it_covers() -> None:
    total = training_flops_per_token(spec(), LENGTH)
    head, scores_and_values = 100 * 32, 2 * 2 * 32 * (LENGTH + 1) / 2
    assert recomputed_flops_per_token(spec(), LENGTH, "none") == 0
    assert recomputed_flops_per_token(spec(), LENGTH, "full") == pytest.approx(total / 3 - 2 * head)
    assert recomputed_flops_per_token(spec(), LENGTH, "every_k", 2) == pytest.approx((total / 3 - 2 * head) / 2)
    assert recomputed_flops_per_token(spec(), LENGTH, "selective") == pytest.approx(2 * scores_and_values)


def test_flops_do_not_change_with_tying_biases_or_norms() -> None:
    plain = training_flops_per_token(spec(), LENGTH)
    other = spec(tied_embeddings=True, qkv_bias=True, mlp_bias=True, norm="layernorm")
    assert training_flops_per_token(other, LENGTH) == plain


def test_a_window_limits_the_context_of_its_layers() -> None:
    def attended(window: int) -> float:
        return sum(min(token + 1, window) for token in range(LENGTH)) / LENGTH

    width = 2 * 32
    full = training_flops_per_token(spec(), LENGTH)
    one = training_flops_per_token(spec(sliding_window=4, sliding_layers=(1,)), LENGTH)
    both = training_flops_per_token(spec(sliding_window=4), LENGTH)
    assert full - one == pytest.approx(6 * width * (attended(LENGTH) - attended(4)))
    assert full - both == pytest.approx(2 * (full - one))
    assert training_flops_per_token(spec(sliding_window=64), LENGTH) == full


def test_experts_count_as_often_as_a_token_passes_them() -> None:
    moe = spec(moe=MOE)
    dense = spec(ffn_size=2 * 16 + 8)
    assert training_flops_per_token(moe, LENGTH) == training_flops_per_token(dense, LENGTH) + 6 * 2 * 4 * 32


def test_latent_attention_by_hand() -> None:
    latent = {"query_rank": 12, "kv_rank": 8, "nope_head_dim": 6, "rope_head_dim": 2, "value_head_dim": 5}
    attention = 12 * (32 + 4 * 8) + 32 * (8 + 2) + 8 * 4 * (6 + 5) + 4 * 5 * 32
    weights = 2 * (attention + 3 * 32 * 48) + 100 * 32
    wanted = 6 * (weights + 2 * 4 * (6 + 2 + 5) * (LENGTH + 1) / 2)
    assert training_flops_per_token(spec(latent_attention=latent), LENGTH) == wanted


def test_groups_sum_to_the_total() -> None:
    model = spec(moe=MOE | {"num_dense_layers": 1, "router_bias": True, "expert_bias": True}, qk_norm=True)
    counts = parameter_counts(model)
    layers = [layer_parameters(model, layer) for layer in range(2)]
    assert counts.layers == layers[0] + layers[1]
    assert layers[0].experts == layers[0].router == 0
    assert layers[1].router == 4 * 33
    assert layers[1].ffn == 3 * 32 * 8
    assert counts.total == counts.embedding + counts.head + sum(layer.total for layer in layers) + counts.final_norm
    assert counts.active == counts.total - layers[1].experts // 2


def test_prediction_blocks_are_apart() -> None:
    counts = parameter_counts(spec(num_mtp_layers=2))
    assert counts.total == parameter_counts(spec()).total
    assert counts.mtp == 2 * (layer_parameters(spec(), 1).total + 2 * 32 * 32 + 3 * 32)
