"""Hugging Face configurations read and written, and parameter counts against the models `transformers` builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.errors import UserError
from engine.flops import parameter_counts
from engine.hf_config import load_model, read_hf_config
from engine.hf_export import to_hf_config
from engine.spec import ModelSpec
from engine.yaml_file import dump_yaml

pytestmark = pytest.mark.unit

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 128,
}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
DEEPSEEK = {
    **SIZES,
    **LATENT,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
QWEN_MOE = {**SIZES, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}
TINY: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "llama-biases": {"model_type": "llama", **SIZES, "attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "llama-tied": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **SIZES},
    "qwen3": {"model_type": "qwen3", **SIZES},
    "qwen3-biases": {"model_type": "qwen3", **SIZES, "head_dim": 16, "attention_bias": True},
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 4},
    "qwen3_moe": {"model_type": "qwen3_moe", **QWEN_MOE},
    "qwen3_moe-dense-first": {"model_type": "qwen3_moe", **QWEN_MOE, "mlp_only_layers": [0]},
    "qwen3_moe-every-second": {"model_type": "qwen3_moe", **QWEN_MOE, "decoder_sparse_step": 2},
    "deepseek_v3": {"model_type": "deepseek_v3", **DEEPSEEK},
    "deepseek_v3-biases": {"model_type": "deepseek_v3", **DEEPSEEK, "attention_bias": True},
    "deepseek_v3-direct-query": {"model_type": "deepseek_v3", **DEEPSEEK, "q_lora_rank": None},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 320},
    "gpt2-untied": {
        "model_type": "gpt2", "n_embd": 64, "n_inner": 100, "n_layer": 2, "n_head": 4, "vocab_size": 320,
        "tie_word_embeddings": False,
    },
    "gpt_oss": {"model_type": "gpt_oss", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2},
}  # fmt: skip


def built_parameters(data: dict[str, Any]) -> int:
    """Parameters of the model that `transformers` builds from a configuration, without memory for them."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    import torch

    rest = {key: value for key, value in data.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(data["model_type"], **rest)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", TINY)
def test_parameters_are_those_transformers_builds(name: str) -> None:
    spec, unknown = read_hf_config(TINY[name], f"{name}.json")
    assert unknown == []
    assert spec.family == TINY[name]["model_type"]
    assert parameter_counts(spec).total == built_parameters(TINY[name])


def test_published_models_have_the_parameters_transformers_builds(shared_data: Path) -> None:
    """Within 0.1 %; in fact exactly. The largest takes seconds to build, so one of each family stands for the rest."""
    files = sorted((shared_data / "model_configs").glob("*.json"))
    assert len(files) == 15
    built = set()
    for path in files:
        data = json.loads(path.read_text(encoding="utf-8"))
        spec, unknown = read_hf_config(data, str(path))
        assert unknown == [], path
        assert spec == load_model(path)
        if spec.family not in built and spec.num_layers < 60:
            assert parameter_counts(spec).total == pytest.approx(built_parameters(data), rel=1e-3)
            built.add(spec.family)
    assert built >= {"gpt2", "llama", "mixtral", "qwen2", "qwen3_moe", "gpt_oss"}


@pytest.mark.parametrize(
    ("name", "total", "active", "mtp"),
    [
        ("deepseek-v3", 671.03e9, 37.55e9, 11.61e9),
        ("gpt-oss-120b", 116.83e9, 5.71e9, 0),
        ("mixtral-8x7b", 46.70e9, 12.88e9, 0),
        ("llama-3.1-405b", 405.85e9, 405.85e9, 0),
    ],
)
def test_published_parameter_counts(shared_data: Path, name: str, total: float, active: float, mtp: float) -> None:
    counts = parameter_counts(load_model(shared_data / "model_configs" / f"{name}.json"))
    assert counts.total == pytest.approx(total, rel=1e-3)
    assert counts.active == pytest.approx(active, rel=1e-3)
    assert counts.mtp == pytest.approx(mtp, rel=1e-3)


@pytest.mark.parametrize("name", TINY)
def test_what_is_written_is_read_as_the_same_model(name: str) -> None:
    spec, _ = read_hf_config(TINY[name], f"{name}.json")
    data = json.loads(json.dumps(to_hf_config(spec)))
    again, unknown = read_hf_config(data, f"{name}.json")
    assert again == spec
    assert unknown == []
    assert built_parameters(data) == parameter_counts(spec).total


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("deepseek_v3", {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}),
        ("gpt_oss", {"swiglu_limit": 7.0, "experts_per_token": 2}),
    ],
)
def test_keys_that_other_tools_read_are_written(name: str, keys: dict[str, Any]) -> None:
    spec, _ = read_hf_config(TINY[name], "a.json")
    assert keys.items() <= to_hf_config(spec).items()


