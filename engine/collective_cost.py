"""Seconds of collectives as a function of bytes, group, layout of the group over the network, and the links.

The network has levels, from the closest devices outwards (a node, a rack, the cluster). A group of devices is told by
how many of its members share one domain of each level. That covers consecutive groups, strided ones (the members of a
data-parallel group of 8-way tensor-parallel ranks are alone on their nodes), and groups along two axes of a mesh.

Every device has its own share of every level's bandwidth, since all groups of one kind talk at the same time: of
``m`` members in a domain, each sends through its own share, so that a group crosses a level with ``m`` shares.

Time of an algorithm with ``w`` bytes through the narrowest point of bandwidth ``B``::

    start + sum of hops * latency + w / B + either((SLOWDOWN - 1) * w / B, RAMP_HOPS * fill + sum of hops * fill)

where ``either(x, y) = x y / (x + y)`` is the softened smaller of two: small messages go by a low-latency protocol at a
fraction of the bandwidth, large ones at all of it after filling each hop's buffers (``fill``: the seconds that the
bytes a hop waits for take; the constant part is filled at the first level). Forms follow the tuning model of NCCL
(``src/graph/tuning.cc``: base latency, latency by hop and protocol, tree bandwidth 0.92 of the ring's) and Thakur et
al., "Optimization of Collective Communication Operations in MPICH", 2005.

All sizes are bytes and seconds. Every argument and every field is one number or ``[n]``; results broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Number = float | np.ndarray
"""One number for all rows, or ``[n]``."""

SLOWDOWN = 3.0
"""How much longer a byte takes in the low-latency protocol."""
RAMP_HOPS = 14.0
"""Hops' worth of filling that a large message pays whatever the group; with the in-node hops of 8 devices this gives
the 110 us that all-reduce on 8 H100 and on 2 to 8 A100 takes above its bandwidth time."""
IN_SWITCH_HOPS = 14.0
"""Hops that a reduction in the switch counts for, whatever the group."""
TREE_RATIO = 0.92
"""Bandwidth of a double binary tree over the ring's (NCCL)."""

PEERS_AT_ONCE = 8.0
"""Peers that an all-to-all sends to at the same time (NCCL)."""

_TINY = 1e-300
_FAR = 2.0**52
"""More devices than any machine has."""


@dataclass(frozen=True)
class Link:
    """One level of the network; each field one number or ``[n]``."""

    num_devices: Number
    """Consecutive devices of one domain; infinite at the last level."""
    bandwidth: Number
    """Of one device to the others, one direction, bytes/s."""
    latency: Number
    """Of one hop of an empty message, seconds."""
    start: Number
    """Of a collective, beyond its hops, seconds."""
    half_bytes: Number
    """Bytes a hop waits for before it sends on, in the protocol for large messages."""
    pair_bandwidth: Number = np.inf
    """Between two devices, where they have a link of their own instead of a switch, bytes/s."""
    reduction_bandwidth: Number = 0.0
    """Bus bandwidth of an all-reduce computed in the switch, bytes/s; 0 without."""
    reduction_min_devices: Number = 2.0
    """Members of a domain from which the switch reduces."""
    all_gather_ratio: Number = 1.0
    """Time of an all-gather over what its form says, where a library departs from it."""
    reduce_scatter_ratio: Number = 1.0
    """The same of a reduce-scatter."""
    all_to_all_ratio: Number = 1.0
    """The same of an all-to-all."""
    send_ratio: Number = 1.0
    """The same of a send."""
    placed_whole: Number = 0.0
    """1 where groups that fit are placed inside one domain, devices left over staying idle (racks); 0 where domains
    are filled one after another, so that a group may straddle two (nodes)."""


@dataclass(frozen=True)
class Group:
    """Devices that communicate."""

    members: tuple[Number, ...]
    """Members in one domain of each level; the last is the size of the group. Means where domains differ."""

    @property
    def size(self) -> Number:
        """Members."""
        return self.members[-1]

    @classmethod
    def along(cls, links: Sequence[Link], world_size: Number, *axes: tuple[Number, Number]) -> Group:
        """A group along axes of a mesh of ranks.

        Args:
            links: The levels.
            world_size: Ranks in all; a group straddles no domain that holds them all.
            axes: ``(size, stride)`` of each axis, in ranks.
        """
        counts = [_members(link, world_size, axes) for link in links[:-1]]
        size = axes[0][0]
        for further, _ in axes[1:]:
            size = size * further
        return cls((*counts, size))


