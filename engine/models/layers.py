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

from engine.precision.linear import linear
from engine.precision.policy import wide
from engine.spec import ModelSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}
"""The activations built, by the name in ModelSpec."""


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
    """Gated (``down(act(gate(x)) * up(x))``) or plain (``down(act(up(x)))``) feed-forward."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.gate = Linear(spec.hidden_size, spec.ffn_size, bias=spec.mlp_bias) if spec.mlp == "gated" else None
        self.up = Linear(spec.hidden_size, spec.ffn_size, bias=spec.mlp_bias)
        self.down = Linear(spec.ffn_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, H] to [B, L, H]."""
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


def initial_std(fqn: str, num_layers: int) -> float:
    """Standard deviation of a weight matrix at the start: 0.02, projections back into the residual stream scaled by
    1/sqrt(2·layers) (GPT-2)."""
    into_residual = fqn.endswith((".attention.out.weight", ".ffn.down.weight", ".experts.down"))
    return 0.02 / math.sqrt(2 * num_layers) if into_residual else 0.02
