"""From the work of single blocks to the time of a step: layers, stages, schedule, overlap, optimizer, stragglers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from autotune.cost.activations import SELECTIVE, recomputed_share
from autotune.cost.coefficients import Coefficients
from autotune.cost.columns import PlanColumns
from autotune.cost.communication import Communication, LinkColumns
from autotune.cost.compute import ComputeWork, Work
from autotune.cost.device_columns import DeviceColumns, SoftwareColumns
from autotune.cost.parameters import is_vee, kinds_of_ranks, layer_share, rank_blocks, vocabulary_share
from autotune.cost.parts import HIDDEN_PARTS, TIME_PARTS
from autotune.cost.pipeline import bubble_seconds, send_seconds
from autotune.cost.shapes import ModelShape, Number

STATE_TRAFFIC_BYTES = 24.0
"""Per parameter whose states are in host memory: master copy and two moments in fp32, there and back."""
KEPT_WIDTHS = 16.0
"""Tensors of hidden size that a layer keeps for its backward pass where nothing is recomputed."""
BLOCKS = ("dense_layer", "moe_layer", "embedding", "head")
LAYERS = BLOCKS[:2]
FIRST, MIDDLE, LAST, MEAN = 0, 1, 2, 3
"""Kinds of pipeline ranks: the first, the fullest between the ends, the last; and the mean over all."""
WEIGHT_RATIO = 0.5
"""Share of a backward pass, without recomputation, that computes gradients of weights: each matrix product has one
product for its input and an equal one for its weights."""


@dataclass(frozen=True)
class StepTime:
    """Seconds per step by part; each ``[n]``."""

    parts: dict[str, np.ndarray]
    """``TIME_PARTS``."""
    hidden: dict[str, np.ndarray]
    """``HIDDEN_PARTS``."""


class Blocks(NamedTuple):
    """A quantity of each kind of block, ``[n]`` each; or how many of each a rank has."""

    dense: Number
    moe: Number
    embedding: Number
    head: Number

    def on(self, counts: Blocks) -> np.ndarray:
        """The sum over a rank's blocks. ``[n]``, or ``[4, n]`` for the counts of all kinds of ranks."""
        a, b, e, h = self
        return np.asarray(a * counts.dense + b * counts.moe + e * counts.embedding + h * counts.head)

    def of_kind(self, kind: np.ndarray) -> Blocks:
        """Counts of one kind of rank, ``[n]``, of those of all kinds."""
        return Blocks(*(pick(np.asarray(count), kind) for count in self))


def blocks_of(s: ModelShape, c: PlanColumns) -> Blocks:
    """Blocks of each kind of pipeline rank, over all its virtual stages; ``[4, n]`` each."""
    ranks = rank_blocks(s, c, kinds_of_ranks(s, c))
    mean = (s.num_layers - s.num_moe_layers) / c.pp, s.num_moe_layers / c.pp, 1 / c.pp, 1 / c.pp
    own = ranks.dense_layers, ranks.moe_layers, ranks.has_embedding, ranks.has_head
    return Blocks(
        *(
            np.concatenate([of_kinds, np.broadcast_to(of_mean, (1, len(c)))])
            for of_kinds, of_mean in zip(own, mean, strict=True)
        )
    )


def lighter_ranks(s: ModelShape, c: PlanColumns, slow: np.ndarray) -> np.ndarray:
    """Pipeline ranks after the last of the slowest ones, where an even split gives the first ranks a layer more.

    Args:
        s: The architecture.
        c: ``n`` plans; those with several stages per rank, or another split, have none.
        slow: The slowest kind of rank.
    """
    whole, rest = s.num_layers // c.pp, s.num_layers % c.pp
    even = (c.virtual_stages == 1) & (c.largest_stage_layers == whole + (rest > 0)) & (c.last_stage_layers == whole)
    heavy = np.where(rest > 0, rest, np.where(slow == FIRST, 1, c.pp))
    return np.asarray(np.where(even & (slow != LAST), c.pp - heavy, 0))