def _members(link: Link, world_size: Number, axes: Sequence[tuple[Number, Number]]) -> Number:
    """Members of a group in one domain of a level."""
    total: Number = 1.0
    for size, stride in axes:
        inside = np.clip(link.num_devices / np.asarray(stride, float), 1.0, size)
        extent = size * stride
        straddles = (
            (inside >= size)
            & (size > 1)
            & (np.fmod(np.minimum(link.num_devices, _FAR), extent) > 0)
            & (world_size > link.num_devices)
            & (np.asarray(link.placed_whole) == 0)
        )
        total = total * np.where(straddles, inside / 2, inside)
    return total


@dataclass(frozen=True)
class _Path:
    """What the levels that a group crosses amount to."""

    start: Number
    bus: Number
    """Bandwidth that a ring through all members finds, bytes/s."""
    inner: tuple[Number, ...]
    """Members in a domain of the level below each level (1 below the first)."""
    steps: tuple[Number, ...]
    """Hops of each level on a way through all members."""
    shares: tuple[Number, ...]
    """Bandwidth of one device at each level, as far as the group can use it."""


def _path(group: Group, links: Sequence[Link]) -> _Path:
    inner = (1.0, *group.members[:-1])
    start: Number = 0.0
    bus: Number = np.inf
    steps, shares = [], []
    for link, below, here in zip(links, inner, group.members, strict=True):
        branches = here / below
        crosses = branches > 1
        share = np.minimum(link.bandwidth, link.pair_bandwidth * np.maximum(branches - 1, 1))
        start = np.where(crosses, link.start, start)
        bus = np.where(crosses, np.minimum(bus, below * share), bus)
        steps.append(group.size / below - group.size / here)
        shares.append(share)
    return _Path(start, bus, inner, tuple(steps), tuple(shares))


def _sum_hops(hops: Sequence[Number], path: _Path, links: Sequence[Link]) -> tuple[Number, Number]:
    """Latency and filling of so many hops at each level, seconds."""
    latency: Number = 0.0
    filling: Number = RAMP_HOPS * (links[0].half_bytes / links[0].bandwidth)
    for count, link, share in zip(hops, links, path.shares, strict=True):
        latency = latency + count * link.latency
        filling = filling + count * (link.half_bytes / share)
    return latency, filling


def _time(path: _Path, links: Sequence[Link], hops: Sequence[Number], wire: Number) -> Number:
    """Seconds of an algorithm; ``wire``: its bytes over its bandwidth."""
    latency, filling = _sum_hops(hops, path, links)
    slow = (SLOWDOWN - 1) * wire
    return path.start + latency + wire + slow * filling / (slow + filling + _TINY)


def _ratio(group: Group, links: Sequence[Link], name: str) -> Number:
    """A ratio of the outermost level that a group crosses."""
    ratio: Number = 1.0
    for link, below, here in zip(links, (1.0, *group.members[:-1]), group.members, strict=True):
        of_level = getattr(link, name)
        if np.ndim(of_level) or of_level != 1 or np.ndim(ratio):
            ratio = np.where(here > below, of_level, ratio)
    return ratio


def _none_alone(seconds: Number, group: Group, num_bytes: Number) -> Number:
    """Nothing to do in a group of one, or without bytes."""
    idle = (np.asarray(group.size) <= 1) | (np.asarray(num_bytes) <= 0)
    result: Number = np.where(idle, 0.0, seconds)
    return result


