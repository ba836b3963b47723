"""Single changes of the machines, the batch or the pins, each as the question that would be asked then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from autotune.search.plan_space import Value
from autotune.search.question import Question
from autotune.search.words import choice_words
from autotune.specs.cluster import ClusterSpec
from engine.errors import UserError
from engine.units import format_bytes

Kind = Literal["figures", "memory", "space"]

WIDER_DOMAINS = (2, 4, 8, 9)
"""A fast domain is tried at so many times its size; 9 times is the 72 devices of rack-scale systems in place of 8."""
ROUND_BATCH_UNITS = (256, 128, 64, 32, 16, 8, 4, 2)
"""A batch that is no multiple of these leaves few ways to split it."""
ROUND_BATCH_RATIO = 0.1
"""How far a rounder batch may lie from the one asked for."""


@dataclass(frozen=True)
class Variant:
    """The question after one change."""

    id: str
    words: str
    kind: Kind
    """``figures`` and ``memory`` leave the legal plans as they are, ``space`` makes others legal."""
    question: Question
    freed: tuple[str, ...] = ()
    """Fields of Plan that may take values now that they could not."""
    factor: float = 1.0
    """How large the change is: times the memory, the devices or the shortening; 1 for what costs nothing."""


def variants(question: Question) -> Iterator[Variant]:
    """Every single change that applies, in no order of merit."""
    yield from network_variants(question)
    yield from device_variants(question)
    yield from machine_variants(question)
    yield from batch_variants(question)
    yield from precision_variants(question)
    yield from pin_variants(question)


def network_variants(question: Question) -> Iterator[Variant]:
    """Twice the bandwidth of each level of the network, and a wider fastest level."""
    cluster = question.cluster
    for level, link in enumerate(cluster.links):
        inner = cluster.links[level - 1].num_devices if level else 1
        if inner is not None and inner >= cluster.num_devices:
            continue  # nothing crosses this level
        faster = link.changed(
            gb_per_second=link.gb_per_second * 2,
            reduction_gb_per_second=link.reduction_gb_per_second and link.reduction_gb_per_second * 2,
        )
        speeds = _doubled(link.gb_per_second)
        links = (*cluster.links[:level], faster, *cluster.links[level + 1 :])
        name, words = _level_words(cluster, level)
        changed = question.changed(cluster=cluster.changed(links=links))
        yield Variant(f"{name}_bandwidth_x2", f"twice the bandwidth {words} ({speeds})", "figures", changed)
    yield from _wider_domain(question)


def _level_words(cluster: ClusterSpec, level: int) -> tuple[str, str]:
    """A level of the network: its name in ids, and in words."""
    size = cluster.links[level].num_devices
    if size is not None and size < cluster.devices_per_node:
        return f"group_of_{size}", f"inside groups of {size}"
    if size is not None and size <= cluster.devices_per_node:
        return "intra_node", "inside nodes" if cluster.num_nodes > 1 else "between devices"
    if size is not None:
        return f"domain_of_{size}", f"inside domains of {size} devices"
    return ("inter_node", "between nodes") if level else ("device", "between devices")


def _wider_domain(question: Question) -> Iterator[Variant]:
    """The level below the outermost one, joining more devices."""
    cluster = question.cluster
    size = cluster.links[-2].num_devices if len(cluster.links) > 1 else None
    if size is None:
        return
    wider = [size * factor for factor in WIDER_DOMAINS if cluster.num_devices % (size * factor) == 0]
    if wider:
        domain = cluster.links[-2].changed(num_devices=wider[-1])
        changed = cluster.changed(links=(*cluster.links[:-2], domain, cluster.links[-1]))
        words = f"a fast domain of {wider[-1]} devices in place of {size}"
        yield Variant("fast_domain", words, "figures", question.changed(cluster=changed))


def device_variants(question: Question) -> Iterator[Variant]:
    """A faster device in one respect."""
    cluster, figures = question.cluster, question.cluster.figures
    if figures is None:
        return
    matmul = {name: figure.changed(tflops=figure.tflops * 2) for name, figure in figures.matmul.items()}
    peak = {name: value * 2 for name, value in cluster.peak_flops.items()}
    faster = cluster.changed(figures=figures.changed(matmul=matmul), peak_flops=peak)
    yield Variant("matmul_rate_x2", "matrix products twice as fast", "figures", question.changed(cluster=faster))
    speed = figures.memory_gb_per_second
    wider = figures.changed(memory_gb_per_second=2 * speed)
    yield Variant(
        "memory_bandwidth_x2",
        f"twice the memory bandwidth ({_doubled(speed)})",
        "figures",
        question.changed(cluster=cluster.changed(figures=wider)),
    )
    if figures.launch_us > 0:
        quicker = cluster.changed(figures=figures.changed(launch_us=figures.launch_us / 2))
        words = f"half the host time to launch a kernel ({figures.launch_us:.3g} µs)"
        yield Variant("launch_half", words, "figures", question.changed(cluster=quicker))


def machine_variants(question: Question) -> Iterator[Variant]:
    """More memory, more devices."""
    cluster = question.cluster
    yield memory_variant(question, 2 * question.memory_limit_bytes)
    if "devices" not in question.space.pinned and cluster.device != "cpu":  # one machine has the cores that it has
        twice = cluster.changed(num_nodes=2 * cluster.num_nodes)
        words = f"twice the devices ({twice.num_devices}), the same batch"
        changed = _legal(question, cluster=twice)
        if changed is not None:
            yield Variant("devices_x2", words, "space", changed)


def memory_variant(question: Question, limit_bytes: int) -> Variant:
    """Another memory of each device."""
    ratio = limit_bytes / question.memory_limit_bytes
    size = f"{format_bytes(limit_bytes)} a device"
    name, words = (
        ("memory_x2", f"twice the memory ({size})") if ratio == 2 else (f"memory_{limit_bytes}", f"memory of {size}")
    )
    cluster = question.cluster.changed(memory_bytes=max(limit_bytes, question.cluster.memory_bytes))
    changed = question.changed(cluster=cluster, memory_limit_bytes=limit_bytes)
    return Variant(name, words, "memory", changed, factor=ratio)


def offload_variants(question: Question) -> Iterator[Variant]:
    """States, then all there is, kept in host memory."""
    if question.cluster.device == "cpu":
        return  # its memory is the host's
    kinds = [("optimizer", "optimizer states"), ("parameters", "parameters"), ("activations", "activations")]
    pins: tuple[str, ...] = question.pins
    told: list[str] = []
    freed: list[str] = []
    for kind, words in kinds:
        name = f"offload_{kind}_ratio"
        told.append(words)
        if name in question.space.pinned:
            continue
        pins, freed = (*pins, f"{name}=0,0.5,1"), [*freed, name]
        changed = _legal(question, pins=pins)
        if changed is not None:
            yield Variant(f"offload_{kind}", f"{' and '.join(told)} in host memory", "space", changed, tuple(freed))


def batch_variants(question: Question) -> Iterator[Variant]:
    """Twice the batch, and a rounder batch near by."""
    batch = question.global_batch_size
    twice = _legal(question, global_batch_size=2 * batch)
    if twice is not None:
        words = f"twice the batch ({2 * batch} sequences; it changes training)"
        yield Variant("batch_x2", words, "space", twice)
    rounder = _rounder(batch)
    if rounder is not None:
        changed = _legal(question, global_batch_size=rounder)
        if changed is not None:
            words = f"a batch of {rounder} sequences: {batch} has few divisors"
            yield Variant("batch_round", words, "space", changed)


def precision_variants(question: Question) -> Iterator[Variant]:
    """fp8, where the device has it and it was not asked for; bf16 on a CPU that was measured to be faster in it."""
    figures, given = question.cluster.figures, question.space.values["precision"]
    if figures is None:
        return
    rates = {name: figure.tflops for name, figure in figures.matmul.items()}
    if "fp8" in rates and {"bf16", "fp16"}.issuperset(given):
        other = "fp8"
    elif question.cluster.measured and given == ("fp32",) and rates.get("bf16", 0.0) > rates.get("fp32", 0.0):
        other = "bf16"
    else:
        return
    pins = (*(pin for pin in question.pins if not pin.startswith("precision=")), f"precision={other}")
    changed = _legal(question, pins=pins)
    if changed is not None:
        words = f"matrix products in {other} (it changes numerics)"
        yield Variant(f"precision_{other}", words, "space", changed, ("precision",))


def pin_variants(question: Question) -> Iterator[Variant]:
    """Each pin released."""
    for pin in question.pins:
        name = pin.partition("=")[0]
        if name == "precision":
            continue  # it changes numerics: another question
        values: tuple[Value, ...] = question.pinned.get(name, ())
        released = _legal(question, pins=tuple(other for other in question.pins if other != pin))
        if released is not None:
            yield Variant(f"unpin_{name}", f"without the pin {choice_words(name, values)}", "space", released, (name,))


def _doubled(gb_per_second: float) -> str:
    before, after = (
        f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}" for speed in (gb_per_second, 2 * gb_per_second)
    )
    return f"{before} → {after} GB/s"


def _rounder(batch: int) -> int | None:
    """The nearest batch that more degrees divide, within ``ROUND_BATCH_RATIO``."""
    for unit in ROUND_BATCH_UNITS:
        if batch % unit == 0:
            return None
        nearest = max(unit, round(batch / unit) * unit)
        if abs(nearest - batch) <= ROUND_BATCH_RATIO * batch:
            return nearest
    return None


def _legal(
    question: Question,
    *,
    cluster: ClusterSpec | None = None,
    global_batch_size: int | None = None,
    pins: tuple[str, ...] | None = None,
) -> Question | None:
    """The changed question, None where the pins exclude every plan of it."""
    try:
        return question.changed(cluster=cluster, global_batch_size=global_batch_size, pins=pins)
    except UserError:
        return None
