"""One optimizer step in one process."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import RunConfig, RuntimeOptions
from engine.context import open_context
from engine.errors import UserError
from engine.models.loss import IGNORED
from engine.optim.groups import GROUPS
from engine.plan import Plan
from engine.spec import Hyperparameters, ModelSpec, Workload
from engine.step import Stepper

pytestmark = pytest.mark.unit

SPEC = ModelSpec(num_layers=2, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn_size=24, vocab_size=32)
MOE = SPEC.changed(moe={"num_experts": 8, "experts_per_token": 1, "ffn_size": 8})


def stepper(
    plan: dict[str, Any] | None = None, model: ModelSpec = SPEC, vocab_size: int = 1, **hyperparameters: Any
) -> Stepper:
    """A tiny one; 8 sequences of 12 tokens a step."""
    config = RunConfig(
        model=model,
        workload=Workload(sequence_length=12, total_tokens=960),
        hyperparameters=Hyperparameters(global_batch_size=8, **hyperparameters),
        plan=Plan(**{"precision": "fp64", "micro_batch_size": 4, **(plan or {})}),
        runtime=RuntimeOptions(),
    )
    return Stepper.build(config, open_context(config.plan, config.runtime), vocab_size)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Tokens and labels, the labels valid at few places of the later sequences."""
    draws = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, 32, (2, 8, 12), generator=draws)
    for sequence in range(8):
        labels[sequence, 12 - sequence :] = IGNORED
    return tokens, labels


def train(runner: Stepper, steps: int = 3) -> list[float | None]:
    """Loss and gradient norm of some steps, in one list."""
    results = [runner.train_step(*batch(step), 0.01) for step in range(steps)]
    return [value for result in results for value in (result.loss, result.grad_norm)]


