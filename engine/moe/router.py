"""Which experts each token is sent to, and with what weight."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.layers import Linear
from engine.precision.linear import linear
from engine.precision.policy import wide
from engine.spec import MoESpec


class Router(Linear):
    """Logits of all experts, in at least fp32: choices hang on small differences."""

    def __init__(self, hidden_size: int, moe: MoESpec) -> None:
        super().__init__(hidden_size, moe.num_experts, bias=moe.router_bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """[T, H] to [T, E]."""
        dtype = wide(tokens.dtype)
        bias = None if self.bias is None else self.bias.to(tokens.dtype).to(dtype)
        return linear(tokens.to(dtype), self.weight.to(tokens.dtype).to(dtype), bias)


def router_scores(logits: Tensor, moe: MoESpec) -> Tensor:
    """Scores in 0..1 of all experts, [T, E] to [T, E]."""
    return logits.sigmoid() if moe.scoring == "sigmoid" else logits.softmax(dim=-1)


def choose_experts(scores: Tensor, moe: MoESpec, selection_bias: Tensor | None) -> Tensor:
    """The experts of each token: those with the highest scores.

    With groups, only experts of the best groups: a group is as good as the sum of its two best scores (DeepSeek-V3).

    Args:
        scores: [T, E].
        moe: The layer.
        selection_bias: Added to the scores for this choice only, [E].

    Returns:
        int64 [T, K].
    """
    merits = scores.detach() if selection_bias is None else scores.detach() + selection_bias
    if moe.num_groups > 1:
        grouped = merits.unflatten(-1, (moe.num_groups, -1))
        of_groups = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(dim=-1)
        best = of_groups.topk(moe.groups_per_token, dim=-1).indices
        outside = torch.ones_like(of_groups, dtype=torch.bool).scatter(-1, best, False)
        merits = grouped.masked_fill(outside[..., None], float("-inf")).flatten(-2)
    return merits.topk(moe.experts_per_token, dim=-1).indices


def expert_weights(logits: Tensor, scores: Tensor, chosen: Tensor, moe: MoESpec) -> Tensor:
    """Weight of each chosen expert in a token's output.

    Args:
        logits: [T, E].
        scores: ``router_scores`` of them.
        chosen: int64 [T, K].
        moe: The layer.

    Returns:
        [T, K], in the logits' dtype.
    """
    if moe.normalize_weights and moe.scoring == "softmax":
        # What softmax over all experts, scaled to sum to one, comes to: it cannot be 0 / 0.
        weights = logits.gather(-1, chosen).softmax(dim=-1)
    else:
        weights = scores.gather(-1, chosen)
        if moe.normalize_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    return weights * moe.routed_scaling
