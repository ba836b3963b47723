"""Bytes and seconds of every communication of a plan, before any of it is hidden behind compute.

Where training stacks send differently, it is a fact of the stack (``WireFacts``); without any, the conventions are
those of Megatron-LM. With the facts of this project's engine the byte counts are those of its dry runs
(tests/engine/test_trace.py).

A table of many plans of one model has few distinct layouts, so everything is computed once per layout.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields, replace
from typing import Self

import numpy as np

from autotune.cost.columns import PlanColumns, code, words_of
from autotune.cost.device_columns import SoftwareColumns
from autotune.cost.distinct import Columns
from autotune.cost.parameters import (
    candidate_ranks,
    fullest_load,
    is_vee,
    layer_share,
    rank_blocks,
    splits_backward,
    vocabulary_share,
)
from autotune.cost.rank_groups import NOTHING, Cost, Groups, LinkColumns
from autotune.cost.shapes import ModelShape
from engine.collective_cost import Group, Number

__all__ = ["Communication", "LinkColumns", "communication"]

ALL_GATHER = code("cp_attention", "all_gather")
BUCKET_ELEMENTS = 40e6
"""Gradients that are reduced in one message where nothing is sharded by layer (Megatron-LM's bucket)."""
TOPK_RATIO = 0.01
"""Share of the gradient's elements that top-k compression sends."""
INDEX_BYTES = 4
"""Of the place of an element in a sparse gradient."""
POWERSGD_RANK = 4
"""Rank of PowerSGD's factors."""


@dataclass(frozen=True)
class WireFacts:
    """How training stacks send: each 1 where it is so, one number for all plans or ``[n]``. What they mean is written
    with ``SoftwareFigures`` (``autotune/specs/figures.py``)."""

    narrow_gradients: Number = 0
    regathers: Number = 0
    shares_sends: Number = 0
    sends_once: Number = 0
    gathers_keys: Number = 0
    wide_key_gradients: Number = 0
    sums_whole_gradients: Number = 0
    sums_replicas_once: Number = 0
    dispatches_whole: Number = 0
    sums_tied_shards: Number = 0
    split_backward_keeps_gathered: Number = 0

    @classmethod
    def of(cls, software: SoftwareColumns) -> Self:
        """Those of one stack, or of one for each row."""
        return cls(**{f.name: getattr(software, f.name) for f in fields(cls)})


@dataclass(frozen=True)
class Communication:
    """Seconds, and the bytes one rank sends, of ``n`` plans; every array ``[n]``.

    Forward and backward are of one micro-batch and layer. Backward excludes what recomputation repeats: a stack that
    recomputes a layer pays its forward communication again.
    """

    tp_forward: Number
    """Of a layer with a dense feed-forward."""
    tp_backward: Number
    tp_moe_forward: Number
    """Of a layer with experts, its attention included: what the tensor group and the experts' own tensor group send."""
    tp_moe_backward: Number
    tp_step: Number
    """Per step: gradients that the ranks of the tensor group have in parts."""
    cp_forward: Number
    """Keys and values of one layer, to all context ranks."""
    cp_backward: Number
    ep_forward: Number
    """Dispatch and combine of one layer with experts."""
    ep_backward: Number
    pp_send: Number
    """Per micro-batch and stage boundary, in one direction."""
    dp_reduce: Number
    """Gradient reduction of a step on the fullest pipeline rank."""
    dp_gather: Number
    """Gather of the updated parameters per step, of ZeRO 1 and 2, on the fullest pipeline rank."""
    shard_gather: Number
    """ZeRO 3: gather of the fullest pipeline rank's parameters, mean of its passes: without a pipeline the head stays
    gathered from the forward to the backward pass."""
    shard_passes: Number
    """ZeRO 3: passes of a step that gather, forward and backward."""
    vocab_first_forward: Number
    """Of the embedding, per micro-batch."""
    vocab_first_backward: Number
    vocab_last_forward: Number
    """Of the head and the loss, per micro-batch."""
    vocab_last_backward: Number
    tied_reduce: Number
    """Per step: gradients of tied embeddings between the first and the last stage."""
    tp_forward_bytes: Number
    tp_backward_bytes: Number
    tp_moe_forward_bytes: Number
    tp_moe_backward_bytes: Number
    tp_step_bytes: Number
    cp_forward_bytes: Number
    cp_backward_bytes: Number
    ep_forward_bytes: Number
    ep_backward_bytes: Number
    pp_send_bytes: Number
    dp_reduce_bytes: Number
    dp_gather_bytes: Number
    shard_gather_bytes: Number
    vocab_first_forward_bytes: Number
    vocab_first_backward_bytes: Number
    vocab_last_forward_bytes: Number
    vocab_last_backward_bytes: Number
    tied_reduce_bytes: Number


def communication(
    shape: ModelShape,
    links: LinkColumns,
    c: PlanColumns,
    *,
    element_bytes: Number,
    facts: WireFacts | None = None,
    imbalance_ratio: Number = 0.0,
) -> Communication:
    """What a table of plans sends, and how long that takes alone.

    Args:
        shape: The models.
        links: The networks.
        c: ``n`` plans.
        element_bytes: Of an activation and of a gathered parameter.
        facts: How the training stacks send; None for those that do nothing of it.
        imbalance_ratio: Tokens of the rank with the most above the mean, relative, where experts are spread over ranks.
    """
    x = _Inputs(shape, c, element_bytes, facts or WireFacts(), imbalance_ratio)
    if x.is_one_model and all(np.ndim(value) == 0 for level in links.levels for value in astuple(level)):
        parts = _once_per_layout(x, links)
    else:
        groups = Groups(links, c)
        parts = _of_passes(x, groups) | _of_step(x, groups)
    stage = np.where(c.num_shards > 1, c.zero_stage, 0)
    reductions = np.where((stage == 3) & (c.pp == 1), c.num_micro_batches, 1)
    parts["tp_step"] = (parts["tp_step"].where(x.splits_sequence, NOTHING) + parts.pop("tp_shared")) * reductions
    once = np.where(x.facts.sums_replicas_once, 1, reductions)
    parts["dp_reduce"] = parts["dp_reduce"] * reductions + parts.pop("replica_reduce") * once
    n = len(c)
    columns = {name: np.broadcast_to(cost.seconds, n) for name, cost in parts.items()}
    columns |= {f"{name}_bytes": np.broadcast_to(cost.bytes, n) for name, cost in parts.items()}
    return Communication(**columns, shard_passes=np.broadcast_to(_shard_passes(c, x.facts), n))


@dataclass(frozen=True)
class _Inputs:
    """What the formulas are functions of; see ``communication``."""

    shape: ModelShape
    c: PlanColumns
    element_bytes: Number
    facts: WireFacts
    imbalance_ratio: Number

    @property
    def gradient_bytes(self) -> Number:
        """Of a gradient element on the wire."""
        narrow = np.asarray(self.facts.narrow_gradients) > 0
        return np.where(narrow, self.element_bytes, self.wide_bytes)

    @property
    def wide_bytes(self) -> Number:
        """Of what is never narrower than fp32."""
        return np.maximum(self.element_bytes, 4)

    @property
    def tokens(self) -> Number:
        """Of a micro-batch on one context-parallel rank."""
        return self.c.micro_batch_size * self.c.sequence_length / self.c.cp

    @property
    def hidden_bytes(self) -> Number:
        """Of the activations between layers, of those tokens."""
        return self.tokens * self.shape.hidden * self.element_bytes

    @property
    def splits_sequence(self) -> np.ndarray:
        """Where the sequence is split between the tensor-parallel regions."""
        return np.asarray(self.c.sequence_parallel) > 0

    @property
    def is_one_model(self) -> bool:
        """Whether only the plans, and with them the precision, differ from row to row."""
        figures = (*astuple(self.shape), *astuple(self.facts), self.imbalance_ratio)
        return all(np.ndim(value) == 0 for value in figures)

    def take(self, rows: np.ndarray) -> _Inputs:
        """Some of the rows."""
        elements = self.element_bytes[rows] if isinstance(self.element_bytes, np.ndarray) else self.element_bytes
        return replace(self, c=self.c.take(rows), element_bytes=elements)


_LAYOUT = ("tp", "pp", "cp", "dp", "ep", "etp", "rank_order", "vocab_parallel", "element_bytes")
_PASS_KEY = (*_LAYOUT, "micro_batch_size", "sequence_length", "sequence_parallel", "cp_attention")
_STEP_KEY = (
    *_LAYOUT, "dp_replicate", "dp_shard", "zero_stage", "schedule", "virtual_stages", "first_stage_layers",
    "last_stage_layers", "largest_stage_layers", "gradient_compression",
)  # fmt: skip
"""What the formulas of a pass, and those of a step, depend on."""


def _once_per_layout(x: _Inputs, links: LinkColumns) -> dict[str, Cost]:
    """All parts, computed for the distinct layouts of a table."""
    n = len(x.c)
    names = {*_PASS_KEY, *_STEP_KEY} - {"element_bytes"}
    table = {name: getattr(x.c, name) for name in names}
    table["element_bytes"] = np.asarray(x.element_bytes, dtype=np.int64)
    columns = Columns(
        {name: np.broadcast_to(column, n) if np.ndim(column) else column for name, column in table.items()}
    )
    parts: dict[str, Cost] = {}
    for key, formulas in ((_PASS_KEY, _of_passes), (_STEP_KEY, _of_step)):
        first, kind = columns.distinct(key)
        few = x.take(first)
        found = formulas(few, Groups(links, few.c))
        parts |= {name: cost.rows(kind) for name, cost in found.items()}
    return parts


def _of_passes(x: _Inputs, groups: Groups) -> dict[str, Cost]:
    """What each micro-batch sends."""
    half = _Half.of(x, groups)
    return _layers(x, groups, half) | _experts(x, groups, half) | _vocabulary(x, groups, half)


@dataclass(frozen=True)
class _Half:
    """The activations between layers over the tensor group: what half a layer (attention, feed-forward) sends."""

    reduced: Cost
    """All-reduce: each rank has a part of the sum for all tokens."""
    gathered: Cost
    """Gather of a split sequence."""
    exchanged: Cost
    """Gather and reduce-scatter of a split sequence."""

    @classmethod
    def of(cls, x: _Inputs, groups: Groups) -> _Half:
        """For a table of plans."""
        gathered = groups.all_gather(groups.tp, x.hidden_bytes)
        scattered = groups.reduce_scatter(groups.tp, x.hidden_bytes)
        return cls(groups.all_reduce(groups.tp, x.hidden_bytes), gathered, gathered + scattered)


def _layers(x: _Inputs, groups: Groups, half: _Half) -> dict[str, Cost]:
    """A dense layer over the tensor group, its keys and values around the context ring, the stage boundary.

    Without sequence parallelism each half of a layer all-reduces its activations forward and backward; with it, a
    gather and a reduce-scatter each, and a second gather in the backward pass of stacks that don't keep the gathered
    sequence (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2).
    """
    shape, c, split = x.shape, x.c, x.splits_sequence
    forward = half.exchanged.where(split, half.reduced)
    backward = (half.exchanged + half.gathered * np.asarray(x.facts.regathers)).where(split, half.reduced)
    # Keys and values of one rank; with more tensor ranks than heads each head is held by several.
    heads = np.maximum(shape.num_kv_heads / c.tp, 1.0)
    keys = x.tokens * heads * (shape.query_key_dim + shape.value_dim) * x.element_bytes
    gradients = keys * np.where(np.asarray(x.facts.wide_key_gradients) > 0, x.wide_bytes / x.element_bytes, 1)
    at_once = (np.asarray(x.facts.gathers_keys) > 0) | (c.cp_attention == ALL_GATHER)

    def around(num_bytes: Number) -> Cost:
        ring = groups.send(groups.cp_neighbours, num_bytes) * (c.cp - 1)
        return groups.all_gather(groups.cp, num_bytes * c.cp).where(at_once, ring)

    shares = ~split & (np.asarray(x.facts.shares_sends) > 0)
    crossing = groups.send(groups.pp, x.hidden_bytes / np.where(split | shares, c.tp, 1))
    return {
        "tp_forward": forward * 2,
        "tp_backward": backward * 2,
        "cp_forward": around(keys),
        "cp_backward": around(keys) + around(gradients),  # keys and values again
        "pp_send": crossing + half.gathered.where(shares & (np.asarray(c.pp) > 1), NOTHING),
    }


def _experts(x: _Inputs, groups: Groups, half: _Half) -> dict[str, Cost]:
    """A layer with experts: its attention, and the experts.

    Experts in slices on all ranks of the tensor group (etp = tp, at ep 1 or where a stack dispatches all tokens from
    each rank): the tokens of the group are whole on each rank, and the layer sends what a dense one does, beside the
    all-to-all over ep. Otherwise each rank dispatches its share of the tokens: all-to-all over ep, a gather over etp of
    what arrived, the way back for the output; the gradients take the same ways backwards (Megatron-LM's all-to-all
    dispatcher).
    """
    shape, c, split = x.shape, x.c, x.splits_sequence
    if not np.any(np.asarray(shape.num_experts) > 0):
        return dict.fromkeys(("tp_moe_forward", "tp_moe_backward", "ep_forward", "ep_backward"), NOTHING)
    has_experts = np.asarray(shape.num_experts) > 0
    per_token = np.maximum(shape.experts_per_token, 1)
    attention = half.exchanged.where(split, half.reduced)
    attention_back = (half.exchanged + half.gathered * np.asarray(x.facts.regathers)).where(split, half.reduced)
    # Each rank dispatches its own share of the tensor group's tokens, or all of them, a copy for each of their experts.
    whole = (np.asarray(x.facts.dispatches_whole) > 0) & (c.etp == c.tp)
    copies = x.hidden_bytes / np.where(whole, 1, c.tp) * shape.experts_per_token * fullest_load(x.imbalance_ratio, c.ep)
    domains = c.ep / np.maximum(groups.ep.members[0], 1)
    limit = np.where(np.asarray(shape.token_groups) > 0, shape.token_groups, np.inf)
    reached = np.minimum(domains * (1 - (1 - 1 / domains) ** per_token), limit)
    outside = np.where(np.asarray(x.facts.sends_once) > 0, np.minimum(reached / per_token, 1.0), 1.0)
    exchange = groups.all_to_all(groups.ep, copies, outside) * 2
    arrived = groups.all_gather(groups.etp, copies * c.etp) * 2
    shared = half.exchanged.where(split, half.reduced).where(np.asarray(shape.shared_ffn) > 0, NOTHING)
    # Without a split sequence the outputs of the ranks' shares are gathered.
    dispatched = arrived + half.gathered.where(~split, NOTHING) + shared
    sliced = ((c.ep == 1) & (c.etp == c.tp)) | whole
    return {
        "tp_moe_forward": (attention + attention.where(sliced, dispatched)).where(has_experts, NOTHING),
        "tp_moe_backward": (attention_back + attention_back.where(sliced, dispatched)).where(has_experts, NOTHING),
        "ep_forward": exchange.where(has_experts, NOTHING),
        "ep_backward": exchange.where(has_experts, NOTHING),
    }


def _vocabulary(x: _Inputs, groups: Groups, half: _Half) -> dict[str, Cost]:
    """Embedding, head and loss, split over the vocabulary or whole on every rank.

    The loss of a split vocabulary takes three all-reduces of a number per token: maximum, sum of exponentials, and the
    label's logit.
    """
    split, by_vocabulary = x.splits_sequence, np.asarray(x.c.vocab_parallel) > 0
    activations = half.gathered.where(split, half.reduced)
    losses = groups.all_reduce(groups.tp, x.tokens * x.wide_bytes) * 3
    gathered = half.gathered.where(split, NOTHING)
    return {
        "vocab_first_forward": activations.where(by_vocabulary, NOTHING),
        "vocab_first_backward": gathered,
        "vocab_last_forward": gathered + losses.where(by_vocabulary, NOTHING),
        "vocab_last_backward": activations.where(by_vocabulary, NOTHING),
    }


def _of_step(x: _Inputs, groups: Groups) -> dict[str, Cost]:
    """Gradients and parameters over the data-parallel ranks, for the pipeline rank with the most parameters; the
    gradients of norms and of tied embeddings.

    Parameters outside the experts are reduced over dp and cp, the experts' over their own data-parallel ranks. Shards
    are reduced over the replicas after the reduce-scatter.
    """
    shape, c = x.shape, x.c
    held = _Held.of(shape, c)
    stage = np.where(c.num_shards > 1, c.zero_stage, 0)
    on_wire, is_sparse = _compressed_bytes(x)
    reduce, replicas, gather = NOTHING, NOTHING, NOTHING
    # Stages whose gradients are reduced into shards, and the width of the parameters that come back of it.
    into_shards = stage > np.where(x.facts.sums_whole_gradients, 1, 0)
    gathered_bytes = np.where(into_shards, x.element_bytes, x.wide_bytes)
    for parameters, whole, shard, replicate in (
        (held.shared, groups.dp, groups.shard, groups.replicate),
        (held.experts, groups.edp, groups.edp_shard, groups.edp_replicate),
    ):
        if not np.any(parameters):
            continue
        message = parameters / held.messages
        gradients = message * on_wire
        scattered = groups.reduce_scatter(shard, gradients)
        summed = _summed(groups, whole, gradients, is_sparse)
        reduce = reduce + scattered.where(into_shards, summed) * held.messages
        shards = _summed(groups, replicate, gradients / shard.size, is_sparse)
        replicas = replicas + shards.where(into_shards, NOTHING) * held.messages
        gather = gather + groups.all_gather(shard, message * gathered_bytes) * held.messages
    kept = groups.all_gather(groups.shard, held.head * x.element_bytes).where(c.pp == 1, NOTHING)
    # Wherever there are tensor ranks: whether they split the sequence is not part of a step's key.
    # Where each micro-batch is reduced, its gradients are not yet accumulated in fp32.
    in_parts = np.where((stage == 3) & (c.pp == 1), x.element_bytes, x.wide_bytes)
    norms = (2 * shape.num_layers / c.pp + 1) * shape.hidden * in_parts
    # Whole on all tensor ranks and used by each on its own heads or tokens, split sequence or not: latent projections,
    # routers, and key and value heads that are fewer than the ranks.
    keys = np.where(shape.num_kv_heads < c.tp, shape.num_kv_heads * (shape.query_key_dim + shape.value_dim), 0)
    rows = shape.num_layers * (shape.query_rank + shape.kv_rank + keys) + shape.num_moe_layers * shape.num_experts
    shared = rows * shape.hidden / c.pp * in_parts
    ends = np.where((stage >= 2) & (np.asarray(x.facts.sums_tied_shards) > 0), c.num_shards, 1)
    tied = vocabulary_share(shape, c) / ends * x.gradient_bytes
    return {
        "dp_reduce": reduce,
        "replica_reduce": replicas,
        "dp_gather": gather.where((stage == 1) | (stage == 2), NOTHING),
        "shard_gather": (gather + kept * -0.5).where(stage == 3, NOTHING),
        "tp_step": groups.all_reduce(groups.tp, norms),
        "tp_shared": groups.all_reduce(groups.tp, shared),
        "tied_reduce": groups.all_reduce(groups.pp, tied).where((np.asarray(shape.tied) > 0) & ~is_vee(c), NOTHING),
    }


@dataclass(frozen=True)
class _Held:
    """Parameters of the fullest pipeline rank."""

    shared: Number
    """Outside the routed experts."""
    experts: Number
    head: Number
    """Of those outside, the head with its norm, where no other use of it follows (untied)."""
    messages: Number
    """In which they travel: a layer's each where they are sharded by layer, else buckets."""

    @classmethod
    def of(cls, shape: ModelShape, c: PlanColumns) -> _Held:
        """For a table of plans."""
        blocks = rank_blocks(shape, c, candidate_ranks(shape, c))
        dense, moe, routed = layer_share(shape, c)
        vocabulary = vocabulary_share(shape, c)
        # A tied head is the embedding where both are on one rank.
        head = blocks.has_head * (vocabulary * (1 - shape.tied * blocks.has_embedding) + shape.hidden)
        ends = blocks.has_embedding * (vocabulary + shape.learned_positions * shape.hidden) + head
        shared = blocks.dense_layers * dense + blocks.moe_layers * moe + ends
        experts = blocks.moe_layers * routed
        by_layer = blocks.dense_layers + blocks.moe_layers + blocks.has_embedding + blocks.has_head
        fullest = np.argmax(shared + experts, axis=0)[None]

        def of_fullest(ranks: np.ndarray) -> np.ndarray:
            return np.asarray(np.take_along_axis(ranks, fullest, axis=0)[0])

        shared, experts, by_layer = of_fullest(shared), of_fullest(experts), of_fullest(by_layer)
        buckets = np.ceil((shared + experts) / BUCKET_ELEMENTS)
        messages = np.where(c.zero_stage >= 2, by_layer, np.minimum(by_layer, buckets))
        return cls(shared, experts, np.where(np.asarray(shape.tied) == 0, of_fullest(head), 0.0), messages)


def _shard_passes(c: PlanColumns, facts: WireFacts) -> Number:
    """Passes of a step for which ZeRO 3 gathers a rank's parameters.

    Without a pipeline each forward and each backward pass. In a pipeline a backward pass leaves them gathered for the
    forward pass that follows it: one gather per forward pass of the warm-up, one per backward pass of the steady state.
    Stacks that keep them gathered where weights have a backward pass of their own gather them once.
    """
    micro_batches = c.num_micro_batches
    once = splits_backward(c) & (np.asarray(facts.split_backward_keeps_gathered) > 0)
    passes = np.where(c.pp > 1, np.where(once, 1, micro_batches + 1), 2 * micro_batches)
    result: Number = np.where((c.zero_stage == 3) & (c.num_shards > 1), passes, 0)
    return result


def _compressed_bytes(x: _Inputs) -> tuple[Number, Number]:
    """Bytes on the wire of an element of the gradients, and whether ranks send different elements of them.

    Top-k sends values with their places (Lin et al. 2018, arXiv 1712.01887); PowerSGD the two factors of a matrix, here
    a square one (Vogels et al. 2019, arXiv 1905.13727).
    """
    words = words_of("gradient_compression")
    sizes: dict[str, Number] = {
        "none": x.gradient_bytes,
        "int8": 1.0,
        "topk": TOPK_RATIO * (x.gradient_bytes + INDEX_BYTES),
        "int8_topk": TOPK_RATIO * (1 + INDEX_BYTES),
        "powersgd": 2 * POWERSGD_RANK / np.asarray(x.shape.hidden, float) * x.gradient_bytes,
    }
    chosen = [x.c.gradient_compression == words.index(word) for word in sizes]
    sparse = chosen[list(sizes).index("topk")] | chosen[list(sizes).index("int8_topk")]
    return np.select(chosen, [np.asarray(size) for size in sizes.values()]), sparse


def _summed(groups: Groups, group: Group, gradients: Number, is_sparse: Number) -> Cost:
    """Gradients of all members in everybody's hands. Sparse ones can't be added on the way: everybody gathers them."""
    if not np.any(is_sparse):
        return groups.all_reduce(group, gradients)
    gathered = groups.all_gather(group, gradients * group.size)
    return gathered.where(is_sparse, groups.all_reduce(group, gradients))
