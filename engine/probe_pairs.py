"""Times messages between every two ranks, in rounds of pairs that don't disturb each other."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import UTC, datetime

import torch
import torch.distributed as dist

from engine.comm.transport import Message, Transport
from engine.context import ParallelContext
from engine.topology import PROBED_BYTES, Edge, PairSample, Topology

REPEATS = 7
"""Times that a message is sent; the least counts."""
_EMPTY = 4
"""Bytes of the answer, and of an empty message."""


def pair_rounds(size: int, edges: Sequence[Edge] | None = None) -> list[list[Edge]]:
    """Pairs of ranks in rounds; in a round every rank has one partner at most.

    Args:
        size: Ranks.
        edges: The pairs wanted, in any direction; None for all.
    """
    places = size + size % 2  # with an odd number, whoever meets the extra place has a rest
    wanted = None if edges is None else {frozenset(edge) for edge in edges}
    rounds = []
    for turn in range(places - 1):
        circle = [0, *((turn + index) % (places - 1) + 1 for index in range(places - 1))]
        pairs = [tuple(sorted((circle[index], circle[-1 - index]))) for index in range(places // 2)]
        found = [(one, other) for one, other in pairs if other < size]
        rounds.append([pair for pair in found if wanted is None or frozenset(pair) in wanted])
    return [pairs for pairs in rounds if pairs]


def probe_pair(transport: Transport, pair: Edge, device: torch.device, sizes: Sequence[int]) -> list[PairSample]:
    """Time messages in both directions of a pair; its two ranks call it together, others may but do nothing.

    Returns:
        Samples of the messages that this rank sent.
    """
    samples: list[PairSample] = []
    for source, target in (pair, pair[::-1]):
        if transport.rank not in pair:
            continue
        round_trips = {size: _round_trip(transport, source, target, size, device) for size in (_EMPTY, *sizes)}
        if transport.rank == source:
            back = round_trips[_EMPTY] / 2
            samples += [
                PairSample(source=source, target=target, bytes=size, seconds=max(round_trips[size] - back, back / 2))
                for size in sizes
            ]
    return samples


def _round_trip(transport: Transport, source: int, target: int, num_bytes: int, device: torch.device) -> float:
    """The least time from sending a message to having an empty answer (on the source)."""
    message = torch.zeros(max(num_bytes // 4, 1), device=device)
    answer = torch.zeros(_EMPTY // 4, device=device)
    times = []
    for _ in range(REPEATS):
        start = transport.clock()
        if transport.rank == source:
            transport.exchange(Message(message, target), None)
            transport.exchange(None, Message(answer, target))
        else:
            transport.exchange(None, Message(message, source))
            transport.exchange(Message(answer, source), None)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(transport.clock() - start)
    return min(times)


def probe_edges(
    transport: Transport,
    device: torch.device,
    edges: Sequence[Edge] | None = None,
    sizes: Sequence[int] = PROBED_BYTES,
) -> list[PairSample]:
    """Time all pairs of a transport's group, or some; all its members call it together.

    Returns:
        Every member's samples, on every member, in an order that is the same for all.
    """
    mine: list[PairSample] = []
    for pairs in pair_rounds(transport.size, edges):
        dist.barrier(transport.group)
        for pair in pairs:
            mine += probe_pair(transport, pair, device, sizes)
    everyone: list[list[PairSample]] = [[] for _ in range(transport.size)]
    dist.all_gather_object(everyone, mine, group=transport.group)
    return [sample for samples in everyone for sample in samples]


def measure_pairs(context: ParallelContext, sizes: Sequence[int] = PROBED_BYTES) -> Topology:
    """Measure every pair of ranks of a context with several; equal on all ranks."""
    world = dist.group.WORLD
    assert world is not None, "one process has no pairs"
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return Topology(
        num_devices=context.world_size,
        hosts=tuple(context.gather(socket.gethostname())),
        backend=dist.get_backend(),
        started=context.broadcast(started),
        samples=tuple(probe_edges(Transport(world), context.device, sizes=sizes)),
    )
