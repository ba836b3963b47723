"""What the cost model must know of a device, its links and the software that drives it.

The figures are attained ones, of real programs, not datasheet peaks: from ``hardware.yaml`` for the devices of the
catalogue, from ``autotune profile`` for this machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from engine.collective_cost import Link
from engine.plan import KeyExchange, Schedule
from engine.schema import Schema
from engine.spec import Count, NonNegative, Positive

MatmulPrecision = Literal["fp64", "fp32", "bf16", "fp16", "fp8"]


class MatmulFigures(Schema):
    """How fast a device multiplies matrices in one precision, as a function of shape."""

    tflops: Positive
    """Rate attained on the best shapes, 10^12 FLOP/s."""
    half_depth: NonNegative = 0.0
    """Inner dimension at which half of the rate is reached, for reasons other than bandwidth."""


class DeviceFigures(Schema):
    """One device."""

    matmul: dict[MatmulPrecision, MatmulFigures]
    """By precision of the operands; one that is missing can't be planned with."""
    sustained_ratio: Positive = 1.0
    """Rate that long training sustains over ``tflops`` of the best shapes measured alone (clocks, power, kernels)."""
    sustained_memory_ratio: Positive = 1.0
    """The same of the memory bandwidth."""
    tile_rows: Count = 128
    """Rows of the output that one unit computes at a time; shapes are rounded up to whole tiles."""
    tile_columns: Count = 128
    """Columns of the same."""
    num_units: Count = 1
    """Units that compute tiles at the same time (streaming multiprocessors); tiles come in whole waves of them."""
    attention_ratio: Annotated[float, Field(gt=0, le=1)] = 0.6
    """Rate of a fused attention kernel over the matrix-multiply rate."""
    memory_gb_per_second: Positive
    """Memory bandwidth that element-wise kernels attain, 10^9 bytes/s."""
    launch_us: NonNegative
    """Host time to launch one kernel, microseconds."""
    host_link_gb_per_second: Positive = 20.0
    """Bandwidth between the device and the host's memory, in one direction, 10^9 bytes/s."""
    overhead_gib: NonNegative = 0.0
    """Memory taken by driver, libraries and communicators before the first tensor."""
    overlap_slowdown_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """How much longer a computation takes while a collective runs beside it."""
    is_fitted: bool = False
    """Whether step times of published runs on it stand behind the figures."""
    interval_ratio: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Half-width of the interval of time estimates on this device, relative, with a stack that is not known."""


class LinkFigures(Schema):
    """One level of the network, from the closest devices outwards."""

    num_devices: Count | None = None
    """Consecutive devices that it joins; null for all of the cluster (the last level)."""
    gb_per_second: Positive
    """Bandwidth of one device to the others in one direction that large messages attain, 10^9 bytes/s."""
    latency_us: NonNegative
    """Time of one hop of an empty message, microseconds."""
    start_us: NonNegative = 7.0
    """Time of a collective beyond its hops, microseconds."""
    half_mb: NonNegative = 1.0
    """Message per hop (10^6 bytes) at which half of the bandwidth is attained."""
    pair_gb_per_second: Positive | None = None
    """Bandwidth between two devices where each pair has links of its own, 10^9 bytes/s; null where a switch gives a
    pair all of ``gb_per_second``."""
    reduction_gb_per_second: Positive | None = None
    """Bandwidth of an all-reduce computed inside the switches (NVLS, SHARP), as the bus bandwidth; null without."""
    reduction_min_devices: Count = 2
    """Group size from which the switches are used."""
    all_gather_ratio: Positive = 1.0
    """Time of an all-gather over what the cost model's form says, where a library departs from it."""
    reduce_scatter_ratio: Positive = 1.0
    """The same of a reduce-scatter."""
    all_to_all_ratio: Positive = 1.0
    """The same of an all-to-all."""
    send_ratio: Positive = 1.0
    """The same of a send."""


