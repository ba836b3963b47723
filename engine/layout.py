"""Which rank stands where: one array of ranks, seen three ways.

Data loading sees the data-parallel ranks and, within a sequence, the context-parallel ones. Dense parameters are
replicated over ``dp_replicate``, sharded over ``fsdp`` (dp_shard and cp together) and split over ``tp``. Experts are
spread over the same ranks of a pipeline rank anew: ``ep`` and ``etp`` hold different weights, what is left
(``edp_replicate`` and ``efsdp``) holds the same ones, so gradients of experts are summed over a group of their own.
"""

from __future__ import annotations

import numpy as np

from engine.plan import Plan

DENSE_AXES = ("dp_replicate", "fsdp", "tp")
"""Mesh axes of all parameters but the experts', from the slowest."""
EXPERT_AXES = ("edp_replicate", "efsdp", "ep", "etp")
"""Mesh axes of the experts' parameters, from the slowest."""
COORDINATES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes of ``world_ranks``."""


def world_ranks(plan: Plan) -> np.ndarray:
    """The ranks of a plan, [pp, dp_replicate, dp_shard, cp, tp]; ``plan.rank_order`` says which axis varies fastest."""
    slowest_first = [axis for name in reversed(plan.rank_order.split("-")) for axis in _parts(name)]
    ranks = np.arange(plan.world_size).reshape([getattr(plan, axis) for axis in slowest_first])
    return ranks.transpose([slowest_first.index(axis) for axis in COORDINATES])


def _parts(name: str) -> tuple[str, ...]:
    return ("dp_replicate", "dp_shard") if name == "dp" else (name,)


def dense_ranks(plan: Plan) -> np.ndarray:
    """[pp, dp_replicate, fsdp, tp]."""
    return world_ranks(plan).reshape(plan.pp, plan.dp_replicate, plan.dp_shard * plan.cp, plan.tp)


def expert_ranks(plan: Plan) -> np.ndarray:
    """[pp, edp_replicate, efsdp, ep, etp]: ``etp`` lies along ``tp``, ``ep`` takes the ranks next to it.

    Experts' parameters are sharded over what ``ep`` and ``etp`` leave of dp_shard * cp * tp, and replicated over the
    rest.
    """
    shard = plan.dp_shard * plan.cp * plan.tp // (plan.ep * plan.etp) or 1
    return world_ranks(plan).reshape(plan.pp, plan.edp // shard, shard, plan.ep, plan.etp)


def axis_groups(plan: Plan, *, has_experts: bool = True) -> dict[str, np.ndarray]:
    """The groups of each axis above degree 1, [groups, members]. The members of a group stand in the axis' order, which
    is ascending under every ``rank_order``: process groups are in no other.

    Beside the mesh axes: ``pp``; ``ends``, the first and last pipeline rank; ``cp``; ``dp``, which load different
    sequences; ``data`` (dp * cp), which hold different tokens; ``expert_data``, which hold the same experts.

    Args:
        plan: The plan.
        has_experts: Whether there are experts; else the axes of their parameters are left out.
    """
    world, dense, experts = world_ranks(plan), dense_ranks(plan), expert_ranks(plan)
    along = {
        "pp": _along(world, 0),
        "ends": _along(world[[0, -1]], 0) if plan.pp > 1 else world.reshape(-1, 1),
        "cp": _along(world, 3),
        "dp": _along(world.reshape(plan.pp, plan.dp, plan.cp, plan.tp), 1),
        "data": _along(world.reshape(plan.pp, plan.dp * plan.cp, plan.tp), 1),
        **{axis: _along(dense, 1 + index) for index, axis in enumerate(DENSE_AXES)},
    }
    if has_experts:
        along |= {axis: _along(experts, 1 + index) for index, axis in enumerate(EXPERT_AXES)}
        along["expert_data"] = _along(experts.reshape(plan.pp, plan.edp, plan.ep * plan.etp), 1)
    return {axis: groups for axis, groups in along.items() if groups.shape[1] > 1}


def _along(ranks: np.ndarray, dim: int) -> np.ndarray:
    return np.moveaxis(ranks, dim, -1).reshape(-1, ranks.shape[dim])
