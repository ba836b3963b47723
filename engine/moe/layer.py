"""The mixture of experts as a block's feed-forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.models.layers import FeedForward
from engine.moe.auxiliary import AuxiliaryLosses, with_loss
from engine.moe.capacity import count_of_each
from engine.moe.experts import Experts
from engine.moe.kept_routing import RoutingMemory
from engine.moe.router import Router, choose_experts, expert_weights, router_scores
from engine.spec import ModelSpec, MoESpec


class MixtureOfExperts(nn.Module):
    """Router and routed experts, and the shared experts that every token passes.

    Attributes:
        selection_bias: Added to the scores for the choice of experts only, [E]. A buffer: no gradient changes it.
        load: Assignments of each expert by this rank's tokens in the step so far, int64 [E]. Evaluation and
            recomputation do not count.
        previous_load: The same of the last step's whole global batch; zero before the first step.
        auxiliary: The losses of the router in training; None for none.
        memory: What a recomputation takes over.
    """

    def __init__(self, spec: ModelSpec, moe: MoESpec) -> None:
        super().__init__()
        self.moe = moe
        self.memory = RoutingMemory()
        self.auxiliary: AuxiliaryLosses | None = None
        self.load: Tensor
        self.previous_load: Tensor
        self.selection_bias: Tensor | None
        for name in ("load", "previous_load"):
            self.register_buffer(name, torch.zeros(moe.num_experts, dtype=torch.int64), persistent=False)
        self.register_buffer("selection_bias", torch.zeros(moe.num_experts) if moe.selection_bias else None)
        self.router = Router(spec.hidden_size, moe)
        self.experts = Experts(spec, moe, self.memory)
        self.shared = FeedForward(spec, moe.shared_ffn_size) if moe.shared_ffn_size else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, H] to [B, L, H]."""
        routed = self.routed(x.flatten(0, 1)).view_as(x)
        return routed if self.shared is None else routed + self.shared(x)

    def routed(self, tokens: Tensor) -> Tensor:
        """The routed experts' part of the output, [T, H] to [T, H]."""
        logits = self.router(tokens)
        scores = router_scores(logits, self.moe)
        chosen = self.memory("chosen", lambda: self._choose(scores))
        weights = expert_weights(logits, scores, chosen, self.moe)
        if self.training and self.auxiliary is not None:
            weights = self._with_losses(self.auxiliary, weights, logits, scores, chosen)
        return self.experts(tokens, weights.to(tokens.dtype), chosen)

    def _choose(self, scores: Tensor) -> Tensor:
        chosen = choose_experts(scores, self.moe, self.selection_bias)
        if self.training:
            self.load.add_(count_of_each(chosen, self.moe.num_experts))
        return chosen

    def _with_losses(
        self, auxiliary: AuxiliaryLosses, weights: Tensor, logits: Tensor, scores: Tensor, chosen: Tensor
    ) -> Tensor:
        whole_batch = auxiliary.balance_scope == "global"
        load = self.previous_load if whole_batch else count_of_each(chosen, self.moe.num_experts)
        loss = auxiliary.loss(logits, scores, load)
        if loss is None:
            return weights
        self.memory("told", lambda: auxiliary.tell(loss))
        return with_loss(weights, loss)