def all_reduce(num_bytes: Number, group: Group, links: Sequence[Link]) -> Number:
    """The sum of everybody's buffer of ``num_bytes`` in everybody's: the fastest of three ways.

    Ring: ``2 (g - 1)`` steps, each of ``1/g`` of the bytes. Double binary tree across domains, a chain inside: hops
    grow with the logarithm of the domains. In the switch inside the innermost domain, tree across (NVLS and NVLS
    tree): from a number of members on.
    """
    path = _path(group, links)
    size = group.size
    traffic = 2 * (size - 1) / size * num_bytes
    best = _time(path, links, [2 * steps for steps in path.steps], traffic / path.bus)
    branches = [here / below for here, below in zip(group.members, path.inner, strict=True)]
    across = [2 * np.ceil(np.log2(np.maximum(count, 1.0))) for count in branches[1:]]
    if across:
        chain = 2 * np.maximum(group.members[0] - 1, 0.0)
        best = np.minimum(best, _time(path, links, [chain, *across], traffic / (TREE_RATIO * path.bus)))
    first = links[0]
    usable = (np.asarray(first.reduction_bandwidth) > 0) & (group.members[0] >= np.asarray(first.reduction_min_devices))
    if np.any(usable):
        bus = np.where(usable, first.reduction_bandwidth, 1.0)
        for count, below, share in zip(branches[1:], path.inner[1:], path.shares[1:], strict=True):
            bus = np.where(count > 1, np.minimum(bus, below * share), bus)
        best = np.where(usable, np.minimum(best, _time(path, links, [IN_SWITCH_HOPS, *across], traffic / bus)), best)
    return _none_alone(best, group, num_bytes)


def all_gather(num_bytes: Number, group: Group, links: Sequence[Link]) -> Number:
    """Everybody's part in everybody's buffer of ``num_bytes`` in all: a ring of ``g - 1`` steps, switches or not."""
    return _ring(num_bytes, group, links) * _ratio(group, links, "all_gather_ratio")


def reduce_scatter(num_bytes: Number, group: Group, links: Sequence[Link]) -> Number:
    """Each member gets its part of the sum of everybody's buffer of ``num_bytes``: as ``all_gather``, backwards."""
    return _ring(num_bytes, group, links) * _ratio(group, links, "reduce_scatter_ratio")


def _ring(num_bytes: Number, group: Group, links: Sequence[Link]) -> Number:
    """``g - 1`` steps around a ring, each with a member's part of ``num_bytes``."""
    path = _path(group, links)
    traffic = (group.size - 1) / group.size * num_bytes
    return _none_alone(_time(path, links, path.steps, traffic / path.bus), group, num_bytes)


def broadcast(num_bytes: Number, group: Group, links: Sequence[Link]) -> Number:
    """One member's ``num_bytes`` to all, in pieces along a ring."""
    path = _path(group, links)
    return _none_alone(_time(path, links, path.steps, num_bytes / path.bus), group, num_bytes)


def all_to_all(num_bytes: Number, group: Group, links: Sequence[Link], *, outside_ratio: Number = 1.0) -> Number:
    """A different part of each member's ``num_bytes`` to each member.

    What goes to members in the same domain and what leaves it are not hidden by one another: tables of all-to-all on 2
    to 16 nodes (SimAI) take the sum of both.

    Args:
        num_bytes: Of one member's buffer, its own part included.
        group: The devices.
        links: The levels.
        outside_ratio: Bytes that leave the innermost domain over those of plain parts: below 1 where what goes to
            several members of a domain is sent there once.
    """
    path = _path(group, links)
    size = group.size
    wire: Number = 0.0
    for level, (below, here, share) in enumerate(zip(path.inner, group.members, path.shares, strict=True)):
        seconds = (here - below) / size * num_bytes / share
        wire = wire + seconds * (outside_ratio if level else 1.0)
    hops = [(here - below) / PEERS_AT_ONCE for below, here in zip(path.inner, group.members, strict=True)]
    seconds = _time(path, links, hops, wire) * _ratio(group, links, "all_to_all_ratio")
    return _none_alone(seconds, group, num_bytes)


def send(num_bytes: Number, group: Group, links: Sequence[Link]) -> Number:
    """``num_bytes`` from one device to one other. ``group``: the two, by ``Group.along(links, world, (2, stride))``."""
    path = _path(group, links)
    share: Number = np.inf
    for link, below, here in zip(links, path.inner, group.members, strict=True):
        share = np.where(here > below, np.minimum(link.bandwidth, link.pair_bandwidth), share)
    seconds = _time(path, links, path.steps, num_bytes / share) * _ratio(group, links, "send_ratio")
    return _none_alone(seconds, group, num_bytes)
