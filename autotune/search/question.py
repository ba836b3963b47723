"""What ``autotune plan`` is asked: model, machines, batch, pinned choices and limits, as people write them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.cost.software import OWN_ENGINE, software_figures
from autotune.search.plan_objectives import PlanObjective, Prices, check_objectives
from autotune.search.plan_space import (
    DERIVED_PINS,
    FIELDS,
    PlanSpace,
    Value,
    check_is_priced,
    check_pipeline_pins,
    plan_space,
)
from autotune.specs.cluster import ClusterSpec
from engine.config import load_run
from engine.errors import UserError
from engine.hf_config import load_model
from engine.spec import ModelSpec
from engine.units import format_bytes, parse_batch, parse_bytes, parse_count
from engine.yaml_file import read_yaml

PIN_ALIASES = {
    "mb": "micro_batch_size",
    "mbs": "micro_batch_size",
    "micro_batch": "micro_batch_size",
    "vp": "virtual_stages",
    "vpp": "virtual_stages",
    "zero": "zero_stage",
    "sp": "sequence_parallel",
}
"""Short names of a plan's fields."""

GIVEN_ELSEWHERE = {"precision": "--precision", "global_batch_size": "--global-batch", "sequence_length": "--seq-len"}
"""Fields that have an option of their own."""

BATCH_UNIT = ("dp", "dp_replicate", "dp_shard", "micro_batch_size")
"""What the global batch must be a multiple of, where it is pinned."""
MAX_BATCH_CHANGE_RATIO = 0.05
"""Most that the global batch is changed by, so that pinned values can split it."""
MIN_MEMORY_LIMIT_BYTES = 2**20
"""Smallest memory limit that may be meant: a number without its unit is below."""


@dataclass(frozen=True)
class Question:
    """One question to the planner."""

    model: ModelSpec
    cluster: ClusterSpec
    sequence_length: int
    global_batch_size: int
    """Sequences."""
    memory_limit_bytes: int
    """What a plan may take of each device."""
    space: PlanSpace
    pins: tuple[str, ...]
    """``field=value,value`` texts that the space was made with."""
    objectives: tuple[PlanObjective, ...]
    """The first one ranks."""
    software: str
    notes: tuple[str, ...]
    """What was rounded or deserves a warning."""

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch_size * self.sequence_length

    @property
    def prices(self) -> Prices:
        """What a device costs while it runs."""
        return prices_of(self.cluster)

    @property
    def pinned(self) -> dict[str, tuple[Value, ...]]:
        """Field -> the values it may take, of the pinned ones."""
        return {name: self.space.values[name] for name in sorted(self.space.pinned) if name in self.space.values} | (
            {"devices": self.space.device_counts} if "devices" in self.space.pinned else {}
        )

    def changed(
        self,
        *,
        cluster: ClusterSpec | None = None,
        global_batch_size: int | None = None,
        sequence_length: int | None = None,
        memory_limit_bytes: int | None = None,
        pins: Sequence[str] | None = None,
        software: str | None = None,
    ) -> Question:
        """The same question with other machines, batch, limit, pins or software.

        Raises:
            UserError: The pins leave nothing of the new space.
        """
        cluster = cluster or self.cluster
        batch = global_batch_size or self.global_batch_size
        length = sequence_length or self.sequence_length
        texts = tuple(self.pins if pins is None else pins)
        space = self.space
        stack = software or self.software
        before = (self.cluster.num_devices, self.global_batch_size, self.sequence_length, self.pins, self.software)
        if (cluster.num_devices, batch, length, texts, stack) != before:
            space = plan_space(
                self.model,
                cluster,
                global_batch_sizes=[batch],
                sequence_lengths=[length],
                pins=texts,
                fewer_devices=needs_fewer_devices(self.objectives),
                scopes=self.space.scopes,
                stack=software_figures(stack),
            )
        return replace(
            self,
            cluster=cluster,
            global_batch_size=batch,
            sequence_length=length,
            memory_limit_bytes=memory_limit_bytes or self.memory_limit_bytes,
            space=space,
            pins=texts,
            software=stack,
        )


