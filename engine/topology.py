"""How fast every device reaches every other: the measured file, and the links that it tells.

``engine.probe --pairs`` writes the file. A link is told by two figures, the latency of an empty message and the
bandwidth of a long one (Hockney, "The communication challenge for MPP", 1994); the two directions of a pair may differ
in bandwidth. Latency is half a round trip: without a common clock its two halves can't be told apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from engine import collective_cost
from engine.collective_cost import Group, Link
from engine.errors import UserError
from engine.schema import Schema, parse
from engine.spec import Count, CountOrZero, Positive

PROBED_BYTES = (2**10, 2**17, 2**22)
"""Sizes of the messages that are timed between two devices."""
_MEASURE = "measure it with one process per device: torchrun ... -m engine.probe --pairs --output topology.json"
_LEAST_SHARE = 1e-3
"""Of the measured time of a message: a latency, or a time for its bytes, below that is noise."""

Edge = tuple[int, int]
"""Source and target."""


class PairSample(Schema):
    """One message from one device to another."""

    source: CountOrZero
    """Device that sends; devices are numbered as the processes were started (their RANK)."""
    target: CountOrZero
    """Device that receives."""
    bytes: Count
    """Size of the message."""
    seconds: Positive
    """Time on the way, the least of several: round trip with an empty answer, less half an empty round trip."""


class Topology(Schema):
    """What ``engine.probe --pairs`` measured."""

    schema_version: Literal[1] = 1
    """Version of this file format."""
    num_devices: Count
    """Devices, one a process."""
    hosts: Annotated[tuple[str, ...], Field(strict=False)]
    """The machine of each device."""
    backend: str
    """What carried the messages."""
    started: str
    """UTC time at which it began, ISO 8601."""
    samples: Annotated[tuple[PairSample, ...], Field(strict=False)]
    """Every ordered pair of devices, several sizes."""

    def links(self) -> Links:
        """The two figures of every link, fitted to the samples.

        Raises:
            UserError: A pair has fewer than two sizes.
        """
        shape = (self.num_devices, self.num_devices)
        wanted = {(int(source), int(target)) for source, target in np.argwhere(~np.eye(self.num_devices, dtype=bool))}
        sizes: dict[Edge, set[int]] = {edge: set() for edge in wanted}
        for sample in self.samples:
            sizes.setdefault((sample.source, sample.target), set()).add(sample.bytes)
        for (source, target), found in sizes.items():
            if (source, target) not in wanted or len(found) < 2:
                raise UserError(
                    f"the topology of {self.num_devices} devices has {len(found)} sizes of messages from device"
                    f" {source} to {target}; two or more are needed, of every pair of different devices below"
                    f" {self.num_devices}",
                    hint=_MEASURE,
                )
        return Links(np.zeros(shape), np.full(shape, np.inf)).updated(fit_links(self.samples))


def fit_links(samples: Iterable[PairSample]) -> dict[Edge, tuple[float, float]]:
    """Latency and bandwidth of every link that was sampled, with two sizes or more."""
    of_link: dict[Edge, list[PairSample]] = {}
    for sample in samples:
        of_link.setdefault((sample.source, sample.target), []).append(sample)
    return {
        edge: fit_link([sample.bytes for sample in found], [sample.seconds for sample in found])
        for edge, found in of_link.items()
    }


def fit_link(num_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency (seconds) and bandwidth (bytes/s) of a link from messages' sizes and times: the line with the least
    relative squares."""
    sizes, times = np.asarray(num_bytes, float), np.asarray(seconds, float)
    slope, start = np.polyfit(sizes, times, 1, w=1 / times)
    slope = max(slope, _LEAST_SHARE * times[sizes.argmax()] / sizes.max())
    return max(float(start), _LEAST_SHARE * float(times[sizes.argmin()])), 1 / float(slope)


@dataclass(frozen=True)
class Links:
    """Two figures of every ordered pair of devices, [source, target] each; what stands on the diagonal is not used."""

    latency: np.ndarray
    """Seconds of an empty message."""
    bandwidth: np.ndarray
    """Bytes/s."""

    @property
    def num_devices(self) -> int:
        """Devices."""
        return len(self.latency)

    def seconds(self, num_bytes: float) -> np.ndarray:
        """Time of a message of ``num_bytes``, [source, target]; 0 on the diagonal."""
        times = collective_cost.send(num_bytes, Group((2.0,)), [as_level(self.latency, self.bandwidth)])
        return np.where(np.eye(self.num_devices, dtype=bool), 0.0, times)

    def among(self, devices: Sequence[int]) -> Links:
        """The links between some devices, numbered as listed."""
        index = np.ix_(devices, devices)
        return Links(self.latency[index], self.bandwidth[index])

    def updated(self, figures: Mapping[Edge, tuple[float, float]]) -> Links:
        """With another latency and bandwidth of some links."""
        latency, bandwidth = self.latency.copy(), self.bandwidth.copy()
        for edge, (start, rate) in figures.items():
            latency[edge], bandwidth[edge] = start, rate
        return Links(latency, bandwidth)


def as_level(latency: collective_cost.Number, bandwidth: collective_cost.Number) -> Link:
    """Links between single devices as the one level of a network; any shape."""
    return Link(np.inf, bandwidth, latency, start=0.0, half_bytes=0.0)


def load_topology(path: str | Path) -> Topology:
    """Read a measured file.

    Raises:
        UserError: It is missing or is no such file.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"can't read the topology: {error.strerror}", hint=_MEASURE, where=str(path)) from None
    except ValueError as error:
        raise UserError(f"the topology is not JSON: {error}", hint=_MEASURE, where=str(path)) from None
    try:
        return parse(Topology, data)
    except UserError as error:
        raise UserError(error.message, hint=error.hint, where=str(path)) from None
