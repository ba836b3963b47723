"""The building blocks of the decoder. Shapes: B sequences, L tokens, H hidden size, V vocabulary.

Modules compute in the dtype of their input and round their parameters to it; see ``engine.precision.policy``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.parametrization import writes_to_residual
from engine.precision.linear import linear
from engine.precision.policy import wide
from engine.spec import SWIGLU_LIMIT, ModelSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
"""Activations of one argument, by the name in ModelSpec."""

_SWIGLU_SLOPE = 1.702


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss's gated activation: ``gate · sigmoid(1.702 · gate) · (up + 1)`` with the gate at most 7 and ``up`` within
    ±7."""
    gate = gate.clamp(max=SWIGLU_LIMIT)
    return gate * torch.sigmoid(_SWIGLU_SLOPE * gate) * (up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT) + 1)


def gated_activation(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """What a gated feed-forward makes of gate and up, by the name in ModelSpec: ``act(gate) · up``, or
    ``clamped_swiglu``."""
    if name == "clamped_swiglu":
        return clamped_swiglu
    activation = ACTIVATIONS[name]
    return lambda gate, up: activation(gate) * up


class Linear(nn.Linear):
    """``x Wᵀ + b`` in the dtype of ``x``."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return linear(x, self.weight.to(x.dtype), bias)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension, computed in at least fp32."""

    def __init__(self, size: int, eps: float, kind: Literal["rmsnorm", "layernorm"] = "rmsnorm") -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if kind == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] to the same."""
        dtype = wide(x.dtype)
        weight = self.weight.to(x.dtype).to(dtype)
        if self.bias is None:
            return F.rms_norm(x.to(dtype), weight.shape, weight, self.eps).to(x.dtype)
        return F.layer_norm(x.to(dtype), weight.shape, weight, self.bias.to(x.dtype).to(dtype), self.eps).to(x.dtype)


class Head(nn.Module):
    """The head of a model with tied embeddings: it has no weights of its own."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """[B, L, H] and the embedding [V, H] to logits [B, L, V]."""
        return linear(x, weight.to(x.dtype))


class FeedForward(nn.Module):
    """Gated (``down(act(gate(x)) * up(x))``) or plain (``down(act(up(x)))``) feed-forward.

    Args:
        spec: The architecture.
        ffn_size: Width; the spec's when None.
    """

    def __init__(self, spec: ModelSpec, ffn_size: int | None = None) -> None:
        super().__init__()
        width = ffn_size or spec.ffn_size
        self.gate: Linear | None = None
        if spec.mlp == "gated":
            self.gate = Linear(spec.hidden_size, width, bias=spec.mlp_bias)
            self.combine = gated_activation(spec.activation)
        else:
            self.activation = ACTIVATIONS[spec.activation]
        self.up = Linear(spec.hidden_size, width, bias=spec.mlp_bias)
        self.down = Linear(width, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, H] to [B, L, H]."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.combine(self.gate(x), self.up(x)))


def initial_std(fqn: str, num_layers: int) -> float:
    """Standard deviation of a weight matrix at the start: 0.02, projections back into the residual stream scaled by
    1/sqrt(2·layers) (GPT-2)."""
    return 0.02 / math.sqrt(2 * num_layers) if writes_to_residual(fqn) else 0.02
