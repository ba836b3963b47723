"""The machines: from the catalogue by name, from a file, or from a probe of this machine."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from autotune.specs import machine
from autotune.specs.figures import DeviceFigures, LinkFigures, MeasuredFigures
from engine.errors import UserError
from engine.schema import Schema, parse
from engine.spec import Count, Name, Positive
from engine.units import GIB, format_bytes
from engine.yaml_file import read_yaml

CATALOGUE_FILE = Path(__file__).with_name("hardware.yaml")
MAX_DEVICES_PER_NODE = 1024
"""More in a node are taken for a slip; the largest fast domains that are sold join a few hundred."""
MAX_DEVICES = 2**20
"""More are taken for a slip: the largest machines have a few hundred thousand."""


class DeviceEntry(Schema):
    """One device of the catalogue (``hardware.yaml``)."""

    title: str
    """The device's full name."""
    aliases: list[str]
    """Other names people use."""
    reported_as: list[str]
    """Parts of the names that drivers give it."""
    memory_gib: Positive
    """Memory."""
    tflops: dict[Literal["bf16", "fp16", "fp8", "fp32", "fp64"], Positive]
    """Dense peak of matrix products by precision, 10^12 FLOP/s."""
    memory_gb_per_second: Positive
    """Memory bandwidth, 10^9 bytes/s."""
    link_gb_per_second: Positive
    """Total bandwidth to the other devices of a node in one direction, 10^9 bytes/s."""
    devices_per_node: Count
    """Devices of the usual node."""
    source: str
    """Where the figures above come from."""
    device: Literal["cpu", "cuda"] = "cuda"
    """Kind of device torch sees."""
    watts: Positive | None = None
    """Power limit; null when unknown."""
    figures: DeviceFigures
    """What the cost model must know of it; of a CPU, of one core."""
    links: Annotated[tuple[LinkFigures, ...], Field(strict=False, min_length=1)]
    """Levels of the usual network, the node first."""
    sources: dict[str, str]
    """Figure (a key of ``figures``, ``node_links``, ``cluster_links``, ``watts``) -> where it comes from."""


class ClusterSpec(Schema):
    """The machines a run or a sweep may use. A CPU machine is several devices, each with its share of the cores."""

    schema_version: Literal[1] = 1
    """Version of this file format."""
    name: Name
    """What the cluster is called in reports."""
    device_kind: Name
    """Device of the catalogue, ``cpu``, or the driver's name for one that is not in it."""
    device: Literal["cpu", "cuda"]
    """Kind of device torch sees (``cuda`` for AMD devices too)."""
    devices_per_node: Count
    """Devices of each node."""
    num_nodes: Count = 1
    """Nodes."""
    memory_bytes: Count
    """Memory of one device; of a CPU device, its share of the machine's."""
    threads_per_device: Count = 1
    """CPU threads of the process that drives a device."""
    peak_flops: dict[str, Positive] = Field(default_factory=dict)
    """Dense peak of matrix products by precision, FLOP/s; empty when unknown."""
    memory_bytes_per_second: Positive | None = None
    """Memory bandwidth of a device; null when unknown."""
    link_bytes_per_second: Positive | None = None
    """Bandwidth of a device to the others of its node, in one direction; null when unknown."""
    figures: DeviceFigures | None = None
    """What the cost model must know of a device; null when unknown."""
    links: Annotated[tuple[LinkFigures, ...], Field(strict=False)] = ()
    """Levels of the network from the closest devices outwards; empty when unknown."""
    measured: MeasuredFigures | None = None
    """How the figures were measured, and what else was found; null for figures of the catalogue."""
    watts: Positive | None = None
    """Power that a busy device draws, for estimates of energy; null when unknown."""
    dollars_per_device_hour: Positive | None = None
    """Price, for estimates of cost; null when unknown (the catalogue has none: prices change)."""

    @property
    def num_devices(self) -> int:
        """Devices of all nodes."""
        return self.devices_per_node * self.num_nodes

    @property
    def is_rough(self) -> bool:
        """Whether its figures are rough: those of the catalogue for a CPU, which stand for no machine in particular.
        ``autotune profile`` measures better ones."""
        return self.device == "cpu" and self.figures is not None and self.measured is None

    def describe(self) -> str:
        """One line for people."""
        nodes = f"{self.num_nodes} nodes of " if self.num_nodes > 1 else ""
        shares = [format_bytes(self.memory_bytes)]
        if self.device == "cpu":
            shares.append(f"{self.threads_per_device} thread{'s' if self.threads_per_device > 1 else ''}")
        return f"{nodes}{self.devices_per_node} {self.device_kind} ({', '.join(shares)} each)"


@functools.cache
def catalogue() -> dict[str, DeviceEntry]:
    """Device kind -> its entry."""
    document = read_yaml(CATALOGUE_FILE)
    return {kind: parse(DeviceEntry, data, document=document, path=(kind,)) for kind, data in document.data.items()}