def ask(
    *,
    model: ModelSpec,
    cluster: ClusterSpec,
    sequence_length: int,
    global_batch: str,
    pins: Sequence[str] = (),
    precision: str | None = None,
    max_memory: str | None = None,
    objectives: Sequence[str] = ("speed",),
    software: str = "default",
    engine_only: bool = False,
) -> Question:
    """A question from what people give.

    Args:
        model: The architecture.
        cluster: The machines.
        sequence_length: Tokens per sequence.
        global_batch: ``512``, ``512-seqs`` or ``4Mi-tokens``, rounded to what the pinned degrees can split.
        pins: ``tp=8``, ``mb=1,2`` (either), ``tp=8,pp=4``.
        precision: Of the matrix products, or several (``bf16,fp8``); None takes the device's usual one.
        max_memory: What a plan may take of each device, such as ``70GiB``; None for all of it.
        objectives: What is optimised; the first one ranks.
        software: Training stack, a name in ``software.yaml``.
        engine_only: Only plans that the product's own engine runs, at its speed whatever ``software`` says.

    Raises:
        UserError: Anything that can't be read or that leaves nothing to search.
    """
    ranked = _ordered_objectives(objectives, cluster)
    texts = read_pins(pins)
    if precision is not None:
        texts.append(f"precision={precision}")
    notes = [*check_sequence_length(model, sequence_length), *unpriced_parts(model)]
    if engine_only and software != OWN_ENGINE:
        notes.append(
            f"this project's engine has a speed of its own: that of {OWN_ENGINE} is assumed, not of {software}"
        )
        software = OWN_ENGINE

    def space_of(batch: int) -> PlanSpace:
        return plan_space(
            model,
            cluster,
            global_batch_sizes=[batch],
            sequence_lengths=[sequence_length],
            pins=texts,
            fewer_devices=needs_fewer_devices(objectives),
            scopes=("universal", "engine") if engine_only else ("universal",),
            stack=software_figures(software),
        )

    check_pipeline_pins(space_of(1))
    batch = parse_batch(global_batch, sequence_length)
    num_sequences, batch_notes = _splittable_batch(batch.num_sequences, space_of(1))
    if batch.note and num_sequences == batch.num_sequences:
        batch_notes = [batch.note]
    limit, limit_notes = read_memory_limit(max_memory, cluster)
    return Question(
        model=model,
        cluster=cluster,
        sequence_length=sequence_length,
        global_batch_size=num_sequences,
        memory_limit_bytes=limit,
        space=space_of(num_sequences),
        pins=tuple(texts),
        objectives=ranked,
        software=software,
        notes=(*notes, *batch_notes, *limit_notes),
    )


def prices_of(cluster: ClusterSpec) -> Prices:
    """Prices that a cluster states."""
    return Prices(cluster.dollars_per_device_hour, cluster.watts)


def _ordered_objectives(names: Sequence[str], cluster: ClusterSpec) -> tuple[PlanObjective, ...]:
    """The objectives in the order given.

    Raises:
        UserError: An unknown one, one twice, one that lacks its price.
    """
    prices = prices_of(cluster)
    if "cost" in names and not prices.dollars_per_device_hour:
        raise UserError("the objective cost needs a price", hint="give --price, in dollars per device and hour")
    if "energy" in names and not prices.watts_per_device:
        raise UserError(f"the power of {cluster.device_kind} is unknown", hint="give --watts, of a busy device")
    known = check_objectives(names, prices)
    return tuple(sorted(known, key=lambda name: names.index(name)))


def needs_fewer_devices(objectives: Sequence[str]) -> bool:
    """Whether an objective makes it worth while to leave devices idle."""
    return not {"devices", "cost", "energy"}.isdisjoint(objectives)


def read_model(path: str) -> ModelSpec:
    """The architecture in a folder, a ``config.json``, a ModelSpec as YAML or JSON, or a run file.

    Raises:
        UserError: It can't be read.
    """
    if path.endswith((".yaml", ".yml")):
        data = read_yaml(path).data
        if isinstance(data, dict) and {"model", "workload"} <= data.keys():
            return load_run(path)[0].model
    return load_model(path)


def read_pins(texts: Sequence[str]) -> list[str]:
    """Pins as people write them (``tp=8``, ``mb=1,2``, ``tp=8,pp=4``), one field each and by its whole name.

    Raises:
        UserError: No pin, or a field that has an option of its own.
    """
    pins: list[str] = []
    for text in texts:
        start = len(pins)
        for piece in text.split(","):
            name, equals, value = piece.partition("=")
            if not equals:
                if len(pins) == start:
                    raise UserError(f"a pin is NAME=VALUE, got {text!r}", hint="examples: --pin tp=8 --pin mb=1,2")
                pins[-1] += f",{piece.strip()}"
                continue
            name = PIN_ALIASES.get(name.strip(), name.strip())
            if name in GIVEN_ELSEWHERE:
                raise UserError(f"{name} has an option of its own", hint=f"use {GIVEN_ELSEWHERE[name]} {value}")
            check_is_priced(name)
            if name not in (*FIELDS, *DERIVED_PINS):
                known = (*FIELDS, *DERIVED_PINS, *PIN_ALIASES)
                close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
                hint = f"did you mean {close[0]}? " if close else ""
                raise UserError(
                    f"--pin {text}: a plan has no choice {name!r}",
                    hint=f"{hint}It has {', '.join((*FIELDS, *DERIVED_PINS))}",
                )
            pins.append(f"{name}={value.strip()}")
    return pins


