"""Bytes and seconds of every communication of a plan, before any of it is hidden behind compute.

Byte counts are what this project's engine sends where it builds the plan (tensor, pipeline and sharded data
parallelism, experts sliced over the tensor group); for the rest the conventions of Megatron-LM: expert and context
parallelism, ZeRO 0 and 1, sequence gathered again in the backward pass (by an option).

Seconds come from ``engine.collective_cost``; which devices form a group follows from ``rank_order``: tensor ranks are
consecutive, context, data and pipeline ranks strided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from autotune.cost.columns import PlanColumns, words_of
from autotune.cost.shapes import ModelShape
from autotune.specs.cluster import ClusterSpec
from engine import collective_cost
from engine.collective_cost import Group, Link, Number
from engine.errors import UserError

BUCKET_ELEMENTS = 40e6
"""Gradients that are reduced in one message where nothing is sharded by layer (Megatron-LM's bucket)."""
TOPK_RATIO = 0.01
"""Share of the gradient's elements that top-k compression sends."""
POWERSGD_RANK = 4
"""Rank of PowerSGD's factors."""


@dataclass(frozen=True)
class LinkColumns:
    """The levels of the network, from the closest devices outwards, as numbers or columns."""

    levels: tuple[Link, ...]

    @classmethod
    def of(cls, cluster: ClusterSpec) -> Self:
        """The levels of one cluster.

        Raises:
            UserError: The cluster says nothing of its links.
        """
        return cls(_levels(cluster))

    @classmethod
    def rows(cls, clusters: Sequence[ClusterSpec], index: np.ndarray) -> Self:
        """One network per row of a table.

        Args:
            clusters: The machines that occur.
            index: ``[n]``: which of them each row has.
        """
        tables = [_levels(cluster) for cluster in clusters]
        depth = max(map(len, tables))
        padded = [(*levels, *[levels[-1]] * (depth - len(levels))) for levels in tables]
        names = Link.__dataclass_fields__
        return cls(
            tuple(
                Link(**{name: np.array([getattr(levels[i], name) for levels in padded])[index] for name in names})
                for i in range(depth)
            )
        )


def _levels(cluster: ClusterSpec) -> tuple[Link, ...]:
    if not cluster.links:
        raise UserError(
            f"the cluster {cluster.name} says nothing of its links",
            hint="add 'links' to its file, run autotune profile on it, or name a device of the catalogue",
        )
    return tuple(
        Link(
            num_devices=np.inf if level.num_devices is None else float(level.num_devices),
            bandwidth=level.gb_per_second * 1e9,
            latency=level.latency_us * 1e-6,
            start=level.start_us * 1e-6,
            half_bytes=level.half_mb * 1e6,
            pair_bandwidth=np.inf if level.pair_gb_per_second is None else level.pair_gb_per_second * 1e9,
            reduction_bandwidth=(level.reduction_gb_per_second or 0.0) * 1e9,
            reduction_min_devices=float(level.reduction_min_devices),
            placed_whole=float(level.num_devices is None or level.num_devices > cluster.devices_per_node),
        )
        for level in cluster.links
    )


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
    """Per step: gradients of norms that sequence parallelism leaves in parts."""
    cp_forward: Number
    """Keys and values on their way around the ring, of one layer."""
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
    """ZeRO 3: gather of the fullest pipeline rank's parameters for one pass."""
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


@dataclass(frozen=True)
class Cost:
    """Seconds, and the bytes that one rank sends."""

    seconds: Number = 0.0
    bytes: Number = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.bytes + other.bytes)

    def __mul__(self, factor: Number) -> Cost:
        return Cost(self.seconds * factor, self.bytes * factor)

    def where(self, condition: Number, other: Cost) -> Cost:
        """This where the condition holds, else the other."""
        return Cost(np.where(condition, self.seconds, other.seconds), np.where(condition, self.bytes, other.bytes))


NOTHING = Cost()