def probe_cluster() -> ClusterSpec:
    """This machine: its visible NVIDIA devices where the installed torch can use them, else its physical cores."""
    gpus = machine.nvidia_gpus()
    if not gpus or not torch_has_cuda():
        return _cpu_cluster("local", machine.num_usable_cores())
    memory = min(gpu.memory_bytes for gpu in gpus)
    threads = max(1, machine.num_usable_cores() // len(gpus))
    kind = _kind_reported_as(gpus[0].name)
    if kind is None:
        kind = re.sub(r"[^A-Za-z0-9]+", "-", gpus[0].name).strip("-").lower() or "gpu"
        return ClusterSpec(
            name="local",
            device_kind=kind,
            device="cuda",
            devices_per_node=len(gpus),
            memory_bytes=memory,
            threads_per_device=threads,
        )
    spec = _catalogue_cluster("local", kind, len(gpus), 1)
    return spec.changed(memory_bytes=memory, threads_per_device=threads)


def torch_has_cuda() -> bool:
    """Whether the installed torch is a build for GPUs, told from its version alone (a CPU build ends in ``+cpu``)."""
    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def parse_cluster(text: str) -> ClusterSpec:
    """A cluster as people name it.

    Args:
        text: ``local`` (this machine), ``cpu:2`` (so many devices of this machine's cores), ``h100x8:64`` (64 nodes
            of 8 devices of the catalogue; ``h100x8`` is one node, ``h100`` one usual node), or the path of a YAML file.

    Raises:
        UserError: Unknown device (with the nearest name), a count that is not one, a file that can't be read.
    """
    text = text.strip()
    if text == "local":
        return probe_cluster()
    if is_cluster_file(text):
        return _from_file(text)
    if text == "cpu" or text.startswith("cpu:"):
        return _parse_cpu(text)
    counts = re.search(r"(?P<nodes>:.*)$", text)
    if counts and not counts["nodes"][1:].isdecimal():
        raise UserError(
            f"the nodes of a cluster are a whole number of 1 or more, got {text!r}",
            hint="example: h100x8:64 (64 nodes of 8)",
        )
    match = re.fullmatch(r"(?P<kind>.+?)(?:x(?P<devices>[0-9]+))?(?::(?P<nodes>[0-9]+))?", text)
    kind = _known_kind(match["kind"] if match else text, text)
    devices = int(match["devices"]) if match and match["devices"] else catalogue()[kind].devices_per_node
    nodes = int(match["nodes"]) if match and match["nodes"] else 1
    if not devices or not nodes:
        raise UserError(f"a cluster needs at least one device, got {text!r}", hint="example: h100x8:64 (64 nodes of 8)")
    if devices > MAX_DEVICES_PER_NODE:
        whole = catalogue()[kind].devices_per_node
        raise UserError(
            f"{text!r} has {devices} devices in one node; {MAX_DEVICES_PER_NODE} are the most",
            hint=f"did you mean {kind}x{whole}:{-(-devices // whole)} (nodes of {whole})?",
        )
    if devices * nodes > MAX_DEVICES:
        raise UserError(
            f"{text!r} has {devices * nodes:,} devices; estimates are for {MAX_DEVICES:,} at most",
            hint=f"for example {kind}x{devices}:{MAX_DEVICES // devices}",
        )
    return _catalogue_cluster(f"{kind}x{devices}-{nodes}", kind, devices, nodes)


def _from_file(path: str) -> ClusterSpec:
    """A cluster file, completed from the catalogue.

    Raises:
        UserError: Not readable, unknown keys, an unknown device without figures, link levels that fit neither
            each other nor the nodes.
    """
    document = read_yaml(path)
    data = document.data
    if not isinstance(data, dict) or not {"name", "device_kind", "devices_per_node"} & data.keys():
        raise UserError(f"{path} is no cluster file", hint="docs/clusters.md shows one; 'autotune profile' writes one")
    kind = data.get("device_kind")
    if isinstance(kind, str) and kind not in catalogue() and not {"memory_bytes", "device"} & data.keys():
        close = difflib.get_close_matches(kind.lower(), _kinds_by_name(), n=1, cutoff=0.5)
        raise UserError(
            f"unknown device_kind {kind!r}; known are {', '.join(catalogue())}",
            hint=(f"did you mean '{_kinds_by_name()[close[0]]}'? " if close else "")
            + "For another device, state device, memory_bytes, figures and links",
            where=document.where(("device_kind",)),
        )
    spec = parse(ClusterSpec, _completed(data), document=document)
    if "links" in data:
        _check_levels(spec, document.where(("links",)))
    return spec


def _check_levels(spec: ClusterSpec, where: str) -> None:
    """Refuse levels of the network of which one does not consist of whole groups of the one inside it."""
    sizes = [level.num_devices for level in spec.links]
    if None in sizes[:-1]:
        raise UserError("only the last of the links may leave out num_devices", hint="it joins all", where=where)
    inner = 1
    for size in (size for size in sizes if size is not None):
        if size < inner or size % inner or (size % spec.devices_per_node and spec.devices_per_node % size):
            raise UserError(
                f"a level of the network joins {size} devices: it must be a multiple of the level inside it ({inner}),"
                f" and a part or a multiple of the node ({spec.devices_per_node})",
                hint=f"for the level of a node write num_devices: {spec.devices_per_node}",
                where=where,
            )
        inner = size


def _completed(data: Any) -> Any:
    """A cluster file with what it leaves out about a device of the catalogue: its memory, figures, usual network."""
    if not isinstance(data, dict) or data.get("device_kind") not in catalogue():
        return data
    entry, per_node = catalogue()[data["device_kind"]], data.get("devices_per_node")
    if entry.device == "cpu" or not isinstance(per_node, int) or per_node < 1:
        return data
    known = _catalogue_cluster("known", data["device_kind"], per_node, 1)
    names = ("device", "memory_bytes", "peak_flops", "memory_bytes_per_second", "link_bytes_per_second")
    return {name: getattr(known, name) for name in (*names, "figures", "links", "watts")} | data


def is_cluster_file(text: str) -> bool:
    """Whether a cluster as people name it is the path of a file."""
    return re.search(r"[/\\]|\.(ya?ml|json)$", text.strip()) is not None


def _parse_cpu(text: str) -> ClusterSpec:
    cpus = len(machine.usable_cpus())
    count = text.removeprefix("cpu").removeprefix(":") or str(machine.num_usable_cores())
    if not count.isdigit() or not 1 <= int(count) <= cpus:
        raise UserError(
            f"'cpu:N' needs a number of devices from 1 to this machine's {cpus} CPUs, got {text!r}",
            hint=f"for example cpu:{machine.num_usable_cores()}, or local",
        )
    return _cpu_cluster(f"cpu-{count}", int(count))


def _cpu_cluster(name: str, num_devices: int) -> ClusterSpec:
    entry = catalogue()["cpu"]
    threads = max(1, machine.num_usable_cores() // num_devices)
    return ClusterSpec(
        name=name,
        device_kind="cpu",
        device="cpu",
        devices_per_node=num_devices,
        memory_bytes=machine.memory_limit_bytes() // num_devices,
        threads_per_device=threads,
        figures=_of_cores(entry.figures, threads),
        links=entry.links,
        watts=entry.watts * threads if entry.watts else None,
    )


def _of_cores(figures: DeviceFigures, num_cores: int) -> DeviceFigures:
    """The figures of a CPU device of several cores."""
    matmul = {precision: rate.changed(tflops=rate.tflops * num_cores) for precision, rate in figures.matmul.items()}
    return figures.changed(
        matmul=matmul, num_units=num_cores, memory_gb_per_second=figures.memory_gb_per_second * num_cores
    )


def _catalogue_cluster(name: str, kind: str, devices_per_node: int, num_nodes: int) -> ClusterSpec:
    entry = catalogue()[kind]
    return ClusterSpec(
        name=name,
        device_kind=kind,
        device="cuda",
        devices_per_node=devices_per_node,
        num_nodes=num_nodes,
        memory_bytes=int(entry.memory_gib * GIB),
        peak_flops={precision: value * 1e12 for precision, value in entry.tflops.items()},
        memory_bytes_per_second=entry.memory_gb_per_second * 1e9,
        link_bytes_per_second=entry.link_gb_per_second * 1e9,
        figures=entry.figures,
        links=_links(entry, devices_per_node),
        watts=entry.watts,
    )


def _links(entry: DeviceEntry, devices_per_node: int) -> tuple[LinkFigures, ...]:
    """The usual network, with the node's level and those inside it fitted to the cluster's nodes."""

    def fitted(size: int | None) -> int | None:
        if size is None or size > entry.devices_per_node:
            return size
        return devices_per_node if size == entry.devices_per_node else min(size, devices_per_node)

    return tuple(level.changed(num_devices=fitted(level.num_devices)) for level in entry.links)


def _kinds_by_name() -> dict[str, str]:
    """Name or alias -> kind, of the catalogue's devices but the CPU."""
    known = {kind: entry for kind, entry in catalogue().items() if entry.device != "cpu"}
    return {name: kind for kind, entry in known.items() for name in (kind, *entry.aliases)}


def _known_kind(given: str, text: str) -> str:
    names = _kinds_by_name()
    if given.lower() in names:
        return names[given.lower()]
    if Path(text).is_file():
        raise UserError(f"{text} is a file, but no cluster file: those end in .yaml", hint="docs/clusters.md shows one")
    words = ["local", "cpu", *names]
    close = difflib.get_close_matches(given.lower(), words, n=1, cutoff=0.5)
    raise UserError(
        f"unknown device {given!r} in the cluster {text!r}; known are {', '.join(dict.fromkeys(names.values()))}",
        hint=(f"did you mean '{close[0]}'? " if close else "")
        + "A cluster is local, cpu:2, h100x8:64 (64 nodes of 8), or a YAML file",
    )


def _kind_reported_as(name: str) -> str | None:
    """The catalogue's device with the longest part of a name that is in ``name`` (GB200 before B200)."""
    fits = [(len(part), kind) for kind, entry in catalogue().items() for part in entry.reported_as if part in name]
    return max(fits)[1] if fits else None
