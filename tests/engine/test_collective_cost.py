"""Collectives in closed form: laws they obey, and published measurements within stated tolerances."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autotune.cost.communication import LinkColumns
from autotune.specs.cluster import parse_cluster
from engine import collective_cost as cost
from engine.collective_cost import Group, Link

pytestmark = pytest.mark.unit

MIB, GIB = 2**20, 2**30
NODE = Link(num_devices=8.0, bandwidth=400e9, latency=1e-6, start=8e-6, half_bytes=2e6)
NETWORK = Link(num_devices=np.inf, bandwidth=50e9, latency=4e-6, start=10e-6, half_bytes=0.4e6)
LINKS = (NODE, NETWORK)
COLLECTIVES = [cost.all_reduce, cost.all_gather, cost.reduce_scatter, cost.broadcast, cost.all_to_all]


def group(size: float, stride: float = 1.0, links: tuple[Link, ...] = LINKS, world: float = 1024.0) -> Group:
    return Group.along(links, world, (size, stride))


def in_a_node(size: float, links: tuple[Link, ...] = LINKS) -> Group:
    return group(size, links=links, world=size)


# ------------------------------------------------------------------------------------------------------------ the laws


@pytest.mark.parametrize(
    ("size", "stride", "members"),
    [
        (8, 1, (8, 8)),  # one node
        (16, 1, (8, 16)),
        (4, 2, (4, 4)),  # every other device of a node
        (16, 4, (2, 16)),
        (64, 8, (1, 64)),  # one device a node
        (64, 32, (1, 64)),
        (3, 1, (1.5, 3)),  # every third group of 3 straddles two nodes
    ],
)
def test_members_of_a_domain(size: int, stride: int, members: tuple[float, ...]) -> None:
    assert group(size, stride).members == members


def test_a_group_straddles_no_domain_that_holds_all_ranks_or_places_groups_whole() -> None:
    assert group(3, world=6).members == (3, 3)
    rack = replace(NODE, num_devices=72.0, placed_whole=1.0)
    assert group(64, links=(rack, NETWORK)).members == (64, 64)
    assert group(64, links=(replace(rack, placed_whole=0.0), NETWORK)).members == (32, 64)


def test_members_along_two_axes_multiply() -> None:
    assert Group.along(LINKS, 1024, (2, 1), (16, 4)).members == (4, 32)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_more_bytes_and_more_members_never_take_less(collective: Callable[..., np.ndarray]) -> None:
    sizes = np.geomspace(1, 64 * GIB, 80)
    for members in (2, 8, 16, 512):
        seconds = collective(sizes, group(members), LINKS)
        assert np.all(np.diff(seconds) > 0)
        assert np.all(np.diff(seconds / sizes) <= 1e-18)  # never a worse bandwidth
    for num_bytes in (1e3, 1e7, 1e9):
        nodes = collective(num_bytes, group(np.array([8.0, 16, 32, 64, 128, 256, 512, 1024])), LINKS)
        assert np.all(np.diff(nodes) > 0)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_nothing_to_do(collective: Callable[..., np.ndarray]) -> None:
    assert collective(1e6, group(1), LINKS) == 0
    assert collective(0.0, group(8), LINKS) == 0


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_columns_equal_single_numbers(collective: Callable[..., np.ndarray]) -> None:
    sizes, strides, num_bytes = np.array([2.0, 8, 64]), np.array([1.0, 8, 4]), np.array([1e4, 1e6, 1e9])
    columns = tuple(
        Link(**{name: np.full(3, getattr(link, name)) for name in Link.__dataclass_fields__}) for link in LINKS
    )
    together = collective(num_bytes, Group.along(columns, 1024, (sizes, strides)), columns)
    for row in range(3):
        alone = collective(num_bytes[row], group(sizes[row], strides[row]), LINKS)
        assert together[row] == pytest.approx(float(alone), rel=1e-12)


def test_large_messages_take_their_bytes_over_the_narrowest_bandwidth() -> None:
    num_bytes = 1e13
    inside, across = group(8), group(64)
    assert cost.all_gather(num_bytes, inside, LINKS) == pytest.approx(7 / 8 * num_bytes / 400e9, rel=0.01)
    assert cost.all_reduce(num_bytes, inside, LINKS) == pytest.approx(2 * 7 / 8 * num_bytes / 400e9, rel=0.01)
    # Eight network shares of a node carry one ring each.
    assert cost.all_gather(num_bytes, across, LINKS) == pytest.approx(63 / 64 * num_bytes / 400e9, rel=0.01)
    assert cost.all_gather(num_bytes, group(8, 8), LINKS) == pytest.approx(7 / 8 * num_bytes / 50e9, rel=0.01)
    in_node, outside = 7 / 64 * num_bytes / 400e9, 56 / 64 * num_bytes / 50e9
    assert cost.all_to_all(num_bytes, across, LINKS) == pytest.approx(in_node + outside, rel=0.01)
    once = cost.all_to_all(num_bytes, across, LINKS, outside_ratio=0.5)
    assert once == pytest.approx(in_node + outside / 2, rel=0.01)
    assert cost.send(num_bytes, group(2, 8), LINKS) == pytest.approx(num_bytes / 50e9, rel=0.01)
    assert cost.send(num_bytes, group(2, 1), LINKS) == pytest.approx(num_bytes / 400e9, rel=0.01)


def test_ring_latency_grows_with_the_group_and_tree_latency_with_its_logarithm() -> None:
    small = 1e3
    gathers = [float(cost.all_gather(small, group(n), LINKS)) for n in (256, 512, 1024)]
    reduces = [float(cost.all_reduce(small, group(n), LINKS)) for n in (256, 512, 1024)]
    assert gathers[2] - gathers[1] == pytest.approx(2 * (gathers[1] - gathers[0]), rel=0.01)
    assert reduces[2] - reduces[1] == pytest.approx(reduces[1] - reduces[0], rel=0.2)
    assert reduces[2] < gathers[2] / 5


def test_a_mesh_gives_a_small_group_only_its_own_links() -> None:
    mesh = (replace(NODE, pair_bandwidth=50e9), NETWORK)
    for members, bandwidth in ((2, 50e9), (4, 150e9), (8, 350e9)):
        seconds = cost.all_gather(1e13, group(members, links=mesh), mesh)
        assert (members - 1) / members * 1e13 / seconds == pytest.approx(bandwidth, rel=0.01)
    assert cost.send(1e13, group(2, links=mesh), mesh) == pytest.approx(1e13 / 50e9, rel=0.01)


def test_switches_reduce_for_large_enough_groups_and_all_reduce_alone() -> None:
    switch = (replace(NODE, reduction_bandwidth=500e9, reduction_min_devices=5.0), NETWORK)
    for members, faster in ((4, False), (5, True), (8, True)):
        with_switch = cost.all_reduce(1e10, in_a_node(members), switch)
        assert (with_switch < cost.all_reduce(1e10, in_a_node(members), LINKS)) == faster
    assert cost.all_gather(1e10, group(8), switch) == cost.all_gather(1e10, group(8), LINKS)


# ---------------------------------------------------------------------------------------------- published measurements


@pytest.fixture(scope="module")
def rows(shared_data: Path) -> list[dict[str, str]]:
    with (shared_data / "hardware.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def links_of(name: str, **network: float) -> tuple[Link, ...]:
    """The catalogue's links of a device, with another network between nodes."""
    levels = LinkColumns.of(parse_cluster(name)).levels
    return (*levels[:-1], replace(levels[-1], **network))