def smooth_maximum(a: np.ndarray, b: np.ndarray, sharpness: float) -> np.ndarray:
    """Between the maximum and the sum: ``(a^p + b^p)^(1/p)``, computed without overflow."""
    large, small = np.maximum(a, b), np.minimum(a, b)
    return np.asarray(large * (1 + (small / np.maximum(large, 1e-30)) ** sharpness) ** (1 / sharpness))


@dataclass(frozen=True)
class Scope:
    """Model, device, stack, network and figures of the formulas: one of each for a table, or one per row."""

    shape: ModelShape
    device: DeviceColumns
    software: SoftwareColumns
    coefficients: Coefficients
    links: LinkColumns


class Wait(NamedTuple):
    """Communication of a layer's pass: what nothing hides, and what compute hides. Seconds."""

    exposed: Number
    hidden: Number

    def plus(self, other: Wait) -> Wait:
        """Both."""
        return Wait(self.exposed + other.exposed, self.hidden + other.hidden)


def beside(wait: Number, compute: Number, ratio: Number, slowdown: Number) -> Wait:
    """Communication that runs beside compute.

    At most ``ratio * compute`` of it is hidden, and what is hidden slows the compute down: that share is exposed time.
    """
    hidden = np.minimum(wait, ratio * compute)
    return Wait(wait - hidden + slowdown * hidden, hidden)


@dataclass(frozen=True)
class PassTimes:
    """One pass of a micro-batch: each block's work and its communication."""

    work: dict[str, Work]
    """Block (``BLOCKS``) -> its work."""
    waits: dict[str, dict[str, Wait]]
    """Axis -> block -> communication."""

    def seconds(self) -> Blocks:
        """Device time of each block with its exposed communication."""
        return Blocks(
            *(
                self.work[block].seconds + sum(wait[block].exposed for wait in self.waits.values() if block in wait)
                for block in BLOCKS
            )
        )

    def of(self, name: str) -> Blocks:
        """One class of work, by block."""
        return Blocks(*(getattr(self.work[block], name) for block in BLOCKS))

    def waiting(self, axis: str) -> tuple[Blocks, Blocks]:
        """Communication of one axis by block: exposed, hidden."""
        none = Wait(0.0, 0.0)
        found = [self.waits[axis].get(block, none) for block in BLOCKS]
        return Blocks(*(wait.exposed for wait in found)), Blocks(*(wait.hidden for wait in found))


def pass_times(
    x: Scope, c: PlanColumns, work: ComputeWork, wire: Communication, direction: Literal["forward", "backward"]
) -> PassTimes:
    """One pass of a micro-batch, ``forward`` or ``backward`` (without what is recomputed)."""
    k, slowdown, ratio = x.coefficients, x.device.overlap_slowdown_ratio, x.software.communication_ratio
    works = {block: getattr(getattr(work, block), direction) for block in BLOCKS}
    if direction == "backward":
        for block, parameters in zip(BLOCKS, block_parameters(x.shape, c), strict=True):
            added = sum(parameters) * k.accumulate_bytes / x.device.memory_bytes_per_second * accumulated_share(x, c)
            works[block] = works[block]._replace(memory=works[block].memory + added)
    for block in BLOCKS:
        launches = works[block].kernels + x.software.shard_launches * (c.dp_shard > 1)
        is_split = (c.tp > 1) & ((block in LAYERS) | (np.asarray(c.vocab_parallel) > 0))
        launches = launches + x.software.tp_launches * is_split
        works[block] = works[block]._replace(kernels=launches)
    cp, ep = (getattr(wire, f"{name}_{direction}") * ratio for name in ("cp", "ep"))
    tp, tp_moe, vocab_first, vocab_last = (
        getattr(wire, f"{name}_{direction}") * ratio * x.software.tp_communication_ratio
        for name in ("tp", "tp_moe", "vocab_first", "vocab_last")
    )
    hides_tp = np.where(c.overlap_tp > 0, k.tp_hidden_ratio, 0.0)
    dense, moe = works["dense_layer"], works["moe_layer"]
    ring = beside(cp, dense.attention, k.cp_hidden_ratio, slowdown)
    waits = {
        "tp": {
            "dense_layer": beside(tp, dense.matmul, hides_tp, slowdown),
            "moe_layer": beside(tp_moe, moe.matmul, hides_tp, slowdown),
            "embedding": Wait(vocab_first, 0.0),
            "head": Wait(vocab_last, 0.0),
        },
        "cp": {"dense_layer": ring, "moe_layer": ring},
        "ep": {"moe_layer": beside(ep, moe.matmul, k.ep_hidden_ratio, slowdown)},
    }
    return PassTimes(works, waits)


