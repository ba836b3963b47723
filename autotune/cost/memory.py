"""Memory of the fullest device, by part, in closed form.

A pipeline rank holds parameters of its layers (with the embedding or the head at the ends), their gradients and
optimizer states under ZeRO, and the activations of the micro-batches in flight. Two moments can be the peak: the turn
from forward to backward pass, with all activations and the logits, and the end of the step, with all gradients. The
first and the last rank are worked out for every plan, and the second where a later stage may hold more than the first;
the fullest is told. In between, layers and micro-batches in flight only fall.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autotune.cost.activations import NONE, LayerActivations, element_bytes, layer_activations, recomputed_share
from autotune.cost.columns import PlanColumns, code, words_of
from autotune.cost.memory_recipe import MemoryRecipe
from autotune.cost.parameters import (
    RankBlocks,
    candidate_ranks,
    layer_share,
    neighbours,
    rank_blocks,
    splits_backward,
    vocabulary_share,
)
from autotune.cost.pipeline import GPIPE, ONE_F_ONE_B, ZBV, in_flight, waiting_for_weights
from autotune.cost.shapes import ModelShape, Number
from engine.units import GIB

BF16 = code("precision", "bf16")
_KEEPS_RESIDUALS = np.array(
    [word in ("topk", "int8_topk", "powersgd") for word in words_of("gradient_compression")], dtype=bool
)
"""By code of the gradient compression: whether each rank keeps what it has not sent yet, a number for each of its
parameters (error feedback; Karimireddy et al. 2019, arXiv 1901.09847)."""


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
    """What pipeline ranks hold of ``n`` plans."""

    blocks: RankBlocks
    in_flight: np.ndarray
    """Micro-batches whose activations are held at the peak, ``[k, n]``."""
    waiting: np.ndarray
    """Of those, the ones that wait for their backward pass of the weights."""
    is_last: np.ndarray
    """Whether it is the last rank."""
    neighbours: np.ndarray
    """Stages on other ranks that send to the rank's."""