def read_memory_limit(text: str | None, cluster: ClusterSpec) -> tuple[int, list[str]]:
    """What a plan may take of each device, and what was said about it.

    Raises:
        UserError: Not a size, zero, or so little that a unit must have been forgotten.
    """
    if text is None:
        return cluster.memory_bytes, []
    limit = parse_bytes(text)
    if limit <= 0:
        raise UserError(f"--max-memory must be above zero, got {text!r}", hint="example: 70GiB")
    if limit < MIN_MEMORY_LIMIT_BYTES:
        meant = f"did you mean {text.strip()}GiB?" if text.strip()[-1].isdigit() else "example: 70GiB"
        raise UserError(f"--max-memory {text} is {limit} bytes, less than any plan takes", hint=meant)
    if limit > cluster.memory_bytes:
        note = f"--max-memory {text} is more than a device has; {format_bytes(cluster.memory_bytes)} are taken"
        return cluster.memory_bytes, [note]
    return limit, []


def check_sequence_length(model: ModelSpec, sequence_length: int) -> list[str]:
    """A warning where the sequence is longer than the model's rotary positions were made for.

    Raises:
        UserError: Learned positions end before the sequence does.
    """
    if sequence_length <= model.max_positions:
        return []
    told = f"sequences of {sequence_length} tokens are longer than the model's {model.max_positions} positions"
    if model.positions == "learned":
        raise UserError(
            f"{told}, which are learned", hint=f"use --seq-len {model.max_positions} or less, or raise max_positions"
        )
    return [f"{told}; speed and memory are as estimated, what the model learns of them is another matter"]


def unpriced_parts(model: ModelSpec) -> list[str]:
    """What a model has that estimates leave out."""
    if not model.num_mtp_layers:
        return []
    layers = f"{model.num_mtp_layers} layer{'s' if model.num_mtp_layers > 1 else ''}"
    return [f"the model's multi-token prediction ({layers}) is not priced: the plan is for training without it"]


def read_count(text: str, option: str) -> int:
    """A whole number above zero, such as 8192 or 8Ki.

    Raises:
        UserError: It is none.
    """
    count = parse_count(text, what=option)
    if count < 1:
        raise UserError(f"{option} must be 1 or more, got {text!r}", hint=f"example: {option} 8192")
    return count


def _splittable_batch(batch: int, space: PlanSpace) -> tuple[int, list[str]]:
    """The batch that pinned values can split, and what was said where that is another one.

    Of the multiples within ``MAX_BATCH_CHANGE_RATIO`` one is taken that leaves the data-parallel degree the most
    freedom: the largest common divisor with the devices, then the nearest.

    Raises:
        UserError: The nearest multiple is farther away.
    """
    names = _pinned_units(space)
    unit = math.prod(min(int(value) for value in space.values[name]) for name in names)
    if batch % unit == 0:
        return batch, []
    pins = " and ".join(f"{name}={','.join(map(str, space.values[name]))}" for name in names)
    told = f"a batch of {batch} sequences is no multiple of {unit}, as pinned by {pins}"
    below = batch // unit
    reach = int(MAX_BATCH_CHANGE_RATIO * batch)
    factors = range(max(1, -(-(batch - reach) // unit)), (batch + reach) // unit + 1)
    if not factors:
        legal = [str(factor * unit) for factor in (below, below + 1) if factor]
        raise UserError(told, hint=f"use --global-batch {' or '.join(legal)}, or pin another value")
    is_dp_free = names == ["micro_batch_size"]
    devices = max(space.device_counts) if is_dp_free else 1
    factor = max(factors, key=lambda factor: (math.gcd(factor, devices), -abs(factor * unit - batch)))
    return factor * unit, [f"{told}; {factor * unit} are taken"]


def _pinned_units(space: PlanSpace) -> list[str]:
    """Pinned fields whose product, by their smallest values, must divide the batch."""
    pinned = [name for name in BATCH_UNIT if name in space.pinned]
    if "dp" in pinned:
        pinned = [name for name in pinned if name in ("dp", "micro_batch_size")]
    return [name for name in pinned if min(int(value) for value in space.values[name]) > 1]
