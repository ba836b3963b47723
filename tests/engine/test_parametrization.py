"""muP: what follows from a parameter's name, equality with the standard form at the base, with the published table
elsewhere, and activations that change alike over widths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from engine.checkpoint.hf_weights import export_weights, import_weights
from engine.config import RunConfig, RuntimeOptions
from engine.context import open_context
from engine.models.decoder import Decoder, initial_value
from engine.models.loss import summed_loss
from engine.optim.groups import decays
from engine.parametrization import Scales, kind_of, scales_of, writes_to_residual
from engine.plan import Plan
from engine.proxy import proxy_model
from engine.spec import Hyperparameters, ModelSpec, Workload
from engine.step import Stepper
from tests.engine.parallel.cases import MODELS, run_config, train

pytestmark = pytest.mark.unit

MUP: dict[str, Any] = {"parametrization": "mup", "base_hidden_size": 16}


def shapes(spec: ModelSpec) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = Decoder(spec, layers=range(spec.num_layers))
    return {fqn: parameter.shape for fqn, parameter in model.named_parameters()}


# ------------------------------------------------------------------------------------------------------------ the names


@pytest.mark.parametrize("name", MODELS)
def test_kinds_are_what_the_shapes_of_a_narrower_model_say(name: str) -> None:
    """Which dimensions change with the width, looked at in every family that the engine builds."""
    spec = MODELS[name].changed(num_heads=8, num_kv_heads=8, hidden_size=64, ffn_size=96)
    if spec.latent_attention:
        spec = spec.changed(latent_attention=spec.latent_attention.changed(query_rank=16, kv_rank=16))
    wide, narrow = shapes(spec), shapes(proxy_model(spec, 0.5))
    for fqn, shape in wide.items():
        changed = [one != other for one, other in zip(shape, narrow[fqn], strict=True)]
        if fqn.startswith("norm.") and spec.tied_embeddings:
            expected = "output"  # it has the factor on the logits
        elif sum(changed) == 2:
            expected = "hidden"
        elif not any(changed):
            expected = "constant"
        else:
            expected = "output" if changed[-1] and fqn.endswith(("head.weight", "router.weight")) else "vector"
        assert kind_of(fqn, spec) == expected, fqn


def test_what_writes_to_the_residual_stream() -> None:
    spec = MODELS["moe-biased"].changed(attention_out_bias=True, qkv_bias=True)
    found = {
        fqn.removeprefix("layers.0.") for fqn in shapes(spec) if fqn.startswith("layers.0.") and writes_to_residual(fqn)
    }
    assert found == {
        "attention.out.weight", "attention.out.bias", "moe.experts.down", "moe.experts.down_bias",
        "moe.shared.down.weight", "moe.shared.down.bias",
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- the base


@pytest.mark.parametrize("model", ["llama-tied", "moe-biased", "deepseek"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_at_the_base_width_mup_is_the_standard_form_in_every_bit(model: str, optimizer: str) -> None:
    hyper = {"optimizer": optimizer, "clip_norm": 0.5}
    depth = {"base_num_layers": MODELS[model].num_layers} if optimizer == "adamw" else {}
    base = {"parametrization": "mup", "base_hidden_size": MODELS[model].hidden_size, **depth}
    standard, mup = (train(run_config(model, {}, hyper | more)) for more in ({}, base))
    for key, expected in standard.items():
        pairs = expected.items() if isinstance(expected, dict) else [(key, expected)]
        for name, tensor in pairs:
            given = mup[key][name] if isinstance(expected, dict) else mup[key]
            assert torch.equal(given, tensor), name


# ------------------------------------------------------------------------------------------------------------ the table


def reference(spec: ModelSpec, config: RunConfig, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Parameters after some steps of muP as table 8 of arXiv 2203.03466 states it, in plain torch, with the factors on
    the logits and (CompleteP) on what blocks add in the forward pass; then with those factors moved into the weights.
    """
    h = config.hyperparameters
    assert h.base_hidden_size is not None
    width, depth = spec.hidden_size / h.base_hidden_size, spec.num_layers / (h.base_num_layers or spec.num_layers)
    model = Decoder(spec, layers=range(spec.num_layers), compute_dtype=torch.float64).double()
    for block in model.layers.values():
        for branch in (block.attention, block.feed_forward):
            branch.register_forward_hook(lambda _module, _inputs, out: out / depth)
    groups = []
    for fqn, parameter in model.named_parameters():
        value = initial_value(spec, config.runtime.seed, fqn, parameter.shape).double()
        kind = kind_of(fqn, spec)
        if fqn.endswith((".out.weight", ".down.weight")):
            value *= depth**0.5  # GPT-2's factor is the base's
        if kind == "hidden":
            value *= width**-0.5
        with torch.no_grad():
            parameter.copy_(value)
        adamw = h.optimizer == "adamw"
        rate = {"hidden": 1 / width if adamw else 1.0, "constant": 1.0}.get(kind, 1.0 if adamw else width)
        epsilon = h.eps / (depth if fqn.startswith("layers.") else 1) / (1 if kind == "constant" else width)
        decay = h.weight_decay / rate if decays(fqn, parameter) else 0.0
        groups.append({"params": [parameter], "lr": rate, "weight_decay": decay, **({"eps": epsilon} if adamw else {})})
    optimizer = (
        torch.optim.AdamW(groups, betas=(h.beta1, h.beta2))
        if h.optimizer == "adamw"
        else torch.optim.SGD(groups, momentum=h.beta1)
    )
    for group in optimizer.param_groups:
        group["lr"] *= 0.1
    for tokens, labels in batches:
        optimizer.zero_grad()
        (summed_loss(model(tokens) / width, labels) / labels.numel()).backward()
        clip(model, h.clip_norm or 0.0)
        optimizer.step()
    folded = {}
    for fqn, parameter in model.named_parameters():
        factor = 1 / width if fqn.startswith("norm." if spec.tied_embeddings else "head.") else 1.0
        factor /= depth if ".out." in fqn or ".down." in fqn else 1.0
        folded[fqn] = parameter.detach() * factor
    return folded


