"""Mixture of experts with a softmax router, dropless: every token reaches its experts whatever the load.

The experts run one after another on their own tokens: the reference path, right in every dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.models.layers import ACTIVATIONS, Linear
from engine.precision.linear import linear
from engine.precision.policy import wide
from engine.spec import ModelSpec, MoESpec


class Experts(nn.Module):
    """Gated feed-forwards with stacked weights: gate and up [E, F, H], down [E, H, F]."""

    def __init__(self, spec: ModelSpec, moe: MoESpec) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.gate = nn.Parameter(torch.empty(moe.num_experts, moe.ffn_size, spec.hidden_size))
        self.up = nn.Parameter(torch.empty(moe.num_experts, moe.ffn_size, spec.hidden_size))
        self.down = nn.Parameter(torch.empty(moe.num_experts, spec.hidden_size, moe.ffn_size))

    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Gate, up and down as they are computed with."""
        return self.gate, self.up, self.down

    @staticmethod
    def loads(chosen: Tensor, num_experts: int) -> list[int]:
        """Tokens of each expert."""
        return chosen.flatten().bincount(minlength=num_experts).tolist()

    def forward(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sum over each token's experts of its weight times the expert's output.

        Args:
            x: [B, L, H].
            weights: Weight of each chosen expert, [T, K].
            chosen: The experts of each token, int64 [T, K].

        Returns:
            [B, L, H]
        """
        tokens = x.flatten(0, 1)
        gates, ups, downs = (stacked.to(x.dtype) for stacked in self.weights())
        order = chosen.flatten().argsort(stable=True)
        token_of = order // chosen.shape[1]
        parts = tokens[token_of].split(self.loads(chosen, gates.shape[0]))
        outputs = [
            linear(self.activation(linear(part, gate)) * linear(part, up), down)
            for part, gate, up, down in zip(parts, gates, ups, downs, strict=True)
        ]
        weighted = torch.cat(outputs) * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, token_of, weighted).view_as(x)


class MixtureOfExperts(nn.Module):
    """Router and experts."""

    def __init__(self, spec: ModelSpec, moe: MoESpec) -> None:
        super().__init__()
        self.moe = moe
        self.router = Linear(spec.hidden_size, moe.num_experts, bias=False)
        self.experts = Experts(spec, moe)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, H] to [B, L, H]."""
        logits = self.router(x).flatten(0, 1)
        scores = logits.to(wide(x.dtype)).softmax(dim=-1)
        weights, chosen = scores.topk(self.moe.experts_per_token, dim=-1)
        if self.moe.normalize_weights:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.experts(x, (weights * self.moe.routed_scaling).to(x.dtype), chosen)