def measured(rows: list[dict[str, str]], device: str, pattern: str) -> Iterator[tuple[re.Match[str], dict[str, str]]]:
    for row in rows:
        match = re.fullmatch(pattern, row["quantity"])
        if match and row["device"].startswith(device):
            yield match, row


def sweep(rows: list[dict[str, str]], device: str, pattern: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and seconds of an all-reduce sweep over ``size`` devices, from its times or its bus bandwidth."""
    found = []
    for match, row in measured(rows, device, pattern + r"_(\d+)"):
        num_bytes, told = int(match[1]), re.search(r"time ([\d.]+) us", row["conditions"])
        if told or row["unit"] == "us":
            seconds = float(told[1] if told else row["value"]) * 1e-6
        else:
            seconds = 2 * (size - 1) / size * num_bytes / (float(row["value"]) * 1e9)
        found.append((num_bytes, seconds))
    assert found
    return tuple(np.array(found, dtype=float).T)  # type: ignore[return-value]


def errors(estimated: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    return np.abs(estimated / seconds - 1)


@pytest.mark.parametrize(
    ("device", "pattern", "name", "size", "median", "most"),
    [
        # Median and largest error from 1 MiB on; the A100 sweeps jump where the library changes protocol, the H200 one
        # was timed from Python, which shows below 8 MiB.
        ("H100-SXM", "all_reduce_8gpu", "h100", 8, 0.05, 0.20),
        ("H200-SXM", "all_reduce_8gpu", "h200", 8, 0.10, 0.45),
        ("A100-SXM", "all_reduce_8gpu", "a100", 8, 0.15, 0.45),
        ("A100", "vtrain_all_reduce_2gpu", "a100", 2, 0.15, 0.20),
        ("A100", "vtrain_all_reduce_4gpu", "a100", 4, 0.10, 0.25),
        ("A100", "vtrain_all_reduce_8gpu", "a100", 8, 0.15, 0.40),
    ],
)
def test_all_reduce_in_a_node(
    rows: list[dict[str, str]], device: str, pattern: str, name: str, size: int, median: float, most: float
) -> None:
    num_bytes, seconds = sweep(rows, device, pattern, size)
    found = errors(cost.all_reduce(num_bytes, group(size, links=links_of(name)), links_of(name)), seconds)
    found = found[num_bytes >= MIB]
    assert np.median(found) < median
    assert np.max(found) < most


def test_the_floor_of_small_messages(rows: list[dict[str, str]]) -> None:
    num_bytes, seconds = sweep(rows, "H100-SXM", "all_reduce_8gpu", 8)
    small = (num_bytes >= 512) & (num_bytes < MIB)
    found = errors(cost.all_reduce(num_bytes, group(8, links=links_of("h100")), links_of("h100")), seconds)[small]
    assert np.median(found) < 0.15


def test_all_reduce_over_four_nodes(rows: list[dict[str, str]]) -> None:
    """A network of about 93 GB/s a node. Between 8 and 32 MiB a protocol that the formula lacks is 1.4 to 1.6 times
    faster than it says; below 1 MiB the timer is Python's."""
    links = links_of("a100", bandwidth=11.6e9, half_bytes=0.1e6)
    num_bytes, seconds = sweep(rows, "unnamed 4 nodes", "all_reduce_4node", 32)
    found = errors(cost.all_reduce(num_bytes, group(32, links=links), links), seconds)
    assert np.median(found) < 0.15
    assert np.max(found[num_bytes >= 64 * MIB]) < 0.15
    assert np.max(found) < 0.65


@pytest.mark.parametrize(("device", "name"), [("H200-SXM", "h200"), ("B200", "b200")])
def test_the_switch_by_group_size(rows: list[dict[str, str]], device: str, name: str) -> None:
    for match, row in measured(rows, device, r"all_reduce_busbw_(\d)gpu_8GiB"):
        size = int(match[1])
        seconds = cost.all_reduce(8.0 * GIB, in_a_node(size, links_of(name)), links_of(name))
        bus = 2 * (size - 1) / size * 8 * GIB / seconds / 1e9
        assert bus == pytest.approx(float(row["value"]), rel=0.17)


def test_gathers_stay_at_the_ring_where_all_reduce_uses_the_switch(rows: list[dict[str, str]]) -> None:
    links = links_of("h200")
    for name in ("all_gather", "reduce_scatter"):
        ((_, row),) = measured(rows, "H200-SXM", f"{name}_ring_busbw_8gpu_16GiB")
        seconds = getattr(cost, name)(16.0 * GIB, group(8, links=links), links)
        assert 7 / 8 * 16 * GIB / seconds / 1e9 == pytest.approx(float(row["value"]), rel=0.03)


def test_a_pair_of_a_mesh_has_one_link(rows: list[dict[str, str]]) -> None:
    links = links_of("mi300x")
    for match, row in measured(rows, "MI300X", r"all_reduce_busbw_(\d)gpu"):
        size = int(match[1])
        seconds = cost.all_reduce(16.0 * GIB, group(size, links=links), links)
        assert 2 * (size - 1) / size * 16 * GIB / seconds / 1e9 == pytest.approx(float(row["value"]), rel=0.03)


def hierarchy(rows: list[dict[str, str]], table: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes, nodes of 8 and fraction of the line rate of an Alibaba HPN table, from two nodes on."""
    pattern = table + r"_(\d+)MiB_(\d+)Node-\d+GPU"
    found = [(int(m[1]) * MIB, int(m[2]), float(row["value"])) for m, row in measured(rows, "Alibaba HPN", pattern)]
    assert found
    return tuple(np.array(found).T)  # type: ignore[return-value]


HPN = (replace(NODE, bandwidth=365e9, latency=0.6e-6, start=7e-6, half_bytes=1.9e6), NETWORK)
"""H100-like nodes with 8 network cards of 400 Gb/s."""


def test_group_size_and_payload_of_rings(rows: list[dict[str, str]]) -> None:
    """Rings over 16 to 1024 devices. Messages below 16 KiB a step are left out: the formula says up to 4 times less
    than the table, which has 5 us for each of the 2046 steps of a ring of 1024 whatever they carry."""
    num_bytes, nodes, ratio = hierarchy(rows, "nic")
    size = 8 * nodes
    traffic = 2 * (size - 1) / size * num_bytes
    seconds = traffic / (ratio * 400e9)
    ring = 2 * cost.all_gather(num_bytes, group(size, links=HPN), HPN)
    enough = num_bytes / size > 1.5 * MIB
    assert np.median(errors(ring, seconds)[enough]) < 0.12
    assert np.max(errors(ring, seconds)[enough]) < 0.30
    assert np.median(errors(ring, seconds)) < 0.20
    # What matters for ranking: the same order of all cells.
    order = np.corrcoef(np.argsort(np.argsort(ring)), np.argsort(np.argsort(seconds)))[0, 1]
    assert order > 0.95


def test_all_reduce_across_nodes_in_two_levels(rows: list[dict[str, str]]) -> None:
    num_bytes, nodes, ratio = hierarchy(rows, "nvlink")
    size = 8 * nodes
    seconds = 2 * (size - 1) / size * num_bytes / (ratio * 400e9)
    found = errors(cost.all_reduce(num_bytes, group(size, links=HPN), HPN), seconds)
    assert np.median(found) < 0.06
    assert np.max(found[num_bytes >= 256 * MIB]) < 0.15


def test_all_to_all_across_nodes(rows: list[dict[str, str]]) -> None:
    num_bytes, nodes, ratio = hierarchy(rows, "ata")
    size = 8 * nodes
    seconds = (size - 8) / size * num_bytes / (ratio * 50e9)
    found = errors(cost.all_to_all(num_bytes, group(size, links=HPN), HPN), seconds)
    assert np.median(found) < 0.10
    assert np.max(found) < 0.25


def test_strided_groups_use_fewer_network_cards(rows: list[dict[str, str]]) -> None:
    """A100-class nodes with 45 GB/s a node. The pair was measured alone and shares its card with nobody (8.1)."""
    links = links_of("a100", bandwidth=5.6e9)
    links = (replace(links[0], bandwidth=154e9), links[1])
    cases = {
        "allreduce_8gpu": (8, 1, 0.10),
        "allreduce_16gpu_2node": (16, 1, 0.10),
        "allreduce_8gpu_strided_across_2_nodes": (8, 2, 0.10),
        "allreduce_2gpu_strided_across_2_nodes": (2, 8, 0.35),
    }
    for quantity, (size, stride, tolerance) in cases.items():
        ((_, row),) = measured(rows, "A100-class", quantity)
        seconds = cost.all_reduce(256.0 * MIB, group(size, stride, links), links)
        bus = 2 * (size - 1) / size * 256 * MIB / seconds / 1e9
        assert bus == pytest.approx(float(row["value"]), rel=tolerance), quantity


def test_expert_dispatch(rows: list[dict[str, str]]) -> None:
    """DeepEP on H800: 4096 tokens of width 7168 to 8 experts, fp8. Between two nodes it hides the traffic inside them,
    which a plain all-to-all does not."""
    links = links_of("h800")
    sent = 4096 * 7168 * 8.0
    ((_, row),) = measured(rows, "H800-SXM", "intranode_dispatch")
    inside = 7 / 8 * sent / cost.all_to_all(sent, group(8, links=links), links) / 1e9
    assert inside == pytest.approx(float(row["value"]), rel=0.05)
    ((_, row),) = measured(rows, "H800-SXM", "internode_dispatch_EP16-64")
    low, high = map(float, row["value"].split("-"))
    for size in (16, 32, 64):
        seconds = cost.all_to_all(sent, group(size, links=links), links)
        assert 0.75 * low < (size - 8) / size * sent / seconds / 1e9 < 1.05 * high


def test_a_switch_of_pcie_and_two_sockets(rows: list[dict[str, str]]) -> None:
    """Links of PCIe 4.0 as the catalogue has them for L40S; measured on A100 PCIe of the same generation."""
    links = links_of("l40s")
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        for match, row in measured(rows, "a100_pcie", rf"simumax_intra_node_pcie_(\d)x_{name}"):
            size = int(match[1])
            laps = 2 if name == "all_reduce" else 1
            seconds = getattr(cost, name)(1.0 * GIB, group(size, links=links), links)
            bus = laps * (size - 1) / size * GIB / seconds / 1e9
            assert bus == pytest.approx(float(row["value"]) * 30, rel=0.15)


def test_dies_in_a_mesh_that_rings_use_in_part(rows: list[dict[str, str]]) -> None:
    """MI200: the one device whose ring attains less than its links; all-to-all, which uses all of them, is 2 to 3 times
    faster than the catalogue's figures say."""
    links = links_of("mi250x")
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        for match, row in measured(rows, "MI200", rf"{name}_8gpu_(\d+)MiB"):
            if int(match[1]) >= 64:
                seconds = getattr(cost, name)(float(match[1]) * MIB, group(8, links=links), links)
                assert seconds == pytest.approx(float(row["value"]) * 1e-6, rel=0.35)
