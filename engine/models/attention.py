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
    """Causal attention of whole sequences. With a window, time and memory grow with the length times the window.

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
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if window is None or window >= query.shape[2]:
        return _fused(query, key, value, None, sinks, scale)
    first = _fused(query[:, :, :window], key[:, :, :window], value[:, :, :window], None, sinks, scale)
    return torch.cat((first, _after_window(query, key, value, window, sinks, scale)), dim=2)


def _after_window(query: Tensor, key: Tensor, value: Tensor, window: int, sinks: Tensor | None, scale: float) -> Tensor:
    """What the queries behind the first ``window`` tokens see: chunks of at most ``window`` queries, each beside the
    keys from the window of its first to its last, all at once as a batch; one mask serves all chunks.

    Args:
        query: [B, Hq, L, D].
        key: [B, Hkv, L, D].
        value: [B, Hkv, L, Dv].
        window: Less than L.
        sinks: [Hq], or None.
        scale: Factor on the logits.

    Returns:
        [B, Hq, L - window, Dv]
    """
    batch, num_later = query.shape[0], query.shape[2] - window
    num_chunks = -(-num_later // window)
    chunk = -(-num_later // num_chunks)
    # The last chunk is filled up with tokens that are cut off at the end and that no other one sees.
    query, key, value = (F.pad(x, (0, 0, 0, num_chunks * chunk - num_later)) for x in (query, key, value))
    seen = window - 1 + chunk
    queries = query[:, :, window:].unflatten(2, (num_chunks, chunk)).transpose(1, 2).flatten(0, 1)
    keys, values = (x[:, :, 1:].unfold(2, seen, chunk).permute(0, 2, 1, 4, 3).flatten(0, 1) for x in (key, value))
    mask = torch.ones(chunk, seen, dtype=torch.bool, device=query.device).triu().tril(window - 1)
    mixed = _fused(queries, keys, values, mask, sinks, scale)
    return mixed.unflatten(0, (batch, num_chunks)).transpose(1, 2).flatten(2, 3)[:, :, :num_later]


def _fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor | None, scale: float
) -> Tensor:
    """Attention by torch's kernels.

    Args:
        query: [B, Hq, T, D].
        key: [B, Hkv, S, D].
        value: [B, Hkv, S, Dv].
        mask: Which keys each query sees, bool [T, S]; None where S is T and each sees those up to its own.
        sinks: [Hq], or None.
        scale: Factor on the logits.

    Returns:
        [B, Hq, T, Dv]
    """
    length, value_dim = query.shape[2], value.shape[-1]
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


def _led_by_sink(query: Tensor, key: Tensor, value: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences that begin with the sink, so that fused kernels do the rest: a token that all others see, without a
    value, whose key meets nothing but a further dimension in which queries have their head's logit.

    Args:
        query: [B, Hq, T, D].
        key: [B, Hkv, S, D].
        value: [B, Hkv, S, Dv].
        logits: [Hq], before they are scaled.

    Returns:
        [B, Hq, 1 + T, D'], [B, Hkv, 1 + S, D'] and [B, Hkv, 1 + S, Dv], D' the next multiple of 8 above D (kernels
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
