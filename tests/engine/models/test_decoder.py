"""A pipeline's parts are together the whole model, first values follow from names, and attention looks back only."""

from __future__ import annotations

import pytest
import torch

from engine.models import decoder
from engine.models.decoder import Decoder, initial_value
from engine.optim.groups import decays
from engine.plan import Plan
from engine.spec import ModelSpec, MoESpec

pytestmark = pytest.mark.unit

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


def test_first_values_of_some_rows_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a rank holds, from the middle of what is drawn together or over several of such parts."""
    name, shape = "layers.0.moe.experts.gate", torch.Size([11, 4, 6])
    together = initial_value(SPEC, 1, name, shape)
    for num_elements in (24, 72, 100):
        monkeypatch.setattr(decoder, "_DRAWN_TOGETHER", num_elements)
        whole = initial_value(SPEC, 1, name, shape)
        assert torch.equal(whole[: num_elements // 24], initial_value(SPEC, 1, name, shape, range(num_elements // 24)))
        assert len(torch.unique(whole)) == len(torch.unique(together)) == whole.numel()
        for rows in (range(11), range(2, 5), range(3, 4), range(7, 11), range(5, 5), range(11, 11)):
            assert torch.equal(initial_value(SPEC, 1, name, shape, rows), whole[rows.start : rows.stop])


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


def test_weight_decay_leaves_norms_sinks_and_every_bias_alone() -> None:
    spec = ModelSpec(
        num_layers=1, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, ffn_size=8, vocab_size=16,
        positions="learned", qk_norm=True, attention_sinks=True, qkv_bias=True,
        moe=MoESpec(num_experts=2, experts_per_token=1, ffn_size=4, expert_bias=True, router_bias=True),
    )  # fmt: skip
    with torch.device("meta"):
        parameters = dict(Decoder(spec, layers=range(1)).named_parameters())
    kept = {fqn.removeprefix("layers.0.") for fqn, parameter in parameters.items() if decays(fqn, parameter)}
    assert kept == {
        "embedding.weight", "head.weight", "moe.router.weight", "moe.experts.gate", "moe.experts.up",
        "moe.experts.down", *(f"attention.{name}.weight" for name in ("query", "key", "value", "out")),
    }  # fmt: skip
