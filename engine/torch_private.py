"""Every symbol of torch that is not public, in one place, each with what becomes of the engine without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "PRIVATE",
    "FakeTensor",
    "FakeTensorMode",
    "StridedShard",
    "TorchDispatchMode",
    "accumulate_fsdp_gradients",
    "collective_group",
    "describe_shard",
    "flash_attention",
    "flash_attention_backward",
    "fsdp_parameters",
    "pipelines_without_handshake",
    "shapes_inferred_aside",
]
"""``StridedShard``: what fully_shard makes of a dimension that tensor parallelism splits already. A rank's part is a
slice of the tensor-parallel slice, though its mesh axis stands before."""

_DRY_RUN = "engine.trace and the tests that count collectives stop working; plans train as before"
_CPU_MEMORY = "peak memory of CPU runs is the process's high-water mark alone (set runtime.measure_memory to false)"
_CHECKPOINT = "checkpoints are right only where tensor parallelism and sharding divide a dimension evenly"
_CPU_ATTENTION = "attention in tiles takes its unfused path, which CUDA takes, too: slower on a CPU, the same numbers"
_SPLIT_BACKWARD = "schedules that split the backward pass need zero_stage 0 or 1"

PRIVATE = {
    "torch._subclasses.fake_tensor:FakeTensor.fake_device": _DRY_RUN,
    "torch._subclasses.fake_tensor:FakeTensorMode": _DRY_RUN,
    "torch.distributed._tools.fake_collectives:CollectiveOp.get_process_group": _DRY_RUN,
    "torch.distributed._tools.fake_collectives:collective_ops": _DRY_RUN,
    "torch.distributed._tools.fake_collectives:sync_ops": _DRY_RUN,
    "torch.distributed.pipelining._utils:InferenceMode.STATIC": _DRY_RUN,
    "torch.distributed.pipelining.schedules:_PipelineSchedule._warmup_p2p": _DRY_RUN,
    "torch.distributed.tensor._sharding_prop:ShardingPropagator._propagate_tensor_meta_non_cached": _DRY_RUN,
    "torch.utils._python_dispatch:_disable_current_modes": _DRY_RUN,
    "torch.utils._python_dispatch:TorchDispatchMode": _CPU_MEMORY,
    "torch.distributed.tensor.placement_types:_StridedShard": "tensor parallelism needs zero_stage 0",
    "torch.distributed.checkpoint.metadata:ChunkStorageMetadata": _CHECKPOINT,
    "torch.distributed.checkpoint.planner:TensorWriteData": _CHECKPOINT,
    "torch.ops:aten._scaled_dot_product_flash_attention_for_cpu": _CPU_ATTENTION,
    "torch.ops:aten._scaled_dot_product_flash_attention_for_cpu_backward": _CPU_ATTENTION,
    "torch.distributed.fsdp:FSDPModule._get_fsdp_state": _SPLIT_BACKWARD,
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.accumulate_unsharded_grad_if_needed": _SPLIT_BACKWARD,
    "torch.distributed.fsdp._fully_shard._fsdp_param:FSDPParam.to_accumulated_grad_if_needed": _SPLIT_BACKWARD,
}
"""``module:name`` of everything used here that torch does not promise to keep, and what to do where it is gone. All are
there in torch 2.13, the oldest version that is allowed and the newest that was tried."""


def collective_group(function: Any, args: tuple[Any, ...]) -> ProcessGroup | None:
    """The group of a dispatched operator that communicates; None for any other operator."""
    from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops

    if function not in collective_ops or function in sync_ops:
        return None
    return CollectiveOp.get_process_group(function, args)


def describe_shard(tensor: DTensor, spans: Sequence[range]) -> None:
    """Tell distributed checkpoints where a rank's part of a tensor lies, instead of what they work out themselves.

    Args:
        tensor: The tensor, which may not be empty as a whole.
        spans: Where the local part lies, by dimension.
    """
    offsets, sizes = torch.Size(span.start for span in spans), torch.Size(map(len, spans))
    chunks = [ChunkStorageMetadata(offsets, sizes)] if sizes.numel() else []

    def write_items(fqn: str, shard: DTensor) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(shard.to_local())
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=shard.size()),
            )
            for chunk in chunks
        ]

    part: Any = tensor._local_tensor
    part.__create_write_items__ = write_items
    part.__create_chunk_list__ = lambda: chunks


def flash_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Fused attention on the CPU, which also tells the logarithm of the softmax's denominator.

    Args:
        query: [B, Hq, T, D].
        key: [B, Hkv, S, D]; Hkv divides Hq.
        value: [B, Hkv, S, D].
        causal: Query i sees keys 0 to i, else all.
        scale: Factor on the logits.

    Returns:
        Output [B, Hq, T, D], and [B, Hq, T] in at least fp32.
    """
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return operator(query, key, value, 0.0, causal, scale=scale)  # type: ignore[no-any-return]


def flash_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, log_sum: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``flash_attention``. Where ``key`` and ``value`` are some of the keys that a query saw, and ``out``
    and ``log_sum`` are of all: what these add.

    Returns:
        Of query, key and value.
    """
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return operator(grad, query, key, value, out, log_sum, 0.0, causal, scale=scale)  # type: ignore[no-any-return]


def fsdp_parameters(part: nn.Module) -> Iterator[Any]:
    """What fully_shard keeps of each parameter: ``all_gather_outputs``, ``_unsharded_param`` (once it was gathered),
    ``unsharded_accumulated_grad``."""
    for module in part.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params


def accumulate_fsdp_gradients(part: nn.Module) -> None:
    """Add gradients that were just made to those of earlier micro-batches, in the dtype that gradients are reduced in:
    what fully_shard does after a backward pass, but not after one for weights alone."""
    for parameter in fsdp_parameters(part):
        if hasattr(parameter, "_unsharded_param"):
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


@contextmanager
def pipelines_without_handshake() -> Iterator[None]:
    """Pipelines take the shapes that they were given, without asking their neighbours whether they do the same: where
    nothing is really received, the answer would be noise."""
    from torch.distributed.pipelining._utils import InferenceMode
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    def take_static_shapes(_: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    plain = _PipelineSchedule._warmup_p2p
    _PipelineSchedule._warmup_p2p = take_static_shapes  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        _PipelineSchedule._warmup_p2p = plain  # type: ignore[method-assign]


@contextmanager
def shapes_inferred_aside() -> Iterator[None]:
    """DTensor infers global shapes with tensors that no mode sees: the engine's real steps do it once, outside of what
    is measured, and those tensors hold nothing."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator
    from torch.utils._python_dispatch import _disable_current_modes

    plain = ShardingPropagator._propagate_tensor_meta_non_cached

    def aside(self: Any, op_schema: Any) -> Any:
        with _disable_current_modes():
            return plain(self, op_schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = aside  # type: ignore[method-assign]
    try:
        yield
    finally:
        ShardingPropagator._propagate_tensor_meta_non_cached = plain  # type: ignore[method-assign]