def links_of(levels: Sequence[LinkFigures], devices_per_node: int) -> tuple[Link, ...]:
    """Levels of a network in the form that ``engine.collective_cost`` takes.

    Args:
        levels: From the closest devices outwards.
        devices_per_node: Groups within a larger level are placed whole, as those of racks are.
    """
    return tuple(
        Link(
            num_devices=math.inf if level.num_devices is None else float(level.num_devices),
            bandwidth=level.gb_per_second * 1e9,
            latency=level.latency_us * 1e-6,
            start=level.start_us * 1e-6,
            half_bytes=level.half_mb * 1e6,
            pair_bandwidth=math.inf if level.pair_gb_per_second is None else level.pair_gb_per_second * 1e9,
            reduction_bandwidth=(level.reduction_gb_per_second or 0.0) * 1e9,
            reduction_min_devices=float(level.reduction_min_devices),
            all_gather_ratio=level.all_gather_ratio,
            reduce_scatter_ratio=level.reduce_scatter_ratio,
            all_to_all_ratio=level.all_to_all_ratio,
            send_ratio=level.send_ratio,
            placed_whole=float(level.num_devices is None or level.num_devices > devices_per_node),
        )
        for level in levels
    )


class SoftwareFigures(Schema):
    """What differs between training stacks on the same device: a generation of software as calibrated factors."""

    title: str
    """What it is."""
    parent: str | None = None
    """Stack that it grew from or is most like: its factors hold where no measured run says otherwise."""
    schedules: Annotated[tuple[Schedule, ...], Field(strict=False)] = ("1f1b", "interleaved_1f1b")
    """Pipeline schedules that it runs; none where it has no pipelines. The planner searches these."""
    uneven_stages: Literal["never", "odd_layers", "always"] = "odd_layers"
    """For which models it is searched for pipelines whose stages have unequally many layers; a first and a last stage
    with fewer are always allowed. ``odd_layers``: where an odd number of layers leaves few other ways (61 layers, for
    which Megatron-Core has ``--pipeline-model-parallel-layout``)."""
    compute_ratio: Positive = 1.0
    """Time of matrix products relative to the device's figures."""
    attention_ratio: Positive = 1.0
    """Time of fused attention relative to the device's figure (generations of the kernel)."""
    attention_tflops: Positive = 1e6
    """Most that its fused attention kernel attains on any device, 10^12 FLOP/s: one written for an older device doesn't
    use what newer ones have."""
    memory_bound_ratio: Positive = 1.0
    """Time of element-wise operators relative to the device's figure (how many are fused)."""
    half_precision_ratio: Positive = 0.5
    """Time of element-wise operators in 16 bits relative to 32: half as long for half the bytes; longer where they
    compute in 32 bits and convert."""
    fp8_ratio: Positive = 1.0
    """Rate of 8-bit products relative to the device's figure: recipes of scales differ."""
    communication_ratio: Positive = 1.0
    """Communication time relative to the links' figures."""
    host_ratio: Positive = 1.0
    """Launch overhead relative to the device's figure."""
    tp_launches: NonNegative = 0.0
    """Host work that tensor parallelism adds to each pass of a layer, and of an embedding or a head that it splits, in
    launches of a kernel."""
    shard_launches: NonNegative = 0.0
    """Host work that sharded parameters add to each pass of a layer, an embedding or a head, in launches."""
    gather_launches: NonNegative = 0.0
    """Host work around each gather of sharded parameters and each reduction into shards, in launches."""
    pp_launches: NonNegative = 0.0
    """Host work that a pipeline adds to each pass of a micro-batch, in launches."""
    tp_communication_ratio: Positive = 1.0
    """Tensor-parallel communication within a step over the same alone: ranks arrive apart, buffers are copied."""
    dp_communication_ratio: Positive = 1.0
    """The same of data-parallel communication."""
    pp_communication_ratio: Positive = 1.0
    """The same of sends between pipeline stages."""
    pads_vocabulary: bool = True
    """Whether the vocabulary is enlarged to a multiple of what matrix units like."""
    recomputes: bool = True
    """Whether what a plan says is recomputed is in its measured steps; false for figures taken without, so that
    recompute costs a plan no time with such a stack."""
    recompute_ratio: Positive = 1.0
    """Time of a forward pass that is done again, relative to the first time: parts of it may be kept or left out."""
    expert_ratio: Positive = 1.0
    """Time of the experts' grouped products relative to the device's figures."""
    expert_launches: NonNegative = 2.0
    """Kernels of a grouped linear layer for each expert, forward: products and casts are not one for all."""
    imbalance_ratio: NonNegative = 0.1
    """Tokens of the fullest expert rank above the mean, relative; benchmarks that force balance have 0."""
    fused_attention: bool = True
    """Whether attention is one kernel that keeps no score matrix."""
    narrow_gradients: bool = False
    """Whether gradients are reduced over data-parallel ranks in the compute dtype, not in fp32."""
    regathers: bool = False
    """Whether a split sequence is gathered again in the backward pass instead of kept, with nothing to hide it
    (Megatron-LM)."""
    shares_sends: bool = False
    """Whether tensor ranks each send a share of the activations to the next stage, which gathers them there
    (Megatron-LM of 2021, Narayanan et al. section 4.1; DeepSpeed)."""
    sums_from_second: bool = False
    """Whether the first micro-batch's gradients become the sum that later ones are added to, in place of being added to
    zeros; under ZeRO-3 without a pipeline each rank then adds its shard alone."""
    sends_once: bool = False
    """Whether a token goes once to a node however many of its experts are there, at most to as many nodes as its
    routing allows (DeepEP); else a copy for each expert."""
    cp_attention: Annotated[tuple[KeyExchange, ...], Field(strict=False)] = ("ring",)
    """How context ranks come by each other's keys and values: passed around a ring beside the attention, gathered all
    at once, or as the plan says. The planner searches these."""
    wide_key_gradients: bool = False
    """Whether gradients of keys and values are summed over context ranks in at least fp32, not in the compute dtype."""
    sums_whole_gradients: bool = False
    """Whether ZeRO-1 shards the states alone: gradients are summed whole on every rank, and the updated parameters are
    gathered in the width they are stored in. Else gradients are reduced into shards, and parameters gathered in the
    compute dtype."""
    sums_replicas_once: bool = False
    """Whether replicas of shards sum their gradients once a step, also where each micro-batch's are reduced into
    shards."""
    dispatches_whole: bool = False
    """Whether tensor ranks that hold slices of the same experts each dispatch all tokens of the group, instead of a
    share of them that they gather from each other where it arrives."""
    sums_tied_shards: bool = False
    """Whether the ends of a pipeline sum the shards that ZeRO-2 and 3 leave of a tied embedding's gradient, not all of
    it."""
    split_backward_keeps_gathered: bool = False
    """Whether ZeRO-3 keeps parameters gathered for the whole step under schedules with a backward pass of the weights
    alone."""
    memory_recipe: str = "megatron"
    """Which copies it keeps in memory: a name in ``autotune/cost/memory.yaml``."""
    interval_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """Half-width of the interval of its time estimates on devices whose figures are fitted, relative; null takes the
    device's."""
    source: str = ""
    """What it describes: the release, repository or paper that its facts and the runs behind its factors are from."""

    @property
    def gathers_keys(self) -> bool:
        """Whether keys and values are gathered whatever the plan says."""
        return self.cp_attention == ("all_gather",)


class MeasuredFigures(Schema):
    """How ``autotune profile`` measured a cluster, and what it found beyond the figures of device and links."""

    started: str
    """UTC time, ISO 8601."""
    host: str
    """Name of the (first) machine."""
    device_name: str
    """What its device is called."""
    versions: dict[str, str]
    """Python, torch and the system."""
    seconds: NonNegative
    """How long it took."""
    is_quick: bool
    """Whether fewer and shorter measurements were made."""
    busy_cpus: NonNegative
    """CPUs' worth of work that other processes did meanwhile."""
    noise_ratio: NonNegative
    """How far the median of the timings lay above the low quantile that was taken, relative."""
    errors: dict[str, NonNegative] = Field(default_factory=dict)
    """Median relative error of each fit over the measurements it was made from."""
    coefficients: dict[str, NonNegative] = Field(default_factory=dict)
    """Figures of the cost model's formulas on this machine, in place of those fitted to published runs."""
    software: dict[str, NonNegative] = Field(default_factory=dict)
    """Factors of this project's engine on this machine, in place of those of ``software.yaml``."""
    input_tokens_per_second: Positive | None = None
    """Tokens that one loader thread delivers."""
