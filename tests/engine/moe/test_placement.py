"""Forecast of experts' load and their placement: close to the optimum, equal on all ranks, never worse than none."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.context import ParallelContext
from engine.moe.placement import LoadForecast, Placement, all_at_home, home_ranks, move_cost, place
from engine.moe.placer import EXPERT_FLOPS, flops_per_byte, num_nodes
from engine.plan import Plan
from engine.topology import Links

pytestmark = pytest.mark.unit


def skewed(seed: int, num_experts: int) -> np.ndarray:
    """Loads as unbalanced routers make them."""
    return np.random.default_rng(seed).lognormal(4, 1, num_experts)


# ---------------------------------------------------------------------------------------------------------- placement


def optimum(load: np.ndarray, num_ranks: int, num_replicas: int) -> float:
    """The least possible load of the busiest rank, over all replications and packings."""
    slots = (len(load) + num_replicas) // num_ranks
    best = np.inf

    def replications(left: int, num_experts: int) -> Iterator[tuple[int, ...]]:
        if not num_experts:
            yield from [()] if not left else []
            return
        for copies in range(1, min(num_ranks, 1 + left) + 1):
            yield from ((copies, *rest) for rest in replications(left - copies + 1, num_experts - 1))

    def pack(weights: list[float], sums: list[float], room: list[int]) -> None:
        nonlocal best
        if not weights:
            best = min(best, max(sums))
            return
        for rank in range(num_ranks):
            if (
                room[rank]
                and sums[rank] + weights[0] < best
                and (sums[rank], room[rank]) not in zip(sums[:rank], room[:rank], strict=True)
            ):
                pack(
                    weights[1:],
                    [total + (i == rank) * weights[0] for i, total in enumerate(sums)],
                    [left - (i == rank) for i, left in enumerate(room)],
                )

    for copies in replications(num_replicas, len(load)):
        weights = np.repeat(load / np.array(copies), copies)
        pack(sorted(weights.tolist(), reverse=True), [0.0] * num_ranks, [slots] * num_ranks)
    return float(best)


@pytest.mark.parametrize(
    ("num_experts", "num_ranks", "num_replicas", "mean_excess", "largest_excess"),
    [
        (8, 2, 0, 0.001, 0.01),
        (8, 4, 0, 0.001, 0.01),
        (9, 3, 0, 0.001, 0.01),
        (8, 2, 2, 0.05, 0.2),
        (6, 3, 3, 0.05, 0.2),
    ],
)
def test_packing_is_close_to_the_enumerated_optimum(
    num_experts: int, num_ranks: int, num_replicas: int, mean_excess: float, largest_excess: float
) -> None:
    excess = []
    for seed in range(12):
        load = skewed(seed, num_experts)
        found = place(load, num_ranks, num_replicas).rank_loads(load).max()
        excess.append(found / optimum(load, num_ranks, num_replicas) - 1)
    assert min(excess) > -1e-9
    assert np.mean(excess) < mean_excess
    assert max(excess) < largest_excess


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 10_000))
def test_every_placement_is_whole_deterministic_and_no_dearer_than_none(data: st.DataObject, seed: int) -> None:
    num_nodes = data.draw(st.sampled_from([1, 2]))
    num_ranks = num_nodes * data.draw(st.integers(1, 4))
    num_experts = num_ranks * data.draw(st.integers(1, 4))
    num_replicas = num_ranks * data.draw(st.integers(0, num_experts * (num_ranks - 1) // num_ranks))
    load = skewed(seed, num_experts) * data.draw(st.sampled_from([0.0, 1.0]))
    cost = data.draw(st.sampled_from([0.0, 30.0, 1e6]))
    found = place(load, num_ranks, num_replicas, num_nodes=num_nodes, move_cost=cost)
    again = place(load.copy(), num_ranks, num_replicas, num_nodes=num_nodes, move_cost=cost)
    assert np.array_equal(found.experts, again.experts)
    assert found.experts.shape == (num_ranks, (num_experts + num_replicas) // num_ranks)
    assert len(found.num_copies) == num_experts
    assert found.num_copies.min() >= 1
    assert (np.diff(found.experts, axis=1) >= 0).all()
    assert found.rank_loads(load).sum() == pytest.approx(load.sum())
    none = all_at_home(num_experts, num_ranks, num_replicas)
    assert none.num_moved == 0
    assert found.price(load, cost) <= none.price(load, cost) * (1 + 1e-6) + 1e-6


def test_even_load_leaves_experts_at_home() -> None:
    assert place(np.full(16, 7.0), 4).num_moved == 0
    assert np.array_equal(place(np.full(16, 7.0), 4).experts, np.arange(16).reshape(4, 4))


def test_dearer_moves_make_fewer_of_them() -> None:
    load = skewed(0, 64)
    moved = [place(load, 8, 8, move_cost=cost).num_moved for cost in (0.0, 10.0, 100.0, 1e6)]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] == 0


def test_cost_of_a_move_is_told_in_assignments() -> None:
    # A bf16 weight of an expert: 2 values moved of 2 bytes; an assignment computes 6 FLOPs with it.
    assert move_cost(3000.0, 2, 1) == 2 * 2 * 3000 / 6
    assert move_cost(3000.0, 2, 4) == 4 * move_cost(3000.0, 2, 1)


def test_replicas_for_all_ranks_put_every_expert_on_each() -> None:
    everywhere = place(skewed(0, 4), 4, 12)
    assert np.array_equal(everywhere.experts, np.tile(np.arange(4), (4, 1)))


def test_groups_of_the_router_stay_on_one_node() -> None:
    load = skewed(3, 32)
    found = place(load, 8, 8, num_nodes=2, num_groups=4)
    nodes = [set((found.experts[node * 4 : node * 4 + 4] // 8).ravel().tolist()) for node in range(2)]
    assert not nodes[0] & nodes[1]
    assert [len(groups) for groups in nodes] == [2, 2]


def test_moved_experts_are_the_busiest_ranks() -> None:
    placement = Placement(np.array([[0, 1, 2], [0, 2, 3]]))
    # Rank 0 takes in expert 2; rank 1 takes in expert 0.
    assert placement.num_moved == 1
    assert Placement(np.array([[0, 2, 3], [1, 2, 3]])).num_moved == 2
    assert placement.rank_loads(np.array([4.0, 1.0, 2.0, 5.0])).tolist() == [2 + 1 + 1, 2 + 1 + 5]
    assert home_ranks(4, 2).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("plan", "ranks_per_node", "expected"),
    [
        ({"dp_shard": 8, "ep": 4}, 8, 1),
        ({"dp_shard": 8, "ep": 4}, 2, 2),
        ({"dp_shard": 8, "ep": 8}, 2, 4),
        ({"dp_shard": 8, "ep": 4}, 3, 1),
        ({"tp": 2, "dp_shard": 4, "ep": 4}, 4, 1),
        ({"tp": 2, "dp_shard": 4, "ep": 4, "etp": 2}, 4, 2),
    ],
)
def test_nodes_count_where_every_group_lies_on_them_in_equal_parts(
    plan: dict[str, int], ranks_per_node: int, expected: int
) -> None:
    assert num_nodes(Plan(**plan), ranks_per_node) == expected


def test_replicas_that_a_node_has_no_room_for_go_over_all_ranks() -> None:
    assert place(np.ones(4), 4, 8, num_nodes=2).num_copies.tolist() == [3, 3, 3, 3]


def test_nodes_are_those_of_the_processes_where_ranks_were_placed() -> None:
    plan = Plan(dp_shard=4, ep=4)
    assert num_nodes(plan, 2, np.array([2, 3, 0, 1])) == 2
    assert num_nodes(plan, 2, np.array([0, 2, 1, 3])) == 1


def test_moves_are_weighed_by_the_slowest_measured_link_of_any_group() -> None:
    plan, bandwidth = Plan(dp_shard=4, ep=2), np.full((4, 4), 8e9)
    bandwidth[3, 2], bandwidth[1, 2] = 2e9, 1e3  # the second is between groups
    contexts = [ParallelContext(plan, torch.device("cpu"), rank, links=Links(bandwidth, bandwidth)) for rank in (0, 3)]
    assert [flops_per_byte(plan, context) for context in contexts] == [EXPERT_FLOPS["cpu"] / 2e9] * 2


# ----------------------------------------------------------------------------------------------------------- forecast


def drifting_loads(seed: int, num_steps: int, num_experts: int) -> np.ndarray:
    """Counted loads whose underlying shares drift steadily and at random, [steps, E]."""
    draws = np.random.default_rng(seed)
    logits = draws.normal(0, 0.7, num_experts)
    slope = draws.normal(0, 0.01, num_experts)
    loads = []
    for _ in range(num_steps):
        logits = logits + slope + draws.normal(0, 0.01, num_experts)
        shares = np.exp(logits) / np.exp(logits).sum()
        loads.append(draws.multinomial(2048, shares))
    return np.array(loads)


def errors(loads: np.ndarray, horizon: int) -> tuple[float, float]:
    """Mean absolute error of the next ``horizon`` steps' mean load: forecast, and last value."""
    forecast = LoadForecast.empty(loads.shape[1])
    ours, last = [], []
    for step in range(len(loads) - horizon):
        forecast = forecast.after(loads[step])
        if step >= 30:
            truth = loads[step + 1 : step + 1 + horizon].mean(axis=0)
            ours.append(np.abs(forecast.mean(horizon) - truth).mean())
            last.append(np.abs(loads[step] - truth).mean())
    return float(np.mean(ours)), float(np.mean(last))


