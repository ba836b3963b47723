"""The experts of a layer as stacked feed-forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.models.layers import ACTIVATIONS, gated_activation
from engine.moe.dispatch import Dispatch
from engine.moe.kept_routing import RoutingMemory
from engine.moe.stacked_linear import stacked_linear
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

    def each(self, change: Callable[[Tensor], Tensor]) -> ExpertWeights:
        """The weights that there are, changed."""
        changed = {name: change(weight) for name, weight in self._asdict().items() if weight is not None}
        return self._replace(**changed)


class Experts(nn.Module):
    """Gated or plain feed-forwards with stacked weights: see ``ExpertWeights``, which names the parameters."""

    def __init__(self, spec: ModelSpec, moe: MoESpec, memory: RoutingMemory) -> None:
        super().__init__()
        gated = spec.mlp == "gated"
        inward = torch.Size((moe.num_experts, moe.ffn_size, spec.hidden_size))
        outward = torch.Size((moe.num_experts, spec.hidden_size, moe.ffn_size))
        shapes = {"gate": inward, "up": inward, "down": outward}
        for name, shape in shapes.items():
            exists = gated or name != "gate"
            self.register_parameter(name, nn.Parameter(torch.empty(shape)) if exists else None)
            bias = nn.Parameter(torch.empty(shape[:2])) if exists and moe.expert_bias else None
            self.register_parameter(f"{name}_bias", bias)
        self._combine = gated_activation(spec.activation) if gated else None
        self._activate = None if gated else ACTIVATIONS[spec.activation]
        self.dispatch = Dispatch(moe.num_experts, memory)

    def slot_weights(self) -> ExpertWeights:
        """The weights of this rank's slots, as they are computed with: at first those of all experts."""
        return ExpertWeights(*(getattr(self, name) for name in ExpertWeights._fields))

    def forward(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Sum over each token's experts of its weight times the expert's output.

        Args:
            tokens: [T, H].
            weights: Weight of each chosen expert, [T, K].
            chosen: The experts of each token, int64 [T, K].

        Returns:
            [T, H]
        """
        return self.dispatch(tokens, weights, chosen, self._compute, limited=self.training)

    def _compute(self, rows: Tensor, loads: Sequence[int]) -> Tensor:
        """Rows [R, H], sorted by slot, to each slot's output [R, H]."""
        weights = self.slot_weights().each(lambda weight: weight.to(rows.dtype))
        up = stacked_linear(rows, loads, weights.up, weights.up_bias)
        if self._combine is not None and weights.gate is not None:
            hidden = self._combine(stacked_linear(rows, loads, weights.gate, weights.gate_bias), up)
        else:
            assert self._activate is not None
            hidden = self._activate(up)
        return stacked_linear(hidden, loads, weights.down, weights.down_bias)
