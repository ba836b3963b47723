"""Tensor parallelism as a table: how each module of the decoder is split over the ``tp`` axis.

Columns of the projections out of the residual stream and rows of those back into it are split, so a block costs one
reduction after attention and one after the feed-forward (two more in the backward pass). With ``sequence_parallel`` the
residual stream between them is split over the sequence: the reductions become reduce-scatters, and what enters a
projection is gathered first. Modules without a line here keep whole parameters and compute the same on every rank.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from engine.models.decoder import Decoder
from engine.models.loss import IGNORED
from engine.moe.experts import Experts
from engine.parallel.runner import LossFunction
from engine.parallel.shards import local
from engine.plan import Plan
from engine.precision.policy import wide
from engine.spec import ModelSpec


class ExpertSlices(ParallelStyle):
    """Splits the width of every expert: each rank computes a part of every expert's output for all tokens.

    Args:
        output: Placement of the sum of the parts.
    """

    def __init__(self, output: Placement) -> None:
        self._output = output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, Experts)
        for name, dim in (("gate", 1), ("up", 1), ("down", 2)):
            split = distribute_tensor(getattr(module, name), device_mesh, [Shard(dim)], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(split))
        whole_weights = module.weights
        module.weights = lambda: tuple(map(local, whole_weights()))  # type: ignore[assignment, method-assign, return-value]
        module.register_forward_pre_hook(lambda _, inputs: self._enter(device_mesh, *inputs))
        module.register_forward_hook(lambda _, __, output: self._leave(device_mesh, output))
        return module

    @staticmethod
    def _enter(mesh: DeviceMesh, x: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and router weights as they are; their gradients, of which each rank has a part, are summed."""
        whole = (DTensor.from_local(tensor, mesh, [Replicate()], run_check=False) for tensor in (x, weights))
        x, weights = (tensor.to_local(grad_placements=[Partial()]) for tensor in whole)
        return x, weights, chosen

    def _leave(self, mesh: DeviceMesh, output: Tensor) -> Tensor:
        return (
            DTensor.from_local(output, mesh, [Partial()], run_check=False).redistribute(mesh, [self._output]).to_local()
        )


def tensor_parallel_table(spec: ModelSpec, plan: Plan) -> dict[str, ParallelStyle]:
    """Style by module name, ``*`` for any layer number. Names that a model or stage lacks are skipped."""
    stream: Placement = Shard(1) if plan.sequence_parallel else Replicate()
    # The input stays a DTensor, so that gradients of all projections that read it are summed before they are reduced.
    enter = PrepareModuleInput(input_layouts=stream, desired_input_layouts=Replicate(), use_local_output=False)
    table: dict[str, ParallelStyle] = {
        "layers.*.attention": enter,
        **{f"layers.*.attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "layers.*.attention.out": RowwiseParallel(output_layouts=stream),
        "layers.*.ffn": enter,
        "layers.*.ffn.gate": ColwiseParallel(),
        "layers.*.ffn.up": ColwiseParallel(),
        "layers.*.ffn.down": RowwiseParallel(output_layouts=stream),
        "layers.*.moe.experts": ExpertSlices(stream),
    }
    # A tied head is called with the embedding's weights beside its input; they stay as they are.
    beside = (None,) if spec.tied_embeddings else ()
    if plan.vocab_parallel:
        table["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
        table["head"] = ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1))
        if spec.tied_embeddings:
            table["head"] = PrepareModuleInputOutput(
                input_layouts=(stream, *beside),
                desired_input_layouts=(Replicate(), *beside),
                output_layouts=Shard(-1),
                desired_output_layouts=Shard(-1),
            )
    if plan.sequence_parallel:
        split = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
        table["positions"] = split
        table["layers.*.moe"] = _gathered()
        for norm in ("layers.*.attention_norm", "layers.*.ffn_norm", "norm"):
            table[norm] = SequenceParallel(use_local_output=True)
        if not plan.vocab_parallel:
            table["embedding"] = split
            table["head"] = _gathered(*beside)
    return table


def _gathered(*beside: None) -> PrepareModuleInput:
    """The first input gathered over the sequence, the others as they are."""
    return PrepareModuleInput(
        input_layouts=(Shard(1), *beside), desired_input_layouts=(Replicate(), *beside), use_local_output=True
    )


def apply_tensor_parallel(part: Decoder, spec: ModelSpec, plan: Plan, mesh: DeviceMesh) -> None:
    """Split a whole model or a stage, still on the meta device, over the ``tp`` mesh."""
    modules = dict(part.named_modules())
    for pattern, style in tensor_parallel_table(spec, plan).items():
        for name in [pattern.replace("*", layer) for layer in part.layers] if "*" in pattern else [pattern]:
            if modules.get(name) is not None:
                parallelize_module(modules[name], mesh, style)


def vocab_parallel_loss(mesh: DeviceMesh) -> LossFunction:
    """``summed_loss`` of logits whose vocabulary is split over ``mesh``; use inside torch's ``loss_parallel``."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        flat = logits.to(wide(logits.dtype)).flatten(0, 1)
        split = DTensor.from_local(flat, mesh, [Shard(1)], run_check=False)
        summed = F.cross_entropy(split, labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return local(summed)

    return loss


def settle_gradients(part: nn.Module) -> None:
    """Sum gradients that ranks of the ``tp`` axis hold in parts (norms and biases applied to a split sequence)."""
    for parameter in part.parameters():
        gradient = parameter.grad
        if not (isinstance(parameter, DTensor) and isinstance(gradient, DTensor)):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)