def test_window_and_its_layers_survive_the_way_there_and_back() -> None:
    data = {"model_type": "qwen2", **SIZES, "use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}
    spec, _ = read_hf_config(data, "a.json")
    assert (spec.sliding_window, spec.sliding_layers) == (32, (1, 2))
    assert read_hf_config(to_hf_config(spec), "a.json")[0] == spec


def test_a_family_that_cannot_express_the_model_is_told() -> None:
    spec, _ = read_hf_config(TINY["llama"], "a.json")
    with pytest.raises(UserError, match="can't express norm 'layernorm', attention_out_bias False"):
        to_hf_config(spec.changed(norm="layernorm", qkv_bias=True))
    with pytest.raises(UserError, match="a qwen3 configuration can't express qk_norm False"):
        to_hf_config(spec.changed(family="qwen3"))
    spec, _ = read_hf_config({**TINY["deepseek_v3"], "scoring_func": "softmax"}, "a.json")
    with pytest.raises(UserError, match="can't express moe"):
        to_hf_config(spec)


def test_missing_keys_take_the_values_of_transformers() -> None:
    small = {key: SIZES[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")}
    data = {"model_type": "mistral", **small, "num_attention_heads": 8}
    spec, _ = read_hf_config(data, "a.json")
    assert (spec.num_kv_heads, spec.sliding_window, spec.norm_eps) == (8, 4096, 1e-6)
    assert parameter_counts(spec).total == built_parameters(data)


def test_old_and_new_rope_keys_mean_the_same() -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    old, _ = read_hf_config({**TINY["llama"], "rope_theta": 5e5, "rope_scaling": scaling}, "a.json")
    new, _ = read_hf_config({**TINY["llama"], "rope_parameters": {**scaling, "rope_theta": 5e5}}, "a.json")
    assert old == new
    assert old.rope_scaling == scaling
    yarn = {**TINY["llama"], "rope_scaling": {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 32}
    beside, unknown = read_hf_config(yarn, "a.json")
    assert beside.rope_scaling == {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert not unknown
    plain, _ = read_hf_config(
        {**TINY["llama"], "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "a.json"
    )
    assert (plain.rope_scaling, plain.rope_theta) == (None, 1e6)


def test_keys_not_understood_are_listed_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rope = {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0, "spiral": 2}
    data = {**TINY["llama"], "use_cache": True, "partial_rotary_factor": 1.0, "surprise": 1, "rope_parameters": rope}
    assert read_hf_config(data, "a.json")[1] == ["rope_parameters.spiral", "surprise"]
    (tmp_path / "config.json").write_text(json.dumps(data), encoding="utf-8")
    load_model(tmp_path)
    assert "rope_parameters.spiral, surprise" in caplog.text


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0\.5 are not built, only with 1\.0"),
        ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave false are not built, only with true"),
        ("gpt_oss", {"swiglu_limit": 5.0}, r"swiglu_limit 5\.0 are not built, only with 7\.0"),
        ("gpt_oss", {"layer_types": ["full_attention", "chunked_attention"] * 2}, "'layer_types' must be a list of"),
        ("gpt_oss", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "full_attention and"),
    ],
)
def test_a_model_that_would_be_another_one_is_refused(family: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_hf_config(TINY[family] | change, "a.json")


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        ({"model_type": "lama"}, "unknown model_type 'lama'; allowed are llama, mistral", "did you mean 'llama'"),
        ({"model_type": None, "architectures": ["OPTForCausalLM"]}, "unknown model_type 'OPTForCausalLM'", "by hand"),
        ({"hidden_size": None}, "'hidden_size' is missing", "add 'hidden_size'"),
        ({"hidden_size": "64"}, "'hidden_size' must be a whole number of 1 or more, got '64'", "correct"),
        ({"num_attention_heads": 5}, "'hidden_size' must be a multiple of num_attention_heads 5", "correct"),
        ({"num_key_value_heads": 3}, "num_kv_heads 3 must divide num_heads 4", ""),
        ({"rms_norm_eps": 0}, "'rms_norm_eps' must be a number above zero, got 0", "correct"),
        ({"hidden_act": "mish"}, "'hidden_act' must be one of silu", "correct"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' must be true or false, got 'yes'", "correct"),
        ({"hidden_act": ["silu"]}, "'hidden_act' must be one of silu", "correct"),
        ({"model_type": {}}, "unknown model_type {}", "by hand"),
        ({"model_type": None, "architectures": [[]]}, "unknown model_type []", "by hand"),
        ({"rope_parameters": {"rope_theta": "big"}}, "'rope_theta' must be a number above zero, got 'big'", "correct"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 1}, "'mlp_only_layers' must be empty, or the first", "correct"),
        ({"rope_scaling": 4}, "'rope_scaling' must be a mapping or null", "correct"),
    ],
)
def test_what_is_wrong_is_told(change: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        read_hf_config({**TINY["llama"], **change}, "model.json")
    assert message in caught.value.message
    assert hint in str(caught.value.hint)
    assert caught.value.where == "model.json"


def test_dense_layers_that_cannot_be_represented_are_told() -> None:
    with pytest.raises(UserError, match="'mlp_only_layers' must be empty, or the first layers"):
        read_hf_config({**TINY["qwen3_moe"], "mlp_only_layers": [1]}, "a.json")
    with pytest.raises(UserError, match="'layer_types' must be a list of 3 layer types"):
        read_hf_config({**TINY["gpt_oss"], "layer_types": ["full_attention"]}, "a.json")


def test_a_model_is_loaded_from_a_folder_a_config_or_a_spec(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY["llama"]), encoding="utf-8")
    spec = load_model(folder)
    assert spec.name == "tiny"
    assert load_model(folder / "config.json") == spec
    for name, text in (("spec.yaml", dump_yaml(spec.to_data())), ("spec.json", json.dumps(spec.to_data()))):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert load_model(tmp_path / name) == spec


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "num_layers: two\n", "num_layers"),
        ("a.json", '{"num_layers": 2,\n "x" 3}', "not valid JSON"),
        ("a.json", "[1]", "must be a mapping"),
    ],
)
def test_a_bad_model_file_is_told_with_its_place(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message) as caught:
        load_model(tmp_path / name)
    assert name in str(caught.value.where)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"a": 1}, "neither a Hugging Face config.json (no 'model_type')"),
        ({key: value for key, value in TINY["llama"].items() if key != "model_type"}, "no 'model_type'"),
        ({"model_type": "bert", "hidden_size": 8}, "unknown model_type 'bert'"),
    ],
)
def test_what_is_no_model_points_to_how_one_is_written(tmp_path: Path, data: dict[str, Any], message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        load_model(tmp_path / "config.json")
    assert message in caught.value.message
    assert "docs/run_file.md" in str(caught.value.hint)


def test_a_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json in the folder"):
        load_model(tmp_path)
    with pytest.raises(UserError, match="file not found"):
        load_model(tmp_path / "nothing.json")


def test_specs_stay_specs() -> None:
    spec, _ = read_hf_config(TINY["deepseek_v3"], "a.json")
    assert ModelSpec.model_validate(spec.to_data()) == spec
