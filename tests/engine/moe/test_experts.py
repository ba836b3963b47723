"""Experts against a loop over tokens; the grouped product against one product per expert; experts without tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import deterministic

from engine.models.layers import ACTIVATIONS, clamped_swiglu
from engine.moe import stacked_linear
from engine.moe.capacity import count_of_each, expert_capacity, within_capacity
from engine.moe.layer import MixtureOfExperts
from engine.precision.linear import has_fast_bf16
from engine.spec import ModelSpec, MoESpec

pytestmark = pytest.mark.unit

SPEC = ModelSpec(num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn_size=24, vocab_size=32)
MOE: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2, "ffn_size": 8}


def layer_of(dtype: torch.dtype = torch.float64, *, model: ModelSpec = SPEC, **moe: Any) -> MixtureOfExperts:
    """A layer with random weights."""
    layer = MixtureOfExperts(model, MoESpec(**(MOE | moe))).to(dtype)
    draws = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.5, generator=draws)
    return layer


def tokens_of(dtype: torch.dtype = torch.float64) -> Tensor:
    """[2, 9, 16]"""
    return torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


@pytest.fixture
def nan_filled() -> Iterator[None]:
    """Tensors made without values are full of NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(
    ("changes", "moe"),
    [
        ({}, {}),
        ({"mlp": "plain", "activation": "gelu"}, {"expert_bias": True}),
        ({"activation": "clamped_swiglu"}, {"expert_bias": True, "router_bias": True, "shared_ffn_size": 12}),
    ],
)
def test_output_is_the_weighted_sum_of_the_chosen_experts(changes: dict[str, Any], moe: dict[str, Any]) -> None:
    layer, x = layer_of(model=SPEC.changed(**changes), **moe), tokens_of()
    experts = layer.experts

    def feed_forward(token: Tensor, e: int) -> Tensor:
        up, gate = experts.up[e] @ token, None if experts.gate is None else experts.gate[e] @ token
        if experts.up_bias is not None:
            up = up + experts.up_bias[e]
        if gate is None:
            hidden = ACTIVATIONS[layer_activation](up)
        else:
            gate = gate if experts.gate_bias is None else gate + experts.gate_bias[e]
            swiglu = layer_activation == "clamped_swiglu"
            hidden = clamped_swiglu(gate, up) if swiglu else ACTIVATIONS[layer_activation](gate) * up
        output = experts.down[e] @ hidden
        return output if experts.down_bias is None else output + experts.down_bias[e]

    layer_activation = changes.get("activation", "silu")
    expected = []
    for token in x.flatten(0, 1):
        logits = layer.router.weight @ token + (0 if layer.router.bias is None else layer.router.bias)
        best = logits.topk(2)
        parts = zip(best.values.softmax(0), best.indices.tolist(), strict=True)
        expected.append(sum(weight * feed_forward(token, expert) for weight, expert in parts))
    whole = torch.stack(expected).view_as(x) + (0 if layer.shared is None else layer.shared(x))
    torch.testing.assert_close(layer(x), whole)


@pytest.mark.skipif(not has_fast_bf16(), reason="this CPU has no grouped bf16 product")
def test_grouped_product_equals_one_product_per_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    draws = torch.Generator().manual_seed(0)
    loads = [5, 0, 7, 0]
    tensors = [torch.randn(*shape, generator=draws).bfloat16() for shape in ((12, 16), (4, 24, 16), (4, 24))]
    gradient = torch.randn(12, 24, generator=draws).bfloat16()
    results = []
    for grouped in (True, False):
        rows, weight, bias = (tensor.clone().requires_grad_() for tensor in tensors)
        assert stacked_linear.suits_grouped_product(rows, weight) or not grouped
        product = stacked_linear.stacked_linear(rows, loads, weight, bias)
        product.backward(gradient)
        results.append((product, rows.grad, weight.grad, bias.grad))
        monkeypatch.setattr(stacked_linear, "suits_grouped_product", lambda *_: False)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-1)
    assert not results[0][2][[1, 3]].any(), "experts without rows have a zero gradient"


@pytest.mark.usefixtures("nan_filled")
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_an_expert_without_tokens_gives_no_nan(dtype: torch.dtype) -> None:
    layer, x = layer_of(dtype, selection_bias=True, scoring="sigmoid"), tokens_of(dtype)
    assert layer.selection_bias is not None
    layer.selection_bias[2] = -100.0
    layer(x).square().sum().backward()
    assert layer.load[2] == 0
    assert layer.load.sum() == 2 * x.shape[0] * x.shape[1]
    for parameter in layer.parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
    assert not layer.experts.up.grad[2].any()  # type: ignore[index]


def test_the_smallest_weights_are_dropped_first() -> None:
    chosen = torch.tensor([0, 1, 0, 0, 1, 0])
    weights = torch.tensor([0.3, 0.9, 0.5, 0.1, 0.2, 0.3])
    assert within_capacity(chosen, weights, 3, 2).tolist() == [True, True, True, False, True, False]
    assert within_capacity(chosen, weights, 3, 1).tolist() == [False, True, True, False, False, False]
    assert expert_capacity(1.25, 36, 4) == 12


def test_capacity_limits_rows_in_training_alone() -> None:
    whole, x = layer_of(shared_ffn_size=8), tokens_of()
    limited = layer_of(shared_ffn_size=8)
    limited.experts.dispatch.capacity_factor = 4.0
    torch.testing.assert_close(limited(x), whole(x))  # room for all
    limited.experts.dispatch.capacity_factor = 1e-9  # one row each
    logits = limited.router(x.flatten(0, 1))
    best = logits.topk(2, dim=-1)
    kept = within_capacity(best.indices.flatten(), best.values.softmax(-1).flatten(), 4, 1).view(-1, 2)
    passed_by = ~kept.any(-1).view(2, 9)
    assert int(kept.sum()) == 4
    assert limited.shared is not None
    torch.testing.assert_close(limited(x)[passed_by], limited.shared(x)[passed_by])
    assert int(limited.load.sum()) == 2 * 36, "what is counted is what was chosen"
    limited.eval()
    torch.testing.assert_close(limited(x), whole(x))


def test_counts_have_a_fixed_size() -> None:
    assert count_of_each(torch.tensor([[0, 2], [2, 2]]), 5).tolist() == [1, 0, 3, 0, 0]
