"""Activations that one micro-batch leaves on one rank, by layer: what the backward pass needs again.

Counted tensor by tensor, as Korthikanti et al. (arXiv 2205.05198, section 4) do for GPT: the inputs of norms and of
matrix products, queries, keys, values and output of attention, the feed-forward's inner tensors, dropout masks.
Sequence parallelism and context parallelism divide tokens, tensor parallelism the inner widths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from autotune.cost.columns import PlanColumns, code
from autotune.cost.device_columns import ELEMENT_BYTES, FP8
from autotune.cost.memory_recipe import MemoryRecipe
from autotune.cost.parameters import fullest_load
from autotune.cost.shapes import ModelShape, Number

NONE, FULL, SELECTIVE, EVERY_K = (code("recompute", word) for word in ("none", "full", "selective", "every_k"))


@dataclass(frozen=True)
class LayerActivations:
    """Bytes per micro-batch and layer, each ``[n]`` or one number."""

    stream: Number
    """The residual stream: one tensor of hidden size."""
    end: Number
    """Kept by the norm before the head, and the head's input."""
    dense: Number
    """Kept by a layer with a dense feed-forward, under the plan's recompute."""
    moe: Number
    """The same of a layer with experts."""
    dense_backward: Number
    """More that is alive within the layer's backward pass: what is recomputed, and gradients of activations."""
    moe_backward: Number
    """The same of a layer with experts."""
    dense_outputs: Number
    """Outputs of the layer's products and norms, as large as their gradients."""
    moe_outputs: Number
    """The same of a layer with experts."""


def element_bytes(c: PlanColumns) -> Number:
    """Bytes of an activation."""
    return ELEMENT_BYTES[c.precision]


def recomputed_share(c: PlanColumns) -> np.ndarray:
    """Share of the layers that keep their input alone, and whose forward pass is done again in the backward pass."""
    return np.where(c.recompute == FULL, 1.0, np.where(c.recompute == EVERY_K, 1 / c.recompute_period, 0.0))


def layer_activations(
    shape: ModelShape,
    c: PlanColumns,
    recipe: MemoryRecipe,
    *,
    fused_attention: Number,
    dropout: Number,
    imbalance_ratio: Number,
) -> LayerActivations:
    """Activations of each kind of layer.

    Args:
        shape: The architecture.
        c: Plans.
        recipe: What the stack keeps.
        fused_attention: 1 where attention keeps no score matrix.
        dropout: 1 where there is dropout, whose masks are kept.
        imbalance_ratio: Tokens of the rank with the most above the mean, relative, where experts are spread over ranks.
    """
    t = _Tokens.of(c, recipe)
    attention, scores, products = _attention(shape, c, recipe, t, fused_attention, dropout)
    dense_ffn, dense_width = _dense_ffn(shape, recipe, t)
    moe_ffn, moe_width = _moe_ffn(shape, c, recipe, t, imbalance_ratio)
    stream = t.e * t.split * shape.hidden
    tensors = np.where(shape.rms_norm, recipe.rms_norm_tensors, 1.0)
    norms = tensors * np.maximum(t.e, recipe.norm_saved_bytes) * t.split * shape.hidden
    inputs = t.e_input * np.where(recipe.saves_gathered, t.whole, t.split) * shape.hidden
    around = 2 * (norms + inputs + dropout * t.split * shape.hidden) + attention + scores

    by_product = 2 * stream + products  # the layer's input and its last product
    by_operation = np.asarray(recipe.selective_saves_products) > 0
    by_selection = c.recompute == SELECTIVE
    kept, backward = [], []
    for ffn, width in ((dense_ffn, dense_width), (moe_ffn, moe_width)):
        everything = around + ffn
        selected = np.where(by_operation, by_product + width, everything - scores)
        now = _kept(c, stream, everything, selected)
        kept.append(now * (1 - c.offload_activations_ratio))
        again = np.where(_starts_with_kept(shape, c), 0.0, everything - np.where(by_selection, selected, stream))
        working = recipe.working_tensors * t.e * t.whole * shape.hidden + recipe.working_widths * width
        backward.append(again + working)
    query, key, value, _ = _head_widths(shape, t)
    between = 4 * stream + t.e * t.whole * (query + key + value)  # of two norms, attention and feed-forward
    outputs = [between + (shape.ffn_matrices - 1) * width for width in (dense_width, moe_width)]
    return LayerActivations(stream, norms + inputs, kept[0], kept[1], backward[0], backward[1], outputs[0], outputs[1])


def _starts_with_kept(shape: ModelShape, c: PlanColumns) -> np.ndarray:
    """Whether the backward pass begins with a layer that kept everything: what is computed again later takes the place
    of what such layers have freed by then. Layers 0, k, 2 k ... are recomputed."""
    some = (c.recompute == EVERY_K) & (c.pp == 1) & ((shape.num_layers - 1) % c.recompute_period > 0)
    return np.asarray((c.recompute == NONE) | some)


