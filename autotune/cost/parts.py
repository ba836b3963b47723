"""The parts that estimates of time and memory are split into, and what each is."""

from __future__ import annotations

from typing import Literal

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
