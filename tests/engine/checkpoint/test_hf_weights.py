"""Weights out and in again, and the same logits as the reference implementation makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.checkpoint.hf_weights import export_weights, import_weights
from engine.errors import UserError
from engine.models.decoder import Decoder, initial_value
from engine.spec import ModelSpec, MoESpec

pytestmark = pytest.mark.unit

_SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "head_dim": 4, "vocab_size": 40}
_MOE = MoESpec(num_experts=4, experts_per_token=2, ffn_size=12)
_GPT2: dict[str, Any] = {
    "family": "gpt2", "num_kv_heads": 4, "ffn_size": 24, "norm": "layernorm", "positions": "learned", "mlp": "plain",
    "activation": "gelu_tanh", "tied_embeddings": True, "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True,
    "max_positions": 32,
}  # fmt: skip
_LATENT: dict[str, Any] = {"kv_rank": 8, "nope_head_dim": 4, "rope_head_dim": 4, "value_head_dim": 6}
_DEEPSEEK: dict[str, Any] = {
    "family": "deepseek_v3", "num_kv_heads": 4, "ffn_size": 24, "latent_attention": {"query_rank": 12, **_LATENT},
    "moe": {
        "num_experts": 8, "experts_per_token": 3, "ffn_size": 12, "shared_ffn_size": 24, "num_dense_layers": 1,
        "scoring": "sigmoid", "selection_bias": True, "num_groups": 4, "groups_per_token": 2, "routed_scaling": 1.5,
    },
}  # fmt: skip
_GPT_OSS: dict[str, Any] = {
    "family": "gpt_oss", "num_kv_heads": 2, "ffn_size": 12, "qkv_bias": True, "attention_out_bias": True,
    "attention_sinks": True, "activation": "clamped_swiglu", "sliding_window": 4, "sliding_layers": [0],
    "moe": {
        "num_experts": 4, "experts_per_token": 2, "ffn_size": 12, "router_bias": True, "expert_bias": True,
    },
}  # fmt: skip
SPECS = {
    "llama": ModelSpec(family="llama", num_kv_heads=2, ffn_size=24, **_SIZES),
    "llama tied with biases": ModelSpec(
        family="llama", num_kv_heads=4, ffn_size=24, tied_embeddings=True, qkv_bias=True, attention_out_bias=True,
        mlp_bias=True, **_SIZES,
    ),
    "mistral": ModelSpec(family="mistral", num_kv_heads=2, ffn_size=24, rope_theta=1e6, **_SIZES),
    "qwen2": ModelSpec(family="qwen2", num_kv_heads=2, ffn_size=24, qkv_bias=True, tied_embeddings=True, **_SIZES),
    "qwen3": ModelSpec(family="qwen3", num_kv_heads=2, ffn_size=24, qk_norm=True, **_SIZES),
    "qwen3_moe": ModelSpec(
        family="qwen3_moe", num_kv_heads=2, ffn_size=24, qk_norm=True, moe=_MOE.changed(num_dense_layers=1), **_SIZES
    ),
    "deepseek_v3": ModelSpec(**_DEEPSEEK, **_SIZES),
    "deepseek_v3 without query rank": ModelSpec(
        **_DEEPSEEK | {"latent_attention": {"query_rank": None, **_LATENT}, "qkv_bias": True},
        attention_out_bias=True, **_SIZES,
    ),
    "gpt_oss": ModelSpec(**_GPT_OSS, **_SIZES),
    "gpt2": ModelSpec(**_GPT2, **_SIZES),
    "mixtral": ModelSpec(family="mixtral", num_kv_heads=2, ffn_size=12, moe=_MOE, **_SIZES),
}  # fmt: skip


def weights(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Weights that differ everywhere, biases and norms too, so that no two places can be mixed up."""
    model = Decoder(spec, layers=range(spec.num_layers))
    generator = torch.Generator().manual_seed(5)
    shapes = {fqn: parameter.shape for fqn, parameter in model.named_parameters()}
    shapes |= {fqn: buffer.shape for fqn, buffer in model.named_buffers() if fqn.endswith("selection_bias")}
    return {
        fqn: initial_value(spec, 3, fqn, shape) + 0.1 * torch.randn(shape, generator=generator)
        for fqn, shape in shapes.items()
    }


