"""How the work is split over devices: the Plan, and tables of plans for vectorised code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from engine.schema import Schema
from engine.spec import Count, CountOrZero, Positive, Ratio

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
KeyExchange = Literal["ring", "all_gather"]
Precision = Literal["fp64", "fp32", "bf16", "fp16", "fp8"]


class Plan(Schema):
    """Parallel degrees, memory and precision settings. world = tp * pp * cp * dp, dp = dp_replicate * dp_shard."""

    KEY_HINTS: ClassVar[Mapping[str, str]] = {
        "dp": "write dp_shard (sharded as zero_stage says), dp_replicate for plain replicas: dp is their product"
    }

    schema_version: Literal[1] = 1
    """Version of this file format."""
    tp: Count = 1
    """Tensor-parallel degree: attention heads and feed-forward width are split."""
    pp: Count = 1
    """Pipeline-parallel degree: layers are split into stages."""
    dp_replicate: Count = 1
    """Data-parallel replicas of whole (or sharded) parameters."""
    dp_shard: Count = 1
    """Data-parallel ranks over which parameters and states are sharded."""
    cp: Count = 1
    """Context-parallel degree: the sequence is split."""
    ep: Count = 1
    """Expert-parallel degree: routed experts are split."""
    etp: Count = 1
    """Tensor-parallel degree inside an expert: 1 or tp."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule; without effect at pp = 1."""
    virtual_stages: Count = 1
    """Pipeline stages per rank."""
    layers_per_stage: Annotated[tuple[Count, ...], Field(strict=False)] | None = None
    """Layers of each stage in order; null splits evenly, the remainder to the first stages. A run file may say
    by_cost: the busiest rank gets as little work as possible, embedding, head, loss and recompute counted."""
    micro_batch_size: Count = 1
    """Sequences per micro-batch and data-parallel rank."""
    zero_stage: Literal[0, 1, 2, 3] = 3
    """ZeRO stage over dp_shard * cp, of experts over what ep * etp leaves of dp_shard * cp * tp: 1 optimizer states, 2
    and gradients, 3 and parameters. No effect where that is 1."""
    sequence_parallel: bool = False
    """Split the sequence between the tensor-parallel regions."""
    vocab_parallel: bool = True
    """Split the embedding and the head over the vocabulary. Without effect at tp = 1."""
    recompute: Literal["none", "full", "selective", "every_k"] = "none"
    """Which activations are recomputed in the backward pass: none, every layer's, or those of one layer in
    ``recompute_period``. Selective (attention's alone) is planned only: this engine does not build it yet."""
    recompute_period: Count = 1
    """For every_k: one layer in so many is recomputed."""
    offload_parameters_ratio: Ratio = 0.0
    """Share of the parameters kept in host memory. Above 0 is planned only: this engine does not build it yet."""
    offload_optimizer_ratio: Ratio = 0.0
    """Share of the optimizer states kept in host memory. Above 0 is planned only: this engine does not build it yet."""
    offload_activations_ratio: Ratio = 0.0
    """Share of saved activations kept in host memory. Above 0 is planned only: this engine does not build it yet."""
    cp_attention: KeyExchange = "ring"
    """How context-parallel ranks see each other's keys and values: passed around a ring, or gathered. No effect at
    cp = 1."""
    expert_capacity_factor: Positive | None = None
    """Each expert takes at most so many times its even share of a rank's micro-batch, further tokens pass it by; null
    drops none."""
    expert_replicas: CountOrZero = 0
    """Further copies of the busiest experts of each layer, spread over the expert-parallel ranks."""
    expert_placement_steps: CountOrZero = 0
    """Place experts on ranks anew, by forecast load, every so many steps; 0 leaves each where it is."""
    all_reduce: Literal["native", "topology"] = "native"
    """How gradients of replicated parameters are summed: by the backend, or along paths that fit the measured links."""
    precision: Precision = "fp32"
    """Matrix-multiply precision; parameters, norms, reductions and states are at least fp32. fp16 and fp8 are
    planned only: this engine does not build it yet."""
    gradient_compression: Literal["none", "int8", "topk", "int8_topk", "powersgd"] = "none"
    """Compression of gradients on the wire. All but none is planned only: this engine does not build it yet."""
    overlap_dp: bool = True
    """Overlap data-parallel communication with compute."""
    overlap_tp: bool = False
    """Overlap tensor-parallel communication with compute; true is planned only: this engine does not build it yet."""
    overlap_pp: bool = True
    """Overlap pipeline sends with compute; false is planned only: this engine always does."""
    rank_order: Literal["tp-cp-dp-pp", "tp-cp-pp-dp", "tp-pp-cp-dp"] = "tp-cp-dp-pp"
    """Mesh axes from the fastest-varying rank to the slowest."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.layers_per_stage is not None and len(self.layers_per_stage) != self.num_stages:
            raise ValueError(
                f"layers_per_stage names {len(self.layers_per_stage)} stages, pp * virtual_stages is {self.num_stages}"
            )
        return self

    @property
    def dp(self) -> int:
        """Data-parallel degree."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Ranks the plan needs."""
        return self.tp * self.pp * self.cp * self.dp

    @property
    def num_stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.pp * self.virtual_stages

    @property
    def edp(self) -> int:
        """Expert data-parallel degree, over which expert gradients are reduced."""
        return self.dp * self.cp * self.tp // (self.ep * self.etp)

    def num_micro_batches(self, global_batch_size: int) -> int:
        """Micro-batches per data-parallel rank and step."""
        return global_batch_size // (self.dp * self.micro_batch_size)

    def recomputes(self, layer: int) -> bool:
        """Whether block ``layer`` (from 0) computes activations again in the backward pass. By its number in the whole
        model, so that it does not depend on the pipeline's stages."""
        return self.recompute != "none" and layer % (self.recompute_period if self.recompute == "every_k" else 1) == 0

    def stage_layers(self, num_layers: int) -> list[range]:
        """The layers of each stage, in stage order."""
        sizes = self.layers_per_stage
        if sizes is None:
            whole, rest = divmod(num_layers, self.num_stages)
            sizes = tuple(whole + (stage < rest) for stage in range(self.num_stages))
        starts = np.concatenate(([0], np.cumsum(sizes))).tolist()
        return [range(starts[i], starts[i + 1]) for i in range(self.num_stages)]

    @property
    def mesh(self) -> str:
        """The parallel degrees as one word, degree-1 axes left out: ``dp2-tp4``, or ``single`` on one rank."""
        axes = {"dpr": self.dp_replicate, "dp": self.dp_shard, "cp": self.cp, "tp": self.tp, "pp": self.pp}
        axes |= {"vp": self.virtual_stages, "ep": self.ep, "etp": self.etp}
        return "-".join(f"{axis}{degree}" for axis, degree in axes.items() if degree > 1) or "single"

    def describe(self) -> str:
        """One line for tables: the mesh and what differs from the defaults that matter."""
        parts = [self.mesh, f"mb{self.micro_batch_size}", self.precision]
        if self.recompute != "none":
            parts.append(f"every{self.recompute_period}" if self.recompute == "every_k" else f"ac-{self.recompute}")
        if self.dp_shard * self.cp > 1:
            parts.append(f"z{self.zero_stage}")
        if self.sequence_parallel:
            parts.append("sp")
        if self.pp > 1 and self.schedule != "1f1b":
            parts.append(self.schedule)
        if self.cp > 1 and self.cp_attention != "ring":
            parts.append("cp-gather")
        if self.expert_capacity_factor is not None:
            parts.append(f"cap{self.expert_capacity_factor:g}")
        if self.expert_replicas:
            parts.append(f"copies{self.expert_replicas}")
        if self.expert_placement_steps:
            parts.append(f"place{self.expert_placement_steps}")
        if self.all_reduce != "native":
            parts.append("routed")
        return " ".join(parts)


MESH_FIELDS = ("tp", "pp", "dp_replicate", "dp_shard", "cp", "ep", "etp", "virtual_stages")
"""The plan fields that make up ``Plan.mesh``."""

PlanTable = Mapping[str, np.ndarray]
"""Plans with their batches as columns of equal length: every field of Plan (``layers_per_stage`` as objects), and
``global_batch_size`` and ``sequence_length``."""


def plan_table(rows: Iterable[tuple[Plan, int, int]]) -> dict[str, np.ndarray]:
    """Columns from ``(plan, global_batch_size, sequence_length)`` rows."""
    rows = list(rows)
    columns: dict[str, np.ndarray] = {}
    for field in Plan.model_fields:
        values: list[Any] = [getattr(plan, field) for plan, _, _ in rows]
        column = np.empty(len(rows), dtype=object)
        column[:] = values
        columns[field] = column if field == "layers_per_stage" or not rows else np.array(values)
    columns["global_batch_size"] = np.array([batch for _, batch, _ in rows], dtype=np.int64)
    columns["sequence_length"] = np.array([length for _, _, length in rows], dtype=np.int64)
    return columns
