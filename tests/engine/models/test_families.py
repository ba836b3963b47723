"""Every family computes what transformers computes of the same weights: windows, sinks, scaled rotary positions beyond
the original length, latent attention and every kind of router."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from engine.checkpoint.hf_weights import import_weights
from engine.errors import UserError
from engine.flops import parameter_counts, training_flops_per_token
from engine.hf_config import load_model, read_hf_config
from engine.models.attention import Attention
from engine.models.decoder import Decoder
from engine.models.latent import LatentAttention
from engine.rope import rotation, scaling_of
from engine.spec import ModelSpec

pytestmark = pytest.mark.unit

LENGTH = 24
SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
QWEN_MOE = SIZES | {"moe_intermediate_size": 20, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
DEEPSEEK = SIZES | {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 10, "moe_intermediate_size": 20, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_mtp_layers": 0,
}  # fmt: skip
GPT_OSS = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "num_hidden_layers": 3}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LONG = {
    "rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.0, 3.0, 4.5],
    "original_max_position_embeddings": 16,
}  # fmt: skip
LLAMA = SIZES | {"rope_theta": 500.0}

# Name -> (family, configuration). Lengths are beyond every window, and beyond the original length of scaled positions.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", LLAMA),
    "llama with biases": ("llama", LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", SIZES | {"sliding_window": None, "head_dim": 8}),
    "mistral with a window": ("mistral", SIZES | {"sliding_window": 7, "head_dim": 12}),
    "qwen2": ("qwen2", SIZES | {"tie_word_embeddings": True}),
    "qwen2 with a window in later layers": (
        "qwen2", SIZES | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    "qwen3": ("qwen3", SIZES | {"head_dim": 16, "rms_norm_eps": 1e-3}),
    "qwen3 with a window by layer": (
        "qwen3",
        SIZES | {
            "head_dim": 8, "use_sliding_window": True, "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "mixtral": ("mixtral", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}),
    "qwen3_moe": ("qwen3_moe", QWEN_MOE),
    "qwen3_moe, weights made to sum to one": ("qwen3_moe", QWEN_MOE | {"norm_topk_prob": True}),
    "qwen3_moe, first layer dense": ("qwen3_moe", QWEN_MOE | {"mlp_only_layers": [0]}),
    "qwen3_moe, every second layer": (
        "qwen3_moe", QWEN_MOE | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 6}
    ),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "deepseek_v3 without query rank, with biases": (
        "deepseek_v3", DEEPSEEK | {"q_lora_rank": None, "attention_bias": True, "rms_norm_eps": 1e-4}
    ),
    "deepseek_v3, one group, raw weights": (
        "deepseek_v3", DEEPSEEK | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False}
    ),
    "deepseek_v3 with yarn": (
        "deepseek_v3", DEEPSEEK | {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}
    ),
    "gpt_oss": ("gpt_oss", GPT_OSS | {"sliding_window": 5}),
    "gpt_oss without scaling": (
        "gpt_oss", GPT_OSS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "sliding_window": 5}
    ),
    "gpt2": ("gpt2", {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}),
    "gpt2 with relu": (
        "gpt2",
        {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": 40,
         "activation_function": "relu", "tie_word_embeddings": False},
    ),
    **{
        f"llama, {name}": ("llama", LLAMA | {"max_position_embeddings": most, "rope_scaling": scaling})
        for name, most, scaling in [
            ("linear", 64, {"rope_type": "linear", "factor": 3.0}),
            ("dynamic within the original length", 64, {"type": "dynamic", "factor": 3.0}),
            ("dynamic beyond the original length", 8, {"rope_type": "dynamic", "factor": 3.0}),
            (
                "llama3", 64,
                {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                 "original_max_position_embeddings": 16},
            ),
            ("yarn", 32, YARN),
            ("yarn with settings", 32, YARN | {"beta_fast": 8.0, "beta_slow": 2.0, "truncate": False}),
            ("yarn with an amplitude", 32, YARN | {"attention_factor": 1.3}),
            ("longrope beyond the original length", 64, LONG),
            ("longrope within the original length", 64, LONG | {"original_max_position_embeddings": 32}),
        ]
    },
}  # fmt: skip


def transformers_model(family: str, config: dict[str, Any]) -> Any:
    """A model of ``transformers`` with random weights, biases and norms, in fp64."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    built = transformers.AutoConfig.for_model(
        family, **config, attn_implementation="eager", experts_implementation="eager"
    )
    model = transformers.AutoModelForCausalLM.from_config(built).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.2)
    return model


