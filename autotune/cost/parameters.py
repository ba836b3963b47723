"""Parameters that one rank holds of each kind of block, before any sharding over data-parallel ranks."""

from __future__ import annotations

import numpy as np

from autotune.cost.columns import PlanColumns
from autotune.cost.shapes import ModelShape, Number


def layer_share(shape: ModelShape, c: PlanColumns) -> tuple[Number, Number, Number]:
    """Of a dense layer, of a layer with experts without the routed ones, and of its routed experts. ``[n]`` each.

    Experts are split over ep * etp and never over tp; norms, routers and latent down-projections are on every
    tensor-parallel rank; where tp exceeds the key and value heads, each is held by several ranks.
    """
    tp = np.asarray(c.tp, dtype=np.float64)
    whole = shape.replicated_layer_parameters
    again = np.maximum(1 - shape.num_kv_heads / tp, 0) * shape.hidden * (shape.query_key_dim + shape.value_dim)
    dense = (shape.dense_layer_parameters - whole) / tp + whole + again
    moe = (shape.moe_layer_parameters - whole) / tp + whole + again
    experts = shape.expert_parameters / (np.asarray(c.ep, dtype=np.float64) * c.etp)
    return dense, moe, experts


def vocabulary_share(shape: ModelShape, c: PlanColumns) -> Number:
    """Of an embedding without its positions, or of a head without its norm. ``[n]``"""
    split = np.where(np.asarray(c.vocab_parallel) > 0, np.asarray(c.tp, dtype=np.float64), 1.0)
    return shape.vocab * shape.hidden / split
