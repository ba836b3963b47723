"""Experts apart: routed experts' parameters over ``ep`` and ``etp``, their rows exchanged over ``ep``.

``ep`` ranks hold different experts and exchange the rows of tokens. With ``etp`` = tp every expert's width is split
over the tensor-parallel ranks, each of which computes a part of the output for all tokens of the micro-batch. With
``etp`` = 1 and tp > 1 each tensor-parallel rank routes its own part of the tokens. Which tokens enter a layer, and what
becomes of its output, is in the table of ``engine.parallel.tensor``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from engine.context import ParallelContext
from engine.models.decoder import Decoder
from engine.moe.experts import Experts, ExpertWeights
from engine.moe.layer import MixtureOfExperts
from engine.parallel.shards import chunk_of, local
from engine.plan import Plan

_WIDTH = {"gate": 1, "up": 1, "down": 2, "gate_bias": 1, "up_bias": 1, "down_bias": 1}
"""The dimension of each stacked weight that is split over ``etp``: the expert's width; of ``down_bias`` the hidden
size, so that each of its elements is added by one rank."""


def mixtures_of(part: nn.Module) -> dict[str, MixtureOfExperts]:
    """The mixtures of experts of a model or stage by name, in order."""
    return {name: module for name, module in part.named_modules() if isinstance(module, MixtureOfExperts)}


def splits_tokens(plan: Plan) -> bool:
    """Whether the ranks of ``tp`` route different tokens."""
    return plan.tp > 1 and plan.etp == 1


def apply_experts(part: Decoder, plan: Plan, context: ParallelContext) -> None:
    """Spread the experts of a model or stage, still on the meta device and split over ``tp`` already."""
    mesh = context.submesh("ep", "etp")
    for layer in mixtures_of(part).values():
        dispatch = layer.experts.dispatch
        dispatch.capacity_factor = plan.expert_capacity_factor
        if context.has_axis("ep"):
            dispatch.group = context.group("ep")
        if mesh is not None:
            _split(layer.experts, mesh)


def _split(experts: Experts, mesh: DeviceMesh) -> None:
    names = mesh.mesh_dim_names or ()
    for name, whole in list(experts.named_parameters()):
        placements = [Shard(0) if axis == "ep" else Shard(_WIDTH[name]) for axis in names]
        split = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        experts.register_parameter(name, nn.Parameter(split))
    width_mesh = mesh["etp"] if "etp" in names else None
    experts.slot_weights = partial(_own_weights, experts.slot_weights, width_mesh)  # type: ignore[method-assign]


def _own_weights(whole: Callable[[], ExpertWeights], width_mesh: DeviceMesh | None) -> ExpertWeights:
    """This rank's parts; its slice of ``down_bias`` among zeros."""
    weights = whole()
    parts = weights.each(local)
    if width_mesh is None or parts.down_bias is None or weights.down_bias is None:
        return parts
    size = weights.down_bias.shape[1]
    mine = chunk_of(range(size), width_mesh.size(), width_mesh.get_local_rank())
    return parts._replace(down_bias=F.pad(parts.down_bias, (mine.start, size - mine.stop)))
