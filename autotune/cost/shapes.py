"""What the formulas take from a model, as numbers or as columns, so that one table may hold rows of many models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from engine.flops import layer_parameters, parameter_counts
from engine.spec import ModelSpec

Number = float | np.ndarray
"""A number for all rows, or ``[n]``."""


@dataclass(frozen=True)
class ModelShape:
    """An architecture in numbers; each field is one number, or ``[n]`` with one per row of a table."""

    num_layers: Number
    num_moe_layers: Number
    num_leading_dense_layers: Number
    """Of the layers with a dense feed-forward of a mixture, those that come first; the others lie evenly."""
    hidden: Number
    num_heads: Number
    num_kv_heads: Number
    """With latent attention the query heads: each has its own key and value."""
    query_key_dim: Number
    """Dimensions per head of queries and keys."""
    value_dim: Number
    """Dimensions per head of values."""
    query_rank: Number
    """Rank of latent attention's query projection; 0 without."""
    kv_rank: Number
    """Rank of latent attention's joint projection, rotary dimensions included; 0 without latent attention."""
    ffn: Number
    """Width of the dense feed-forward."""
    ffn_matrices: Number
    """3 when gated, 2 when plain."""
    vocab: Number
    num_experts: Number
    """Routed experts of a layer; 0 for a dense model."""
    experts_per_token: Number
    token_groups: Number
    """Groups of experts, each on a node of its own, that the routing limits a token to; 0 without a limit."""
    expert_ffn: Number
    shared_ffn: Number
    window: Number
    """Attention window of the layers that have one; 0 without."""
    num_windowed_layers: Number
    rms_norm: Number
    """1 when norms are RMSNorm, 0 when they are LayerNorm."""
    tied: Number
    """1 when the head uses the embedding's weights."""
    learned_positions: Number
    """Rows of a learned position embedding; 0 with rotary positions."""
    dense_layer_parameters: Number
    """Parameters of a layer with a dense feed-forward."""
    moe_layer_parameters: Number
    """Parameters of a layer with experts, without the routed experts."""
    expert_parameters: Number
    """Parameters of all routed experts of one layer."""
    replicated_layer_parameters: Number
    """Of a layer's parameters, those that tensor parallelism replicates: norms, routers, latent down-projections."""
    total_parameters: Number

    @classmethod
    def of(cls, model: ModelSpec) -> Self:
        """The numbers of one model."""
        moe, latent = model.moe, model.latent_attention
        layers = [layer_parameters(model, layer) for layer in range(model.num_layers)]
        is_moe = [model.is_moe_layer(layer) for layer in range(model.num_layers)]
        dense = next((p for p, m in zip(layers, is_moe, strict=True) if not m), layers[0])
        sparse = next((p for p, m in zip(layers, is_moe, strict=True) if m), layers[0])
        windowed = 0
        if model.sliding_window:
            windowed = model.num_layers if model.sliding_layers is None else len(model.sliding_layers)
        replicated = sparse.norms + sparse.router
        if latent:
            replicated += model.hidden_size * (latent.kv_rank + latent.rope_head_dim + (latent.query_rank or 0))
        return cls(
            num_layers=model.num_layers,
            num_moe_layers=sum(is_moe),
            num_leading_dense_layers=moe.num_dense_layers if moe else 0,
            hidden=model.hidden_size,
            num_heads=model.num_heads,
            num_kv_heads=model.num_heads if latent else model.num_kv_heads,
            query_key_dim=latent.nope_head_dim + latent.rope_head_dim if latent else model.head_dim,
            value_dim=latent.value_head_dim if latent else model.head_dim,
            query_rank=(latent.query_rank or 0) if latent else 0,
            kv_rank=latent.kv_rank + latent.rope_head_dim if latent else 0,
            ffn=model.ffn_size,
            ffn_matrices=3 if model.mlp == "gated" else 2,
            vocab=model.vocab_size,
            num_experts=moe.num_experts if moe else 0,
            experts_per_token=moe.experts_per_token if moe else 0,
            token_groups=moe.groups_per_token if moe and moe.num_groups > 1 else 0,
            expert_ffn=moe.ffn_size if moe else 0,
            shared_ffn=moe.shared_ffn_size if moe else 0,
            window=model.sliding_window or 0,
            num_windowed_layers=windowed,
            rms_norm=int(model.norm == "rmsnorm"),
            tied=int(model.tied_embeddings),
            learned_positions=model.max_positions if model.positions == "learned" else 0,
            dense_layer_parameters=dense.total,
            moe_layer_parameters=sparse.total - sparse.experts,
            expert_parameters=sparse.experts,
            replicated_layer_parameters=replicated,
            total_parameters=parameter_counts(model).total,
        )

    @classmethod
    def rows(cls, shapes: Sequence[Self], index: np.ndarray) -> Self:
        """One shape per row of a table.

        Args:
            shapes: Shapes of single models.
            index: ``[n]``: which of them each row has.
        """
        return cls(**{f.name: np.array([getattr(s, f.name) for s in shapes])[index] for f in fields(cls)})