@dataclass(frozen=True)
class MicroBatchTimes:
    """Both passes of a micro-batch, by block: times of any set of blocks follow, of a rank or of one of its stages."""

    forward: PassTimes
    backward: PassTimes
    """Without what is recomputed."""
    again: Blocks
    """Forward work done again in the backward pass, seconds."""
    kernels_again: Blocks
    """Its kernels."""
    launch: Number
    """Seconds per kernel."""
    pass_launches: Number
    """Launches' worth of host work of each pass, whatever its blocks."""
    sharpness: float
    """Of ``smooth_maximum``, between device and host."""

    def device_seconds(self, counts: Blocks) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward pass of so many blocks, with exposed communication, as if the host were never late."""
        return self.forward.seconds().on(counts), self.backward.seconds().on(counts) + self.again.on(counts)

    def seconds(self, counts: Blocks) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward pass of so many blocks."""
        forward, backward = self.device_seconds(counts)
        kernels = self.forward.of("kernels").on(counts) + self.pass_launches
        kernels_back = self.backward.of("kernels").on(counts) + self.kernels_again.on(counts) + self.pass_launches
        return (
            smooth_maximum(forward, kernels * self.launch, self.sharpness),
            smooth_maximum(backward, kernels_back * self.launch, self.sharpness),
        )


def micro_batch_times(x: Scope, c: PlanColumns, work: ComputeWork, wire: Communication) -> MicroBatchTimes:
    """The passes of a micro-batch from the work of single blocks and the seconds of single collectives."""
    forward, backward = pass_times(x, c, work, wire, "forward"), pass_times(x, c, work, wire, "backward")
    again_ratio = x.software.recomputes * x.software.recompute_ratio
    share = recomputed_share(c) * again_ratio
    blocks, kernels = forward.seconds(), forward.of("kernels")
    selective = (c.recompute == SELECTIVE) * work.attention_again.seconds * again_ratio
    return MicroBatchTimes(
        forward,
        backward,
        again=Blocks(blocks.dense * share + selective, blocks.moe * share + selective, 0.0, 0.0),
        kernels_again=Blocks(kernels.dense * share, kernels.moe * share, 0.0, 0.0),
        launch=launch_seconds(x) * (1 + x.coefficients.host_skew * (c.tp - 1)),
        pass_launches=x.software.pp_launches * (c.pp > 1),
        sharpness=x.coefficients.host_sharpness,
    )


