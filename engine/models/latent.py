"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): queries, keys and values of all heads made
from low-rank projections. Shapes: B sequences, L tokens, H hidden size, Hq heads; N and R are a head's query and key
dimensions without and with rotary positions, Dv its value dimensions, rq and rkv the ranks.

Modules by name: ``query`` [Hq·(N+R), H], or ``query_down`` [rq, H], ``query_norm`` [rq] and ``query_up``
[Hq·(N+R), rq]; ``kv_down`` [rkv + R, H], whose last R outputs are the rotary part of every head's key; ``kv_norm``
[rkv]; ``kv_up`` [Hq·(N+Dv), rkv]; ``sinks`` [Hq]; ``out`` [H, Hq·Dv]. Heads are counted by the widths of what
``query`` or ``query_up`` and ``kv_up`` return, so that a module with a part of the heads needs nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.models.attention import AttentionCore, Sinks, attend
from engine.models.layers import Linear, Norm
from engine.models.positions import RotaryPositions
from engine.rope import softmax_factor
from engine.spec import ModelSpec

_NORM_EPS = 1e-6
"""Of the norms of the low-rank parts, whatever the other norms have."""


class LatentAttention(nn.Module):
    """Causal multi-head latent attention, with keys and values of all heads made explicitly.

    Attributes:
        core: What attends; see ``engine.models.attention.AttentionCore``.
    """

    def __init__(self, spec: ModelSpec, layer: int, rotary: RotaryPositions | None) -> None:
        super().__init__()
        latent = spec.latent_attention
        assert latent is not None
        self.nope_dim, self.rope_dim = latent.nope_head_dim, latent.rope_head_dim
        self.value_dim, self.kv_rank = latent.value_head_dim, latent.kv_rank
        self.window = spec.window_of(layer)
        self.rotary = rotary
        self.core: AttentionCore = attend
        self.scale = (self.nope_dim + self.rope_dim) ** -0.5 * softmax_factor(spec)
        query_size = spec.num_heads * (self.nope_dim + self.rope_dim)
        bias = spec.qkv_bias
        self.query = self.query_down = self.query_norm = self.query_up = None
        if latent.query_rank is None:
            self.query = Linear(spec.hidden_size, query_size, bias=False)
        else:
            self.query_down = Linear(spec.hidden_size, latent.query_rank, bias=bias)
            self.query_norm = Norm(latent.query_rank, _NORM_EPS)
            self.query_up = Linear(latent.query_rank, query_size, bias=False)
        self.kv_down = Linear(spec.hidden_size, self.kv_rank + self.rope_dim, bias=bias)
        self.kv_norm = Norm(self.kv_rank, _NORM_EPS)
        self.kv_up = Linear(self.kv_rank, spec.num_heads * (self.nope_dim + self.value_dim), bias=False)
        self.sinks = Sinks(spec.num_heads) if spec.attention_sinks else None
        self.out = Linear(spec.num_heads * self.value_dim, spec.hidden_size, bias=spec.attention_out_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, H] to [B, L, H]."""
        query_nope, query_rope = self._heads(self._queries(x), self.nope_dim, self.rope_dim)
        compressed, key_rope = self.kv_down(x).split((self.kv_rank, self.rope_dim), dim=-1)
        key_nope, value = self._heads(self.kv_up(self.kv_norm(compressed)), self.nope_dim, self.value_dim)
        query_rope, key_rope = self._turn(query_rope), self._turn(key_rope[:, None])
        query = torch.cat((query_nope, query_rope), dim=-1)
        key = torch.cat((key_nope, key_rope.expand(-1, key_nope.shape[1], -1, -1)), dim=-1)
        sinks = None if self.sinks is None else self.sinks(x.dtype)
        mixed = self.core(query, key, value, window=self.window, sinks=sinks, scale=self.scale)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _queries(self, x: Tensor) -> Tensor:
        """[B, L, H] to [B, L, heads·(N+R)]."""
        if self.query is not None:
            return self.query(x)
        assert self.query_down is not None
        assert self.query_norm is not None
        assert self.query_up is not None
        return self.query_up(self.query_norm(self.query_down(x)))

    @staticmethod
    def _heads(x: Tensor, first: int, second: int) -> tuple[Tensor, Tensor]:
        """[B, L, heads·(first + second)] to [B, heads, L, first] and [B, heads, L, second]."""
        one, other = x.unflatten(-1, (-1, first + second)).transpose(1, 2).split((first, second), dim=-1)
        return one, other

    def _turn(self, x: Tensor) -> Tensor:
        """Rotary positions on [B, heads, L, R]. The weights pair neighbours: dimensions 2i and 2i + 1."""
        if self.rotary is None:
            return x
        return self.rotary.rotate(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2))
