"""Activations that one micro-batch leaves on one rank, by layer: what the backward pass needs again.

Counted tensor by tensor, as Korthikanti et al. (arXiv 2205.05198, section 4) do for GPT: the inputs of norms and of
matrix products, queries, keys, values and output of attention, the feed-forward's inner tensors, dropout masks.
Sequence parallelism and context parallelism divide tokens, tensor parallelism the inner widths.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.cost.columns import PlanColumns, code
from autotune.cost.memory_recipe import MemoryRecipe
from autotune.cost.shapes import ModelShape, Number

NONE, FULL, SELECTIVE, EVERY_K = (code("recompute", word) for word in ("none", "full", "selective", "every_k"))
FP8 = code("precision", "fp8")

_WIDTHS = np.array([8.0, 4.0, 2.0, 2.0, 2.0])
"""Bytes of an activation by the code of the precision; fp8 plans keep activations in bf16 between products."""


@dataclass(frozen=True)
class LayerActivations:
    """Bytes per micro-batch and layer, each ``[n]`` or one number."""

    stream: Number
    """The residual stream: one tensor of hidden size."""
    dense: Number
    """Kept by a layer with a dense feed-forward, under the plan's recompute."""
    moe: Number
    """The same of a layer with experts."""
    dense_backward: Number
    """More that is alive within the layer's backward pass: what is recomputed, and gradients of activations."""
    moe_backward: Number
    """The same of a layer with experts."""


def element_bytes(c: PlanColumns) -> Number:
    """Bytes of an activation."""
    return _WIDTHS[c.precision]


def layer_activations(
    shape: ModelShape,
    c: PlanColumns,
    recipe: MemoryRecipe,
    *,
    fused_attention: Number,
    dropout: Number,
    imbalance: Number,
) -> LayerActivations:
    """Activations of each kind of layer.

    Args:
        shape: The architecture.
        c: Plans.
        recipe: What the stack keeps.
        fused_attention: 1 where attention keeps no score matrix.
        dropout: 1 where there is dropout, whose masks are kept.
        imbalance: Tokens of the rank with the most, relative to the mean, with experts.
    """
    e = element_bytes(c)
    e_input = np.where((c.precision == FP8) & (recipe.saves_fp8 > 0), 1.0, e)
    tp = np.asarray(c.tp, dtype=np.float64)
    tokens = c.micro_batch_size * (c.sequence_length / np.asarray(c.cp, dtype=np.float64))
    split = np.where(c.sequence_parallel, 1 / tp, 1.0)
    stream = e * tokens * split * shape.hidden
    inputs = e_input * tokens * shape.hidden * np.where(recipe.saves_gathered, 1.0, split)
    norms = np.maximum(e, recipe.norm_saved_bytes) * tokens * split * shape.hidden
    masks = dropout * tokens * split * shape.hidden
    around = 2 * (norms + inputs + masks)

    query, value = shape.num_heads * shape.query_key_dim / tp, shape.num_heads * shape.value_dim / tp
    held = np.maximum(shape.num_kv_heads / tp, 1.0)
    key, kv_value = held * shape.query_key_dim, held * shape.value_dim
    latent = 2 * e * tokens * split * (shape.query_rank + shape.kv_rank)
    kept = (query + key + kv_value) * (1 + recipe.attention_copies) + value
    fp8_input = np.where(e_input == e, 0.0, value)
    attention = tokens * (e * kept + fp8_input) + latent
    maxima = 4 * tokens * shape.num_heads / tp
    per_score = np.where(fused_attention, 0.0, e + dropout * (1 + e))
    scores = per_score * tokens * shape.num_heads / tp * c.sequence_length + maxima

    widths = np.where(shape.ffn_matrices == 3, recipe.gated_widths, recipe.plain_widths)
    e_gate = np.where((recipe.saves_gate_fp8 > 0) & (shape.ffn_matrices == 3), e_input, e)
    per_width = (widths - 1) * e_gate + e_input
    dense_ffn = tokens / tp * shape.ffn * per_width
    etp = np.asarray(c.etp, dtype=np.float64)
    routed = tokens * shape.experts_per_token * (etp / tp) * imbalance
    moe_ffn = (
        routed * (shape.hidden * (e_input + e * recipe.expert_copies) + shape.expert_ffn / etp * per_width)
        + tokens / tp * shape.shared_ffn * per_width
        + 8 * tokens * split * shape.num_experts
    )
    common = around + attention + scores
    working = recipe.working_tensors * e * tokens * shape.hidden
    dense, moe = common + dense_ffn, common + moe_ffn
    products = tokens * e * (query + kv_value + value)
    by_product = stream + products + np.maximum(stream, 0)
    selective_dense = np.where(
        recipe.selective_saves_products, by_product + e * tokens / tp * shape.ffn, dense - scores
    )
    selective_moe = np.where(
        recipe.selective_saves_products,
        by_product + e * (routed * (shape.hidden + shape.expert_ffn / etp) + tokens / tp * shape.shared_ffn),
        moe - scores,
    )
    share = np.where(c.recompute == FULL, 1.0, np.where(c.recompute == EVERY_K, 1 / c.recompute_period, 0.0))
    selective = c.recompute == SELECTIVE
    kept_dense = share * stream + (1 - share) * np.where(selective, selective_dense, dense)
    kept_moe = share * stream + (1 - share) * np.where(selective, selective_moe, moe)
    again_dense = np.where(share > 0, dense - stream, np.where(selective, dense - selective_dense, 0.0))
    again_moe = np.where(share > 0, moe - stream, np.where(selective, moe - selective_moe, 0.0))
    onto_device = 1 - c.offload_activations_ratio
    return LayerActivations(
        stream,
        kept_dense * onto_device,
        kept_moe * onto_device,
        again_dense + working,
        again_moe + working,
    )
