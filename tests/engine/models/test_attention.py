"""Attention with windows, sinks and grouped heads against a loop over tokens; positions and cores that are replaced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.models.attention import Attention, attend
from engine.models.decoder import Decoder
from engine.models.latent import LatentAttention
from engine.models.layers import clamped_swiglu
from engine.models.positions import Positions
from engine.spec import ModelSpec

pytestmark = pytest.mark.unit

SIZES: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "ffn_size": 16,
    "vocab_size": 19,
}  # fmt: skip
LATENT = {"query_rank": 6, "kv_rank": 5, "nope_head_dim": 4, "rope_head_dim": 2, "value_head_dim": 3}


def by_token(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, sinks: Tensor | None, scale: float | None
) -> Tensor:
    """Attention written out for one head and one token after another."""
    output = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype)
    groups = query.shape[1] // key.shape[1]
    for batch in range(query.shape[0]):
        for head in range(query.shape[1]):
            for token in range(query.shape[2]):
                first = 0 if window is None else max(token - window + 1, 0)
                keys, values = (x[batch, head // groups, first : token + 1] for x in (key, value))
                logits = keys @ query[batch, head, token] * (query.shape[-1] ** -0.5 if scale is None else scale)
                shares = logits.exp()
                total = shares.sum() + (0 if sinks is None else sinks[head].exp())
                output[batch, head, token] = (shares / total) @ values
    return output


def heads(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    query, key, value, sinks = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((2, 4, 7, 4), (2, 2, 7, 4), (2, 2, 7, 3), (4,))
    )
    return query, key, value, sinks


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 6, 7])
def test_attention_is_what_a_loop_over_tokens_gives(window: int | None, has_sinks: bool, scale: float | None) -> None:
    query, key, value, sinks = heads()
    given = attend(query, key, value, window=window, sinks=sinks if has_sinks else None, scale=scale)
    expected = by_token(query, key, value, window, sinks if has_sinks else None, scale)
    assert torch.allclose(given, expected, rtol=0, atol=1e-12)
    inputs = [query, key, value, *([sinks] if has_sinks else [])]
    direction = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(given, inputs, direction), torch.autograd.grad(expected, inputs, direction), strict=True
    ):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_softmax_of_bf16_heads_is_taken_in_fp32() -> None:
    query, key, value, sinks = heads(torch.bfloat16)
    given = attend(query, key, value, window=3, sinks=sinks)
    expected = by_token(query.double(), key.double(), value.double(), 3, sinks.double(), None)
    assert given.dtype == torch.bfloat16
    assert torch.allclose(given.double(), expected, rtol=0, atol=0.02)


def test_a_sink_that_is_far_below_every_logit_changes_nothing() -> None:
    query, key, value, sinks = heads()
    far_below = torch.full_like(sinks, -1e4)
    assert torch.allclose(attend(query, key, value, sinks=far_below), attend(query, key, value), rtol=0, atol=1e-12)


@pytest.mark.parametrize("latent", [None, LATENT])
def test_a_core_in_the_place_of_attend_gets_heads_window_sinks_and_scale(latent: dict[str, int] | None) -> None:
    spec = ModelSpec(
        **SIZES, sliding_window=5, sliding_layers=[1], attention_sinks=True, latent_attention=latent, qk_norm=not latent
    )
    model = Decoder(spec, layers=range(2))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    calls = []

    def core(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
        calls.append((query.shape[-1], key.shape[1], value.shape[-1], settings["window"], settings["sinks"].shape))
        return attend(query, key, value, **settings)

    tokens = torch.randint(19, (2, 8))
    before = model(tokens)
    for module in model.modules():
        if isinstance(module, Attention | LatentAttention):
            module.core = core
    assert torch.equal(model(tokens), before)
    shape = (6, 4, 3) if latent else (4, 2, 4)
    assert calls == [(*shape, None, (4,)), (*shape, 5, (4,))]


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_positions_are_asked_for_in_one_place(positions: str) -> None:
    """Tokens turned by their distance alone: whole sequences moved along give the same with rotary positions, and
    what stands at those places with learned ones."""

    class Moved(Positions):
        def ids(self, length: int, device: torch.device) -> Tensor:
            return super().ids(length, device) + 3

    model = Decoder(ModelSpec(**SIZES, positions=positions), layers=range(2), compute_dtype=torch.float64).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens = torch.randint(19, (2, 8))
    with torch.no_grad():
        before = model(tokens)
        model.use_positions(Moved())
        after = model(tokens)
        if model.positions is not None:
            model.use_positions(Positions())
            model.positions.weight.copy_(model.positions.weight.roll(-3, 0))
            before = model(tokens)
    assert torch.allclose(after, before, rtol=0, atol=1e-10)


def test_clamped_swiglu_limits_gate_and_up() -> None:
    gate = torch.tensor([-20.0, -1.0, 2.0, 20.0], dtype=torch.float64)
    up = torch.tensor([3.0, -20.0, 20.0, -2.0], dtype=torch.float64)
    limited = torch.tensor([-20.0, -1.0, 2.0, 7.0], dtype=torch.float64)
    expected = limited / (1 + (-1.702 * limited).exp()) * torch.tensor([4.0, -6.0, 8.0, -1.0], dtype=torch.float64)
    assert torch.allclose(clamped_swiglu(gate, up), expected, rtol=1e-12, atol=0)
