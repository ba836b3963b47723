"""What carries messages between the members of a process group; also over emulated links, in real or virtual time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from engine.topology import Links

_TAG = 1 << 20
"""Of our messages, so that they are not taken for others between the same ranks."""

Clock = Callable[[], float]
Sleep = Callable[[float], None]


class Message(NamedTuple):
    """A contiguous tensor and the member of the group at the other end."""

    values: Tensor
    peer: int


class Transport:
    """Point-to-point messages in a group that exists. Members are told by their place in the group.

    Args:
        group: The process group.
        clock: Seconds.
    """

    def __init__(self, group: ProcessGroup, clock: Clock = time.perf_counter) -> None:
        self.group = group
        self.clock = clock
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def exchange(self, send: Message | None, receive: Message | None) -> None:
        """Send one message and receive one at the same time; return when both have arrived."""
        for work in self._start(send, receive):
            work.wait()

    def _start(self, send: Message | None, receive: Message | None) -> list[dist.Work]:
        operations = []
        if receive:
            operations.append(
                dist.P2POp(dist.irecv, receive.values, group=self.group, group_peer=receive.peer, tag=_TAG)
            )
        if send:
            operations.append(dist.P2POp(dist.isend, send.values, group=self.group, group_peer=send.peer, tag=_TAG))
        return dist.batch_isend_irecv(operations) if operations else []


class TokenBucket:
    """One direction of an emulated link: bytes pass at its bandwidth, one message after another, nothing in reserve.

    Args:
        latency: Seconds that every message takes beside.
        bandwidth: Bytes/s.
    """

    def __init__(self, latency: float, bandwidth: float) -> None:
        self._latency = latency
        self._bandwidth = bandwidth
        self._free_at = 0.0

    def pass_at(self, num_bytes: int, now: float) -> float:
        """When a message that comes ``now`` has passed."""
        self._free_at = max(self._free_at, now) + num_bytes / self._bandwidth
        return self._free_at + self._latency


class EmulatedTransport(Transport):
    """Messages that take at least as long as emulated links take: sender and receiver each sleep for the rest.

    The sender is busy for the link's time from when it comes to the message, the receiver from when it has it, as
    ``engine.routes.replay`` reckons. What the real link takes beside is not taken off.

    Args:
        group: The process group.
        links: Between its members.
        clock: Seconds.
        sleep: Waits for so many seconds.
    """

    def __init__(
        self, group: ProcessGroup, links: Links, clock: Clock = time.perf_counter, sleep: Sleep = time.sleep
    ) -> None:
        super().__init__(group, clock)
        self._sleep = sleep
        self.set_links(links)

    def set_links(self, links: Links) -> None:
        """Emulate other links from now on."""
        figures = {edge: (links.latency[edge], links.bandwidth[edge]) for edge in self._edges()}
        self._buckets = {edge: TokenBucket(float(latency), float(rate)) for edge, (latency, rate) in figures.items()}

    def exchange(self, send: Message | None, receive: Message | None) -> None:
        """As over the links."""
        ends = []
        if send:
            ends.append(self._buckets[self.rank, send.peer].pass_at(send.values.nbytes, self.clock()))
        super().exchange(send, receive)
        if receive:
            ends.append(self._buckets[receive.peer, self.rank].pass_at(receive.values.nbytes, self.clock()))
        left = max(ends, default=0.0) - self.clock()
        if left > 0:
            self._sleep(left)

    def _edges(self) -> list[tuple[int, int]]:
        others = [peer for peer in range(self.size) if peer != self.rank]
        return [(self.rank, peer) for peer in others] + [(peer, self.rank) for peer in others]


class VirtualTransport(Transport):
    """Messages over emulated links in virtual time: nobody sleeps, every message tells when it was begun, and the clock
    of each rank goes on as ``engine.routes.replay`` reckons. Computation takes no time.

    Attributes:
        links: Between the members of the group; may be exchanged at any time.
        now: This rank's clock, seconds.
    """

    def __init__(self, group: ProcessGroup, links: Links) -> None:
        super().__init__(group, lambda: self.now)
        self.links = links
        self.now = 0.0

    def exchange(self, send: Message | None, receive: Message | None) -> None:
        """As over the links."""
        begun, of_sender = torch.tensor([self.now], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
        super().exchange(
            Message(begun, send.peer) if send else None, Message(of_sender, receive.peer) if receive else None
        )
        super().exchange(send, receive)
        start = self.now
        if send:
            self.now = start + self._seconds(self.rank, send)
        if receive:
            both = max(start, float(of_sender))
            self.now = max(self.now, both + self._seconds(receive.peer, receive))

    def _seconds(self, source: int, message: Message) -> float:
        edge = (source, message.peer if source == self.rank else self.rank)
        return float(self.links.latency[edge] + message.values.nbytes / self.links.bandwidth[edge])
