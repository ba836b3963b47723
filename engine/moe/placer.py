"""Experts placed anew at step boundaries: by the loads so far, on all ranks alike."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from engine.context import ParallelContext
from engine.layout import axis_groups
from engine.moe.layer import MixtureOfExperts
from engine.moe.migration import ExpertSlots
from engine.moe.placement import LoadForecast, Placement, all_at_home, move_cost, place
from engine.plan import Plan
from engine.precision.policy import precision_policy

EXPERT_FLOPS = {"cpu": 5e10, "cuda": 4e14}
"""FLOP/s at which a device computes experts, in round numbers: of a core's fp32; half of what large products in bf16
attain on an H100 (``autotune/specs/hardware.yaml``)."""
LINK_BANDWIDTH = {"cpu": 1e9, "cuda": 1.5e11}
"""Bytes/s of a rank to another where no topology was measured: the order of a loopback; the geometric mean of NVLink 4
(450 GB/s) and a 400 Gbit/s network adapter, as of an H100."""


def apply_placement(mixtures: Mapping[str, MixtureOfExperts], plan: Plan, context: ParallelContext) -> None:
    """Let the experts of a stage, spread over ``ep`` already, be computed in slots: at first each at home."""
    if not plan.expert_placement_steps:
        return
    dtype = precision_policy(plan.precision).compute
    for layer in mixtures.values():
        ExpertSlots(layer.experts, context.group("ep"), context.device, dtype, first_placement(layer, plan))


def first_placement(layer: MixtureOfExperts, plan: Plan) -> Placement:
    """Of a layer whose load is not known yet."""
    return all_at_home(layer.moe.num_experts, plan.ep, plan.expert_replicas)


def flops_per_byte(plan: Plan, context: ParallelContext) -> float:
    """What a rank computes while one byte comes in from another of its expert-parallel group, by the slowest measured
    link of any of these groups, so that all ranks get the same. It decides only whether a placement is worth its
    exchange of weights."""
    kind = context.device.type
    if context.links is None:
        return EXPERT_FLOPS[kind] / LINK_BANDWIDTH[kind]
    links = [context.links.among(group).bandwidth for group in axis_groups(plan)["ep"].tolist()]
    return EXPERT_FLOPS[kind] / min(float(found[~np.eye(plan.ep, dtype=bool)].min()) for found in links)


def num_nodes(plan: Plan, ranks_per_node: int, numbers: np.ndarray | None = None) -> int:
    """Nodes that each expert-parallel group lies on; 1 where the groups do not lie on nodes in equal parts.

    Args:
        plan: The plan.
        ranks_per_node: Processes started on each node.
        numbers: As what the process of each rank was started, [ranks]; None where that is the rank.
    """
    started = np.arange(plan.world_size) if numbers is None else numbers
    nodes = started[axis_groups(plan)["ep"]] // ranks_per_node
    count = len(np.unique(nodes[0]))
    if plan.ep % count:
        return 1
    blocks = nodes.reshape(len(nodes), count, -1)
    return count if (blocks == blocks[..., :1]).all() else 1


class ExpertPlacer:
    """Forecasts the load of one rank's layers and places their experts every ``plan.expert_placement_steps`` steps.

    A placement changes where an expert is computed and no result (but for the order of sums). It is taken when, by the
    forecast, a step becomes cheaper with it, the exchange of weights counted in (``Placement.price``): homes never
    move, so the exchange recurs with each step, and what is weighed is one step against one step, however many follow.

    The state does not depend on the plan: the forecast, and the loads that the placement in force was made for, from
    which it is made again.

    Args:
        layers: The mixtures of experts on this rank by name.
        plan: Of the run.
        context: This rank's place.
        num_micro_batches: Of a rank's step.

    Attributes:
        watches: Whether loads are looked at after each step. A dry run, whose loads have no values, sets it to false.
        move_cost: Of an expert away from home, in assignments a step.
    """

    def __init__(
        self, layers: Mapping[str, MixtureOfExperts], plan: Plan, context: ParallelContext, num_micro_batches: int
    ) -> None:
        self._layers = layers
        self._plan = plan
        self.watches = bool(plan.expert_placement_steps and layers)
        self.move_cost, self._num_nodes = 0.0, 1
        if self.watches:
            bytes_per_weight = precision_policy(plan.precision).compute.itemsize
            self.move_cost = move_cost(flops_per_byte(plan, context), bytes_per_weight, num_micro_batches)
            ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", plan.world_size))
            self._num_nodes = num_nodes(plan, ranks_per_node, context.numbers)
        num_experts = max((layer.moe.num_experts for layer in layers.values()), default=0)
        self._loads = torch.zeros(len(layers), 3, num_experts, dtype=torch.float64)
        """Of each layer: level and trend of its forecast, and the load that its placement was made for."""
        self._num_steps = torch.zeros((), dtype=torch.int64)
        """Steps forecast from."""

    def end_step(self) -> None:
        """Take in the loads of a step that was not skipped, and place the experts anew when it is time to."""
        if not self.watches:
            return
        loads = torch.stack([layer.previous_load for layer in self._layers.values()]).cpu().numpy()
        level, trend, _ = self._loads.numpy().swapaxes(0, 1)
        forecast = LoadForecast(level, trend).after(loads)
        level[:], trend[:] = forecast.level, forecast.trend
        self._num_steps += 1
        if self._num_steps % self._plan.expert_placement_steps == 0:
            self._plan_anew(forecast.mean(self._plan.expert_placement_steps))

    def state_dict(self) -> dict[str, Tensor]:
        """What a checkpoint holds, as live tensors; in the same form under every plan."""
        if not self._layers:
            return {}
        loads = {f"{name}.load_forecast": self._loads[index] for index, name in enumerate(self._layers)}
        return {**loads, "load_forecast.num_steps": self._num_steps}

    def restore(self) -> None:
        """Place the experts as they were, after the state was loaded."""
        for index, (layer, slots) in enumerate(self._slots()):
            load = self._loads[index, 2].numpy()
            slots.put(self._place(load, layer) if load.any() else first_placement(layer, self._plan))

    def _plan_anew(self, expected: np.ndarray) -> None:
        for index, (layer, slots) in enumerate(self._slots()):
            load = expected[index]
            placement = self._place(load, layer)
            if placement.price(load, self.move_cost) < slots.placement.price(load, self.move_cost):
                slots.put(placement)
                self._loads[index, 2] = torch.from_numpy(load)

    def _place(self, load: np.ndarray, layer: MixtureOfExperts) -> Placement:
        return place(
            load,
            self._plan.ep,
            self._plan.expert_replicas,
            num_nodes=self._num_nodes,
            num_groups=layer.moe.num_groups,
            move_cost=self.move_cost,
        )

    def _slots(self) -> list[tuple[MixtureOfExperts, ExpertSlots]]:
        """All layers with their slots; none where experts are not placed."""
        found = ((layer, layer.experts.dispatch.slots_of) for layer in self._layers.values())
        return [(layer, slots) for layer, slots in found if isinstance(slots, ExpertSlots)]
