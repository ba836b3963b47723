"""What a dry run of one rank shows (``engine.trace``): what it sends and what memory it needs at its peak."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from engine.schema import Schema
from engine.spec import Count, CountOrZero, NonNegative

Axis = Literal["dp", "tp", "pp", "cp", "ep", "world"]
MemoryPart = Literal["parameters", "gradients", "optimizer", "activations", "logits", "buffers"]


class CollectiveUse(Schema):
    """All calls of one operation over one axis of the mesh, in a step."""

    axis: Axis
    """Axis of the mesh; ``world`` for all ranks. Where one axis is the whole mesh, its name stands for both."""
    operation: str
    """``all_reduce``, ``all_gather``, ``reduce_scatter``, ``send``, ``receive`` ..."""
    group_size: Count
    """Ranks of the group."""
    calls: NonNegative
    """Calls per step."""
    message_bytes: NonNegative
    """Bytes of the whole messages: what is reduced, what a rank has after a gather or before a scatter, or sends."""
    sent_bytes: NonNegative
    """Bytes that this rank sends, over rings: twice (all_reduce) or once (gather, scatter) the others' shares."""


class RankTrace(Schema):
    """One step of one rank, without its numbers."""

    schema_version: Literal[1] = 1
    """Version of this form."""
    rank: CountOrZero
    """The rank."""
    pipeline_rank: CountOrZero
    """Its pipeline stage."""
    world_size: Count
    """Ranks of the plan."""
    num_micro_batches: Count
    """Micro-batches of a step."""
    num_traced_micro_batches: Count
    """Micro-batches that were run; what further ones add was taken from the difference of two dry runs."""
    collectives: Annotated[tuple[CollectiveUse, ...], Field(strict=False)]
    """What the rank sends in a step."""
    peak_bytes: CountOrZero
    """Bytes of live tensors at the peak."""
    peak_parts: dict[MemoryPart, int]
    """The same by part: parameters (this rank's shards), their gradients, optimizer states, what is kept for the
    backward pass with temporaries, the head's output and the loss, gathered parameters and communication buffers."""
