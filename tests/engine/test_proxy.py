"""Narrower models stay legal and in proportion, and say where they could not."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.cost.architectures import Architecture, architectures
from engine.config import RunConfig
from engine.errors import UserError
from engine.flops import parameter_counts
from engine.hf_export import to_hf_config
from engine.parametrization import scales_of, standard_scales
from engine.proxy import describe_proxy, proxy_hyperparameters, proxy_model, proxy_run
from engine.spec import Hyperparameters, ModelSpec, Workload
from tests.engine.parallel.cases import MODELS

pytestmark = pytest.mark.unit


def spec_of(known: Architecture) -> ModelSpec | None:
    """The model of an entry that describes one whole."""
    if known.unsupported or not (known.hidden and known.layers and known.heads and known.vocab):
        return None
    heads: dict[str, Any] = {"num_heads": known.heads, "num_kv_heads": known.kv_heads or known.heads}
    moe = None
    if known.num_experts and known.moe_ffn:
        moe = {
            "num_experts": known.num_experts, "experts_per_token": known.experts_per_token, "ffn_size": known.moe_ffn,
            "shared_ffn_size": known.shared_experts * known.moe_ffn, "num_dense_layers": known.num_dense_layers,
        }  # fmt: skip
    return ModelSpec(
        num_layers=known.layers, hidden_size=known.hidden, head_dim=known.head_dim or known.hidden // known.heads,
        ffn_size=known.ffn or known.moe_ffn or 4 * known.hidden, vocab_size=known.vocab, positions=known.positions,
        latent_attention=known.latent_attention, moe=moe, tied_embeddings=bool(known.tied), **heads,
    )  # fmt: skip


CATALOGUE = {name: spec for name, known in architectures().items() if (spec := spec_of(known)) is not None}
SPECS = {**CATALOGUE, **MODELS}


@given(name=st.sampled_from(sorted(SPECS)), ratio=st.floats(0.01, 1.0))
def test_a_proxy_is_a_legal_narrower_model_in_proportion(name: str, ratio: float) -> None:
    """Constructing it checks it; each width is within one unit of its share."""
    spec = SPECS[name]
    proxy = proxy_model(spec, ratio)
    kept = {"num_layers", "head_dim", "vocab_size", "max_positions", "tied_embeddings", "positions", "family"}
    assert all(getattr(proxy, field) == getattr(spec, field) for field in kept)
    assert proxy.num_heads % proxy.num_kv_heads == 0
    assert (proxy.num_heads == proxy.num_kv_heads) == (spec.num_heads == spec.num_kv_heads) or proxy.num_kv_heads == 1
    assert abs(proxy.hidden_size - ratio * spec.hidden_size) <= 8
    assert abs(proxy.num_kv_heads - ratio * spec.num_kv_heads) < 1
    assert abs(proxy.num_heads - ratio * spec.num_heads) <= max(proxy.num_kv_heads / 2, 1)
    assert abs(proxy.ffn_size - proxy.hidden_size / spec.hidden_size * spec.ffn_size) <= 8
    assert parameter_counts(proxy).total <= parameter_counts(spec).total
    if spec.moe and proxy.moe:
        assert (proxy.moe.num_experts, proxy.moe.experts_per_token) == (
            spec.moe.num_experts,
            spec.moe.experts_per_token,
        )
        if spec.moe.shared_ffn_size % spec.moe.ffn_size == 0:
            assert proxy.moe.shared_ffn_size * spec.moe.ffn_size == spec.moe.shared_ffn_size * proxy.moe.ffn_size


def test_the_catalogue_is_looked_at() -> None:
    assert len(CATALOGUE) >= 20
    assert any(spec.moe for spec in CATALOGUE.values())
    assert any(spec.latent_attention for spec in CATALOGUE.values())


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_even_share_rounds_nothing(name: str) -> None:
    spec = CATALOGUE[name]
    told = describe_proxy(spec, proxy_model(spec, 0.5))
    odd = [size for size in (spec.num_heads, spec.num_kv_heads) if size % 2]
    sizes = [spec.hidden_size, spec.ffn_size, *([spec.moe.ffn_size] if spec.moe else [])]
    if not odd and not any(size % 16 for size in sizes):
        assert told == ()


def test_what_was_rounded_is_told() -> None:
    spec = MODELS["llama"].changed(hidden_size=64, num_heads=8, num_kv_heads=2, ffn_size=176)
    proxy = proxy_model(spec, 0.25)
    assert (proxy.hidden_size, proxy.num_heads, proxy.num_kv_heads, proxy.ffn_size) == (16, 2, 1, 48)
    assert proxy.name == "model-w16"
    assert describe_proxy(spec, proxy) == (
        "num_kv_heads 2 is 1, 0.5 of it; hidden_size is 0.25",
        "ffn_size 176 is 48, 0.273 of it; hidden_size is 0.25",
    )


def test_a_family_without_a_size_of_heads_keeps_whole_ones() -> None:
    spec = MODELS["gpt2"].changed(family="gpt2", hidden_size=768, num_heads=12, num_kv_heads=12, head_dim=64)
    proxy = proxy_model(spec, 0.3)
    assert (proxy.hidden_size, proxy.num_heads) == (256, 4)
    to_hf_config(proxy)


@pytest.mark.parametrize("ratio", [0.0, -1.0, 1.5, float("nan")])
def test_ratios_that_make_nothing_narrower_are_refused(ratio: float) -> None:
    with pytest.raises(UserError, match="above 0 and at most 1"):
        proxy_model(MODELS["llama"], ratio)


def test_a_standard_run_and_its_proxy_are_of_one_parametrization() -> None:
    config = RunConfig(model=MODELS["llama"], workload=Workload(sequence_length=16, total_tokens=1000))
    same, half = proxy_run(config, 1.0), proxy_run(config, 0.5)
    assert same.model == config.model
    names = ("embedding.weight", "layers.0.ffn.up.weight", "head.weight", "norm.weight")
    assert all(scales_of(same.hyperparameters, same.model)(name) == standard_scales(name) for name in names)
    assert half.hyperparameters.base_hidden_size == config.model.hidden_size
    assert scales_of(half.hyperparameters, half.model)("layers.0.ffn.up.weight").learning_rate == 2
    relative = Hyperparameters(parametrization="mup", base_hidden_size=8)
    assert proxy_hyperparameters(relative, config.model) == relative
