"""What a training stack keeps in memory: which copies of parameters, gradients and activations, as data.

Stacks differ by a factor of two in memory for one plan, and hardly at all in the formulas: so the formulas
(``memory.py``, ``activations.py``) are written once, over the numbers of a recipe (``memory.yaml``).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np

from autotune.cost.shapes import Number
from engine.errors import UserError
from engine.yaml_file import read_yaml

RECIPES_FILE = Path(__file__).with_name("memory.yaml")


@dataclass(frozen=True)
class MemoryRecipe:
    """One stack; each field is one number, or ``[n]`` with one per row of a table.

    Bytes per parameter are those of a plan in bf16, fp16 or fp8; in fp32 and fp64 there is one copy of each, in that
    width, and a gathered one where ``shards_stored``.
    """

    master_bytes: Number
    """Bytes per parameter of the copy that the optimizer updates, sharded from ZeRO-1 on."""
    working_bytes: Number
    """Bytes per parameter of the copy that is computed with, whole below ZeRO-3."""
    shards_stored: Number
    """1 where parameters are stored once, sharded from ZeRO-1 on, and gathered in compute precision (FSDP)."""
    whole_below_stage: Number
    """ZeRO stage below which parameters are whole, as without ranks to shard over, whatever ``shards_stored``."""
    gradient_bytes: Number
    """Bytes per parameter of the gradients that are summed over micro-batches."""
    bf16_gradient_bytes: Number
    """Bytes per parameter of further gradients, never sharded, in bf16 plans; the optimizer step then needs nothing."""
    preallocates_gradients: Number
    """1 where gradients have their memory for the whole step, 0 where they appear in the backward pass."""
    whole_key_heads: Number
    """1 where all key and value heads are on every tensor rank if they are fewer than these, 0 where each holds one."""
    state_bytes: Number
    """Bytes per parameter of one optimizer state (AdamW has two)."""
    step_bytes: Number
    """Bytes per parameter, sharded as the states are, that the optimizer step needs for itself; large flat buffers,
    for which the allocator finds no room among what the activations leave."""
    bucket_bytes: Number
    """Communication buffers of data parallelism that don't depend on the model."""
    saves_fp8: Number
    """1 where fp8 plans keep the inputs of matrix products in fp8."""
    saves_attention_fp8: Number
    """1 where fp8 plans keep queries, keys, values and output of attention in fp8."""
    saves_gate_fp8: Number
    """1 where fp8 plans keep the inputs of a gated activation in fp8 too."""
    saves_gathered: Number
    """1 where sequence parallelism keeps the gathered inputs of matrix products, 0 where it gathers them again."""
    norm_saved_bytes: Number
    """Bytes per element of the input that a norm keeps; in plans with wider activations those are kept."""
    rms_norm_tensors: Number
    """Such tensors that an RMSNorm keeps (a LayerNorm keeps one)."""
    gated_widths: Number
    """Tensors as wide as the feed-forward that a gated one keeps (3 where activation and product are one kernel)."""
    plain_widths: Number
    """The same of a plain feed-forward."""
    attention_copies: Number
    """Further copies of queries, keys and values kept."""
    window_copies: Number
    """1 where a layer with an attention window attends in chunks, and keeps queries and outputs of the tokens behind
    the first window once more, their keys and values twice more; not in context parallelism."""
    expert_copies: Number
    """Tensors of hidden size kept for each token and expert it is sent to."""
    selective_saves_products: Number
    """What selective recompute keeps: 1 every other matrix product (per operation), 0 all but attention's scores."""
    logit_copies: Number
    """Tensors of the logits' size in compute precision, at the peak."""
    wide_logit_copies: Number
    """The same in fp32 or wider."""
    split_logit_copies: Number
    """Further ones where the vocabulary is split over tp; negative for fewer."""
    logits_outlive: Number
    """1 where the logits live on while the layers' backward pass runs."""
    working_tensors: Number
    """Tensors of hidden size that a layer's backward pass needs beside what was kept: gradients, gathered inputs."""
    working_widths: Number
    """Tensors of the feed-forward's width that it needs."""
    weight_gradient_bytes: Number
    """Bytes per parameter of a layer's largest matrix for its gradient on the way to the sum."""
    keeps_stage_outputs: Number
    """1 where a pipeline stage keeps its outputs (of the last stage the logits) until their backward pass."""
    pipeline_keeps_gathered: Number
    """1 where a pipeline stage keeps gathered parameters for the whole step under ZeRO-3."""
    split_backward_keeps_gathered: Number
    """1 where it does under schedules with a backward pass of the weights alone."""
    split_backward_gradients: Number
    """1 where such schedules keep, for that pass, the gradients of the outputs of products and norms."""
    recompute_frees_copies: Number
    """1 where, without sharding, copies in compute precision live with the activations of their layer."""
    stage_buffers: Number
    """Buffers of one micro-batch for pipeline sends."""
    stage_buffers_per_micro_batch: Number
    """Further such buffers for each micro-batch of the step."""
    neighbour_buffers: Number
    """Further ones for each micro-batch and each stage on another rank that sends to one of the rank's stages."""
    keeps_sent: Number
    """1 where schedules other than GPipe and 1F1B keep what they have sent until the end of the step."""
    slack_ratio: Number
    """Memory that the allocator reserves beyond the peak of live tensors, relative to it."""
    group_gib: Number
    """Memory of the communicator of one parallel axis, GiB."""
    context_gib: Number
    """Memory of libraries beyond the device's own overhead, GiB."""
    interval_ratio: Number
    """Half-width of the interval, relative."""

    @classmethod
    def rows(cls, recipes: Sequence[Self], index: np.ndarray) -> Self:
        """One recipe per row of a table.

        Args:
            recipes: Single recipes.
            index: ``[n]``: which of them each row has.
        """
        return cls(**{f.name: np.array([getattr(r, f.name) for r in recipes])[index] for f in fields(cls)})


@functools.cache
def recipes() -> dict[str, MemoryRecipe]:
    """Name -> recipe, from ``memory.yaml``."""
    data = read_yaml(RECIPES_FILE).data
    return {
        name: MemoryRecipe(**{key: float(value) for key, value in entry.items() if key not in ("title", "source")})
        for name, entry in data.items()
    }


def recipe(name: str, device: str = "cuda") -> MemoryRecipe:
    """The recipe called ``name``; on a CPU the one called ``<name>_cpu`` where there is one (its kernels differ).

    Args:
        name: A name of ``memory.yaml``.
        device: Kind of device, ``cuda`` or ``cpu``.

    Raises:
        UserError: There is none.
    """
    known = recipes()
    if name not in known:
        raise UserError(f"unknown memory recipe {name!r}", hint=f"known are {', '.join(known)}")
    return known.get(f"{name}_cpu", known[name]) if device == "cpu" else known[name]