class Groups:
    """The groups of a table of plans, and what collectives over them cost."""

    def __init__(self, links: LinkColumns, c: PlanColumns) -> None:
        self._levels = links.levels
        self._c = c
        orders = words_of("rank_order")
        # Ranks of one pipeline stage, counted tensor first: up to `near` they are consecutive, beyond they lie pp times
        # as far apart (the pipeline axis varies faster than the rest).
        stage = c.tp * c.cp * c.dp
        self._near = np.select(
            [c.rank_order == orders.index("tp-cp-dp-pp"), c.rank_order == orders.index("tp-cp-pp-dp")],
            [stage, c.tp * c.cp],
            c.tp,
        )
        self.tp = self._in_stage(c.tp, 1)
        self.cp = self._in_stage(c.cp, c.tp)
        self.shard = self._in_stage(c.cp * c.dp_shard, c.tp)
        self.replicate = self._in_stage(c.dp_replicate, c.tp * c.cp * c.dp_shard)
        self.dp = self._in_stage(c.cp * c.dp, c.tp)
        self.etp = self._in_stage(c.etp, 1)
        self.ep = self._in_stage(c.ep, c.etp)
        edp_shard = np.maximum(c.edp // c.dp_replicate, 1)
        self.edp = self._in_stage(c.edp, c.ep * c.etp)
        self.edp_shard = self._in_stage(edp_shard, c.ep * c.etp)
        self.edp_replicate = self._in_stage(c.edp // edp_shard, c.ep * c.etp * edp_shard)
        self.pp = self._neighbours()

    def _in_stage(self, size: Number, stride: Number) -> Group:
        """A group among the ranks of one stage, ``stride`` apart in the order tensor, context, data."""
        inner = np.clip(self._near // stride, 1, size)
        outer = size // inner
        outer_stride = np.maximum(stride, self._near) * self._c.pp
        axes = ((inner, stride), (outer, outer_stride))
        return Group.along(self._levels, self._c.world_size, *axes)

    def _neighbours(self) -> Group:
        """Two neighbouring stages at the farthest boundary of the pipeline."""
        whole = Group.along(self._levels, self._c.world_size, (self._c.pp, self._near))
        pair = [np.where(members >= whole.size, 2.0, 1.0) for members in whole.members[:-1]]
        return Group((*pair, np.minimum(whole.size, 2)))

    def all_reduce(self, group: Group, num_bytes: Number) -> Cost:
        """See ``engine.collective_cost``."""
        sent = 2 * (group.size - 1) / group.size * num_bytes
        return Cost(collective_cost.all_reduce(num_bytes, group, self._levels), sent)

    def all_gather(self, group: Group, num_bytes: Number) -> Cost:
        """See ``engine.collective_cost``; ``num_bytes``: of the whole."""
        sent = (group.size - 1) / group.size * num_bytes
        return Cost(collective_cost.all_gather(num_bytes, group, self._levels), sent)

    reduce_scatter = all_gather

    def all_to_all(self, group: Group, num_bytes: Number, outside_ratio: Number = 1.0) -> Cost:
        """See ``engine.collective_cost``."""
        inside = (group.members[0] - 1) / group.size
        outside = (group.size - group.members[0]) / group.size * outside_ratio
        seconds = collective_cost.all_to_all(num_bytes, group, self._levels, outside_ratio=outside_ratio)
        return Cost(seconds, (inside + outside) * num_bytes)

    def send(self, num_bytes: Number) -> Cost:
        """From a stage to the next."""
        sent = np.where(self._c.pp > 1, num_bytes, 0.0)
        return Cost(collective_cost.send(num_bytes, self.pp, self._levels), sent)

    def around_ring(self, group: Group, num_bytes: Number) -> Cost:
        """``num_bytes`` of each member passed on until everybody had them."""
        return self.all_gather(group, num_bytes * group.size)


def communication(
    shape: ModelShape,
    links: LinkColumns,
    c: PlanColumns,
    *,
    element_bytes: Number,
    gradient_bytes: Number | None = None,
    regather: Number = 0,
    expert_load: Number = 1.0,
    domains_per_token: Number = np.inf,
) -> Communication:
    """What a table of plans sends, and how long that takes alone.

    Args:
        shape: The models.
        links: The networks.
        c: ``n`` plans.
        element_bytes: Of an activation and of a gathered parameter.
        gradient_bytes: Of a gradient element on the wire; null for fp32 or wider, as the engine reduces.
        regather: 1 where a split sequence is gathered a second time in the backward pass instead of kept (Megatron-LM).
        expert_load: Tokens of the fullest expert-parallel rank over the mean, at least 1.
        domains_per_token: Innermost domains that a token is sent to at most, once each (routing limited to nodes, with
            a dispatcher that sends a token once to a node); infinite for a copy per expert.
    """
    groups = Groups(links, c)
    wide = np.maximum(element_bytes, 4) if gradient_bytes is None else gradient_bytes
    tensor = _tensor(shape, groups, c, element_bytes, regather)
    forward, backward = tensor["forward"], tensor["backward"]
    experts = _experts(shape, groups, c, element_bytes, expert_load, domains_per_token)
    data = _data(shape, groups, c, element_bytes, wide)
    parts = {
        "tp_forward": forward * 2,
        "tp_backward": backward * 2,
        "tp_moe_forward": forward + experts["tp_forward"],
        "tp_moe_backward": backward + experts["tp_backward"],
        "tp_step": tensor["step"],
        "cp_forward": tensor["cp_forward"],
        "cp_backward": tensor["cp_backward"],
        "ep_forward": experts["forward"],
        "ep_backward": experts["backward"],
        "pp_send": tensor["send"],
        **data,
        **_vocabulary(shape, groups, c, element_bytes, wide),
    }
    n = len(c)
    columns = {name: np.broadcast_to(cost.seconds, n) for name, cost in parts.items()}
    columns |= {f"{name}_bytes": np.broadcast_to(cost.bytes, n) for name, cost in parts.items()}
    return Communication(**columns, shard_passes=np.broadcast_to(_shard_passes(c), n))


def _tokens(c: PlanColumns) -> Number:
    """Of a micro-batch on one context-parallel rank."""
    return c.micro_batch_size * c.sequence_length / c.cp


def _tensor(
    shape: ModelShape, groups: Groups, c: PlanColumns, element_bytes: Number, regather: Number
) -> dict[str, Cost]:
    """Half a dense layer (attention, or feed-forward) over the tensor group; context ring; stage boundary.

    Without sequence parallelism an all-reduce of the activations forward and one backward; with it, a gather and a
    reduce-scatter each, and a second gather in the backward pass of stacks that don't keep the gathered sequence
    (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2).
    """
    hidden = _tokens(c) * shape.hidden * element_bytes
    split = c.sequence_parallel > 0
    reduced, gathered = groups.all_reduce(groups.tp, hidden), groups.all_gather(groups.tp, hidden)
    norms = np.where(split, (2 * shape.num_layers / c.pp + 1) * shape.hidden * 4, 0.0)
    # Keys and values of one rank; with more tensor ranks than heads each head is held by several.
    heads = np.maximum(shape.num_kv_heads / c.tp, 1.0)
    keys = _tokens(c) * heads * (shape.query_key_dim + shape.value_dim) * element_bytes
    ring = groups.around_ring(groups.cp, keys)
    return {
        "forward": (gathered * 2).where(split, reduced),
        "backward": (gathered * (2 + regather)).where(split, reduced),
        "step": groups.all_reduce(groups.tp, norms),
        "cp_forward": ring,
        "cp_backward": ring * 2,
        "send": groups.send(hidden / np.where(split, c.tp, 1)),
    }


def _experts(
    shape: ModelShape,
    groups: Groups,
    c: PlanColumns,
    element_bytes: Number,
    expert_load: Number,
    domains_per_token: Number,
) -> dict[str, Cost]:
    """The second half of a layer with experts.

    Experts in slices on all ranks of the tensor group (ep 1, etp = tp; the engine): the tokens of the group are whole
    on each rank, the output is reduced, and the gradients of tokens and router weights are summed. Otherwise each rank
    dispatches its share of the tokens: all-to-all over ep, a gather over etp of what arrived, the way back for the
    output; the gradients take the same ways backwards (Megatron-LM's all-to-all dispatcher).
    """
    has_experts = np.asarray(shape.num_experts) > 0
    tokens, split = _tokens(c), c.sequence_parallel > 0
    hidden = tokens * shape.hidden * element_bytes
    weights = tokens * shape.experts_per_token * element_bytes
    reduced, gathered = groups.all_reduce(groups.tp, hidden), groups.all_gather(groups.tp, hidden)
    sliced_forward = (gathered * 2).where(split, reduced)
    entering = reduced + groups.all_reduce(groups.tp, weights)
    sliced_backward = (entering + gathered).where(split, entering)
    # Each rank of the tensor group dispatches its own share of the tokens, and the group gathers the sum.
    copies = hidden / c.tp * shape.experts_per_token
    domains = c.ep / np.maximum(groups.ep.members[0], 1)
    reached = np.minimum(domains * (1 - (1 - 1 / domains) ** np.maximum(shape.experts_per_token, 1)), domains_per_token)
    once = np.minimum(reached / np.maximum(shape.experts_per_token, 1), 1.0)
    outside = np.where(np.isfinite(domains_per_token), once, 1.0)
    exchange = groups.all_to_all(groups.ep, copies * expert_load, outside) * 2
    arrived = groups.all_gather(groups.etp, copies * expert_load * c.etp) * 2
    whole = gathered.where(~split, NOTHING)
    shared = (gathered * 2).where(split & (np.asarray(shape.shared_ffn) > 0), NOTHING)
    dispatched = arrived + whole + shared
    sliced = (c.ep == 1) & (c.etp == c.tp)
    return {
        "tp_forward": sliced_forward.where(sliced, dispatched).where(has_experts, NOTHING),
        "tp_backward": sliced_backward.where(sliced, dispatched).where(has_experts, NOTHING),
        "forward": exchange.where(has_experts, NOTHING),
        "backward": exchange.where(has_experts, NOTHING),
    }


def _vocabulary(
    shape: ModelShape, groups: Groups, c: PlanColumns, element_bytes: Number, wide: Number
) -> dict[str, Cost]:
    """Embedding, head and loss, split over the vocabulary or whole on every rank.

    The loss of a split vocabulary takes three all-reduces of a number per token: maximum, sum of exponentials, and the
    label's logit.
    """
    tokens = _tokens(c)
    hidden = tokens * shape.hidden * element_bytes
    split, by_vocabulary = c.sequence_parallel > 0, c.vocab_parallel > 0
    reduced, gathered = groups.all_reduce(groups.tp, hidden), groups.all_gather(groups.tp, hidden)
    per_token = groups.all_reduce(groups.tp, tokens * wide) * 3
    weights = shape.vocab * shape.hidden / np.where(by_vocabulary, c.tp, 1) * wide
    return {
        "vocab_first_forward": gathered.where(split, reduced).where(by_vocabulary, NOTHING),
        "vocab_first_backward": gathered.where(split, NOTHING),
        "vocab_last_forward": (gathered.where(split, NOTHING) + per_token.where(by_vocabulary, NOTHING)),
        "vocab_last_backward": gathered.where(split, reduced).where(by_vocabulary, NOTHING),
        "tied_reduce": groups.all_reduce(groups.pp, weights).where(np.asarray(shape.tied) > 0, NOTHING),
    }


def _data(shape: ModelShape, groups: Groups, c: PlanColumns, element_bytes: Number, wide: Number) -> dict[str, Cost]:
    """Gradients and parameters over the data-parallel ranks, for the pipeline rank with the most parameters.

    Parameters outside the experts are reduced over dp and cp, the experts' over their own data-parallel ranks. Shards
    are reduced over the replicas after the reduce-scatter.
    """
    dense, expert, messages = _parameters(shape, c)
    stage = np.where(c.dp_shard > 1, c.zero_stage, 0)
    ratio = _compression_ratio(shape, c)
    reductions = np.where((stage == 3) & (c.pp == 1), c.num_micro_batches, 1)
    reduce, gather = NOTHING, NOTHING
    for parameters, whole, shard, replicate in (
        (dense, groups.dp, groups.shard, groups.replicate),
        (expert, groups.edp, groups.edp_shard, groups.edp_replicate),
    ):
        message = parameters / messages
        gradients = message * wide * ratio
        scattered = groups.reduce_scatter(shard, gradients) + groups.all_reduce(replicate, gradients / shard.size)
        summed = groups.all_reduce(whole, gradients)
        reduce = reduce + scattered.where(stage > 0, summed) * messages
        gather = gather + groups.all_gather(shard, message * element_bytes) * messages
    return {
        "dp_reduce": reduce * reductions,
        "dp_gather": gather.where((stage == 1) | (stage == 2), NOTHING),
        "shard_gather": gather.where(stage == 3, NOTHING),
    }


def _parameters(shape: ModelShape, c: PlanColumns) -> tuple[Number, Number, Number]:
    """Parameters of the fullest pipeline rank outside the experts and in them, and the messages they travel in."""
    middle = c.largest_stage_layers * (c.virtual_stages - 1)
    vocabulary = shape.vocab * shape.hidden / np.where(c.vocab_parallel > 0, c.tp, 1)
    positions = shape.learned_positions * shape.hidden
    head = np.where(np.asarray(shape.tied) > 0, np.where(c.pp > 1, vocabulary, 0.0), vocabulary)
    moe_share = shape.num_moe_layers / shape.num_layers
    layer_parameters = (
        (1 - moe_share) * shape.dense_layer_parameters
        + moe_share * shape.moe_layer_parameters
        - shape.replicated_layer_parameters
    ) / c.tp + shape.replicated_layer_parameters
    first = (c.first_stage_layers + middle) * layer_parameters + vocabulary + positions
    last = (c.last_stage_layers + middle) * layer_parameters + head
    most = c.largest_stage_layers * c.virtual_stages
    alone = shape.num_layers * layer_parameters + vocabulary + positions + head
    dense = np.where(c.pp == 1, alone, np.maximum(np.maximum(first, last), most * layer_parameters))
    layers = np.minimum(most, shape.num_layers)
    expert = layers * moe_share * shape.expert_parameters / (c.ep * c.etp)
    by_layer = layers + 1
    buckets = np.ceil((dense + expert) / BUCKET_ELEMENTS)
    messages = np.where(c.zero_stage >= 2, by_layer, np.minimum(by_layer, buckets))
    return dense, expert, messages


def _shard_passes(c: PlanColumns) -> Number:
    """Passes of a step for which ZeRO 3 gathers a rank's parameters.

    Without a pipeline each forward and each backward pass. In a pipeline a backward pass leaves them gathered for the
    forward pass that follows it: one gather per forward pass of the warm-up, one per backward pass of the steady state.
    """
    micro_batches = c.num_micro_batches
    passes = np.where(c.pp > 1, micro_batches + 1, 2 * micro_batches)
    result: Number = np.where((c.zero_stage == 3) & (c.dp_shard > 1), passes, 0)
    return result


def _compression_ratio(shape: ModelShape, c: PlanColumns) -> Number:
    """Bytes of a compressed gradient over those of a plain one (4 bytes an element)."""
    ratios = {
        "none": 1.0,
        "int8": 1 / 4,
        "topk": 2 * TOPK_RATIO,
        "int8_topk": (1 / 4 + 1) * TOPK_RATIO,
        "powersgd": 2 * POWERSGD_RANK / np.asarray(shape.hidden, float),
    }
    words = words_of("gradient_compression")
    result: Number = np.select(
        [c.gradient_compression == words.index(word) for word in ratios], [np.asarray(r) for r in ratios.values()]
    )
    return result
