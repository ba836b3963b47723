"""The building blocks of the decoder. Shapes: B sequences, L tokens, H hidden size, D head dimension, T = B·L.

Modules compute in the dtype of their input and round their parameters to it; see ``engine.precision.policy``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

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
    """RMSNorm or LayerNorm, computed in at least fp32."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.eps = spec.norm_eps
        self.weight = nn.Parameter(torch.ones(spec.hidden_size))
        self.bias = nn.Parameter(torch.zeros(spec.hidden_size)) if spec.norm == "layernorm" else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, H] to [B, L, H]."""
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


class RotaryPositions:
    """Rotary positions in Hugging Face's half-split convention: dimension i is paired with i + D/2.

    The tables are kept for the last length asked for; every layer asks for the same.
    """

    def __init__(self, head_dim: int, theta: float) -> None:
        self._head_dim = head_dim
        self._theta = theta
        self._key: tuple[int, torch.device, torch.dtype] | None = None
        self._tables: tuple[Tensor, Tensor] | None = None

    def _tables_for(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every angle, each [L, D], the second half repeating the first."""
        key = (length, like.device, like.dtype)
        if self._tables is None or self._key != key:
            dtype = wide(like.dtype)
            exponents = torch.arange(0, self._head_dim, 2, dtype=dtype, device=like.device) / self._head_dim
            positions = torch.arange(length, dtype=dtype, device=like.device)
            angles = torch.outer(positions, self._theta**-exponents).repeat(1, 2)
            self._key, self._tables = key, (angles.cos().to(like.dtype), angles.sin().to(like.dtype))
        return self._tables

    def rotate(self, x: Tensor) -> Tensor:
        """[B, heads, L, D] to the same, each pair turned by its position's angle."""
        cos, sin = self._tables_for(x.shape[-2], x)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention with grouped queries. The number of heads follows from the width of the projections' output."""

    def __init__(self, spec: ModelSpec, rotary: RotaryPositions | None) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.rotary = rotary
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.query = Linear(spec.hidden_size, query_size, bias=spec.qkv_bias)
        self.key = Linear(spec.hidden_size, kv_size, bias=spec.qkv_bias)
        self.value = Linear(spec.hidden_size, kv_size, bias=spec.qkv_bias)
        self.out = Linear(query_size, spec.hidden_size, bias=spec.attention_out_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, H] to [B, L, H]."""
        query, key, value = (self._heads(projection(x)) for projection in (self.query, self.key, self.value))
        if self.rotary is not None:
            query, key = self.rotary.rotate(query), self.rotary.rotate(key)
        grouped = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, L, heads·D] to [B, heads, L, D]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


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
