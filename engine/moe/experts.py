"""The experts of a layer as stacked feed-forwards."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.models.layers import ACTIVATIONS, gated_activation
from engine.precision.linear import linear
from engine.spec import ModelSpec, MoESpec


class ExpertWeights(NamedTuple):
    """Weights of some experts, stacked; None where they have none."""

    gate: Tensor | None
    """[E, F, H]; None in plain feed-forwards."""
    up: Tensor
    """[E, F, H]"""
    down: Tensor
    """[E, H, F]"""
    gate_bias: Tensor | None
    """[E, F]"""
    up_bias: Tensor | None
    """[E, F]"""
    down_bias: Tensor | None
    """[E, H]"""


class Experts(nn.Module):
    """Gated or plain feed-forwards with stacked weights: see ``ExpertWeights``, which names the parameters."""

    def __init__(self, spec: ModelSpec, moe: MoESpec) -> None:
        super().__init__()
        gated = spec.mlp == "gated"
        inward = torch.Size((moe.num_experts, moe.ffn_size, spec.hidden_size))
        outward = torch.Size((moe.num_experts, spec.hidden_size, moe.ffn_size))
        shapes = {"gate": inward if gated else None, "up": inward, "down": outward}
        for name, shape in shapes.items():
            self.register_parameter(name, None if shape is None else nn.Parameter(torch.empty(shape)))
            has_bias = shape is not None and moe.expert_bias
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(shape[:2])) if has_bias else None)
        self._combine = gated_activation(spec.activation) if gated else None
        self._activate = None if gated else ACTIVATIONS[spec.activation]

    def slot_weights(self) -> ExpertWeights:
        """The weights as they are computed with."""
        return ExpertWeights(*(getattr(self, name) for name in ExpertWeights._fields))

    @staticmethod
    def loads(chosen: Tensor, num_experts: int) -> list[int]:
        """Tokens of each expert."""
        return chosen.flatten().bincount(minlength=num_experts).tolist()

    def forward(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sum over each token's experts of its weight times the expert's output.

        Args:
            tokens: [T, H].
            weights: Weight of each chosen expert, [T, K].
            chosen: The experts of each token, int64 [T, K].

        Returns:
            [T, H]
        """
        stacked = ExpertWeights(*(None if w is None else w.to(tokens.dtype) for w in self.slot_weights()))
        order = chosen.flatten().argsort(stable=True)
        token_of = order // chosen.shape[1]
        parts = tokens[token_of].split(self.loads(chosen, len(stacked.up)))
        outputs = [self._expert(part, _one(stacked, expert)) for expert, part in enumerate(parts)]
        weighted = torch.cat(outputs) * weights.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, token_of, weighted)

    def _expert(self, x: Tensor, weights: ExpertWeights) -> Tensor:
        up = linear(x, weights.up, weights.up_bias)
        if self._combine is not None and weights.gate is not None:
            hidden = self._combine(linear(x, weights.gate, weights.gate_bias), up)
        else:
            assert self._activate is not None
            hidden = self._activate(up)
        return linear(hidden, weights.down, weights.down_bias)


def _one(stacked: ExpertWeights, expert: int) -> ExpertWeights:
    return ExpertWeights(*(None if w is None else w[expert] for w in stacked))
