"""A decoder-only language model built from a ModelSpec. Nothing here knows of parallelism: what is split, and how, is
applied to the finished model by ``engine.parallel``."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.attention import Attention
from engine.models.latent import LatentAttention
from engine.models.layers import FeedForward, Head, Linear, Norm, initial_std
from engine.models.positions import Positions, RotaryPositions
from engine.moe.layer import MixtureOfExperts
from engine.rng import derive_seed
from engine.spec import ModelSpec


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, spec: ModelSpec, layer: int, rotary: RotaryPositions | None, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm = _norm(spec)
        self.attention = (
            LatentAttention(spec, layer, rotary) if spec.latent_attention else Attention(spec, layer, rotary)
        )
        self.ffn_norm = _norm(spec)
        if spec.moe is not None and spec.is_moe_layer(layer):
            self.moe = MixtureOfExperts(spec, spec.moe)
        else:
            self.ffn = FeedForward(spec)

    @property
    def feed_forward(self) -> nn.Module:
        """The dense feed-forward or the mixture of experts."""
        return self.moe if hasattr(self, "moe") else self.ffn

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, H] to [B, L, H]."""
        x = x + self._drop(self.attention(self.attention_norm(x)))
        return x + self._drop(self.feed_forward(self.ffn_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Decoder(nn.Module):
    """A whole model, or the part of it that one pipeline stage holds. Names of parameters are the same in both.

    Args:
        spec: The architecture.
        layers: The layers this part holds, numbered over the whole model.
        stage: Number of this part among the pipeline's stages.
        has_embedding: Whether this part begins with the tokens.
        has_head: Whether this part ends with the logits. With tied embeddings, a part that does not begin with the
            tokens holds a copy of the embedding for it, under the same name.
        dropout: Probability on the embedding, the attention's output and the feed-forward's output.
        compute_dtype: Dtype of the activations between layers.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        layers: range,
        stage: int = 0,
        has_embedding: bool = True,
        has_head: bool = True,
        dropout: float = 0.0,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.takes_tokens = has_embedding
        self.dropout = dropout
        self.compute_dtype = compute_dtype
        self.token_positions = Positions()
        self.rotary = RotaryPositions(spec, self.token_positions) if spec.positions == "rope" else None
        learned = has_embedding and spec.positions == "learned"
        holds_embedding = has_embedding or (has_head and spec.tied_embeddings)
        self.embedding = nn.Embedding(spec.vocab_size, spec.hidden_size) if holds_embedding else None
        self.positions = nn.Embedding(spec.max_positions, spec.hidden_size) if learned else None
        self.layers = nn.ModuleDict({str(layer): Block(spec, layer, self.rotary, dropout) for layer in layers})
        self.norm = _norm(spec) if has_head else None
        self.head: nn.Module | None = None
        if has_head:
            self.head = Head() if spec.tied_embeddings else Linear(spec.hidden_size, spec.vocab_size, bias=False)

    def use_positions(self, positions: Positions) -> None:
        """Ask ``positions`` where tokens stand from now on, for rotary and learned positions alike."""
        self.token_positions = positions
        if self.rotary is not None:
            self.rotary.use_positions(positions)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens int64 [B, L], or hidden states [B, L, H] without an embedding, to logits [B, L, V], or hidden states
        [B, L, H] without a head."""
        if self.takes_tokens:
            x = self._embed(x)
        for block in self.layers.values():
            x = block(x)
        if self.head is None or self.norm is None:
            return x
        x = self.norm(x)
        return self.head(x) if isinstance(self.head, Linear) else self.head(x, self.embedding.weight)  # type: ignore[union-attr]

    def _embed(self, tokens: Tensor) -> Tensor:
        assert self.embedding is not None
        x = self.embedding(tokens)
        if self.positions is not None:
            x = x + self.positions(self.token_positions.ids(tokens.shape[1], tokens.device)[None])
        x = x.to(self.compute_dtype)
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


def _norm(spec: ModelSpec) -> Norm:
    """A norm of the residual stream."""
    return Norm(spec.hidden_size, spec.norm_eps, spec.norm)


_DRAWN_TOGETHER = 2**22
"""About so many elements of a parameter come from one generator."""


def initial_value(spec: ModelSpec, seed: int, fqn: str, shape: torch.Size, rows: range | None = None) -> Tensor:
    """The first value of a parameter, fp32 on the CPU: a function of the seed and the name alone, so that every plan
    starts from the same numbers, and who holds a part of a large parameter need not draw all of it.

    Args:
        spec: The architecture.
        seed: Of the run.
        fqn: Name of the parameter.
        shape: Of all of it.
        rows: Places along the first dimension to give; None for all.
    """
    rows = range(shape[0]) if rows is None else rows
    if fqn.endswith("bias"):
        return torch.zeros(len(rows), *shape[1:])
    if fqn.split(".")[-2].endswith("norm"):
        return torch.ones(len(rows), *shape[1:])
    value = torch.empty(len(rows), *shape[1:])
    size = max(_DRAWN_TOGETHER // max(math.prod(shape[1:]), 1), 1)
    for start in range(rows.start // size * size, rows.stop, size) if rows else ():
        generator = torch.Generator().manual_seed(derive_seed(seed, "initial", fqn, *([start] if start else [])))
        drawn = torch.empty(min(size, shape[0] - start), *shape[1:])
        drawn.normal_(0.0, initial_std(fqn, spec.num_layers), generator=generator)
        first, last = max(start, rows.start), min(start + size, rows.stop)
        value[first - rows.start : last - rows.start] = drawn[first - start : last - start]
    return value