def memory(
    shape: ModelShape,
    c: PlanColumns,
    recipe: MemoryRecipe,
    *,
    overhead_bytes: Number,
    num_states: Number = 2,
    fused_attention: Number = True,
    dropout: Number = 0,
    imbalance_ratio: Number = 0.0,
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
        imbalance_ratio: Tokens of the rank with the most above the mean, relative, where experts are spread over ranks.
    """
    ranks = candidate_ranks(shape, c)
    held = _held(
        shape, c, recipe, ranks,
        num_states=num_states, fused_attention=fused_attention, dropout=dropout, imbalance_ratio=imbalance_ratio,
    )  # fmt: skip
    live = _peak(c, recipe, held)
    masks = [live[0] >= live[1:].max(axis=0)] if len(ranks) > 1 else []
    masks += [live[rank] >= live[rank + 1 :].max(axis=0) for rank in range(1, len(ranks) - 1)]
    chosen = _parts(c, recipe, _Held(**{name: _pick(value, masks) for name, value in vars(held).items()}))
    live = live.max(axis=0)
    reserved = live * (1 + recipe.slack_ratio)
    groups = sum((np.asarray(degree) > 1).astype(np.float64) for degree in (c.tp, c.pp, c.dp, c.cp, c.ep))
    fixed = overhead_bytes + (recipe.context_gib + recipe.group_gib * groups) * GIB
    total = reserved + fixed
    chosen["overhead"] = total - live
    interval = recipe.interval_ratio
    return MemoryTable(
        parts=chosen,
        fullest_stage=_pick(ranks, masks),
        allocated_bytes=live,
        reserved_bytes=reserved,
        memory_bytes=total,
        low_bytes=total * (1 - interval),
        high_bytes=total * (1 + interval),
    )


def _pick(values: np.ndarray, masks: list[np.ndarray]) -> np.ndarray:
    """Of values of several ranks ``[k, n]`` those of the first rank whose mask holds, else of the last. ``[n]``."""
    if np.ndim(values) < 2:
        return values
    found: np.ndarray = values[-1]
    for rank in range(len(masks) - 1, -1, -1):
        found = np.where(masks[rank], values[rank], found)
    return found


def rank_share(shape: ModelShape, c: PlanColumns, ranks: np.ndarray) -> RankShare:
    """What pipeline ranks hold.

    Args:
        shape: The architecture.
        c: ``n`` plans.
        ranks: ``[k, n]``: pipeline ranks.
    """
    held = in_flight(c.schedule, c.pp, c.virtual_stages, c.num_micro_batches, ranks)
    waiting = waiting_for_weights(c.schedule, c.pp, c.virtual_stages, c.num_micro_batches, ranks)
    is_last = ranks == np.asarray(c.pp) - 1
    return RankShare(rank_blocks(shape, c, ranks), held, waiting, is_last, neighbours(c, ranks))


def memory_of_ranks(
    shape: ModelShape,
    c: PlanColumns,
    recipe: MemoryRecipe,
    ranks: np.ndarray,
    *,
    num_states: Number,
    fused_attention: Number,
    dropout: Number,
    imbalance_ratio: Number,
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
        imbalance_ratio: See ``memory``.

    Returns:
        Bytes by part and their sum, each ``[k, n]``; the overhead is not among them.
    """
    held = _held(
        shape, c, recipe, ranks,
        num_states=num_states, fused_attention=fused_attention, dropout=dropout, imbalance_ratio=imbalance_ratio,
    )  # fmt: skip
    return _parts(c, recipe, held), _peak(c, recipe, held)


@dataclass(frozen=True)
class _Held:
    """What is held at one moment or another, ``[k, n]`` or ``[n]`` where it is the same on every rank."""

    parameters: np.ndarray
    gradients: np.ndarray
    optimizer: np.ndarray
    own: np.ndarray
    """Fixed buffers, and what the optimizer step needs for itself."""
    gathered_for_head: np.ndarray
    """Parameters gathered while the loss is computed."""
    gathered_for_layer: np.ndarray
    """Parameters gathered while a layer's backward pass runs: its own and the next one's."""
    reduced: np.ndarray
    """Gradients of a layer on their way to their shards."""
    activations: np.ndarray
    """Of all micro-batches in flight."""
    later: np.ndarray
    """The same without the first one: it is done when the first gradients are there."""
    layer: np.ndarray
    """Of the activations, those of one layer and micro-batch."""
    in_flight: np.ndarray
    logits: np.ndarray
    backward: np.ndarray
    """Within the backward pass of a layer."""
    sends: np.ndarray
    """Buffers of the pipeline."""


def _held(
    shape: ModelShape,
    c: PlanColumns,
    recipe: MemoryRecipe,
    ranks: np.ndarray,
    *,
    num_states: Number,
    fused_attention: Number,
    dropout: Number,
    imbalance_ratio: Number,
) -> _Held:
    share = rank_share(shape, c, ranks)
    kinds = layer_activations(
        shape, c, recipe, fused_attention=fused_attention, dropout=dropout, imbalance_ratio=imbalance_ratio
    )
    held = _states(shape, c, recipe, share, num_states) | _moving(shape, c, recipe, share, kinds)
    keeps_sent = (np.asarray(recipe.keeps_sent) > 0) & (c.schedule != GPIPE) & (c.schedule != ONE_F_ONE_B)
    passed = c.num_micro_batches * share.neighbours * kinds.stream
    held["own"] = held["own"] + passed * (recipe.neighbour_buffers + keeps_sent)
    return _Held(**held)


def _ends(shape: ModelShape, c: PlanColumns, share: RankShare) -> np.ndarray:
    """Parameters of embedding, positions and head on a rank; a tied head needs none where the embedding is."""
    table = vocabulary_share(shape, c)
    positions = shape.learned_positions * shape.hidden
    head = share.blocks.has_head * (1 - shape.tied * share.blocks.has_embedding)
    return share.blocks.has_embedding * (table + positions) + head * table


def _states(
    shape: ModelShape, c: PlanColumns, recipe: MemoryRecipe, share: RankShare, num_states: Number
) -> dict[str, np.ndarray]:
    """The fields of ``_Held`` that come of parameters."""
    dense, moe, experts = layer_share(shape, c, recipe.whole_key_heads)
    ends = _ends(shape, c, share)
    common = share.blocks.dense_layers * dense + share.blocks.moe_layers * moe + ends
    routed = share.blocks.moe_layers * experts
    shard = np.asarray(c.dp_shard * c.cp, dtype=np.float64)
    expert_shard = np.maximum(shard * c.tp / (np.asarray(c.ep, dtype=np.float64) * c.etp), 1.0)
    number, sharded = common + routed, common / shard + routed / expert_shard

    def held(whole: Number, split: Number) -> np.ndarray:
        """Bytes of so many per parameter whole and so many sharded."""
        return np.asarray(whole * number + split * sharded)

    def either(is_split: np.ndarray, size: Number) -> tuple[Number, Number]:
        """``size`` bytes per parameter, whole or sharded."""
        return np.where(is_split, 0.0, size), np.where(is_split, size, 0.0)

    e = element_bytes(c)
    stage = np.asarray(c.zero_stage)
    first, second, third = stage >= 1, stage >= 2, stage >= 3
    is_split = stage >= recipe.whole_below_stage
    half, stored_once, is_sharded = e == 2, np.asarray(recipe.shards_stored) > 0, (shard > 1) & is_split
    keeps_apart = splits_backward(c) & (np.asarray(recipe.split_backward_keeps_gathered) > 0)
    is_free = third & ~((np.asarray(recipe.pipeline_keeps_gathered) > 0) & (c.pp > 1)) & ~keeps_apart
    are_shards = (first & (half | stored_once) & is_split) | third
    stored, stored_split = either(are_shards, np.where(half, recipe.master_bytes, e))
    copies = np.where(half | (stored_once & is_sharded), np.where(half, recipe.working_bytes, e), 0.0)
    with_layers = stored_once & ~is_sharded & (np.asarray(recipe.recompute_frees_copies) > 0)
    copies = copies * np.where(with_layers, 1 - recomputed_share(c), 1.0)
    working, working_split = either(is_free & (is_sharded | ~stored_once), copies)
    working_split = np.where(stored_once, 0.0, working_split)
    onto_device = 1 - c.offload_parameters_ratio

    gradient = np.where(half, recipe.gradient_bytes, e)
    # Gradients that are reduced once a step (``communication``) are whole until all micro-batches are summed.
    summed_whole = (c.num_micro_batches > 1) & (~third | (c.pp > 1))
    whole, split = either(second & ~summed_whole, gradient)
    # The copy belongs to an optimizer that shards states alone; from stage 2 on gradients are never whole.
    further = np.where((np.asarray(c.precision) == BF16) & ~second, recipe.bf16_gradient_bytes, 0.0)
    state = num_states * np.where(half, recipe.state_bytes, e) * (1 - c.offload_optimizer_ratio)
    buckets = np.where(is_sharded & (further == 0), recipe.bucket_bytes, 0.0)

    layer = np.maximum(dense * (shape.num_moe_layers < shape.num_layers), (moe + experts) * (shape.num_moe_layers > 0))
    # Parameters that lie elsewhere, on other ranks or in host memory, come when their layer runs.
    gathered = np.where((is_free & is_sharded) | (c.offload_parameters_ratio > 0), e, 0.0)
    residuals = np.where(_KEEPS_RESIDUALS[c.gradient_compression], gradient, 0.0)
    return {
        "parameters": held((stored + working) * onto_device, (stored_split + working_split) * onto_device),
        "gradients": held(whole + further, split),
        "optimizer": held(*either(first, state)),
        "own": held(*either(first, np.where(further > 0, 0.0, recipe.step_bytes))) + buckets + held(residuals, 0.0),
        "gathered_for_head": gathered * (np.where(c.num_micro_batches > 1, layer, 0.0) + share.blocks.has_head * ends),
        "gathered_for_layer": np.asarray(gathered * 2 * layer),
        "reduced": np.where(second & is_sharded & stored_once, (e + gradient) * layer, 0.0),
    }


def _moving(
    shape: ModelShape, c: PlanColumns, recipe: MemoryRecipe, share: RankShare, kinds: LayerActivations
) -> dict[str, np.ndarray]:
    """The fields of ``_Held`` that come of tokens."""
    tp = np.asarray(c.tp, dtype=np.float64)
    has_dense, has_moe = share.blocks.dense_layers > 0, share.blocks.moe_layers > 0
    saved = share.blocks.dense_layers * kinds.dense + share.blocks.moe_layers * kinds.moe
    outputs = share.blocks.dense_layers * kinds.dense_outputs + share.blocks.moe_layers * kinds.moe_outputs
    held = _until_weights(c, share, saved, outputs * np.asarray(recipe.split_backward_gradients))
    matrix = shape.hidden * (shape.ffn_matrices - 1) * np.maximum(shape.ffn, shape.shared_ffn) / tp
    backward = np.maximum(has_dense * kinds.dense_backward, has_moe * kinds.moe_backward)

    e = element_bytes(c)
    is_split = np.asarray(c.vocab_parallel) & (tp > 1)
    tokens = c.micro_batch_size * (c.sequence_length / np.asarray(c.cp, dtype=np.float64))
    positions = tokens * shape.vocab / np.where(is_split, tp, 1.0)
    wide = np.maximum(e, 4.0) * (recipe.wide_logit_copies + recipe.split_logit_copies * is_split)
    narrow = np.where(e < 4, e, 0.0) * recipe.logit_copies

    buffers = recipe.stage_buffers + recipe.stage_buffers_per_micro_batch * c.num_micro_batches
    is_pipelined = np.asarray(c.pp) > 1
    kept = is_pipelined * recipe.keeps_stage_outputs
    sends = (is_pipelined * buffers + kept * share.in_flight) * kinds.stream
    return {
        "activations": held + share.blocks.has_head * kinds.end,
        "later": (share.in_flight - 1) * saved,
        "layer": np.maximum(has_dense * kinds.dense, has_moe * kinds.moe),
        "in_flight": share.in_flight,
        "logits": share.blocks.has_head * (positions * (wide + narrow)),
        "backward": backward + recipe.weight_gradient_bytes * matrix,
        "sends": sends + share.blocks.has_head * (kept * e * positions),
    }


def _until_weights(c: PlanColumns, share: RankShare, saved: Number, gradients: Number) -> np.ndarray:
    """Activations of all micro-batches in flight, with the gradients that those keep whose backward pass of the weights
    is to come (``[k, n]`` each, of one set of the rank's layers). Stages that recompute have a backward pass in one."""
    waiting = np.where(c.recompute == NONE, share.waiting, 0.0)
    # Later the last rank of a V has one stage less in flight, all of them waiting.
    later = np.where((c.schedule == ZBV) & (waiting > 0) & share.is_last, share.in_flight - 1 / c.virtual_stages, 0.0)
    return np.asarray(np.maximum(share.in_flight * saved + waiting * gradients, later * (saved + gradients)))


def _turn(c: PlanColumns, recipe: MemoryRecipe, x: _Held) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """At the turn from forward to backward pass: bytes needed for the loss, for the last layer's backward pass (first
    its activations' gradients, then its parameters'), those held besides, and the gradients among them."""
    backward = np.maximum(x.backward, x.reduced - x.layer)
    loss = x.logits + x.gathered_for_head + np.where(np.asarray(recipe.logits_outlive) > 0, backward, 0.0)
    # As many micro-batches are in flight once more after the first gradients only if there are more of them.
    again = (np.asarray(recipe.preallocates_gradients) > 0) | (c.num_micro_batches > x.in_flight)
    gradients = np.where(again, x.gradients, 0.0)
    return loss, backward + x.gathered_for_layer, x.activations + x.sends + gradients, gradients


def _end(x: _Held) -> np.ndarray:
    """At the end of the step, with the gradients of all parameters: bytes that come and go."""
    return np.asarray(x.gradients + x.later + np.maximum(x.backward, x.reduced) + x.gathered_for_layer)


def _peak(c: PlanColumns, recipe: MemoryRecipe, x: _Held) -> np.ndarray:
    """Live bytes at the greatest moment."""
    loss, layer, besides, _ = _turn(c, recipe, x)
    return np.asarray(x.parameters + x.optimizer + x.own + np.maximum(np.maximum(loss, layer) + besides, _end(x)))


def _parts(c: PlanColumns, recipe: MemoryRecipe, x: _Held) -> dict[str, np.ndarray]:
    """Live bytes at that moment, by part."""
    loss, layer, besides, gradients = _turn(c, recipe, x)
    at_loss = loss >= layer
    at_turn = np.maximum(loss, layer) + besides >= _end(x)
    with_layer = ~at_loss | (np.asarray(recipe.logits_outlive) > 0)
    is_reducing = np.where(at_turn, with_layer & (x.reduced - x.layer > x.backward), x.backward < x.reduced)
    gathered = np.where(at_turn & at_loss, x.gathered_for_head, x.gathered_for_layer)
    working = np.where(is_reducing | (at_turn & ~with_layer), 0.0, x.backward)
    kept = np.where(at_turn, x.activations - np.where(is_reducing, x.layer, 0.0), x.later)
    sends = np.where(at_turn, x.sends, 0.0)
    parts = {
        "parameters": x.parameters,
        "gradients": np.where(at_turn, gradients, x.gradients),
        "optimizer": x.optimizer,
        "activations": kept + working,
        "logits": np.where(at_turn & at_loss, x.logits, 0.0),
        "buffers": gathered + np.where(is_reducing, x.reduced, 0.0) + sends + x.own,
    }
    return {name: np.broadcast_to(part, kept.shape) for name, part in parts.items()}
