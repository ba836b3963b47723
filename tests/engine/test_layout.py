"""Which ranks form a group along each axis."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from engine.layout import axis_groups, dense_ranks, expert_ranks, world_ranks
from engine.plan import Plan

pytestmark = pytest.mark.unit

ORDERS = get_args(Plan.model_fields["rank_order"].annotation)
PLANS: dict[str, dict[str, Any]] = {
    "dense": {"tp": 2, "cp": 2, "pp": 3, "dp_shard": 2, "dp_replicate": 2},
    "experts": {"tp": 2, "cp": 2, "pp": 2, "dp_shard": 2, "dp_replicate": 2, "ep": 4, "etp": 2},
    "experts over replicas": {"tp": 2, "dp_shard": 2, "dp_replicate": 4, "ep": 8},
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", PLANS)
def test_every_rank_is_in_one_group_of_an_axis_in_ascending_order(name: str, order: str) -> None:
    """Ascending, because torch sorts the ranks of a group, and meshes are laid over the groups."""
    plan = Plan(**PLANS[name] | {"rank_order": order})
    for axis, groups in axis_groups(plan).items():
        assert (np.diff(groups, axis=1) > 0).all(), axis
        inner = plan.pp > 2 and axis == "ends"
        everyone = world_ranks(plan)[[0, -1]] if inner else np.arange(plan.world_size)
        assert sorted(groups.flatten()) == sorted(everyone.flatten()), axis


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_stand_where_the_order_says(order: str) -> None:
    plan = Plan(**PLANS["experts"] | {"rank_order": order})
    strides = dict.fromkeys(order.split("-"), 1)
    degrees = {"tp": plan.tp, "cp": plan.cp, "dp": plan.dp, "pp": plan.pp}
    for slower, faster in zip(order.split("-")[1:], order.split("-"), strict=False):
        strides[slower] = strides[faster] * degrees[faster]
    groups = axis_groups(plan)
    for axis, stride in strides.items():
        assert groups[axis].shape[1] == degrees[axis]
        assert (np.diff(groups[axis], axis=1) == stride).all(), axis
    assert (groups["etp"] == groups["tp"]).all()
    # Both views of a pipeline rank are of the same ranks, and the experts' data-parallel ones hold different tokens.
    assert (dense_ranks(plan).reshape(plan.pp, -1) == expert_ranks(plan).reshape(plan.pp, -1)).all()
    assert groups["expert_data"].shape == (plan.world_size // plan.edp, plan.edp)
