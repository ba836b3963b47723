"""Architectures from Hugging Face ``config.json`` files (``engine.hf_export`` writes them).

Foreign files are read leniently: a missing key takes the value that ``transformers`` would give it, keys that don't
change the architecture are passed over, and the rest is listed as not understood.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import UserError
from engine.schema import parse
from engine.spec import SWIGLU_LIMIT, ModelSpec
from engine.yaml_file import parse_yaml, read_text

_log = logging.getLogger(__name__)

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MixtralForCausalLM": "mixtral",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "GPT2LMHeadModel": "gpt2",
    "GptOssForCausalLM": "gpt_oss",
}
"""Class names of ``transformers`` and the families they build."""

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}

_HARMLESS = frozenset({
    "_attn_implementation", "_name_or_path", "architectures", "attention_dropout", "attn_implementation", "attn_pdrop",
    "auto_map", "aux_loss_alpha", "bos_token_id", "chunk_size_feed_forward", "dropout", "dtype", "embd_pdrop",
    "eos_token_id", "ep_size", "experts_per_token", "hidden_dropout", "id2label", "initial_context_length",
    "initializer_factor", "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "max_window_layers",
    "n_ctx", "name_or_path", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "pretraining_tp", "problem_type", "qk_head_dim", "quantization_config", "reorder_and_upcast_attn", "resid_pdrop",
    "return_dict", "router_aux_loss_coef", "router_jitter_noise", "seq_aux",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "tokenizer_class", "torch_dtype", "transformers_version", "unk_token_id", "use_cache",
})  # fmt: skip
"""Keys that change neither parameter counts nor the function that is computed (dropout is a hyperparameter)."""

_BUILT_VALUES: dict[str, tuple[Any, ...]] = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
    "moe_layer_freq": (1,),
    "partial_rotary_factor": (None, 1.0),
    "rope_interleave": (None, True),
    "clip_qkv": (None,),
    "swiglu_alpha": (1.702,),
    "swiglu_limit": (SWIGLU_LIMIT,),
}
"""Keys that change nothing at these values; at any other the same weights would compute something else."""


_BY_HAND = (
    "write a decoder-only model by hand, as YAML with num_layers, hidden_size, num_heads, num_kv_heads, head_dim,"
    " ffn_size and vocab_size: docs/run_file.md lists all keys under 'model'"
)
"""Hint where a configuration can't be read."""


class _Keys:
    """A foreign configuration, and which of its keys were used."""

    def __init__(self, data: dict[str, Any], source: str) -> None:
        self.data = data
        self.source = source
        self.used = {"model_type"}
        self.unknown: list[str] = []

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it stands, or ``default`` where the key is missing."""
        self.used.add(key)
        return self.data.get(key, default)

    def number(self, key: str, default: float) -> float:
        """A number above zero."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise self.wrong(key, "a number above zero")
        return float(value)

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number under the first of ``names`` that is there and not null; without a default it's needed."""
        self.used.update(names)
        found = [name for name in names if self.data.get(name) is not None]
        if not found and default is not None:
            return default
        if not found:
            raise UserError(
                f"'{names[0]}' is missing", hint=f"add '{names[0]}' to the configuration", where=self.source
            )
        value = self.data[found[0]]
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(found[0], f"a whole number of {least} or more")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false; null counts as missing."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def wrong(self, key: str, wanted: str) -> UserError:
        """The error for a value that can't be used."""
        return UserError(
            f"'{key}' must be {wanted}, got {self.data.get(key)!r}", hint=f"correct '{key}'", where=self.source
        )

    def check_built(self, data: dict[str, Any]) -> None:
        """Refuse values in ``data``, all of the configuration or a part, that make a model which is not built."""
        for key, values in _BUILT_VALUES.items():
            if key in data and data[key] not in values:
                raise UserError(
                    f"models with {key} {json.dumps(data[key])} are not built, only with {json.dumps(values[-1])}",
                    hint=f"choose another model: these weights with another {key} would compute something else",
                    where=self.source,
                )

    def not_understood(self) -> list[str]:
        """Keys that were neither used nor known to be harmless."""
        return sorted([*self.unknown, *(self.data.keys() - self.used - _HARMLESS - _BUILT_VALUES.keys())])


# ------------------------------------------------------------------------------------------------------------- reading