def built_from(folder: Path, compute: torch.dtype = torch.float64) -> tuple[ModelSpec, Decoder]:
    """Our model with the weights that ``transformers`` saved."""
    spec = load_model(folder)
    model = Decoder(spec, layers=range(spec.num_layers), compute_dtype=compute).double().eval()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    imported = dict(import_weights(folder, spec))
    assert imported.keys() >= dict(model.named_parameters()).keys()
    with torch.no_grad():
        for fqn, weight in imported.items():
            tensors[fqn].copy_(weight)
    return spec, model


def relative_error(given: Tensor, expected: Tensor) -> float:
    return float(((given - expected).abs().max() / expected.abs().max()).detach())


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    """Within 1e-5 and 1e-4: transformers computes norms and rotary angles in fp32 whatever the dtype."""
    reference = transformers_model(*FAMILIES[name])
    reference.save_pretrained(tmp_path)
    spec, model = built_from(tmp_path)
    tokens = torch.randint(0, 61, (2, LENGTH))
    expected, given = reference(tokens).logits, model(tokens)
    direction = torch.randn_like(expected)
    expected.backward(direction)
    given.backward(direction)
    assert relative_error(given, expected) < 1e-5
    with torch.no_grad():  # gradients in the places of weights, so that they can be read under our names
        for parameter in reference.parameters():
            parameter.copy_(parameter.grad)
    reference.save_pretrained(tmp_path)
    wanted = dict(import_weights(tmp_path, spec))
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for fqn, parameter in model.named_parameters():
        assert parameter.grad is not None, fqn
        allowed = 1e-4 * float(wanted[fqn].abs().max()) + 1e-12 * largest  # of biases of keys it is 0 but for rounding
        assert float((parameter.grad - wanted[fqn]).abs().max()) < allowed, fqn
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_counts(spec).total


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe, first layer dense", "deepseek_v3", "gpt_oss"])
def test_model_flops_are_those_of_the_products_that_are_computed(name: str) -> None:
    family, config = FAMILIES[name]
    spec = read_hf_config({"model_type": family, **config}, "config.json")[0].changed(sliding_window=None)
    model = Decoder(spec, layers=range(spec.num_layers))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for module in model.modules():
        if isinstance(module, Attention | LatentAttention):
            module.core = plain_products
    tokens = torch.randint(0, 61, (2, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert counter.get_total_flops() == training_flops_per_token(spec, LENGTH, causal=False) * tokens.numel()


def plain_products(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
    """Attention's two products, without mask and sinks."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return (query @ key.transpose(-1, -2)).softmax(-1) @ value


@pytest.mark.parametrize("name", ["qwen3 with a window by layer", "deepseek_v3 with yarn", "gpt_oss"])
def test_bf16_stays_near_fp64(name: str, tmp_path: Path) -> None:
    """Routers may choose other experts in bf16, so only most tokens are compared."""
    transformers_model(*FAMILIES[name]).save_pretrained(tmp_path)
    _, model = built_from(tmp_path)
    _, rounded = built_from(tmp_path, torch.bfloat16)
    tokens = torch.randint(0, 61, (2, LENGTH))
    with torch.no_grad():
        expected, given = model(tokens), rounded(tokens)
    assert given.dtype == torch.bfloat16
    errors = (given - expected).abs().amax(-1) / expected.abs().max()
    assert float(errors.median()) < 0.05


def spec_with(scaling: dict[str, Any] | None, **changes: Any) -> ModelSpec:
    return ModelSpec(
        num_layers=1, hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=8, ffn_size=8, vocab_size=8,
        rope_scaling=scaling, **changes,
    )  # fmt: skip


def test_dynamic_scaling_depends_on_the_length_beyond_the_original_one_only() -> None:
    spec = spec_with({"rope_type": "dynamic", "factor": 2.0}, max_positions=16)
    plain = rotation(spec_with(None), 16).frequencies
    assert (rotation(spec, 16).frequencies == plain).all()
    assert (rotation(spec, 17).frequencies[1:] < plain[1:]).all()
    assert rotation(spec, 16).frequencies[0] == rotation(spec, 64).frequencies[0] == 1.0


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "spiral"}, "kind 'spiral'.*one of linear, dynamic, llama3, yarn, longrope"),
        ({"factor": 2.0}, "kind None"),
        ({"type": "linear"}, "'rope_scaling.factor' is missing"),
        ({"type": "linear", "factor": 0.5}, r"'rope_scaling.factor': must be greater than or equal to 1, got 0\.5"),
        ({"type": "linear", "factor": 2.0, "beta": 1}, "unknown key 'rope_scaling.beta'"),
        ({"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, "unknown key .*partial_rotary_factor"),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}, "1 short and 4 long .*give 4 of each"),
    ],
)
def test_scaling_that_is_not_understood_is_told(scaling: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        scaling_of(spec_with(scaling))
    assert re.search(message, f"{caught.value.message} {caught.value.hint}")