def compose(x: Scope, c: PlanColumns, work: ComputeWork, wire: Communication) -> StepTime:
    """A step from the work of single blocks and the seconds of single collectives.

    The slowest kind of pipeline rank sets the pace; filling and draining pass through all.
    """
    k, m = x.coefficients, c.num_micro_batches
    ranks = blocks_of(x.shape, c)
    micro_batch = micro_batch_times(x, c, work, wire)
    forward, backward, again, launch = micro_batch.forward, micro_batch.backward, micro_batch.again, micro_batch.launch
    forward_device, backward_device = micro_batch.device_seconds(ranks)
    forward_seconds, backward_seconds = micro_batch.seconds(ranks)

    slow = np.argmax((forward_seconds + backward_seconds)[:MEAN], axis=0)
    slow_forward, slow_backward = pick(forward_seconds, slow), pick(backward_seconds, slow)
    own = ranks.of_kind(slow)

    parts: dict[str, Number] = {}
    hidden: dict[str, Number] = {}
    for part, name in {"matmul": "matmul", "attention": "attention", "memory_bound": "memory"}.items():
        parts[part] = m * (forward.of(name).on(own) + backward.of(name).on(own))
    parts["recompute"] = m * again.on(own)
    gathers = num_gathers(c, wire, own) * x.software.gather_launches * launch
    parts["host"] = m * (slow_forward + slow_backward - pick(forward_device + backward_device, slow)) + gathers
    for axis in ("tp", "cp", "ep"):
        (shown, unseen), (shown_back, unseen_back) = forward.waiting(axis), backward.waiting(axis)
        parts[axis] = m * (shown.on(own) + shown_back.on(own))
        hidden[axis] = m * (unseen.on(own) + unseen_back.on(own))
    weight_ratio = WEIGHT_RATIO * (1 - again.on(own) / np.maximum(pick(backward_device, slow), 1e-30))
    parts["bubble"] = bubble_seconds(
        c.schedule, c.pp, c.virtual_stages, m, slow_forward, slow_backward,
        forward_seconds[MEAN], backward_seconds[MEAN], weight_ratio,
        num_after=lighter_ranks(x.shape, c, slow), last_seconds=forward_seconds[LAST] + backward_seconds[LAST],
    )  # fmt: skip
    send = np.asarray(wire.pp_send) * x.software.communication_ratio * x.software.pp_communication_ratio
    slow_seconds, mean_seconds = slow_forward + slow_backward, forward_seconds[MEAN] + backward_seconds[MEAN]
    parts["pp"] = send_seconds(
        c.schedule, c.pp, c.virtual_stages, m, send, c.overlap_pp > 0,
        slack=(slow_seconds - mean_seconds) * c.pp / np.maximum(c.pp - 1, 1),
        stage_forward=slow_forward / c.virtual_stages,
        stage_weight=slow_backward * weight_ratio / c.virtual_stages,
    )  # fmt: skip
    hidden["pp"] = np.maximum(2 * m * c.virtual_stages * send * (c.pp > 1) - parts["pp"], 0)
    data = data_parallel(x, c, wire, slow_forward, slow_backward)
    parts["dp"], hidden["dp"] = data
    parts["optimizer"] = optimizer_seconds(x, c, own, launch)
    parts["offload"], hidden["offload"] = offload_seconds(x, c, own, slow_forward, slow_backward)
    total = sum(parts.values())
    parts["straggler"] = total * k.straggler_ratio * np.log2(np.maximum(c.world_size / 8, 1))
    n = len(c)
    return StepTime(
        {name: np.broadcast_to(parts[name], n) for name in TIME_PARTS},
        {name: np.broadcast_to(hidden[name], n) for name in HIDDEN_PARTS},
    )


def launch_seconds(x: Scope) -> Number:
    """Host time of one kernel."""
    return x.device.launch_seconds * x.software.host_ratio * x.coefficients.framework_ratio


def data_parallel(
    x: Scope, c: PlanColumns, wire: Communication, forward: np.ndarray, backward: np.ndarray
) -> tuple[Number, Number]:
    """Gradient reduction, parameter gathers and the gathers of sharded parameters: exposed and hidden seconds per step.

    With overlap, gradients are reduced beside the last micro-batch's backward pass and parameters gathered beside the
    next step's first forward pass; sharded parameters (ZeRO-3) are gathered beside each pass, but for the first layer.

    Args:
        x: Model, plan, device, stack.
        wire: Seconds of the collectives.
        forward: Seconds of a micro-batch's forward pass on the rank.
        backward: Of its backward pass.
    """
    k = x.coefficients
    ratio = np.where(c.overlap_dp > 0, k.dp_hidden_ratio, 0.0)
    slowdown = x.device.overlap_slowdown_ratio
    scale = x.software.communication_ratio * x.software.dp_communication_ratio
    m = c.num_micro_batches
    passes = wire.shard_passes
    # ZeRO-3 without a pipeline reduces in every backward pass, all others in the last.
    reductions = np.where((passes > 0) & (c.pp == 1), m, 1)
    reduce = beside(wire.dp_reduce * scale, reductions * backward, ratio, slowdown)
    gather = beside(wire.dp_gather * scale, forward, ratio, slowdown)
    first = 1 / np.maximum(x.shape.num_layers / c.pp, 1)
    shard = wire.shard_gather * scale * passes
    beside_passes = beside(shard * (1 - first), passes / 2 * (forward + backward), ratio, slowdown)
    whole = reduce.plus(gather).plus(beside_passes)
    once = (wire.tied_reduce + wire.tp_step) * scale
    return whole.exposed + shard * first + once, whole.hidden


