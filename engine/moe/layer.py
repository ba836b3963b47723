"""The mixture of experts as a block's feed-forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.models.layers import FeedForward
from engine.moe.experts import Experts
from engine.moe.router import Router, choose_experts, expert_weights, router_scores
from engine.spec import ModelSpec, MoESpec


class MixtureOfExperts(nn.Module):
    """Router and routed experts, and the shared experts that every token passes.

    ``selection_bias`` is a buffer, not a parameter: no gradient changes it.
    """

    def __init__(self, spec: ModelSpec, moe: MoESpec) -> None:
        super().__init__()
        self.moe = moe
        self.router = Router(spec.hidden_size, moe)
        self.selection_bias: Tensor | None
        self.register_buffer("selection_bias", torch.zeros(moe.num_experts) if moe.selection_bias else None)
        self.experts = Experts(spec, moe)
        self.shared = FeedForward(spec, moe.shared_ffn_size) if moe.shared_ffn_size else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, H] to [B, L, H]."""
        routed = self.routed(x.flatten(0, 1)).view_as(x)
        return routed if self.shared is None else routed + self.shared(x)

    def routed(self, tokens: Tensor) -> Tensor:
        """The routed experts' part of the output, [T, H] to [T, H]."""
        logits = self.router(tokens)
        scores = router_scores(logits, self.moe)
        chosen = choose_experts(scores, self.moe, self.selection_bias)
        weights = expert_weights(logits, scores, chosen, self.moe)
        return self.experts(tokens, weights.to(tokens.dtype), chosen)