def read_hf_config(data: dict[str, Any], source: str) -> tuple[ModelSpec, list[str]]:
    """Read a Hugging Face configuration.

    Args:
        data: The mapping of ``config.json``.
        source: Where it came from, for messages and for the model's name.

    Returns:
        The architecture, and the keys that were not understood.

    Raises:
        UserError: Unknown family, or a value that is missing, of the wrong type, not representable or not built.
    """
    keys = _Keys(data, source)
    family = _family(data, source)
    keys.check_built(data)
    fields = _READERS[family](keys)
    fields |= {"family": family, "name": _name(source)}
    try:
        return parse(ModelSpec, fields), keys.not_understood()
    except UserError as error:
        raise UserError(error.message, hint=error.hint, where=source) from None


def load_model(path: str | Path) -> ModelSpec:
    """Read an architecture from a folder with a ``config.json``, from such a file, or from a ModelSpec as YAML or JSON.

    Keys of a ``config.json`` that were not understood are told as a warning.

    Raises:
        UserError: The file is missing, malformed, or of a family that is not known.
    """
    path = Path(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(f"no config.json in the folder {path}", hint="name a folder of a Hugging Face model")
        path = path / "config.json"
    text = read_text(path)
    if path.suffix == ".json":
        document = None
        data = _parse_json(text, path)
    else:
        document = parse_yaml(text, str(path))
        data = document.data
    if not isinstance(data, dict) or not {"model_type", "architectures"} & data.keys():
        if isinstance(data, dict) and not {"num_layers", "num_heads"} & data.keys():
            raise UserError(
                "no model: neither a Hugging Face config.json (no 'model_type') nor a model by hand (no 'num_layers')",
                hint=f"add model_type ({', '.join(_READERS)}), or {_BY_HAND}",
                where=str(path),
            )
        try:
            return parse(ModelSpec, data, document=document)
        except UserError as error:
            raise UserError(error.message, hint=error.hint, where=error.where or str(path)) from None
    spec, unknown = read_hf_config(data, str(path))
    if unknown:
        _log.warning("%s: keys not understood, left out: %s", path, ", ".join(unknown))
    return spec


def _parse_json(text: str, path: Path) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"not valid JSON: {error.msg}", hint="correct the file near this line", where=f"{path}:{error.lineno}"
        ) from None


def _name(source: str) -> str:
    path = Path(source)
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", name).lstrip("._+-")[:128] or "model"


def _family(data: dict[str, Any], source: str) -> str:
    given = data.get("model_type")
    architectures = data.get("architectures")
    if given is None and isinstance(architectures, list) and architectures:
        given = ARCHITECTURES.get(str(architectures[0]), architectures[0])
    if not isinstance(given, str) or given not in _READERS:
        close = difflib.get_close_matches(str(given), _READERS, n=1)
        raise UserError(
            f"unknown model_type {given!r}; allowed are {', '.join(_READERS)}",
            hint=f"did you mean '{close[0]}'?" if close else _BY_HAND,
            where=source,
        )
    return given


