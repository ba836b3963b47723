"""What one rank holds before any sharding over data-parallel ranks: blocks of the model, and parameters of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.cost.columns import PlanColumns
from autotune.cost.pipeline import DUALPIPEV, INTERLEAVED_ZB, ZBV
from autotune.cost.shapes import ModelShape, Number


@dataclass(frozen=True)
class RankBlocks:
    """Blocks of the model that pipeline ranks hold; arrays ``[k, n]`` for ``k`` ranks of ``n`` plans."""

    dense_layers: np.ndarray
    moe_layers: np.ndarray
    has_embedding: np.ndarray
    has_head: np.ndarray


def candidate_ranks(shape: ModelShape, c: PlanColumns) -> np.ndarray:
    """Pipeline ranks one of which is the fullest: the first and the last, and an inner one where a later stage may hold
    more than the first. ``[k, n]``."""
    ranks = kinds_of_ranks(shape, c)
    grows = (c.largest_stage_layers > c.first_stage_layers) | (np.asarray(shape.num_leading_dense_layers) > 0)
    return ranks if np.any(grows) else ranks[[0, 2]]


def kinds_of_ranks(shape: ModelShape, c: PlanColumns) -> np.ndarray:
    """The first pipeline rank, the fullest between the ends (the second, or the first behind the leading dense layers;
    the first rank again where there are but two), and the last. ``[3, n]``."""
    last = np.broadcast_to(np.asarray(c.pp), (len(c),)) - 1
    behind = -(-np.asarray(shape.num_leading_dense_layers) // np.maximum(c.first_stage_layers, 1))
    inner = np.minimum(np.maximum(behind, 1), np.maximum(last - 1, 0))
    return np.stack([np.zeros_like(last), inner, last])


def is_vee(c: PlanColumns) -> np.ndarray:
    """Where stages run down the ranks and up again: the first rank has the last stage too. ``[n]`` bools."""
    return np.asarray(((c.schedule == ZBV) | (c.schedule == DUALPIPEV)) & (np.asarray(c.pp) > 1))


def neighbours(c: PlanColumns, ranks: np.ndarray) -> np.ndarray:
    """Stages on other ranks beside those of pipeline ranks, one that is beside two counted twice. ``[k, n]``

    Args:
        c: ``n`` plans.
        ranks: ``[k, n]``: pipeline ranks.
    """
    ends = (ranks == 0) * 1.0 + (ranks == np.asarray(c.pp) - 1)
    beside = np.where(is_vee(c), 4 - 2 * ends, 2 * np.asarray(c.virtual_stages) - ends)
    return np.asarray(np.where(np.asarray(c.pp) > 1, beside, 0.0))


def splits_backward(c: PlanColumns) -> np.ndarray:
    """Where gradients of weights have a backward pass of their own. ``[n]`` bools."""
    apart = (c.schedule == INTERLEAVED_ZB) | (c.schedule == ZBV) | (c.schedule == DUALPIPEV)
    return np.asarray(apart & (np.asarray(c.pp) > 1))


def rank_blocks(shape: ModelShape, c: PlanColumns, ranks: np.ndarray) -> RankBlocks:
    """Layers and ends of the model of pipeline ranks, over all their virtual stages.

    Args:
        shape: The architecture.
        c: ``n`` plans.
        ranks: ``[k, n]``: pipeline ranks.
    """
    pp, v = np.asarray(c.pp, dtype=np.float64), np.asarray(c.virtual_stages, dtype=np.float64)
    vee = is_vee(c)
    at_start = ranks == 0
    at_end = np.where(vee, at_start, ranks == pp - 1)
    stages = pp * v
    whole = np.floor(shape.num_layers / stages)
    rest = shape.num_layers - whole * stages
    most = whole + (rest > 0)
    even = (c.first_stage_layers == most) & (c.largest_stage_layers == most) & (c.last_stage_layers == whole)
    # Stages of a rank among the first `rest` ones, which have a layer more: rank, rank + pp ... (V: 2 pp - 1 - rank).
    more = np.ceil(np.maximum(rest - ranks, 0) / pp)
    if np.any(vee):
        more = np.where(vee, (ranks < rest) * 1.0 + (2 * pp - 1 - ranks < rest), more)
    layers, size = v * whole + more, whole + (ranks < rest)
    if not np.all(even):
        inner = (shape.num_layers - c.first_stage_layers - c.last_stage_layers) / np.maximum(stages - 2, 1)
        inner = np.where(v > 1, inner, c.largest_stage_layers)
        ends = at_start * 1.0 + at_end
        uneven = at_start * c.first_stage_layers + at_end * c.last_stage_layers + (v - ends) * inner
        layers = np.where(even | (pp == 1), layers, uneven)
        size = np.where(even, size, np.where(at_start, c.first_stage_layers, inner))
    moe = 0.0 * layers
    if np.any(shape.num_moe_layers):
        before = np.where(at_start, 0, c.first_stage_layers + (ranks - 1) * size)
        leading = np.clip(shape.num_leading_dense_layers - before, 0, np.where(pp == 1, shape.num_layers, size))
        density = shape.num_moe_layers / np.maximum(shape.num_layers - shape.num_leading_dense_layers, 1)
        moe = (layers - leading) * density
    return RankBlocks(layers - moe, moe, at_start * 1.0, at_end * 1.0)


def layer_share(shape: ModelShape, c: PlanColumns, whole_key_heads: Number = 0) -> tuple[Number, Number, Number]:
    """Of a dense layer, of a layer with experts without the routed ones, and of its routed experts. ``[n]`` each.

    Experts are split over ep * etp and never over tp; norms, routers and latent down-projections are on every
    tensor-parallel rank; where tp exceeds the key and value heads, each is held by several ranks.

    Args:
        shape: The architecture.
        c: ``n`` plans.
        whole_key_heads: 1 where every rank then holds all of them, 0 where it holds one.
    """
    tp = np.asarray(c.tp, dtype=np.float64)
    whole = shape.replicated_layer_parameters
    held = np.where(np.asarray(whole_key_heads) > 0, shape.num_kv_heads, 1.0)
    heads = np.where(shape.num_kv_heads < tp, held - shape.num_kv_heads / tp, 0.0)
    again = heads * shape.hidden * (shape.query_key_dim + shape.value_dim)
    dense = (shape.dense_layer_parameters - whole) / tp + whole + again
    moe = (shape.moe_layer_parameters - whole) / tp + whole + again
    experts = shape.expert_parameters / (np.asarray(c.ep, dtype=np.float64) * c.etp)
    return dense, moe, experts


def vocabulary_share(shape: ModelShape, c: PlanColumns) -> Number:
    """Of an embedding without its positions, or of a head without its norm. ``[n]``"""
    split = np.where(np.asarray(c.vocab_parallel) > 0, np.asarray(c.tp, dtype=np.float64), 1.0)
    return shape.vocab * shape.hidden / split


def fullest_load(imbalance_ratio: Number, ep: Number) -> Number:
    """Tokens of the fullest of ``ep`` expert-parallel ranks over the mean: 1 where all experts are on one.

    Args:
        imbalance_ratio: Tokens of the rank with the most above the mean, relative, where experts are spread over ranks.
        ep: Ranks over which the experts are spread.
    """
    load: Number = 1 + imbalance_ratio * (1 - 1 / np.maximum(np.asarray(ep, dtype=np.float64), 1.0))
    return load
