"""Attention with grouped queries. Shapes: B sequences, L tokens, H hidden size, D head dimension, Hq and Hkv heads.

Modules by name: ``query``, ``key``, ``value`` (heads along the output), ``query_norm`` and ``key_norm`` (weight [D],
one for all heads), ``sinks`` (weight [Hq]) and ``out`` (heads along the input). Heads are counted by the widths of what
the projections return, so that a module with a part of the heads needs nothing else.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.layers import Linear, Norm
from engine.models.positions import RotaryPositions
from engine.spec import ModelSpec


class AttentionCore(Protocol):
    """Causal attention between heads, positions applied. A module's ``core`` is ``attend``, or what replaces it."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        window: int | None = None,
        sinks: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        """See ``attend``."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of whole sequences.

    Args:
        query: [B, Hq, L, D].
        key: [B, Hkv, L, D]; Hkv divides Hq, and query heads in a row share a key head.
        value: [B, Hkv, L, Dv].
        window: Each token attends to so many last tokens, itself included; None for all.
        sinks: A logit per query head [Hq] that takes its share of the softmax and carries no value
            (gpt-oss, arXiv 2508.10925); None for none.
        scale: Factor on the logits; None for 1/sqrt(D).

    Returns:
        [B, Hq, L, Dv]
    """
    length, value_dim = query.shape[2], value.shape[-1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    mask = None if window is None or window >= length else _window_mask(length, window, query.device)
    if sinks is not None:
        query, key, value = _led_by_sink(query, key, value, sinks / scale)
        mask = None if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)
    # Fused kernels take heads of one width. Zeros in queries and keys change no logit, those in values are cut off.
    widest = max(query.shape[-1], value_dim)
    q, k, v = (x if x.shape[-1] == widest else F.pad(x, (0, widest - x.shape[-1])) for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )
    return mixed[:, :, -length:, :value_dim]


def _window_mask(length: int, window: int, device: torch.device) -> Tensor:
    """Which key (column) each query (row) sees, bool [L, L]."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _led_by_sink(query: Tensor, key: Tensor, value: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences that begin with the sink, so that fused kernels do the rest: a token that all others see, without a
    value, whose key meets nothing but a further dimension in which queries have their head's logit.

    Args:
        query: [B, Hq, L, D].
        key: [B, Hkv, L, D].
        value: [B, Hkv, L, Dv].
        logits: [Hq], before they are scaled.

    Returns:
        [B, Hq, 1 + L, D'], [B, Hkv, 1 + L, D'] and [B, Hkv, 1 + L, Dv], D' the next multiple of 8 above D (kernels
        want it). What the sink itself attends to is of no use.
    """
    added = 8 - query.shape[-1] % 8
    meets_sink = logits[:, None, None].expand(*query.shape[:3], 1)
    query = F.pad(torch.cat((query, meets_sink), dim=-1), (0, added - 1, 1, 0))
    sink_key = key.new_zeros(*key.shape[:2], 1, key.shape[-1] + added)
    sink_key[..., key.shape[-1]] = 1
    key = torch.cat((sink_key, F.pad(key, (0, added))), dim=2)
    return query, key, F.pad(value, (0, 0, 1, 0))


class Sinks(nn.Module):
    """A learned logit per query head."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads))

    def forward(self, dtype: torch.dtype) -> Tensor:
        """[Hq], rounded to ``dtype``."""
        return self.weight.to(dtype)


class Attention(nn.Module):
    """Causal attention with grouped queries.

    Attributes:
        core: What attends; see ``AttentionCore``.
    """

    def __init__(self, spec: ModelSpec, layer: int, rotary: RotaryPositions | None) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.window = spec.window_of(layer)
        self.rotary = rotary
        self.core: AttentionCore = attend
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.query = Linear(spec.hidden_size, query_size, bias=spec.qkv_bias)
        self.key = Linear(spec.hidden_size, kv_size, bias=spec.qkv_bias)
        self.value = Linear(spec.hidden_size, kv_size, bias=spec.qkv_bias)
        self.query_norm = Norm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.key_norm = Norm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.sinks = Sinks(spec.num_heads) if spec.attention_sinks else None
        self.out = Linear(query_size, spec.hidden_size, bias=spec.attention_out_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, H] to [B, L, H]."""
        query, key, value = (self._heads(projection(x)) for projection in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary is not None:
            query, key = self.rotary.rotate(query), self.rotary.rotate(key)
        sinks = None if self.sinks is None else self.sinks(x.dtype)
        mixed = self.core(query, key, value, window=self.window, sinks=sinks)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, L, heads·D] to [B, heads, L, D]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
