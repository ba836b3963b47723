"""Hugging Face ``config.json`` of an architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.errors import UserError
from engine.hf_config import ARCHITECTURES, read_hf_config
from engine.spec import SWIGLU_LIMIT, ModelSpec


def to_hf_config(spec: ModelSpec) -> dict[str, Any]:
    """The ``config.json`` that makes ``transformers`` build this architecture.

    Raises:
        UserError: The family has no key for something the architecture has.
    """
    data = {"model_type": spec.family, "architectures": [_CLASSES[spec.family]], **_WRITERS[spec.family](spec)}
    again, _ = read_hf_config(data, spec.name)
    lost = [name for name in _meaningful(spec) if getattr(again, name) != getattr(spec, name)]
    if lost:
        raise UserError(
            f"a {spec.family} configuration can't express " + ", ".join(f"{n} {getattr(spec, n)!r}" for n in lost),
            hint="change model.family, or these fields of the model",
        )
    return data


_CLASSES = {family: name for name, family in ARCHITECTURES.items()}


def _meaningful(spec: ModelSpec) -> list[str]:
    """The fields that say something about this architecture."""
    idle = {"schema_version", "name"}
    if spec.positions == "learned":
        idle |= {"rope_theta", "rope_scaling"}
    if spec.moe and all(spec.is_moe_layer(layer) for layer in range(spec.num_layers)):
        idle.add("ffn_size")
    if spec.latent_attention:
        idle.add("head_dim")
    return [name for name in ModelSpec.model_fields if name not in idle]


def _hf_activation(spec: ModelSpec) -> str:
    return {"gelu_tanh": "gelu_pytorch_tanh"}.get(spec.activation, spec.activation)


def _write_decoder(spec: ModelSpec) -> dict[str, Any]:
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.ffn_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": spec.rope_scaling,
        "hidden_act": _hf_activation(spec),
        "tie_word_embeddings": spec.tied_embeddings,
    }


def _write_llama(spec: ModelSpec) -> dict[str, Any]:
    return _write_decoder(spec) | {"attention_bias": spec.qkv_bias, "mlp_bias": spec.mlp_bias}


def _write_mistral(spec: ModelSpec) -> dict[str, Any]:
    return _write_decoder(spec) | {"sliding_window": spec.sliding_window}


def _write_window(spec: ModelSpec) -> dict[str, Any]:
    """The window and the layers that use it, as Qwen and gpt-oss have them."""
    if spec.sliding_window is None:
        return {"sliding_window": None}
    windows = [spec.window_of(layer) for layer in range(spec.num_layers)]
    kinds = ["full_attention" if window is None else "sliding_attention" for window in windows]
    return {"sliding_window": spec.sliding_window, "layer_types": kinds}


def _write_qwen2(spec: ModelSpec) -> dict[str, Any]:
    return _write_decoder(spec) | {"use_sliding_window": spec.sliding_window is not None} | _write_window(spec)


def _write_qwen3(spec: ModelSpec) -> dict[str, Any]:
    return _write_qwen2(spec) | {"attention_bias": spec.qkv_bias}


def _write_mixtral(spec: ModelSpec) -> dict[str, Any]:
    data = _write_decoder(spec) | {"sliding_window": spec.sliding_window}
    if spec.moe is not None:
        data |= {
            "intermediate_size": spec.moe.ffn_size,
            "num_local_experts": spec.moe.num_experts,
            "num_experts_per_tok": spec.moe.experts_per_token,
        }
    return data


def _write_qwen3_moe(spec: ModelSpec) -> dict[str, Any]:
    data = _write_decoder(spec) | {
        "attention_bias": spec.qkv_bias,
        "use_sliding_window": spec.sliding_window is not None,
        "sliding_window": spec.sliding_window,
    }
    if spec.moe is not None:
        data |= {
            "moe_intermediate_size": spec.moe.ffn_size,
            "num_experts": spec.moe.num_experts,
            "num_experts_per_tok": spec.moe.experts_per_token,
            "mlp_only_layers": list(range(spec.moe.num_dense_layers)),
            "decoder_sparse_step": spec.moe.layer_period,
            "norm_topk_prob": spec.moe.normalize_weights,
        }
    return data


def _write_deepseek_v3(spec: ModelSpec) -> dict[str, Any]:
    data = _write_decoder(spec) | {"attention_bias": spec.qkv_bias, "num_nextn_predict_layers": spec.num_mtp_layers}
    del data["head_dim"]  # follows from the latent attention's
    if spec.latent_attention is not None:
        data |= {
            "q_lora_rank": spec.latent_attention.query_rank,
            "kv_lora_rank": spec.latent_attention.kv_rank,
            "qk_nope_head_dim": spec.latent_attention.nope_head_dim,
            "qk_rope_head_dim": spec.latent_attention.rope_head_dim,
            "v_head_dim": spec.latent_attention.value_head_dim,
        }
    if spec.moe is not None:
        # Scores are always sigmoid with a selection bias there: another router is not written, and so found lost.
        data |= {
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_intermediate_size": spec.moe.ffn_size,
            "n_routed_experts": spec.moe.num_experts,
            "n_shared_experts": spec.moe.shared_ffn_size // spec.moe.ffn_size,
            "num_experts_per_tok": spec.moe.experts_per_token,
            "first_k_dense_replace": spec.moe.num_dense_layers,
            "norm_topk_prob": spec.moe.normalize_weights,
            "routed_scaling_factor": spec.moe.routed_scaling,
            "n_group": spec.moe.num_groups,
            "topk_group": spec.moe.groups_per_token,
        }
    return data


def _write_gpt2(spec: ModelSpec) -> dict[str, Any]:
    return {
        "vocab_size": spec.vocab_size,
        "n_embd": spec.hidden_size,
        "n_inner": spec.ffn_size,
        "n_layer": spec.num_layers,
        "n_head": spec.num_heads,
        "n_positions": spec.max_positions,
        "layer_norm_epsilon": spec.norm_eps,
        "activation_function": "gelu_new" if spec.activation == "gelu_tanh" else spec.activation,
        "tie_word_embeddings": spec.tied_embeddings,
    }


def _write_gpt_oss(spec: ModelSpec) -> dict[str, Any]:
    data = _write_decoder(spec) | _write_window(spec) | {"attention_bias": spec.qkv_bias}
    data["hidden_act"] = "silu"  # the clamped form is the family's own
    data["swiglu_limit"] = SWIGLU_LIMIT
    if spec.rope_scaling is None:
        data["rope_scaling"] = {"rope_type": "default"}  # null would be the family's own scaling
    if spec.moe is not None:
        data |= {
            "intermediate_size": spec.moe.ffn_size,
            "num_local_experts": spec.moe.num_experts,
            "num_experts_per_tok": spec.moe.experts_per_token,
            "experts_per_token": spec.moe.experts_per_token,  # OpenAI's own name of it
        }
    return data


_WRITERS: dict[str, Callable[[ModelSpec], dict[str, Any]]] = {
    "llama": _write_llama,
    "mistral": _write_mistral,
    "qwen2": _write_qwen2,
    "qwen3": _write_qwen3,
    "mixtral": _write_mixtral,
    "qwen3_moe": _write_qwen3_moe,
    "deepseek_v3": _write_deepseek_v3,
    "gpt2": _write_gpt2,
    "gpt_oss": _write_gpt_oss,
}
"""Family -> what turns a ModelSpec into its keys."""
