"""Choice and weights of experts, each kind against a loop over tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.moe.router import Router, choose_experts, expert_weights, router_scores
from engine.spec import MoESpec

pytestmark = pytest.mark.unit


def spec(**changes: Any) -> MoESpec:
    """Eight experts, three per token."""
    return MoESpec(**({"num_experts": 8, "experts_per_token": 3, "ffn_size": 4} | changes))


def logits_of(num_tokens: int = 20) -> Tensor:
    """Without ties."""
    return torch.randn(num_tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def route(logits: Tensor, moe: MoESpec, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Experts and weights."""
    scores = router_scores(logits, moe)
    chosen = choose_experts(scores, moe, bias)
    return chosen, expert_weights(logits, scores, chosen, moe)


def test_softmax_weights_are_of_all_experts_or_of_the_chosen_ones() -> None:
    logits = logits_of()
    best = logits.topk(3, dim=-1)
    chosen, weights = route(logits, spec())
    assert torch.equal(chosen, best.indices)
    torch.testing.assert_close(weights, best.values.softmax(-1))  # gpt-oss: softmax over the chosen logits
    of_all = logits.softmax(-1).gather(-1, best.indices)
    torch.testing.assert_close(weights, of_all / of_all.sum(-1, keepdim=True))  # Mixtral: the same
    torch.testing.assert_close(route(logits, spec(normalize_weights=False))[1], of_all)


def test_selection_bias_changes_the_choice_and_no_weight() -> None:
    logits, moe = logits_of(), spec(scoring="sigmoid", routed_scaling=2.5)
    bias = torch.tensor([0.0, 0, 0, 0, 0, 0, 9, -9], dtype=torch.float64)
    chosen, weights = route(logits, moe, bias)
    assert (chosen == 6).any(-1).all()
    assert not (chosen == 7).any()
    scores = logits.sigmoid().gather(-1, chosen)
    torch.testing.assert_close(weights, 2.5 * scores / scores.sum(-1, keepdim=True))


def test_only_experts_of_the_best_groups_are_chosen() -> None:
    moe = spec(scoring="sigmoid", num_groups=4, groups_per_token=2, num_experts=8)
    logits = logits_of()
    bias = torch.linspace(-0.3, 0.3, 8, dtype=torch.float64)
    chosen, _ = route(logits, moe, bias)
    for merits, experts in zip((logits.sigmoid() + bias).tolist(), chosen.tolist(), strict=True):
        groups = sorted(range(4), key=lambda group: -sum(merits[2 * group : 2 * group + 2]))[:2]
        allowed = [expert for group in groups for expert in (2 * group, 2 * group + 1)]
        assert set(experts) == set(sorted(allowed, key=lambda expert: -merits[expert])[:3])


def test_a_group_is_as_good_as_its_two_best() -> None:
    moe = spec(scoring="sigmoid", num_groups=2, groups_per_token=1, experts_per_token=1)
    logits = torch.tensor([[5.0, -9, -9, -9, 2, 2, -9, -9]])  # the best expert stands in the worse group
    assert int(route(logits, moe)[0]) in (4, 5)


def test_nearly_equal_logits_are_told_apart_in_bf16() -> None:
    router = Router(16, spec()).bfloat16()
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(1))
    tokens = torch.randn(50, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    logits = router(tokens)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, tokens.float() @ router.weight.float().T)


def test_weights_of_hopeless_experts_are_numbers() -> None:
    logits = torch.full((2, 8), -2000.0)
    for scoring in ("softmax", "sigmoid"):
        assert route(logits, spec(scoring=scoring))[1].isfinite().all()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_groups": 3}, "num_groups 3 does not divide num_experts 8"),
        ({"num_groups": 2, "groups_per_token": 3}, "groups_per_token 3 must be at most num_groups 2"),
        ({"num_groups": 4, "groups_per_token": 1}, "hold experts_per_token 3 experts"),
    ],
)
def test_groups_that_cannot_be_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        spec(**changes)
