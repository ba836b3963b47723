"""Loads are counted exactly, once a step, and biases follow them; recomputation takes over what was decided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import RunConfig, RuntimeOptions
from engine.context import open_context
from engine.errors import UserError
from engine.models.loss import IGNORED
from engine.moe import dispatch as dispatch_module
from engine.moe import layer as layer_module
from engine.moe.balance import bias_step
from engine.moe.capacity import within_capacity
from engine.moe.layer import MixtureOfExperts
from engine.moe.router import choose_experts
from engine.parallel.experts import mixtures_of
from engine.plan import Plan
from engine.schema import parse
from engine.spec import Hyperparameters, ModelSpec, MoESpec, Workload
from engine.step import Stepper

pytestmark = pytest.mark.unit

MODEL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "ffn_size": 24,
    "vocab_size": 32,
}  # fmt: skip
MOE = {"num_experts": 4, "experts_per_token": 2, "ffn_size": 8, "scoring": "sigmoid", "selection_bias": True}
BALANCED = {"router_aux_loss_coefficient": 0.1, "router_z_loss_coefficient": 0.01, "expert_bias_rate": 0.01}
NUM_ASSIGNMENTS = 8 * 12 * 2


def stepper(plan: dict[str, Any] | None = None, **hyperparameters: Any) -> Stepper:
    """Of two layers of experts; 8 sequences of 12 tokens a step, two micro-batches unless the plan says otherwise."""
    config = RunConfig(
        model=ModelSpec(**MODEL, moe=MOE),
        workload=Workload(sequence_length=12, total_tokens=960),
        hyperparameters=Hyperparameters(global_batch_size=8, **hyperparameters),
        plan=Plan(**{"precision": "fp64", "micro_batch_size": 4, **(plan or {})}),
        runtime=RuntimeOptions(),
    )
    return Stepper.build(config, open_context(config.plan, config.runtime), 1)


def layers_of(runner: Stepper) -> list[MixtureOfExperts]:
    return list(mixtures_of(runner.parts[0]).values())


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    tokens, labels = torch.randint(0, 32, (2, 8, 12), generator=torch.Generator().manual_seed(seed))
    labels[2:5] = IGNORED
    return tokens, labels


def test_bias_moves_against_the_excess_and_at_most_by_the_rate() -> None:
    change = bias_step(torch.tensor([0, 10, 11, 40, 14]), 0.1)
    torch.testing.assert_close(change, 0.1 * torch.tensor([1.0, 1 / 3, 4 / 15, -1.0, 1 / 15], dtype=torch.float64))
    assert not bias_step(torch.zeros(3), 0.1).any()


@pytest.mark.parametrize("plan", [{}, {"micro_batch_size": 1}, {"micro_batch_size": 2, "recompute": "full"}])
def test_every_assignment_is_counted_once(plan: dict[str, Any]) -> None:
    runner, reference = stepper(plan, **BALANCED), stepper({"micro_batch_size": 8}, **BALANCED)
    for step in range(2):
        runner.evaluate(*batch(99))
        result, expected = (one.train_step(*batch(step), 0.01) for one in (runner, reference))
        assert result.auxiliary_loss == pytest.approx(expected.auxiliary_loss, rel=1e-12)
        for layer, other in zip(layers_of(runner), layers_of(reference), strict=True):
            assert int(layer.previous_load.sum()) == NUM_ASSIGNMENTS
            assert torch.equal(layer.previous_load, other.previous_load)
            assert layer.selection_bias is not None
            assert layer.selection_bias.any(), "every layer's bias moves"
            assert torch.equal(layer.selection_bias, other.selection_bias)
        loads = torch.stack([layer.previous_load for layer in layers_of(runner)])
        evenness = (loads.double().mean(1) / loads.amax(1)).mean()
        assert result.expert_load_ratio == pytest.approx(float(evenness), rel=1e-12)


@pytest.mark.parametrize("scope", ["global", "micro_batch"])
def test_gradients_are_those_of_the_loss_and_the_auxiliary_loss(scope: str) -> None:
    settings = BALANCED | {"expert_bias_rate": 0.0, "router_aux_loss_scope": scope, "clip_norm": None}
    runner = stepper({"recompute": "full"}, **settings)
    runner.train_step(*batch(), 0.1)  # the load is uneven from now on
    router = dict(runner.parts[0].named_parameters())["layers.0.moe.router.weight"]
    gradients: list[Tensor] = []
    runner.optimizer.register_step_pre_hook(lambda *_: gradients.append(router.grad.clone()))  # type: ignore[union-attr]
    state = {name: tensor.clone() for name, tensor in runner.state_dict()["model"].items()}

    def total(shift: float) -> float:
        with torch.no_grad():
            for name, tensor in runner.state_dict()["model"].items():
                tensor.copy_(state[name])
            router[1, 3] += shift
        result = runner.train_step(*batch(1), 0.0)
        assert result.loss is not None
        return result.loss + result.auxiliary_loss

    total(0.0)
    slope = (total(1e-5) - total(-1e-5)) / 2e-5
    assert float(gradients[0][1, 3]) == pytest.approx(slope, rel=1e-5)


def test_a_skipped_step_moves_no_bias() -> None:
    runner = stepper(**BALANCED)
    runner.train_step(*batch(), 0.01)
    before = {name: tensor.clone() for name, tensor in runner.state_dict()["model"].items()}
    with torch.no_grad():
        runner.parts[0].embedding.weight[int(batch(1)[0][0, 0])] = float("inf")  # type: ignore[union-attr, operator]
    assert runner.train_step(*batch(1), 0.01).skipped
    after = runner.state_dict()["model"]
    kept = [name for name in before if name.endswith(("selection_bias", "previous_load"))]
    assert len(kept) == 4
    assert all(torch.equal(after[name], before[name]) for name in kept)


def test_balance_goes_on_where_a_checkpoint_was_made() -> None:
    first, second = stepper(**BALANCED), stepper(**BALANCED)
    for step in range(2):
        first.train_step(*batch(step), 0.01)
    saved = {
        section: {name: tensor.clone() for name, tensor in tensors.items()}
        for section, tensors in first.state_dict().items()
    }
    second.load_state_dict(saved)
    results = [one.train_step(*batch(2), 0.01) for one in (first, second)]
    assert results[0].auxiliary_loss == results[1].auxiliary_loss
    assert results[0].grad_norm == results[1].grad_norm


def test_selection_bias_is_a_weight_and_no_parameter() -> None:
    runner = stepper(**BALANCED)
    assert "layers.0.moe.selection_bias" in runner.full_weights()
    assert not [name for name, _ in runner.parts[0].named_parameters() if "selection" in name]
    weights = runner.full_weights()
    weights["layers.0.moe.selection_bias"] += 1.0
    runner.load_full_weights(weights.items())
    assert layers_of(runner)[0].selection_bias.tolist() == [1.0] * 4  # type: ignore[union-attr]


def test_recomputation_does_not_route_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    capacities: list[int] = []

    def noisy(scores: Tensor, moe: MoESpec, bias: Tensor | None) -> Tensor:
        noise = torch.rand(scores.shape, generator=torch.Generator().manual_seed(len(calls)), dtype=scores.dtype)
        calls.append(noise)
        return choose_experts(noise, moe, bias)

    def counted(*arguments: Any) -> Tensor:
        capacities.append(arguments[-1])
        return within_capacity(*arguments)

    monkeypatch.setattr(layer_module, "choose_experts", noisy)
    monkeypatch.setattr(dispatch_module, "within_capacity", counted)
    results = []
    for recompute in ("none", "full"):
        calls.clear()
        capacities.clear()
        runner = stepper({"recompute": recompute, "expert_capacity_factor": 1.0}, **BALANCED)
        results.append(runner.train_step(*batch(), 0.01))
        assert len(calls) == 4, "two layers, two micro-batches"
        assert capacities == [24] * 4
    assert results[0].grad_norms == pytest.approx(results[1].grad_norms, rel=1e-12)
    assert results[0].auxiliary_loss == results[1].auxiliary_loss


@pytest.mark.parametrize(
    ("moe", "hyperparameters", "told"),
    [
        (None, {"router_aux_loss_coefficient": 0.1}, "the model has none"),
        (MOE | {"selection_bias": False}, {"expert_bias_rate": 0.1}, "needs model.moe.selection_bias"),
    ],
)
def test_balancing_that_cannot_be_is_refused(moe: Any, hyperparameters: dict[str, float], told: str) -> None:
    run = {
        "model": MODEL | {"moe": moe},
        "workload": {"sequence_length": 8, "total_tokens": 64},
        "hyperparameters": hyperparameters,
    }
    with pytest.raises(UserError, match=told):
        parse(RunConfig, run)
