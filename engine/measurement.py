"""What ``engine.probe --measure`` says of a machine: samples of single operations and of small training steps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine.plan import Plan, Precision
from engine.schema import Schema
from engine.spec import Count, CountOrZero, ModelSpec, NonNegative, Positive

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
StreamOperator = Literal["add", "activation", "norm", "loss", "optimizer"]


class MatmulSample(Schema):
    """One product ``[rows, depth] x [depth, columns]`` as a linear layer makes it."""

    precision: Precision
    """Dtype of the operands."""
    part: Literal["forward", "input_gradient", "weight_gradient"]
    """Which of a linear layer's three products it is: they read their operands in different orders."""
    rows: Count
    """Rows of the result."""
    columns: Count
    """Columns of the result."""
    depth: Count
    """Inner dimension."""
    seconds: Positive
    """Time."""


class AttentionSample(Schema):
    """Causal attention between the projections."""

    precision: Precision
    """Dtype."""
    batch: Count
    """Sequences."""
    num_heads: Count
    """Query heads, and as many key and value heads."""
    head_dim: Count
    """Dimensions per head."""
    length: Count
    """Tokens per sequence."""
    forward_seconds: Positive
    """Time of the forward pass."""
    backward_seconds: Positive
    """Time of the backward pass."""


class StreamSample(Schema):
    """A memory-bound operator, forward and backward (``add`` and ``optimizer`` have one pass)."""

    operator: StreamOperator
    """``add`` of two tensors into a new one; gated ``activation``; ``norm``; ``loss`` (cross-entropy); ``optimizer``
    (AdamW with the gradient's norm)."""
    precision: Precision
    """Dtype of the activations."""
    elements: Count
    """Elements of the operator's input; parameters of the optimizer."""
    seconds: Positive
    """Time of all passes."""


class CollectiveSample(Schema):
    """One collective operation as the engine calls it."""

    operation: Collective
    """What is done."""
    num_ranks: Count
    """Ranks of the group."""
    stride: Count = 1
    """Distance between neighbours of the group in the order of ranks."""
    bytes: Count
    """The whole message: what is reduced, what each rank has after a gather or before a scatter, what one sends."""
    seconds: Positive
    """Time over calls; the slowest rank's."""


class StepSample(Schema):
    """One training step of a small model by the engine itself."""

    model: ModelSpec
    """The architecture."""
    plan: Plan
    """How it was split."""
    global_batch_size: Count
    """Sequences."""
    sequence_length: Count
    """Tokens each."""
    compute_seconds: Positive
    """Time of forward and backward; the slowest rank's."""
    optimizer_seconds: Positive
    """Time of norm, clipping and update; the slowest rank's."""


class OverlapSample(Schema):
    """A computation and a collective at the same time."""

    compute_seconds: Positive
    """The computation alone."""
    collective_seconds: Positive
    """The collective alone."""
    both_seconds: Positive
    """Both started together, until both have ended."""


class Machine(Schema):
    """Where and how it was measured."""

    host: str
    """Name of the first node."""
    device: Literal["cpu", "cuda"]
    """Kind of device."""
    device_name: str
    """What the device is called."""
    num_units: Count = 1
    """Streaming multiprocessors or compute units; 1 for a CPU."""
    memory_bytes: Count
    """Memory of the device, or of the machine for a CPU."""
    context_bytes: CountOrZero = 0
    """Memory that driver and libraries hold before the first tensor (CUDA)."""
    num_ranks: Count
    """Processes that measured at the same time, one per device."""
    num_nodes: Count
    """Machines they ran on."""
    threads_per_rank: Count
    """CPU threads of each."""
    backend: str
    """What the collectives ran on."""
    versions: dict[str, str]
    """Python, torch and the system."""
    started: str
    """UTC time at which it began, ISO 8601."""
    seconds: NonNegative
    """How long it took."""
    busy_cpus: NonNegative
    """CPUs' worth of work that other processes did meanwhile, on average; it makes times too long."""
    is_quick: bool = False
    """Whether fewer and shorter measurements were made."""


class Measurement(Schema):
    """All of it."""

    schema_version: Literal[1] = 1
    """Version of this file format."""
    machine: Machine
    """Where and how."""
    launch_seconds: Positive
    """Host time of one small operator."""
    matmul: Annotated[tuple[MatmulSample, ...], Field(strict=False)]
    """Matrix products."""
    attention: Annotated[tuple[AttentionSample, ...], Field(strict=False)]
    """Attention."""
    stream: Annotated[tuple[StreamSample, ...], Field(strict=False)]
    """Memory-bound operators."""
    collectives: Annotated[tuple[CollectiveSample, ...], Field(strict=False)] = ()
    """Collective operations; empty for one device."""
    overlap: OverlapSample | None = None
    """Overlap; null for one device."""
    steps: Annotated[tuple[StepSample, ...], Field(strict=False)] = ()
    """Small training steps under different plans."""
    host_link_bytes_per_second: Positive | None = None
    """Copies from pinned host memory to the device (CUDA)."""
    input_tokens_per_second: Positive
    """Tokens that one loader thread delivers."""
    noise_ratio: NonNegative
    """How far the median of the timings typically lies above what is told (a low quantile), relative."""