def _activation(keys: _Keys, key: str, default: str) -> str:
    given = keys.get(key, default)
    if not isinstance(given, str) or given not in _ACTIVATIONS:
        raise keys.wrong(key, f"one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[given]


def _rope(keys: _Keys, theta: float, scaling: dict[str, Any] | None = None) -> dict[str, Any]:
    """Rotary base and scaling, from ``rope_theta`` and ``rope_scaling`` or from the newer ``rope_parameters``."""
    found = keys.get("rope_parameters") or keys.get("rope_scaling") or scaling or {}
    if not isinstance(found, dict):
        raise keys.wrong("rope_scaling", "a mapping or null")
    found = dict(found)
    inner = found.pop("rope_theta", None)
    kind = found.get("rope_type", found.get("type", "default"))
    if keys.get("original_max_position_embeddings") is not None and kind != "default":
        found["original_max_position_embeddings"] = keys.count("original_max_position_embeddings")
    base = (keys if inner is None else _Keys({"rope_theta": inner}, keys.source)).number("rope_theta", theta)
    if kind != "default":
        return {"rope_theta": base, "rope_scaling": found}
    keys.check_built(found)
    keys.unknown += [f"rope_parameters.{key}" for key in found.keys() - {"rope_type", "type"} - _BUILT_VALUES.keys()]
    return {"rope_theta": base, "rope_scaling": None}


def _decoder(
    keys: _Keys,
    *,
    theta: float = 10000.0,
    eps: float = 1e-6,
    positions: int = 32768,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    scaling: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What the rotary families share. The arguments are the family's own defaults; without one, each query head has
    its own key and value head, and heads split the width."""
    hidden, heads = keys.count("hidden_size"), keys.count("num_attention_heads")
    if head_dim is None and keys.data.get("head_dim") is None and hidden % heads:
        raise keys.wrong("hidden_size", f"a multiple of num_attention_heads {heads} when head_dim is left out")
    if kv_heads is None or "num_key_value_heads" in keys.data:
        kv_heads = heads
    return {
        "num_layers": keys.count("num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": keys.count("num_key_value_heads", default=kv_heads),
        "head_dim": keys.count("head_dim", default=head_dim or hidden // heads),
        "ffn_size": keys.count("intermediate_size"),
        "vocab_size": keys.count("vocab_size"),
        "max_positions": keys.count("max_position_embeddings", default=positions),
        "norm_eps": keys.number("rms_norm_eps", eps),
        "activation": _activation(keys, "hidden_act", "silu"),
        "tied_embeddings": keys.flag("tie_word_embeddings", False),
        **_rope(keys, theta, scaling),
    }


def _attention_bias(keys: _Keys, default: bool = False) -> dict[str, Any]:
    bias = keys.flag("attention_bias", default)
    return {"qkv_bias": bias, "attention_out_bias": bias}


def _window(keys: _Keys, default: int | None = None) -> int | None:
    """The attention window; null for none."""
    value = keys.get("sliding_window", default)
    return None if value is None else keys.count("sliding_window", default=default)


def _layer_window(keys: _Keys, window: int | None, sliding: list[int]) -> dict[str, Any]:
    """The window with the layers that use it: those of ``layer_types``, or else ``sliding``."""
    num_layers = keys.count("num_hidden_layers")
    types = keys.get("layer_types")
    if types is not None:
        if not isinstance(types, list) or len(types) != num_layers:
            raise keys.wrong("layer_types", f"a list of {num_layers} layer types")
        if not set(map(str, types)) <= {"full_attention", "sliding_attention"}:
            raise keys.wrong("layer_types", "a list of full_attention and sliding_attention")
        sliding = [layer for layer, kind in enumerate(types) if kind == "sliding_attention"]
    if window is None or not sliding:
        return {"sliding_window": None}
    return {"sliding_window": window, "sliding_layers": None if len(sliding) == num_layers else sliding}


def _qwen_window(keys: _Keys) -> dict[str, Any]:
    """Qwen's window is off unless asked for, and leaves the first ``max_window_layers`` layers alone."""
    window = _window(keys, 4096)
    if not keys.flag("use_sliding_window", False):
        window = None
    first = keys.count("max_window_layers", default=28, least=0)
    return _layer_window(keys, window, list(range(first, keys.count("num_hidden_layers"))))


def _read_llama(keys: _Keys) -> dict[str, Any]:
    return _decoder(keys, positions=2048) | _attention_bias(keys) | {"mlp_bias": keys.flag("mlp_bias", False)}


def _read_mistral(keys: _Keys) -> dict[str, Any]:
    return _decoder(keys, positions=131072, kv_heads=8) | {"sliding_window": _window(keys, 4096)}


def _read_qwen2(keys: _Keys) -> dict[str, Any]:
    return _decoder(keys) | {"qkv_bias": True} | _qwen_window(keys)


def _read_qwen3(keys: _Keys) -> dict[str, Any]:
    return _decoder(keys, head_dim=128) | {"qk_norm": True} | _attention_bias(keys) | _qwen_window(keys)


def _read_mixtral(keys: _Keys) -> dict[str, Any]:
    fields = _decoder(keys, positions=131072, kv_heads=8, theta=1e6, eps=1e-5)
    fields["sliding_window"] = _window(keys)
    fields["moe"] = {
        "num_experts": keys.count("num_local_experts", "num_experts", default=8),
        "experts_per_token": keys.count("num_experts_per_tok", default=2),
        "ffn_size": fields["ffn_size"],
    }
    return fields


def _read_qwen3_moe(keys: _Keys) -> dict[str, Any]:
    fields = _decoder(keys, kv_heads=4) | {"qk_norm": True} | _attention_bias(keys)
    window = _window(keys, 4096)
    fields["sliding_window"] = window if keys.flag("use_sliding_window", False) else None
    period = keys.count("decoder_sparse_step", default=1)
    dense = keys.get("mlp_only_layers") or []
    if not isinstance(dense, list) or dense != list(range(len(dense))) or (dense and period > 1):
        raise keys.wrong("mlp_only_layers", "empty, or the first layers with decoder_sparse_step 1")
    fields["moe"] = {
        "num_experts": keys.count("num_experts", "num_local_experts", default=128),
        "experts_per_token": keys.count("num_experts_per_tok", default=8),
        "ffn_size": keys.count("moe_intermediate_size", default=768),
        "num_dense_layers": len(dense),
        "layer_period": period,
        "normalize_weights": keys.flag("norm_topk_prob", False),
    }
    return fields


def _read_deepseek_v3(keys: _Keys) -> dict[str, Any]:
    nope = keys.count("qk_nope_head_dim", default=128)
    rope = keys.count("qk_rope_head_dim", default=64)
    fields = _decoder(keys, positions=4096, head_dim=nope + rope)
    fields["head_dim"] = nope + rope  # the file's own head_dim, where there is one, is the rotary part alone
    expert = keys.count("moe_intermediate_size", default=2048)
    fields["latent_attention"] = {
        "query_rank": None if keys.get("q_lora_rank", 1536) is None else keys.count("q_lora_rank", default=1536),
        "kv_rank": keys.count("kv_lora_rank", default=512),
        "nope_head_dim": nope,
        "rope_head_dim": rope,
        "value_head_dim": keys.count("v_head_dim", default=128),
    }
    method = keys.get("topk_method", "noaux_tc")
    fields["moe"] = {
        "num_experts": keys.count("n_routed_experts", "num_local_experts", default=256),
        "experts_per_token": keys.count("num_experts_per_tok", default=8),
        "ffn_size": expert,
        "shared_ffn_size": keys.count("n_shared_experts", default=1, least=0) * expert,
        "num_dense_layers": keys.count("first_k_dense_replace", default=3, least=0),
        "scoring": keys.get("scoring_func", "sigmoid"),
        "normalize_weights": keys.flag("norm_topk_prob", True),
        "routed_scaling": keys.number("routed_scaling_factor", 2.5),
        "num_groups": keys.count("n_group", default=8),
        "groups_per_token": keys.count("topk_group", default=4),
        "selection_bias": method == "noaux_tc",
    }
    fields["num_mtp_layers"] = keys.count("num_nextn_predict_layers", "num_mtp_layers", default=0, least=0)
    return fields | _attention_bias(keys)


def _read_gpt2(keys: _Keys) -> dict[str, Any]:
    hidden, heads = keys.count("n_embd", "hidden_size"), keys.count("n_head", "num_attention_heads")
    if hidden % heads:
        raise keys.wrong("n_embd", f"a multiple of n_head {heads}")
    return {
        "num_layers": keys.count("n_layer", "num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn_size": keys.count("n_inner", default=4 * hidden),
        "vocab_size": keys.count("vocab_size"),
        "max_positions": keys.count("n_positions", "max_position_embeddings", default=1024),
        "norm": "layernorm",
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "positions": "learned",
        "mlp": "plain",
        "activation": _activation(keys, "activation_function", "gelu_new"),
        "tied_embeddings": keys.flag("tie_word_embeddings", True),
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
    }


_GPT_OSS_SCALING = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read_gpt_oss(keys: _Keys) -> dict[str, Any]:
    fields = _decoder(
        keys, kv_heads=8, head_dim=64, theta=150000.0, eps=1e-5, positions=131072, scaling=_GPT_OSS_SCALING
    )
    fields |= _attention_bias(keys, default=True)
    fields |= _layer_window(keys, _window(keys, 128), list(range(0, fields["num_layers"], 2)))
    fields |= {"attention_sinks": True, "activation": "clamped_swiglu"}
    fields["moe"] = {
        "num_experts": keys.count("num_local_experts", "num_experts", default=128),
        "experts_per_token": keys.count("num_experts_per_tok", "experts_per_token", default=4),
        "ffn_size": fields["ffn_size"],
        "router_bias": True,
        "expert_bias": True,
    }
    return fields


_READERS: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "llama": _read_llama,
    "mistral": _read_mistral,
    "qwen2": _read_qwen2,
    "qwen3": _read_qwen3,
    "mixtral": _read_mixtral,
    "qwen3_moe": _read_qwen3_moe,
    "deepseek_v3": _read_deepseek_v3,
    "gpt2": _read_gpt2,
    "gpt_oss": _read_gpt_oss,
}
"""Family -> what turns its keys into the fields of a ModelSpec."""
