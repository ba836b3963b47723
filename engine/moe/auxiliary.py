"""Auxiliary losses of the router: one evens out the experts' load, one keeps logits small.

They are added in the backward pass, on the way of the gradient to the router's logits: so a layer needs nothing but its
own tokens, on whatever pipeline stage it stands. Every rank and micro-batch adds the share of its tokens, divided by
the tokens of the whole global batch: the sum is the same however the batch is split.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from engine.precision.policy import wide


@dataclass
class AuxiliaryLosses:
    """What the layers of a rank must know, and what they tell.

    Args:
        balance_coefficient: Weight of ``balance_loss``.
        balance_scope: Whose load it looks at: of the previous step's whole global batch, or of the micro-batch at hand
            on this rank.
        z_coefficient: Weight of ``z_loss``.
    """

    balance_coefficient: float
    balance_scope: Literal["global", "micro_batch"]
    z_coefficient: float
    num_tokens: int = 1
    """Of the step's global batch."""
    total: Tensor | None = field(default=None, repr=False)
    """This rank's share of the weighted losses of all its layers in the step, fp64; None before the first."""

    def begin_step(self, num_tokens: int) -> None:
        """Say how many tokens the global batch has."""
        self.num_tokens, self.total = num_tokens, None

    def loss(self, logits: Tensor, scores: Tensor, load: Tensor) -> Tensor | None:
        """These tokens' share of the weighted losses; None when no loss has a weight.

        Args:
            logits: [T, E].
            scores: Of all experts, [T, E].
            load: Assignments of each expert in what the scope names, [E].
        """
        losses = []
        if self.balance_coefficient:
            losses.append(self.balance_coefficient * balance_loss(scores, load, self.num_tokens))
        if self.z_coefficient:
            losses.append(self.z_coefficient * z_loss(logits, self.num_tokens))
        return torch.stack(losses).sum() if losses else None

    def tell(self, loss: Tensor) -> None:
        """Add a layer's share to the total."""
        share = loss.detach().double()
        self.total = share if self.total is None else self.total + share


def with_loss(tensor: Tensor, loss: Tensor) -> Tensor:
    """The tensor as it is; whoever differentiates through it differentiates the loss, too, once."""
    attached: Tensor = _WithLoss.apply(tensor, loss)
    return attached


def balance_loss(scores: Tensor, load: Tensor, num_tokens: int) -> Tensor:
    """``E · Σᵢ fᵢ Pᵢ`` with ``f`` each expert's share of the assignments and ``P`` its mean probability (Switch
    Transformer, equation 4): 1 where either is even.

    Args:
        scores: Of some tokens, [T, E]; their share of each token is its probability.
        load: Assignments of each expert, [E]; all zero counts as even.
        num_tokens: Tokens that the mean is taken over, of which these are some.
    """
    probabilities = scores / scores.sum(dim=-1, keepdim=True)
    shares = load.to(wide(scores.dtype))
    even = torch.full_like(shares, 1 / len(shares))
    shares = torch.where(shares.sum() > 0, shares / shares.sum().clamp_min(1), even)
    return len(shares) * (shares * probabilities.sum(dim=0)).sum() / num_tokens


def z_loss(logits: Tensor, num_tokens: int) -> Tensor:
    """Mean square of the log of the softmax's denominator (ST-MoE, equation 5).

    Args:
        logits: Of some tokens, [T, E].
        num_tokens: Tokens that the mean is taken over, of which these are some.
    """
    return logits.logsumexp(dim=-1).square().sum() / num_tokens


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, loss: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, gradient.new_ones(())
