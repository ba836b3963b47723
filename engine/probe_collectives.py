"""Measures collectives between the ranks, over message sizes and groups, and what they cost beside a computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from engine.measurement import Collective, CollectiveSample, OverlapSample
from engine.probe_timing import Timer

CPU_BYTES = (2**6, 2**12, 2**17, 2**19, 2**21, 2**23, 2**25)
CUDA_BYTES = (2**10, 2**15, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28, 2**30)
TIMEOUT = timedelta(seconds=120)


def group_sizes(world_size: int, devices_per_node: int) -> list[tuple[int, int]]:
    """Size and stride of the groups to measure: powers of two inside a node and the whole node; beyond one node also
    all ranks, and one rank of each node."""
    local = min(devices_per_node, world_size)
    sizes = {(2**power, 1) for power in range(1, local.bit_length()) if local % 2**power == 0} | {(local, 1)}
    if world_size > local:
        sizes |= {(world_size, 1), (world_size // local, local)}
    return sorted(size for size in sizes if size[0] > 1)


def measure_collectives(timer: Timer, devices_per_node: int, sizes: Sequence[int]) -> list[CollectiveSample]:
    """Every collective over every group and message size; all groups of a size work at the same time, as they do in
    training."""
    context = timer.context
    samples = []
    for num_ranks, stride in group_sizes(dist.get_world_size(), devices_per_node):
        group = _group_of(num_ranks, stride)
        for num_bytes in sizes:
            for operation, action in _actions(group, num_bytes, context.device).items():
                seconds = timer.together(action)
                samples.append(
                    CollectiveSample(
                        operation=operation, num_ranks=num_ranks, stride=stride, bytes=num_bytes, seconds=seconds
                    )
                )
    return samples


def measure_overlap(timer: Timer, side: int, num_bytes: int) -> OverlapSample:
    """A chain of matrix products and an all-reduce, alone and together. The chain is made as long as the all-reduce."""
    device = timer.context.device
    message = torch.zeros(num_bytes // 4, device=device)
    matrix = torch.randn(side, side, device=device)
    collective = timer.together(lambda: dist.all_reduce(message))
    product = timer.each(lambda: matrix @ matrix)
    count = timer.context.broadcast(max(1, round(collective / product)))

    def compute() -> None:
        for _ in range(count):
            matrix @ matrix

    def both() -> None:
        work = dist.all_reduce(message, async_op=True)
        compute()
        assert work is not None
        work.wait()

    return OverlapSample(
        compute_seconds=timer.together(compute), collective_seconds=collective, both_seconds=timer.together(both)
    )


def _group_of(num_ranks: int, stride: int) -> ProcessGroup:
    """This rank's group of so many ranks at a distance of ``stride``."""
    world = dist.get_world_size()
    if num_ranks == world:
        whole = dist.group.WORLD
        assert whole is not None
        return whole
    ranks = torch.arange(world).view(-1, num_ranks, stride).movedim(1, -1).reshape(-1, num_ranks).tolist()
    group = dist.new_subgroups_by_enumeration(ranks, timeout=TIMEOUT)[0]
    assert group is not None
    return group


def _actions(group: ProcessGroup, num_bytes: int, device: torch.device) -> dict[Collective, Callable[[], object]]:
    """One call each, on buffers that are there already."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    part_elements = max(num_bytes // 4 // size, 1)
    part = torch.zeros(part_elements, device=device)
    whole = torch.zeros(part_elements * size, device=device)
    other = torch.zeros_like(whole)
    # Neighbours in pairs: the even ones send first, so that every link carries one message at a time.
    partner = rank ^ 1
    goes_first = rank % 2 == 0

    def exchange() -> None:
        if partner >= size:
            return
        for sends in (goes_first, not goes_first):
            if sends:
                dist.send(whole, group=group, group_dst=partner)
            else:
                dist.recv(other, group=group, group_src=partner)

    def all_to_all() -> None:
        dist.all_to_all_single(other, whole, group=group)

    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: dist.all_gather_single(whole, part, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_single(part, whole, group=group),
        "all_to_all": all_to_all,
        "send": exchange,
    }