@pytest.mark.parametrize("horizon", [1, 10, 25])
def test_forecast_of_drifting_loads_beats_the_last_value(horizon: int) -> None:
    found = [errors(drifting_loads(seed, 200, 16), horizon) for seed in range(4)]
    assert sum(ours for ours, _ in found) < 0.95 * sum(last for _, last in found)


def test_forecast_follows_a_line_and_never_falls_below_zero() -> None:
    forecast = LoadForecast.empty(2)
    for step in range(400):
        forecast = forecast.after(np.array([100.0 + step, max(400.0 - step, 0.0)]))
    assert forecast.mean(1)[0] == pytest.approx(500.0, rel=0.02)
    assert (forecast.mean(500) >= 0).all()


def test_forecast_goes_on_from_its_saved_arrays() -> None:
    loads = drifting_loads(0, 40, 8)
    whole = resumed = LoadForecast.empty(8)
    for step, load in enumerate(loads):
        whole = whole.after(load)
        resumed = LoadForecast(resumed.level.copy(), resumed.trend.copy()) if step == 20 else resumed
        resumed = resumed.after(load)
    assert np.array_equal(whole.mean(10), resumed.mean(10))


def test_constant_loads_are_forecast_exactly() -> None:
    forecast = LoadForecast.empty(3, 4)
    for _ in range(5):
        forecast = forecast.after(np.full((3, 4), 7.0))
    assert forecast.mean(10) == pytest.approx(np.full((3, 4), 7.0))