@dataclass(frozen=True)
class _Tokens:
    """Tokens of a micro-batch on a rank, and the width of what is kept of them."""

    whole: Number
    """After context parallelism."""
    split: Number
    """After sequence parallelism too."""
    tp: Number
    e: Number
    """Bytes of an activation."""
    e_input: Number
    """Bytes of a kept input of a matrix product."""

    @classmethod
    def of(cls, c: PlanColumns, recipe: MemoryRecipe) -> Self:
        e = element_bytes(c)
        tp = np.asarray(c.tp, dtype=np.float64)
        whole = c.micro_batch_size * (c.sequence_length / np.asarray(c.cp, dtype=np.float64))
        split = np.where(c.sequence_parallel, whole / tp, whole)
        e_input = np.where((c.precision == FP8) & (np.asarray(recipe.saves_fp8) > 0), 1.0, e)
        return cls(whole, split, tp, e, e_input)


def _kept(c: PlanColumns, stream: Number, everything: Number, selected: Number) -> Number:
    """What a layer keeps on average: its input alone, a selection, or everything."""
    share = recomputed_share(c)
    chosen: Number = np.where(c.recompute == SELECTIVE, selected, everything)
    return share * stream + (1 - share) * chosen


def _attention(
    shape: ModelShape, c: PlanColumns, recipe: MemoryRecipe, t: _Tokens, fused: Number, dropout: Number
) -> tuple[Number, Number, Number]:
    """Bytes of attention's projections and output; of its scores (or a fused kernel's row sums); and of the products
    that recomputation by operation keeps: queries, values and output.

    With latent attention the compressed queries, keys and values are kept as well, before and after their norms.
    """
    query, key, value, output = _head_widths(shape, t)
    copies = (query + key + value) * (1 + recipe.attention_copies) + output
    behind = np.maximum(1 - shape.window / c.sequence_length, 0.0) * (c.cp == 1) * recipe.window_copies
    copies = copies + shape.num_windowed_layers / shape.num_layers * behind * (query + 2 * (key + value) + output)
    width = np.where(np.asarray(recipe.saves_attention_fp8) > 0, t.e_input, t.e)
    quantised = np.where(t.e_input == width, 0.0, t.e_input * output)  # beside the output that attention itself keeps
    latent = 2 * t.e * t.split * (shape.query_rank + shape.kv_rank)
    rows = t.whole * shape.num_heads / t.tp
    per_score = np.where(fused, 0.0, t.e + dropout * (1 + t.e))  # softmax; its mask and what dropout leaves
    scores = rows * (4 + per_score * c.sequence_length)
    return t.whole * (width * copies + quantised) + latent, scores, t.whole * t.e * (query + value + output)


def _head_widths(shape: ModelShape, t: _Tokens) -> tuple[Number, Number, Number, Number]:
    """Widths of the queries, keys, values and outputs of a rank's heads."""
    heads = np.maximum(shape.num_kv_heads / t.tp, 1.0)
    queries = shape.num_heads / t.tp
    return (
        queries * shape.query_key_dim,
        heads * shape.query_key_dim,
        heads * shape.value_dim,
        queries * shape.value_dim,
    )


def _per_width(shape: ModelShape, recipe: MemoryRecipe, t: _Tokens) -> Number:
    """Bytes that a feed-forward keeps per token and unit of its width."""
    gated = shape.ffn_matrices == 3
    widths = np.where(gated, recipe.gated_widths, recipe.plain_widths)
    return (widths - 1) * np.where(gated & (np.asarray(recipe.saves_gate_fp8) > 0), t.e_input, t.e) + t.e_input


def _dense_ffn(shape: ModelShape, recipe: MemoryRecipe, t: _Tokens) -> tuple[Number, Number]:
    """Bytes kept by a dense feed-forward, and by its first product."""
    width = t.whole / t.tp * shape.ffn
    return width * _per_width(shape, recipe, t), width * t.e


def _moe_ffn(
    shape: ModelShape, c: PlanColumns, recipe: MemoryRecipe, t: _Tokens, imbalance_ratio: Number
) -> tuple[Number, Number]:
    """Bytes kept by experts, shared experts and router, and by the first products and the experts' outputs.

    A token is held once for each expert it is sent to; ranks of tp share the tokens unless they share the experts.
    """
    fullest = fullest_load(imbalance_ratio, c.ep)
    routed = t.whole * shape.experts_per_token * (c.etp / t.tp) * fullest
    width = routed * shape.expert_ffn / c.etp + t.whole / t.tp * shape.shared_ffn
    copies = routed * shape.hidden * (t.e_input + t.e * recipe.expert_copies)
    router = 8 * t.split * shape.num_experts  # logits and probabilities in fp32
    return copies + width * _per_width(shape, recipe, t) + router, t.e * (width + routed * shape.hidden)