def clip(model: Decoder, norm: float) -> None:
    """``clip_grad_norm_`` without what it adds against division by zero."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    found = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    assert found > norm
    for gradient in gradients:
        gradient.mul_(norm / found)


@pytest.mark.parametrize("model", ["llama", "llama-tied", "gpt2", "gpt2-untied"])
@pytest.mark.parametrize("more", [{}, {"base_num_layers": 12}, {"optimizer": "sgd"}], ids=["adamw", "depth", "sgd"])
def test_training_is_that_of_the_published_table_with_factors_in_the_forward_pass(
    model: str, more: dict[str, Any]
) -> None:
    config = run_config(model, {}, {"base_hidden_size": 8, "parametrization": "mup", "clip_norm": 0.05, **more})
    stepper = Stepper.build(config, open_context(config.plan, config.runtime), vocab_size=1)
    draws = torch.Generator().manual_seed(7)
    batches = [tuple(torch.randint(0, 61, (2, 12, 16), generator=draws).unbind()) for _ in range(3)]
    for tokens, labels in batches:
        stepper.train_step(tokens, labels, 0.1)
    for fqn, expected in reference(config.model, config, batches).items():
        given = stepper.full_weights()[fqn]
        assert float((given - expected).abs().max()) <= 1e-7 * float(expected.abs().max() + 1e-3), fqn


def test_routed_experts_are_hidden_and_their_router_an_output() -> None:
    scales = scales_of(Hyperparameters(**MUP), MODELS["moe"].changed(hidden_size=64))
    assert scales("layers.0.moe.experts.up") == Scales(0.5, 0.25, 0.25, 1.0)
    assert scales("layers.0.moe.router.weight") == Scales(0.25, 0.25, 1.0, 0.25)
    assert scales("layers.0.moe.router.weight").weight_decay == 4


# ------------------------------------------------------------------------------------------------ the coordinate check


def changes(model: str, ratio: float, hyperparameters: dict[str, Any], learning_rate: float) -> dict[str, float]:
    """Root mean square of what four steps change in the output of blocks and routers, and in the logits."""
    extra: dict[str, Any] = {"tied": {"tied_embeddings": True}, "qk-norm": {"qk_norm": True}}.get(model, {})
    if model == "moe":
        extra = {"moe": {"num_experts": 4, "experts_per_token": 2, "ffn_size": 256, "shared_ffn_size": 256}}
    wide = ModelSpec(
        num_layers=2, hidden_size=256, num_heads=16, num_kv_heads=8, head_dim=16, ffn_size=512, vocab_size=64, **extra
    )
    config = RunConfig(
        model=proxy_model(wide, ratio),
        workload=Workload(sequence_length=16, total_tokens=1000),
        hyperparameters=Hyperparameters(global_batch_size=4, clip_norm=None, **hyperparameters),
        plan=Plan(precision="fp32", micro_batch_size=4),
        runtime=RuntimeOptions(seed=1),
    )
    context = open_context(config.plan, config.runtime, has_experts=config.model.moe is not None)
    stepper = Stepper.build(config, context, vocab_size=1)
    tokens, labels = torch.randint(0, 64, (2, 4, 16), generator=torch.Generator().manual_seed(0)).unbind()
    before = activations(stepper.parts[0], tokens)
    for _ in range(4):
        stepper.train_step(tokens, labels, learning_rate)
    after = activations(stepper.parts[0], tokens)
    return {name: float((after[name] - before[name]).square().mean().sqrt()) for name in before}


@torch.no_grad()
def activations(model: Decoder, tokens: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    watched = {name: module for name, module in model.named_modules() if name.count(".") == 1 or "router" in name}
    hooks = [
        module.register_forward_hook(lambda _module, _inputs, out, name=name: found.__setitem__(name, out.clone()))
        for name, module in watched.items()
    ]
    found["logits"] = model.eval()(tokens).clone()
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("model", ["plain", "tied", "qk-norm", "moe"])
@pytest.mark.parametrize(("optimizer", "learning_rate"), [("adamw", 5e-3), ("sgd", 0.5)])
def test_activations_change_alike_over_widths_under_mup_alone(model: str, optimizer: str, learning_rate: float) -> None:
    """From the base to eight times its width. Routers change less there: what their first gradients come from, the
    outputs of random experts, is not aligned with anything yet."""
    options = {"optimizer": optimizer, "beta1": 0.9 if optimizer == "adamw" else 0.0, "weight_decay": 0.0}
    mup = options | {"parametrization": "mup", "base_hidden_size": 32}
    at_base = changes(model, 1 / 8, options, learning_rate)
    for name, change in changes(model, 1.0, mup, learning_rate).items():
        assert (0.2 if "router" in name else 0.7) < change / at_base[name] < 1.4, name
    grown = changes(model, 1.0, options, learning_rate)
    assert min(grown[name] / at_base[name] for name in ("logits", "layers.1")) > 3


# ----------------------------------------------------------------------------------------------------------- the export


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied"])
def test_transformers_makes_the_same_logits_of_what_mup_trained(tied: bool, tmp_path: Path) -> None:
    """No factor is left behind in the run: the weights alone say what the model does."""
    from transformers import AutoModelForCausalLM

    spec = MODELS["llama"].changed(family="qwen3", qk_norm=True, tied_embeddings=tied)
    config = run_config("llama", {}, {**MUP, "base_num_layers": 2}).changed(model=spec)
    stepper = Stepper.build(config, open_context(config.plan, config.runtime), vocab_size=1)
    tokens = torch.randint(0, 62, (12, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        stepper.train_step(tokens, tokens.roll(-1, 1), 0.01)
    weights = stepper.full_weights()
    export_weights(weights, spec, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        torch.testing.assert_close(stepper.parts[0].eval()(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-6)
    assert (float(weights["norm.weight"].mean()) < 0.7) == tied, "the factor on the logits of tied embeddings"
    again = dict(import_weights(tmp_path, spec))
    assert all(torch.equal(again[fqn], weight) for fqn, weight in weights.items())


# -------------------------------------------------------------------------------------------------------- the settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parametrization": "mup"}, "mup needs base_hidden_size"),
        ({"base_hidden_size": 64}, "base_hidden_size is for parametrization mup"),
        ({"base_num_layers": 2}, "base_num_layers is for parametrization mup"),
        ({**MUP, "base_num_layers": 2, "optimizer": "sgd"}, "base_num_layers is for optimizer adamw"),
        ({"parametrization": "ntk"}, "'standard' or 'mup'"),
    ],
)
def test_settings_without_a_meaning_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Hyperparameters(**given)
