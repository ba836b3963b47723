"""What the cost model says of candidates before they run: step time by part and memory by part, with intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autotune.cost.columns import PlanColumns, encode
from autotune.cost.shapes import ModelShape
from autotune.specs.cluster import ClusterSpec
from engine.plan import PlanTable
from engine.spec import ModelSpec

Method = Literal["formula", "replay", "trace", "measured"]

TIME_PARTS = {
    "matmul": "matrix products outside attention, forward and backward",
    "attention": "attention's own products and softmax",
    "memory_bound": "norms, activations, residuals, embedding, loss and other memory-bound work",
    "recompute": "forward work done again in the backward pass",
    "host": "waiting for the host to launch kernels",
    "tp": "tensor-parallel communication that nothing hides",
    "cp": "context-parallel communication that nothing hides",
    "ep": "expert all-to-all that nothing hides, with the wait for the fullest expert",
    "pp": "pipeline sends that nothing hides",
    "bubble": "idle time of the pipeline",
    "dp": "data-parallel communication that nothing hides",
    "optimizer": "the optimizer step",
    "offload": "traffic to host memory that nothing hides",
    "straggler": "waiting for the slowest device",
}
"""Part -> what it is. They add up to the step time; each is seconds per step of the slowest pipeline stage."""

HIDDEN_PARTS = ("tp", "cp", "ep", "pp", "dp", "offload")
"""Communication that has a hidden share too."""

MEMORY_PARTS = {
    "parameters": "weights, as the compute uses and the optimizer keeps them",
    "gradients": "gradients of the step",
    "optimizer": "optimizer states",
    "activations": "activations kept for the backward pass, over all micro-batches in flight",
    "logits": "the head's output and the loss, at their peak",
    "buffers": "communication buffers and gathered parameters",
    "overhead": "driver, libraries, communicators and fragmentation",
}
"""Part -> what it is. They add up to the memory of the fullest device."""


@dataclass(frozen=True)
class EstimateTable:
    """Estimates of ``n`` candidates; every array is ``[n]``."""

    step_seconds: np.ndarray
    step_seconds_low: np.ndarray
    step_seconds_high: np.ndarray
    memory_bytes: np.ndarray
    """Peak memory of the fullest device as its allocator reserves it: the point estimate."""
    memory_bytes_low: np.ndarray
    memory_bytes_high: np.ndarray
    """With the margin: a plan is taken to fit where this is within the device's memory."""
    allocated_bytes: np.ndarray
    """Peak of live tensors on the fullest device, without the allocator's slack and the driver's share."""
    time: Mapping[str, np.ndarray]
    """Seconds by part (``TIME_PARTS``), which add up to ``step_seconds``."""
    hidden: Mapping[str, np.ndarray]
    """Seconds of communication (``HIDDEN_PARTS``) that run beside compute."""
    memory: Mapping[str, np.ndarray]
    """Bytes by part (``MEMORY_PARTS``), which add up to ``memory_bytes``, of the fullest stage."""
    fullest_stage: np.ndarray
    """Pipeline rank of the fullest device."""
    method: Method = "formula"

    def __len__(self) -> int:
        return len(self.step_seconds)


def estimate(
    model: ModelSpec,
    cluster: ClusterSpec,
    table: PlanTable | PlanColumns,
    *,
    software: str = "default",
    optimizer: Literal["adamw", "sgd"] = "adamw",
) -> EstimateTable:
    """Estimate every plan of a table in closed form.

    Args:
        model: The architecture.
        cluster: The machines; needs ``figures`` and ``links``.
        table: ``n`` legal plans with their batches, as words (``engine.plan.plan_table``) or codes.
        software: Training stack, a name in ``software.yaml``.
        optimizer: Optimizer, for its states.

    Raises:
        UserError: The cluster has no figures, or none for a precision of the table.
    """
    shape = ModelShape.of(model)
    columns = table if isinstance(table, PlanColumns) else encode(table, model.num_layers)
    return estimate_columns(shape, columns, optimizer=optimizer)


def estimate_columns(shape: ModelShape, c: PlanColumns, *, optimizer: str = "adamw") -> EstimateTable:
    """Preliminary."""
    n = len(c)
    ones = np.ones(n)
    tokens = c.global_batch_size * c.sequence_length / c.world_size
    compute = 6 * shape.total_parameters * tokens / 150e12 * (1 + 0.05 * c.tp)
    bubble = compute * (c.pp - 1) / (c.virtual_stages * c.num_micro_batches)
    time = dict.fromkeys(TIME_PARTS, 0.0 * ones)
    time["matmul"], time["bubble"] = compute * ones, bubble * ones
    share = shape.total_parameters / (c.tp * c.pp)
    memory = dict.fromkeys(MEMORY_PARTS, 0.0 * ones)
    memory["parameters"] = share * 4 / np.where(c.zero_stage >= 3, c.dp_shard, 1) * ones
    memory["gradients"] = share * 4 / np.where(c.zero_stage >= 2, c.dp_shard, 1) * ones
    memory["optimizer"] = share * 8 / np.where(c.zero_stage >= 1, c.dp_shard, 1) * ones
    layers = shape.num_layers
    memory["activations"] = 34 * c.micro_batch_size * c.sequence_length * shape.hidden * layers / c.tp * ones
    step, total = np.sum(list(time.values()), axis=0), np.sum(list(memory.values()), axis=0)
    return EstimateTable(
        step, step * 0.8, step * 1.25, total, total * 0.9, total * 1.1, total, time,
        dict.fromkeys(HIDDEN_PARTS, 0.0 * ones), memory, np.zeros(n, dtype=np.int64),
    )  # fmt: skip