def accumulated_share(x: Scope, c: PlanColumns) -> Number:
    """Share of a rank's gradients that a micro-batch adds to those of others, mean over the step."""
    m = c.num_micro_batches
    from_second = (m - 1) / m / np.where((c.zero_stage >= 3) & (c.pp == 1), c.dp_shard, 1)
    return np.where(np.asarray(x.software.sums_from_second) > 0, from_second, 1.0)


def num_gathers(c: PlanColumns, wire: Communication, own: Blocks) -> Number:
    """Gathers and reductions of sharded parameters per step and rank: of every block one each, or under ZeRO-3 a gather
    for each pass and, without a pipeline, a reduction for each micro-batch."""
    blocks = own.dense + own.moe + own.embedding + own.head
    passes = np.asarray(wire.shard_passes)
    each = np.where(passes > 0, passes + np.where(c.pp == 1, c.num_micro_batches, 1), 2)
    return blocks * each * (c.dp_shard > 1)


def block_parameters(s: ModelShape, c: PlanColumns) -> tuple[tuple[Number, Number], ...]:
    """Parameters of each kind of block on one rank: those outside the experts, and the experts'."""
    dense, moe, experts = layer_share(s, c)
    vocabulary = vocabulary_share(s, c)
    # A tied head is the embedding where both are on one rank.
    head = vocabulary * np.where((np.asarray(s.tied) > 0) & ((c.pp == 1) | is_vee(c)), 0, 1)
    return (dense, 0.0), (moe, experts), (vocabulary, 0.0), (head, 0.0)


def rank_parameters(s: ModelShape, c: PlanColumns, own: Blocks) -> tuple[Number, Number]:
    """Parameters of a pipeline rank with those blocks: outside the experts, and the experts'."""
    outside, experts = (Blocks(*kind) for kind in zip(*block_parameters(s, c), strict=True))
    return outside.on(own), experts.on(own)


def sharded_parameters(s: ModelShape, c: PlanColumns, own: Blocks, from_stage: int) -> Number:
    """A rank's share of what its blocks hold, of what ZeRO shards from a stage on: states from 1, parameters from 3."""
    shared, experts = rank_parameters(s, c, own)
    sharded = c.zero_stage >= from_stage
    share = shared / np.where(sharded, c.dp_shard * c.cp, 1)
    result: Number = share + experts / np.where(sharded, np.maximum(c.edp / c.dp_replicate, 1), 1)
    return result


def optimizer_seconds(x: Scope, c: PlanColumns, own: Blocks, launch: Number) -> Number:
    """The update of a rank's share of the states through memory, and its launches."""
    k = x.coefficients
    through_memory = sharded_parameters(x.shape, c, own, 1) * k.optimizer_bytes / x.device.memory_bytes_per_second
    return through_memory + k.step_kernels * launch


def offload_seconds(
    x: Scope, c: PlanColumns, own: Blocks, forward: np.ndarray, backward: np.ndarray
) -> tuple[Number, Number]:
    """Traffic to host memory: activations beside each pass, parameters before each pass, states around the update."""
    link, slowdown = x.device.host_link_bytes_per_second, x.device.overlap_slowdown_ratio
    states = c.offload_optimizer_ratio * sharded_parameters(x.shape, c, own, 1) * STATE_TRAFFIC_BYTES / link
    weights = sharded_parameters(x.shape, c, own, 3)
    tokens = c.micro_batch_size * c.sequence_length / c.cp
    kept = tokens * x.shape.hidden * (own.dense + own.moe)
    kept = kept * np.where(recomputed_share(c) >= 1, 1.0, KEPT_WIDTHS / c.tp)
    elements = kept * c.offload_activations_ratio + weights * c.offload_parameters_ratio
    traffic = elements * x.device.element_bytes / link
    both = beside(traffic, forward, 1.0, slowdown).plus(beside(traffic, backward, 1.0, slowdown))
    return states + c.num_micro_batches * both.exposed, c.num_micro_batches * both.hidden


def pick(of_kinds: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """Each row's value for its kind of rank. ``of_kinds``: ``[4, n]``; ``kind``: ``[n]``."""
    return np.asarray(np.take_along_axis(of_kinds, kind[None], axis=0)[0])
