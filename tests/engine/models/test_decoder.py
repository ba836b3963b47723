"""The decoder computes what transformers computes, and a pipeline's parts are together the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.hf_weights import import_weights
from engine.hf_config import load_model
from engine.models.decoder import Decoder, initial_value
from engine.plan import Plan
from engine.spec import ModelSpec

pytestmark = pytest.mark.unit

_SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
HF_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _SIZES | {"rope_theta": 500.0},
    "mistral": _SIZES | {"sliding_window": None, "head_dim": 8},
    "qwen2": _SIZES | {"tie_word_embeddings": True},
    "mixtral": _SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "gpt2": {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
}


@pytest.mark.parametrize("family", HF_CONFIGS)
def test_logits_equal_transformers(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family, **HF_CONFIGS[family], attn_implementation="eager", experts_implementation="eager"
    )
    reference = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.2)  # biases and norms count too
    reference.save_pretrained(tmp_path)
    spec = load_model(tmp_path)
    model = Decoder(spec, layers=range(spec.num_layers), compute_dtype=torch.float64).double().eval()
    parameters = dict(model.named_parameters())
    imported = dict(import_weights(tmp_path, spec))
    assert imported.keys() == parameters.keys()
    tokens = torch.randint(0, 61, (2, 16))
    with torch.no_grad():
        for fqn, weight in imported.items():
            parameters[fqn].copy_(weight)
        expected, given = reference(tokens).logits, model(tokens)
    # transformers computes the rotary angles in fp32 always.
    assert float((given - expected).abs().max()) < 1e-5 * float(expected.abs().max())


SPEC = ModelSpec(
    num_layers=7, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, ffn_size=8, vocab_size=16,
    moe={"num_experts": 2, "experts_per_token": 1, "ffn_size": 4, "num_dense_layers": 1, "layer_period": 2},
)  # fmt: skip


def test_stages_hold_each_parameter_exactly_once() -> None:
    with torch.device("meta"):
        whole = [fqn for fqn, _ in Decoder(SPEC, layers=range(7)).named_parameters()]
        stages = [
            Decoder(SPEC, layers=layers, has_embedding=index == 0, has_head=index == 2)
            for index, layers in enumerate(Plan(pp=3).stage_layers(7))
        ]
    held = [fqn for stage in stages for fqn, _ in stage.named_parameters()]
    assert sorted(held) == sorted(whole)


def test_layers_are_dense_or_mixtures_as_the_spec_says() -> None:
    with torch.device("meta"):
        model = Decoder(SPEC, layers=range(7))
    kinds = [hasattr(block, "moe") for block in model.layers.values()]
    assert kinds == [SPEC.is_moe_layer(layer) for layer in range(7)] == [False, False, True] + [False, True] * 2


def test_first_values_follow_from_seed_and_name() -> None:
    shape = torch.Size([64, 64])
    query = initial_value(SPEC, 1, "layers.0.attention.query.weight", shape)
    assert torch.equal(query, initial_value(SPEC, 1, "layers.0.attention.query.weight", shape))
    assert not torch.equal(query, initial_value(SPEC, 2, "layers.0.attention.query.weight", shape))
    assert not torch.equal(query, initial_value(SPEC, 1, "layers.1.attention.query.weight", shape))
    out = initial_value(SPEC, 1, "layers.0.attention.out.weight", shape)
    assert float(query.std()) == pytest.approx(0.02, rel=0.05)
    assert float(out.std()) == pytest.approx(0.02 / 14**0.5, rel=0.05)
    assert initial_value(SPEC, 1, "layers.0.ffn_norm.weight", torch.Size([4])).tolist() == [1.0] * 4
    assert initial_value(SPEC, 1, "layers.0.attention.query.bias", torch.Size([4])).tolist() == [0.0] * 4


def test_no_token_sees_the_future() -> None:
    torch.manual_seed(0)
    model = Decoder(SPEC, layers=range(7)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    tokens = torch.randint(0, 16, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 16
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-5)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)
