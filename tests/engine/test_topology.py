"""Links from measurements, routes that sum right and take the links' time, choices near the best, ranks well placed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.sparse.csgraph import minimum_spanning_tree

from engine.config import load_run
from engine.errors import UserError
from engine.plan import Plan
from engine.rank_placement import (
    assignment_cost,
    best_assignment,
    exchange_gain,
    improved_assignment,
    place,
    traffic,
)
from engine.route_choice import (
    SIZE_CLASSES,
    Choice,
    choose,
    cluster_counts,
    clusters,
    plan_id,
    ring_order,
    size_class,
    spanning_tree,
)
from engine.route_plan import RoutePlan
from engine.routes import Route, halving_doubling, replay, ring, ring_seconds, tree, two_level
from engine.topology import Links, PairSample, Topology, fit_link, load_topology

pytestmark = pytest.mark.unit


def uniform(size: int = 8) -> Links:
    return Links(np.full((size, size), 1e-5), np.full((size, size), 1e10))


def scattered(seed: int, size: int = 8) -> Links:
    """Links that have nothing to do with each other, the two directions of a pair neither."""
    draws = np.random.default_rng(seed)
    return Links(draws.uniform(3e-6, 3e-5, (size, size)), draws.uniform(1e9, 2e10, (size, size)))


def clustered(order: np.ndarray, cluster: int) -> Links:
    """Devices whose place in ``order`` falls into the same ``cluster`` places are close."""
    place_of = np.argsort(order) // cluster
    close = place_of[:, None] == place_of
    return Links(np.where(close, 3e-6, 4e-5), np.where(close, 1e11, 3e9))


def all_routes() -> Iterator[Route]:
    for size in range(2, 10):
        yield ring(size)
        yield halving_doubling(size)
    yield tree(5, [(4, 1), (3, 1), (1, 0), (2, 0)], [(0, 2), (0, 1), (1, 4), (2, 3)])
    for sizes in [(4, 4), (5, 3), (1, 7), (2, 2, 2), (3, 1, 2), (1, 3, 4), (2, 2, 2, 2), (1, 1, 6)]:
        yield two_level(sizes)


# --------------------------------------------------------------------------------------------------------------- links


def topology_data(size: int = 3) -> dict[str, Any]:
    links = scattered(0, size)
    return Topology(
        num_devices=size,
        hosts=("here",) * size,
        backend="gloo",
        started="2026-01-01T00:00:00+00:00",
        samples=tuple(
            PairSample(source=source, target=target, bytes=num_bytes, seconds=float(times[source, target]))
            for num_bytes in (2**10, 2**17, 2**22)
            for times in [links.seconds(num_bytes)]
            for source, target in permutations(range(size), 2)
        ),
    ).to_data()


def test_links_are_told_from_a_file_with_both_directions(tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    path.write_text(json.dumps(topology_data()))
    found, true = load_topology(path).links(), scattered(0, 3)
    others = ~np.eye(3, dtype=bool)
    assert found.latency[others] == pytest.approx(true.latency[others], rel=1e-6)
    assert found.bandwidth[others] == pytest.approx(true.bandwidth[others], rel=1e-6)


def test_noise_never_makes_a_link_free() -> None:
    latency, bandwidth = fit_link([1000, 100_000], [2e-5, 1e-5])
    assert latency > 0
    assert bandwidth < np.inf
    latency, _ = fit_link([1000, 2000], [1e-5, 3e-5])
    assert latency > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["samples"].pop(), "1 sizes of messages|2 sizes of messages"),
        (lambda data: data.update(num_devices=4), "0 sizes of messages"),
        (lambda data: data.update(num_devices=2), "of every pair of different devices below 2"),
        (lambda data: data.update(devices=2), "unknown key 'devices'"),
        (lambda data: data.update(samples=[]), "two or more are needed"),
    ],
)
def test_a_file_that_lacks_pairs_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    data = topology_data()
    data["samples"] = [sample for sample in data["samples"] if sample["bytes"] > 2**10]
    change(data)
    path = tmp_path / "topology.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=message):
        load_topology(path).links()


def test_a_missing_file_says_how_to_measure_one(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        load_topology(tmp_path / "no.json")
    assert "--pairs" in str(error.value.hint)
    (tmp_path / "no.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        load_topology(tmp_path / "no.json")


def test_the_files_path_is_taken_from_the_run_files_folder(tmp_path: Path) -> None:
    model = {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "ffn_size": 8}
    workload = {"sequence_length": 8, "total_tokens": 64}
    run = {"model": {**model, "vocab_size": 8}, "workload": workload, "runtime": {"topology": "links/topology.json"}}
    (tmp_path / "run.yaml").write_text(json.dumps(run))
    assert load_run(tmp_path / "run.yaml")[0].runtime.topology == str(tmp_path / "links/topology.json")


# -------------------------------------------------------------------------------------------------------------- routes


@pytest.mark.parametrize("route", list(all_routes()), ids=lambda route: f"{route.kind}-{route.num_ranks}")
def test_a_route_sums_everything_everywhere_to_the_same_bits(route: Route) -> None:
    given = np.random.default_rng(0).standard_normal((route.num_ranks, route.num_pieces))
    values = given.copy()
    for step in route.steps:
        assert len({move.source for move in step}) == len({move.target for move in step}) == len(step)
        before = values.copy()
        for move in step:
            part = slice(move.start, move.stop)
            values[move.target, part] = before[move.source, part] + (before[move.target, part] if move.adds else 0)
    assert values == pytest.approx(np.broadcast_to(given.sum(axis=0), values.shape))
    assert (values == values[0]).all()


def test_the_time_of_a_ring_is_that_of_its_slowest_link() -> None:
    links, orders = scattered(1), np.array(list(permutations(range(8))))[::400]
    assert ring_seconds(links, 1e6, orders) == pytest.approx(replay(ring(8), links, 1e6, orders))
    assert ring_seconds(uniform(), 1e6, orders[:1])[0] == pytest.approx(2 * 7 * (1e-5 + 1e6 / 8 / 1e10))


def test_the_times_of_other_routes_on_equal_links() -> None:
    links, start, whole = uniform(), 1e-5, 1e6 / 1e10
    assert replay(halving_doubling(8), links, 1e6)[0] == pytest.approx(2 * (3 * start + 7 / 8 * whole))
    copies = [(0, 4), (0, 2), (4, 6), (0, 1), (4, 5), (2, 3), (6, 7)]
    sums = [(child, parent) for parent, child in reversed(copies)]
    assert replay(tree(8, sums, copies), links, 1e6)[0] == pytest.approx(2 * 3 * (start + whole))
    assert replay(two_level((4, 4)), links, 1e6)[0] == pytest.approx(7 * (start + whole / 4))


def test_a_reordered_route_is_the_same_with_other_devices() -> None:
    links, order = scattered(2), [3, 1, 0, 2, 7, 6, 5, 4]
    for route in (ring(8), halving_doubling(8), two_level((5, 3))):
        told = replay(route, links, 1e6, np.array([order]))
        assert replay(route.reordered(order), links, 1e6) == pytest.approx(told)


# -------------------------------------------------------------------------------------------------------------- choice


def test_the_spanning_tree_is_the_least() -> None:
    seconds = scattered(3).seconds(1e6)
    both = np.maximum(seconds, seconds.T)
    assert sum(both[edge] for edge in spanning_tree(seconds)) == pytest.approx(minimum_spanning_tree(both).sum())


def test_clusters_are_found_at_the_widest_gap_whatever_the_numbering() -> None:
    order = np.random.default_rng(4).permutation(8)
    seconds = clustered(order, 2).seconds(1e6)
    assert cluster_counts(seconds)[0] == 4
    assert sorted(map(sorted, clusters(seconds, 4))) == sorted(sorted(pair) for pair in order.reshape(4, 2).tolist())


def test_local_search_finds_the_ring_that_avoids_a_bad_link() -> None:
    seconds = np.full((6, 6), 2.0)
    order = [0, 3, 1, 5, 2, 4]
    for one, other in zip(order, order[1:] + order[:1], strict=True):
        seconds[one, other] = 1.0
    found = ring_order(seconds)
    assert seconds[found, np.roll(found, -1)].max() == 1.0


@pytest.mark.parametrize("num_bytes", SIZE_CLASSES)
@pytest.mark.parametrize("size", [5, 6])
def test_the_choice_is_near_the_best_of_all_orders(size: int, num_bytes: int) -> None:
    for seed in range(2):
        links = scattered(seed, size)
        best, found = choose(links, num_bytes, exact=True), choose(links, num_bytes)
        assert best.seconds_over(links) == pytest.approx(best.seconds)
        assert best.seconds <= found.seconds <= 1.1 * best.seconds


def test_equal_links_lose_nothing() -> None:
    for num_bytes in SIZE_CLASSES:
        best = min(float(replay(route, uniform(), num_bytes)[0]) for route in (ring(8), halving_doubling(8)))
        assert choose(uniform(), num_bytes).seconds <= 1.02 * best


def test_large_buffers_never_go_whole_through_a_tree() -> None:
    for links in (uniform(), scattered(5), clustered(np.arange(8), 4)):
        assert choose(links, SIZE_CLASSES[-1]).route.kind != "tree"


def test_ranks_agree_on_a_plan_by_what_it_does() -> None:
    one, other = (Choice(1.0, ring(4).reordered(order), 1.0) for order in ([0, 1, 2, 3], [0, 2, 1, 3]))
    assert plan_id([one]) == plan_id([Choice(1.0, ring(4), 2.0)]) != plan_id([other])
    assert [size_class(num_bytes) for num_bytes in (0, 100, 2**17 - 1, 2**17 + 1, 2**40)] == [0, 0, 0, 1, 2]


# ---------------------------------------------------------------------------------------------------------- re-routing


def test_a_route_stays_unless_another_saves_enough() -> None:
    plan = RoutePlan(uniform(), [Choice(size, ring(8), ring_time(size)) for size in SIZE_CLASSES])
    revised = plan.revised(uniform())
    assert [choice.route.kind for choice in revised.choices] == ["halving-doubling", "halving-doubling", "ring"]
    assert plan.changes(revised) == "16 KiB ring to halving-doubling, 1024 KiB ring to halving-doubling"
    assert plan.changes(plan.kept(scattered(9))) == ""


def ring_time(num_bytes: float) -> float:
    return float(ring_seconds(uniform(), num_bytes, np.arange(8)[None])[0])


def test_single_slow_steps_are_no_reason_to_measure() -> None:
    plan = RoutePlan(uniform())
    for slowdown in (1, 1, 1, 9, 1, 9, 1, 1.4, 1.4, 1.4):
        plan.observe(SIZE_CLASSES[1], slowdown * plan.expected_seconds(SIZE_CLASSES[1]))
        assert plan.suspected(plan.end_step()) == []
    assert plan.suspected(plan.end_step()) == []  # a step without sums
    found = []
    for _ in range(2):
        plan.observe(SIZE_CLASSES[1], 2 * plan.expected_seconds(SIZE_CLASSES[1]))
        found.append(plan.suspected(plan.end_step()))
    assert found == [[], list(plan.choices[1].route.edges)]


def test_links_that_are_slower_than_told_are_the_usual_after_some_steps() -> None:
    plan = RoutePlan(uniform())
    for _ in range(9):
        plan.observe(SIZE_CLASSES[0], 4 * plan.expected_seconds(SIZE_CLASSES[0]))
        assert plan.suspected(plan.end_step()) == []


# ----------------------------------------------------------------------------------------------------------- placement


def test_tensor_parallel_groups_get_the_fastest_links() -> None:
    order = np.random.default_rng(6).permutation(8)
    devices = place(Plan(tp=2, pp=2, dp_replicate=2), clustered(order, 2))
    place_of = np.argsort(order) // 2
    assert all(place_of[one] == place_of[other] for one, other in devices.reshape(4, 2))


def test_pipelines_get_the_next_and_data_parallelism_the_rest() -> None:
    plan = Plan(pp=2, dp_replicate=4, rank_order="tp-cp-dp-pp")
    order = np.random.default_rng(7).permutation(8)
    devices = place(plan, clustered(order, 2))
    place_of = np.argsort(order) // 2
    assert all(place_of[devices[rank]] == place_of[devices[rank + 4]] for rank in range(4))


def test_equal_devices_keep_their_numbers() -> None:
    assert place(Plan(tp=2, dp_shard=4), uniform()).tolist() == list(range(8))
    assert place(Plan(tp=2, dp_shard=8), uniform(16)).tolist() == list(range(16))


@pytest.mark.parametrize("degrees", [{"tp": 2, "pp": 2}, {"tp": 4}, {"pp": 4}, {"cp": 2, "tp": 2}])
def test_exchanges_find_the_best_placement(degrees: dict[str, int]) -> None:
    plan = Plan(**degrees, dp_shard=8 // int(np.prod(list(degrees.values()))))
    for seed in range(3):
        sent, seconds = traffic(plan), scattered(seed).seconds(2**20)
        best = assignment_cost(sent, seconds, best_assignment(sent, seconds))
        assert assignment_cost(sent, seconds, improved_assignment(sent, seconds)) <= 1.02 * best


def test_after_exchanges_none_helps_any_more() -> None:
    plan = Plan(tp=2, pp=3, dp_shard=4)
    sent, seconds = traffic(plan), scattered(9, plan.world_size).seconds(2**20)
    device = improved_assignment(sent, seconds)
    assert sorted(device) == list(range(plan.world_size))
    cost = assignment_cost(sent, seconds, device)
    assert exchange_gain(sent, seconds[np.ix_(device, device)]).max() <= 1e-8 * cost


def test_the_gain_of_an_exchange_is_what_the_cost_falls_by() -> None:
    draws = np.random.default_rng(8)
    sent, seconds = draws.random((6, 6)), draws.random((6, 6))
    np.fill_diagonal(sent, 0)
    np.fill_diagonal(seconds, 0)
    gain, cost = exchange_gain(sent, seconds), assignment_cost(sent, seconds, np.arange(6))
    for one, other in permutations(range(6), 2):
        device = np.arange(6)
        device[[one, other]] = other, one
        assert gain[one, other] == pytest.approx(cost - assignment_cost(sent, seconds, device))
