"""The router's losses: their definitions, and their gradients on the way back through a layer."""

from __future__ import annotations

import pytest
import torch

from engine.moe.auxiliary import AuxiliaryLosses, balance_loss, with_loss, z_loss

pytestmark = pytest.mark.unit


def test_balance_loss_is_one_where_load_or_probabilities_are_even() -> None:
    scores = torch.rand(10, 4, dtype=torch.float64).softmax(-1)
    assert float(balance_loss(scores, torch.tensor([5, 5, 5, 5]), 10)) == pytest.approx(1.0)
    assert float(balance_loss(scores, torch.zeros(4), 10)) == pytest.approx(1.0), "no load yet"
    even = torch.full((10, 4), 0.25, dtype=torch.float64)
    assert float(balance_loss(even, torch.tensor([20, 0, 0, 0]), 10)) == pytest.approx(1.0)


def test_balance_loss_by_hand() -> None:
    sigmoids = torch.tensor([[0.9, 0.3], [0.2, 0.6]], dtype=torch.float64)
    # shares 3/4 and 1/4; probabilities (3/4, 1/4) and (1/4, 3/4), of 8 tokens in all
    expected = 2 * (0.75 * (0.75 + 0.25) + 0.25 * (0.25 + 0.75)) / 8
    assert float(balance_loss(sigmoids, torch.tensor([3, 1]), 8)) == pytest.approx(expected)


def test_z_loss_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    log_two = float(torch.tensor(2.0, dtype=torch.float64).log())
    assert float(z_loss(logits, 4)) == pytest.approx((log_two**2 + (1 + log_two) ** 2) / 4)


def test_losses_add_up_over_any_split_of_the_tokens() -> None:
    logits = torch.randn(12, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    load = torch.tensor([7, 1, 2, 2])
    losses = AuxiliaryLosses(0.1, "global", 0.01)
    losses.begin_step(12)
    whole = losses.loss(logits, logits.softmax(-1), load)
    parts = [losses.loss(part, part.softmax(-1), load) for part in logits.split([5, 1, 6])]
    assert whole is not None
    torch.testing.assert_close(sum(part for part in parts if part is not None), whole)
    assert AuxiliaryLosses(0.0, "global", 0.0).loss(logits, logits, load) is None


@pytest.mark.parametrize("scale", [1.0, 1e-3, 0.0])
def test_the_gradient_is_added_once_whatever_comes_back(scale: float) -> None:
    logits = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    output = with_loss(logits * 2, z_loss(logits, 6))
    (scale * output.sum()).backward()
    (alone,) = torch.autograd.grad(z_loss(logits, 6), logits)
    torch.testing.assert_close(logits.grad, 2 * scale + alone)