def logits(spec: ModelSpec, state: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    model = Decoder(spec, layers=range(spec.num_layers)).eval()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for fqn, value in state.items():
            tensors[fqn].copy_(value)
        return model(tokens)


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for fqn, tensor in wanted.items():
        assert torch.equal(found[fqn], tensor), fqn


@pytest.mark.parametrize("name", SPECS)
def test_weights_come_back_as_they_went(tmp_path: Path, name: str) -> None:
    spec, state = SPECS[name], weights(SPECS[name])
    export_weights(state, spec, tmp_path / "one")
    assert_same(dict(import_weights(tmp_path / "one", spec)), state)
    assert_same(dict(import_weights(tmp_path / "one" / "model.safetensors", spec)), state)
    export_weights(state, spec, tmp_path / "many", max_shard_bytes=3000)
    assert len(list((tmp_path / "many").glob("model-*-of-*.safetensors"))) > 3
    assert_same(dict(import_weights(tmp_path / "many", spec)), state)


@pytest.mark.parametrize("name", SPECS)
def test_transformers_makes_the_same_logits_of_the_export(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    spec, state = SPECS[name], weights(SPECS[name])
    export_weights(state, spec, tmp_path, max_shard_bytes=20_000)
    reference, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = torch.randint(spec.vocab_size, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = reference(tokens).logits
    torch.testing.assert_close(logits(spec, state, tokens), wanted, rtol=1e-4, atol=1e-5)
    # And what the reference saves is read again.
    reference.save_pretrained(tmp_path / "again")
    assert_same(dict(import_weights(tmp_path / "again", spec)), state)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_experts_stacked_in_one_tensor_are_read_too(tmp_path: Path, name: str) -> None:
    spec, state = SPECS[name], weights(SPECS[name])
    export_weights(state, spec, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    single = [key for key in stored if ".experts." in key or "block_sparse_moe" in key]
    stored = {key: tensor for key, tensor in stored.items() if key not in single}
    for layer in filter(spec.is_moe_layer, range(spec.num_layers)):
        ours, theirs = f"layers.{layer}.moe", f"model.layers.{layer}.mlp"
        stored[f"{theirs}.gate.weight"] = state[f"{ours}.router.weight"]
        gate_up = torch.cat([state[f"{ours}.experts.gate"], state[f"{ours}.experts.up"]], dim=1)
        stored[f"{theirs}.experts.gate_up_proj"] = gate_up
        stored[f"{theirs}.experts.down_proj"] = state[f"{ours}.experts.down"]
    save_file(stored, tmp_path / "model.safetensors")
    assert_same(dict(import_weights(tmp_path, spec)), state)


def test_layers_that_predict_further_tokens_are_left_out_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spec, state = SPECS["deepseek_v3"], weights(SPECS["deepseek_v3"])
    export_weights(state, spec, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    extra = {f"model.layers.2.{name}.weight": torch.zeros(1) for name in ("eh_proj", "enorm", "self_attn.o_proj")}
    save_file(stored | extra, tmp_path / "model.safetensors")
    assert_same(dict(import_weights(tmp_path, spec)), state)
    assert "multi-token-prediction layers are not built; left out: 1" in caplog.text


def test_old_files_without_prefix_and_with_constants_are_read(tmp_path: Path) -> None:
    spec, state = SPECS["gpt2"], weights(SPECS["gpt2"])
    export_weights(state, spec, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    old = {name.removeprefix("transformer."): tensor for name, tensor in stored.items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)
    save_file(old, tmp_path / "model.safetensors")
    assert_same(dict(import_weights(tmp_path, spec)), state)


def test_a_tied_head_saved_twice_is_no_surprise(tmp_path: Path) -> None:
    spec, state = SPECS["qwen2"], weights(SPECS["qwen2"])
    export_weights(state, spec, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    save_file(stored | {"lm_head.weight": state["embedding.weight"].clone()}, tmp_path / "model.safetensors")
    assert_same(dict(import_weights(tmp_path, spec)), state)


def test_a_head_of_its_own_is_never_dropped(tmp_path: Path) -> None:
    spec, state = SPECS["qwen2"], weights(SPECS["qwen2"])
    export_weights(state, spec, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    save_file(stored | {"lm_head.weight": state["embedding.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="a head of their own"):
        import_weights(tmp_path, spec)


def test_a_vocabulary_smaller_than_the_models_is_read_as_it_is(tmp_path: Path) -> None:
    spec, state = SPECS["llama"], weights(SPECS["llama"])
    export_weights(state, spec, tmp_path)
    assert_same(dict(import_weights(tmp_path, spec.changed(vocab_size=43))), state)


def test_dtype_is_kept_and_told(tmp_path: Path) -> None:
    spec = SPECS["llama"]
    state = {fqn: tensor.to(torch.bfloat16) for fqn, tensor in weights(spec).items()}
    export_weights(state, spec, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert_same(dict(import_weights(tmp_path, spec)), state)


def test_a_new_export_replaces_an_older_one(tmp_path: Path) -> None:
    spec, state = SPECS["llama"], weights(SPECS["llama"])
    export_weights(state, spec, tmp_path, max_shard_bytes=3000)
    export_weights(state, spec, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    spec = SPECS["llama"]
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04never unpickled")
    for source in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(UserError, match="is a pickle, which can run code"):
            import_weights(source, spec)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(UserError, match="no weights in the folder"):
        import_weights(tmp_path, spec)
    with pytest.raises(UserError, match="does not exist"):
        import_weights(tmp_path / "absent", spec)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match="no safetensors file"):
        import_weights(tmp_path / "notes.txt", spec)
    for name in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(UserError, match=r"2 safetensors files and no model\.safetensors\.index\.json"):
        import_weights(tmp_path, spec)


def test_names_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    spec, state = SPECS["llama"], weights(SPECS["llama"])
    export_weights(state, spec, tmp_path)
    with pytest.raises(UserError, match=r"missing: model\.layers\.2\.input_layernorm\.weight, .* and 1 more"):
        import_weights(tmp_path, spec.changed(num_layers=3))
    with pytest.raises(UserError, match=r"not expected: model\.layers\.1\.input_layernorm\.weight"):
        import_weights(tmp_path, spec.changed(num_layers=1))
    export_weights(weights(SPECS["qwen2"]), SPECS["qwen2"], tmp_path)
    with pytest.raises(UserError, match="lm_head") as caught:
        import_weights(tmp_path, SPECS["qwen2"].changed(tied_embeddings=False))
    assert "tied_embeddings to true" in str(caught.value.hint)


@pytest.mark.parametrize("change", [{"ffn_size": 20}, {"vocab_size": 39}])
def test_shapes_that_do_not_fit_are_told(tmp_path: Path, change: dict[str, int]) -> None:
    spec, state = SPECS["llama"], weights(SPECS["llama"])
    export_weights(state, spec, tmp_path)
    with pytest.raises(UserError, match=r"do not fit the model: model\.\S+ is \[\d+, \d+\], the model needs"):
        import_weights(tmp_path, spec.changed(**change))


def test_damaged_files_are_told(tmp_path: Path) -> None:
    spec, state = SPECS["llama"], weights(SPECS["llama"])
    export_weights(state, spec, tmp_path, max_shard_bytes=3000)
    first = sorted(tmp_path.glob("*.safetensors"))[0]
    content = first.read_bytes()
    first.write_bytes(content[:-10])
    with pytest.raises(UserError, match="cannot read the weights"):
        import_weights(tmp_path, spec)
    first.unlink()
    with pytest.raises(UserError, match="files named in the index are missing: model-00001"):
        import_weights(tmp_path, spec)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "../outside.safetensors"}}))
    with pytest.raises(UserError, match="files named in the index are missing"):
        import_weights(tmp_path, spec)
    index.write_text("[]")
    with pytest.raises(UserError, match="not an index of weights"):
        import_weights(tmp_path, spec)


def test_quantised_weights_and_parts_that_a_family_lacks_are_refused(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(4, 4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="quantised"):
        import_weights(tmp_path, SPECS["llama"])
    save_file({"model.embed_tokens.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"family llama have no weights like layers\.0\.attention\.query_norm\.weight"):
        import_weights(tmp_path, SPECS["llama"].changed(qk_norm=True))


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot create the folder"):
        export_weights(weights(SPECS["llama"]), SPECS["llama"], tmp_path / "file" / "folder")
