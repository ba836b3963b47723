"""Memory of the fullest device, by part, in closed form.

A pipeline rank holds parameters of its layers (with the embedding or the head at the ends), their gradients and
optimizer states under ZeRO, and the activations of the micro-batches in flight. Two moments can be the peak: the turn
from forward to backward pass, with all activations and the logits, and the end of the step, with all gradients and what
the optimizer needs. The first, the second and the last rank are computed for every plan and the fullest is told: in
between, layers and micro-batches in flight only fall.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autotune.cost.activations import LayerActivations, element_bytes, layer_activations, recomputed_share
from autotune.cost.columns import PlanColumns, code
from autotune.cost.memory_recipe import MemoryRecipe
from autotune.cost.pipeline import DUALPIPEV, ZBV, in_flight
from autotune.cost.shapes import ModelShape, Number
from engine.units import GIB

BF16 = code("precision", "bf16")


@dataclass(frozen=True)
class MemoryTable:
    """Memory of ``n`` plans; every array is ``[n]``, bytes."""

    parts: Mapping[str, np.ndarray]
    """By part (``MEMORY_PARTS`` of ``estimate.py``) of the fullest rank; they add up to ``memory_bytes``."""
    fullest_stage: np.ndarray
    """Pipeline rank of the fullest device."""
    allocated_bytes: np.ndarray
    """Peak of live tensors (torch's ``max_memory_allocated``)."""
    reserved_bytes: np.ndarray
    """What the allocator holds at its peak (torch's ``max_memory_reserved``)."""
    memory_bytes: np.ndarray
    """All memory of the device: reserved, communicators, driver and libraries (``nvidia-smi``)."""
    low_bytes: np.ndarray
    """Lower end of the interval."""
    high_bytes: np.ndarray
    """Upper end: a plan is taken to fit where this is within the device's memory."""


@dataclass(frozen=True)
class RankShare:
    """What pipeline ranks hold; arrays ``[k, n]`` for ``k`` ranks of ``n`` plans."""

    dense_layers: np.ndarray
    moe_layers: np.ndarray
    has_embedding: np.ndarray
    has_head: np.ndarray
    in_flight: np.ndarray
    """Micro-batches whose activations are held at the peak."""


def memory(
    shape: ModelShape,
    c: PlanColumns,
    recipe: MemoryRecipe,
    *,
    overhead_bytes: Number,
    num_states: Number = 2,
    fused_attention: Number = True,
    dropout: Number = 0,
    imbalance: Number = 1.0,
) -> MemoryTable:
    """Memory of the fullest rank of every plan.

    Args:
        shape: The architecture, one for all plans or one per plan.
        c: ``n`` plans.
        recipe: What the training stack keeps, one for all plans or one per plan.
        overhead_bytes: Memory of driver and libraries before the first tensor.
        num_states: Optimizer states per parameter: 2 for AdamW, 1 for SGD with momentum, 0 for plain SGD.
        fused_attention: Whether attention keeps no score matrix.
        dropout: Whether there is dropout.
        imbalance: Tokens of the rank with the most, relative to the mean, with experts.
    """
    n = len(c)
    last = np.broadcast_to(np.asarray(c.pp), (n,)) - 1
    ranks = np.stack([np.zeros_like(last), np.minimum(1, last), last])
    parts, allocated = memory_of_ranks(
        shape,
        c,
        recipe,
        ranks,
        num_states=num_states,
        fused_attention=fused_attention,
        dropout=dropout,
        imbalance=imbalance,
    )
    fullest = allocated.argmax(axis=0)
    rows = np.arange(n)
    chosen = {name: part[fullest, rows] for name, part in parts.items()}
    live = allocated[fullest, rows]
    reserved = live * (1 + recipe.slack_ratio)
    groups = sum((np.asarray(degree) > 1).astype(np.float64) for degree in (c.tp, c.pp, c.dp, c.cp, c.ep))
    fixed = overhead_bytes + (recipe.context_gib + recipe.group_gib * groups) * GIB
    total = reserved + fixed
    chosen["overhead"] = total - live
    interval = recipe.interval_ratio
    return MemoryTable(
        parts=chosen,
        fullest_stage=ranks[fullest, rows],
        allocated_bytes=live,
        reserved_bytes=reserved,
        memory_bytes=total,
        low_bytes=total * (1 - interval),
        high_bytes=total * (1 + interval),
    )


def rank_share(shape: ModelShape, c: PlanColumns, ranks: np.ndarray) -> RankShare:
    """Layers, ends of the model and micro-batches in flight of pipeline ranks.

    Args:
        shape: The architecture.
        c: ``n`` plans.
        ranks: ``[k, n]``: pipeline ranks.
    """
    pp, v = np.asarray(c.pp), np.asarray(c.virtual_stages)
    vee = ((c.schedule == ZBV) | (c.schedule == DUALPIPEV)) & (pp > 1)
    last = pp - 1
    at_start, at_end = ranks == 0, np.where(vee, ranks == 0, ranks == last)
    stages = pp * v
    whole, rest = shape.num_layers // stages, shape.num_layers % stages
    even = (c.first_stage_layers == whole + (rest > 0)) & (c.largest_stage_layers == whole + (rest > 0))
    even = even & (c.last_stage_layers == whole)
    # Stages of a rank among the first `rest` ones, which have a layer more: rank, rank + pp ... (V: 2 pp - 1 - rank).
    more = np.maximum(0, -((ranks - rest) // pp))
    more = np.where(vee, (ranks < rest) * 1 + (2 * pp - 1 - ranks < rest), more)
    split = v * whole + more
    inner = (shape.num_layers - c.first_stage_layers - c.last_stage_layers) / np.maximum(stages - 2, 1)
    inner = np.where(v > 1, inner, c.largest_stage_layers)
    ends = at_start * 1 + at_end
    uneven = at_start * c.first_stage_layers + at_end * c.last_stage_layers + (v - ends) * inner
    layers = np.where(pp == 1, shape.num_layers, np.where(even, split, uneven))
    size = np.where(even, whole + (ranks < rest), np.where(at_start, c.first_stage_layers, inner))
    before = np.where(at_start, 0, c.first_stage_layers + (ranks - 1) * size)
    leading = np.clip(shape.num_leading_dense_layers - before, 0, np.where(pp == 1, shape.num_layers, size))
    density = shape.num_moe_layers / np.maximum(shape.num_layers - shape.num_leading_dense_layers, 1)
    moe = (layers - leading) * density
    held = in_flight(c.schedule, c.pp, c.virtual_stages, c.num_micro_batches, ranks)
    return RankShare(layers - moe, moe, at_start * 1.0, at_end * 1.0, held)


def memory_of_ranks(
    shape: ModelShape,
    c: PlanColumns,
    recipe: MemoryRecipe,
    ranks: np.ndarray,
    *,
    num_states: Number,
    fused_attention: Number,
    dropout: Number,
    imbalance: Number,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Parts of live memory of given pipeline ranks.

    Args:
        shape: The architecture.
        c: ``n`` plans.
        recipe: What the stack keeps.
        ranks: ``[k, n]``.
        num_states: See ``memory``.
        fused_attention: See ``memory``.
        dropout: See ``memory``.
        imbalance: See ``memory``.

    Returns:
        Bytes by part and their sum, each ``[k, n]``; the overhead is not among them.
    """
    share = rank_share(shape, c, ranks)
    kinds = layer_activations(shape, c, recipe, fused_attention=fused_attention, dropout=dropout, imbalance=imbalance)
    parts = _states(shape, c, recipe, share, num_states)
    moving = _moving(shape, c, recipe, share, kinds)
    return _at_peak(c, recipe, parts, moving)


@dataclass(frozen=True)
class _States:
    """Bytes that stay, ``[k, n]``, and what the collectives over them need."""

    parameters: np.ndarray
    gradients: np.ndarray
    optimizer: np.ndarray
    gathered_for_head: np.ndarray
    """Parameters gathered while the loss is computed."""
    gathered_for_layer: np.ndarray
    """Parameters gathered while a layer's backward pass runs: its own and the next one's."""
    reduced: np.ndarray
    """Gradients of a layer on their way to their shards."""
    own: np.ndarray
    """Fixed buffers, and what the optimizer step needs for itself."""


@dataclass(frozen=True)
class _Moving:
    """Bytes that come and go, ``[k, n]``."""

    activations: np.ndarray
    """Of all micro-batches in flight."""
    later: np.ndarray
    """The same without the first one: it is done when the first gradients are there."""
    layer: np.ndarray
    """Of them, those of one layer and micro-batch."""
    in_flight: np.ndarray
    logits: np.ndarray
    backward: np.ndarray
    """Within the backward pass of a layer."""
    sends: np.ndarray
    """Buffers of the pipeline."""


def layer_share(shape: ModelShape, c: PlanColumns) -> tuple[Number, Number, Number]:
    """Parameters that one rank holds, before any sharding, of a dense layer, of a layer with experts without the
    routed ones, and of its routed experts.

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


def _ends(shape: ModelShape, c: PlanColumns, share: RankShare) -> np.ndarray:
    """Parameters of embedding, positions and head on a rank; a tied head needs none where the embedding is."""
    table = shape.vocab * shape.hidden / np.where(c.vocab_parallel, np.asarray(c.tp, dtype=np.float64), 1.0)
    positions = shape.learned_positions * shape.hidden
    head = share.has_head * (1 - shape.tied * share.has_embedding)
    return share.has_embedding * (table + positions) + head * table


def _states(shape: ModelShape, c: PlanColumns, recipe: MemoryRecipe, share: RankShare, num_states: Number) -> _States:
    dense, moe, experts = layer_share(shape, c)
    ends = _ends(shape, c, share)
    common = share.dense_layers * dense + share.moe_layers * moe + ends
    routed = share.moe_layers * experts
    shard = np.asarray(c.dp_shard * c.cp, dtype=np.float64)
    expert_shard = np.maximum(shard * c.tp / (np.asarray(c.ep, dtype=np.float64) * c.etp), 1.0)
    number, sharded = common + routed, common / shard + routed / expert_shard

    e = element_bytes(c)
    half, stored_once, is_sharded = e == 2, np.asarray(recipe.shards_stored) > 0, shard > 1
    stage = np.asarray(c.zero_stage)
    first, second, third = stage >= 1, stage >= 2, stage >= 3
    is_free = third & ~((np.asarray(recipe.pipeline_keeps_gathered) > 0) & (c.pp > 1))
    stored = np.where(half, recipe.master_bytes, e) * np.where(first & (half | stored_once) | third, sharded, number)
    copies = np.where(half | (stored_once & is_sharded), np.where(half, recipe.working_bytes, e), 0.0)
    working = np.where(is_free & (is_sharded | ~stored_once), np.where(stored_once, 0.0, sharded), number)
    with_layers = stored_once & ~is_sharded & (np.asarray(recipe.recompute_frees_copies) > 0)
    working = np.where(with_layers, working * (1 - recomputed_share(c)), working)

    gradient = np.where(half, recipe.gradient_bytes, e)
    summed_whole = stored_once & (c.num_micro_batches > 1) & (~third | (c.pp > 1))
    further = np.where(np.asarray(c.precision) == BF16, recipe.bf16_gradient_bytes, 0.0)
    gradients = gradient * np.where(second & ~summed_whole, sharded, number) + further * number
    states = np.where(first, sharded, number)

    layer = np.maximum(dense * (shape.num_moe_layers < shape.num_layers), (moe + experts) * (shape.num_moe_layers > 0))
    gathered = np.where(is_free & is_sharded, e, 0.0)
    own = np.where(further > 0, 0.0, recipe.step_bytes * states + np.where(is_sharded, recipe.bucket_bytes, 0.0))
    return _States(
        parameters=(stored + copies * working) * (1 - c.offload_parameters_ratio),
        gradients=gradients,
        optimizer=num_states * np.where(half, recipe.state_bytes, e) * states * (1 - c.offload_optimizer_ratio),
        gathered_for_head=gathered * (np.where(c.num_micro_batches > 1, layer, 0.0) + share.has_head * ends),
        gathered_for_layer=gathered * 2 * layer,
        reduced=np.where(second & is_sharded & stored_once, (e + gradient) * layer, 0.0),
        own=own,
    )


def _moving(
    shape: ModelShape, c: PlanColumns, recipe: MemoryRecipe, share: RankShare, kinds: LayerActivations
) -> _Moving:
    tp = np.asarray(c.tp, dtype=np.float64)
    has_dense, has_moe = share.dense_layers > 0, share.moe_layers > 0
    saved = share.dense_layers * kinds.dense + share.moe_layers * kinds.moe
    matrix = shape.hidden * (shape.ffn_matrices - 1) * np.maximum(shape.ffn, shape.shared_ffn) / tp
    backward = np.maximum(has_dense * kinds.dense_backward, has_moe * kinds.moe_backward)

    e = element_bytes(c)
    is_split = np.asarray(c.vocab_parallel) & (tp > 1)
    tokens = c.micro_batch_size * (c.sequence_length / np.asarray(c.cp, dtype=np.float64))
    positions = share.has_head * tokens * shape.vocab / np.where(is_split, tp, 1.0)
    wide = np.maximum(e, 4.0) * (recipe.wide_logit_copies + recipe.split_logit_copies * is_split)
    narrow = np.where(e < 4, e, 0.0) * recipe.logit_copies

    sends = recipe.stage_buffers + recipe.stage_buffers_per_micro_batch * c.num_micro_batches
    sends = (sends + recipe.keeps_stage_outputs * share.in_flight) * kinds.stream
    sends = sends + recipe.keeps_stage_outputs * e * positions
    return _Moving(
        activations=share.in_flight * saved + share.has_head * kinds.end,
        later=(share.in_flight - 1) * saved,
        layer=np.maximum(has_dense * kinds.dense, has_moe * kinds.moe),
        in_flight=share.in_flight,
        logits=positions * (wide + narrow),
        backward=backward + recipe.weight_gradient_bytes * matrix,
        sends=np.where(c.pp > 1, sends, 0.0),
    )


def _at_peak(
    c: PlanColumns, recipe: MemoryRecipe, states: _States, moving: _Moving
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Parts at the greatest of three moments: the loss; the backward pass of the last layer, first with the gradients
    of its activations, then with those of its parameters; the end of the step with the gradients of all parameters.
    """
    outlive = np.asarray(recipe.logits_outlive) > 0
    reducing = states.reduced - moving.layer
    is_reducing = reducing > moving.backward
    backward = np.maximum(moving.backward, reducing)
    loss = moving.logits + states.gathered_for_head + np.where(outlive, backward, 0.0)
    layer = backward + states.gathered_for_layer
    at_loss = loss >= layer
    with_layer = ~at_loss | outlive
    # As many micro-batches are in flight once more after the first gradients only if there are more of them.
    again = (recipe.preallocates_gradients > 0) | (c.num_micro_batches > moving.in_flight)
    held = np.where(again, states.gradients, 0.0)
    turn = moving.activations + np.maximum(loss, layer) + moving.sends + held
    end = states.gradients + moving.later + np.maximum(moving.backward, states.reduced) + states.gathered_for_layer
    at_turn = turn >= end

    reduced = np.where(at_turn, with_layer & is_reducing, moving.backward < states.reduced)
    gathered = np.where(at_turn & at_loss, states.gathered_for_head, states.gathered_for_layer)
    working = np.where(reduced, 0.0, moving.backward * np.where(at_turn, with_layer, 1.0))
    kept = np.where(at_turn, moving.activations - np.where(reduced, moving.layer, 0.0), moving.later)
    parts = {
        "parameters": states.parameters,
        "gradients": np.where(at_turn, held, states.gradients),
        "optimizer": states.optimizer,
        "activations": kept + working,
        "logits": np.where(at_turn & at_loss, moving.logits, 0.0),
        "buffers": gathered
        + np.where(reduced, states.reduced, 0.0)
        + np.where(at_turn, moving.sends, 0.0)
        + states.own,
    }
    total = states.parameters + states.optimizer + states.own + np.maximum(turn, end)
    return {name: np.broadcast_to(part, total.shape) for name, part in parts.items()}, total