def test_loss_falls_on_one_batch() -> None:
    runner = stepper()
    losses = [runner.train_step(*batch(), 0.01).loss or 9.9 for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("size", [1, 2, 8])
def test_micro_batch_size_changes_nothing(size: int) -> None:
    changed = stepper()
    first = changed.train_step(*batch(0), 0.01)
    changed.set_micro_batch(size)
    assert changed.micro_batch_size == size
    second = changed.train_step(*batch(1), 0.01)
    expected = train(stepper(), 2)
    assert [first.loss, first.grad_norm, second.loss, second.grad_norm] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("size", [0, 3, 16])
def test_micro_batch_size_that_does_not_divide_is_refused(size: int) -> None:
    with pytest.raises(UserError, match="does not divide the 8 sequences"):
        stepper().set_micro_batch(size)


@pytest.mark.parametrize("plan", [{"recompute": "full"}, {"recompute": "every_k", "recompute_period": 2}])
def test_recompute_repeats_the_same_dropout(plan: dict[str, Any]) -> None:
    assert train(stepper(plan, dropout=0.3)) == train(stepper(dropout=0.3))


def test_dropout_leaves_torchs_own_generator_alone() -> None:
    runner = stepper(dropout=0.3)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    train(runner, 1)
    assert torch.equal(torch.rand(3), expected)


def test_evaluation_draws_nothing_and_counts_valid_tokens() -> None:
    runner = stepper(dropout=0.5)
    loss_sum, num_valid = runner.evaluate(*batch())
    assert (loss_sum, num_valid) == runner.evaluate(*batch())
    assert num_valid == int((batch()[1] != IGNORED).sum())
    assert loss_sum / num_valid == pytest.approx(3.47, abs=0.2)  # ln 32
    assert runner.generators.state_dict() == {}


def test_batch_without_a_valid_token_gives_zero() -> None:
    tokens, labels = batch()
    result = stepper().train_step(tokens, torch.full_like(labels, IGNORED), 0.01)
    assert (result.loss, result.num_valid_tokens, result.grad_norm, result.skipped) == (0.0, 0, 0.0, False)


def test_step_that_is_not_finite_changes_nothing() -> None:
    runner = stepper()
    runner.train_step(*batch(), 0.01)
    weight = dict(runner.parts[0].named_parameters())["layers.0.ffn.up.weight"]
    with torch.no_grad():
        weight[0, 0] = float("nan")
    before = {key: {name: t.clone() for name, t in part.items()} for key, part in runner.state_dict().items()}
    result = runner.train_step(*batch(), 0.01)
    assert (result.loss, result.grad_norm, result.grad_norms, result.skipped) == (None, None, {}, True)
    for key, part in runner.state_dict().items():
        for name, tensor in part.items():
            assert torch.equal(tensor.nan_to_num(), before[key][name].nan_to_num()), name


def test_group_norms_make_up_the_global_norm() -> None:
    result = stepper().train_step(*batch(), 0.01)
    assert tuple(result.grad_norms) == GROUPS
    assert sum(norm**2 for norm in result.grad_norms.values()) ** 0.5 == pytest.approx(result.grad_norm)


def test_clipping_scales_to_the_norm_asked_for() -> None:
    plain: dict[str, Any] = {"optimizer": "sgd", "beta1": 0.0, "weight_decay": 0.0}
    free, clipped = stepper(clip_norm=None, **plain), stepper(clip_norm=0.1, **plain)
    start = clipped.full_weights()
    norm = free.train_step(*batch(), 1.0).grad_norm
    assert norm == clipped.train_step(*batch(), 1.0).grad_norm
    assert norm is not None
    for fqn, before in start.items():
        expected = (free.full_weights()[fqn] - before) * (0.1 / norm)
        assert torch.allclose(clipped.full_weights()[fqn] - before, expected, rtol=1e-9, atol=1e-15)


def test_weight_decay_spares_norms_biases_and_positions() -> None:
    learned = SPEC.changed(positions="learned", qkv_bias=True, max_positions=12)
    runner = stepper(model=learned, optimizer="sgd", beta1=0.0, weight_decay=0.5)
    start = runner.full_weights()
    tokens, labels = batch()
    runner.train_step(tokens, torch.full_like(labels, IGNORED), 0.1)  # no gradient: what changes is decay
    changed = {fqn for fqn, weight in runner.full_weights().items() if not torch.equal(weight, start[fqn])}
    assert changed == {fqn for fqn, weight in start.items() if weight.ndim == 2 and fqn != "positions.weight"}


def test_full_weights_are_a_copy() -> None:
    runner = stepper()
    weights = runner.full_weights()
    kept = {fqn: weight.clone() for fqn, weight in weights.items()}
    train(runner, 1)
    assert all(torch.equal(weights[fqn], kept[fqn]) for fqn in kept)


def test_one_whole_weight_at_a_time_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    gathered: list[weakref.ref[Tensor]] = []

    def gather(split: Tensor) -> Tensor:
        assert sum(whole() is not None for whole in gathered) <= 1
        whole = split.clone()
        gathered.append(weakref.ref(whole))
        return whole

    monkeypatch.setattr("engine.weights.gather", gather)
    runner = stepper()
    assert runner.full_weights().keys() == dict(runner.parts[0].named_parameters()).keys()


def test_bf16_keeps_fp32_masters() -> None:
    runner = stepper({"precision": "bf16"})
    assert {t.dtype for part in runner.state_dict().values() for t in part.values()} == {torch.float32}
    assert train(runner) == pytest.approx(train(stepper()), rel=0.03)


def test_idle_experts_get_a_zero_gradient() -> None:
    runner = stepper(model=MOE)
    gradients: dict[str, Tensor] = {}
    named = dict(runner.parts[0].named_parameters())
    runner.optimizer.register_step_pre_hook(
        lambda *_: gradients.update({fqn: p.grad.clone() for fqn, p in named.items() if p.grad is not None})
    )
    tokens, labels = batch()
    runner.train_step(tokens[:, :1].expand(8, 12).contiguous() * 0, labels, 0.01)  # one token: few experts at work
    assert gradients.keys() == named.keys()
    idle = (gradients["layers.0.moe.experts.up"].abs().amax((1, 2)) == 0).sum()
    assert 0 < int(idle) < 8


@pytest.mark.parametrize("optimizer", [{}, {"optimizer": "sgd"}, {"optimizer": "sgd", "beta1": 0.0}])
def test_state_before_the_first_step_has_the_later_form(optimizer: dict[str, Any]) -> None:
    fresh, other = stepper(**optimizer), stepper(**optimizer)
    names = {key: set(part) for key, part in fresh.state_dict().items()}
    train(other, 2)
    saved = {key: {name: t.clone() for name, t in part.items()} for key, part in other.state_dict().items()}
    assert {key: set(part) for key, part in saved.items()} == names
    expected = train(other)
    fresh.load_state_dict(saved)
    assert train(fresh) == expected


def test_vocabulary_is_enlarged_to_the_tokenizers() -> None:
    assert stepper(vocab_size=40).spec.vocab_size == 40
    assert stepper(vocab_size=30).spec.vocab_size == 32


def test_whole_weights_are_taken_over_and_checked() -> None:
    source, target = stepper(), stepper(vocab_size=40)
    train(source, 1)
    weights = source.full_weights()
    untouched = target.full_weights()["head.weight"][32:].clone()
    target.load_full_weights(iter(weights.items()))
    loaded = target.full_weights()
    assert torch.equal(loaded["layers.1.ffn.down.weight"], weights["layers.1.ffn.down.weight"])
    assert torch.equal(loaded["head.weight"][:32], weights["head.weight"])
    assert torch.equal(loaded["head.weight"][32:], untouched)
    with pytest.raises(UserError, match=r"missing, the first is embedding\.weight"):
        target.load_full_weights([item for item in weights.items() if item[0] != "embedding.weight"])
    with pytest.raises(UserError, match=r"norm\.weight has shape \[3\], the model needs \[16\]"):
        target.load_full_weights([("norm.weight", torch.zeros(3))])
