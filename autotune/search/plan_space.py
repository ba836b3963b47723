"""Which plans are searched: the values that each field may take, made from model, machines and batch, or pinned."""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.cost.columns import WORD_FIELDS, words_of
from autotune.specs.cluster import ClusterSpec
from autotune.specs.figures import SoftwareFigures
from engine.errors import UserError
from engine.rule import Scope, divisors
from engine.rules_universal import VIRTUAL_STAGES
from engine.spec import ModelSpec
from engine.units import parse_count

DEGREES = ("tp", "pp", "cp", "dp_replicate", "dp_shard")
"""Their product is the number of devices used."""
OUTER_FIELDS = (
    "schedule", "virtual_stages", "layers_per_stage", "ep", "etp", "sequence_length", "global_batch_size",
    "micro_batch_size", "precision", "gradient_compression", "rank_order", "cp_attention", "recompute",
    "recompute_period",
)  # fmt: skip
"""Fields that a block of the search fixes, with the degrees."""
PIPELINE_FIELDS = frozenset({"pp", "schedule", "virtual_stages"})
INNER_FIELDS = (
    "zero_stage", "sequence_parallel", "vocab_parallel", "offload_parameters_ratio", "offload_optimizer_ratio",
    "offload_activations_ratio", "overlap_dp", "overlap_tp", "overlap_pp",
)  # fmt: skip
"""Fields that vary inside a block."""
FIELDS = (*DEGREES, *OUTER_FIELDS, *INNER_FIELDS)
"""Every axis, in the order in which combinations are numbered."""
NOT_PRICED = {
    "expert_capacity_factor": "nothing is dropped",
    "expert_replicas": "each expert has one copy",
    "expert_placement_steps": "experts stay where they are",
    "all_reduce": "the backend sums",
}
"""Fields of Plan that no estimate depends on, so that nothing can be said of their values -> what holds in every plan
that is searched."""
DERIVED_PINS = ("devices", "dp")
"""What may be pinned besides: devices used, and the whole data-parallel degree."""

LAYER_SPLITS = ("even", "light_ends")
"""How layers are split over stages: evenly, the remainder to the first stages; or with a layer less on the first and on
the last stage, which hold embedding and head. The axis ``layers_per_stage`` takes one of these words."""
WHOLE_EXPERT_TENSOR = 0
"""Code of ``etp = tp`` on the axis ``etp``, whose other degrees stand for themselves."""

MAX_TENSOR_DEGREE = 64
MIN_CONTEXT_SLICE = 1024
"""Fewest tokens of a sequence that a context-parallel rank is given by default."""
MAX_MICRO_BATCH_TOKENS = 2**17
"""Most tokens of a micro-batch by default (one sequence is always allowed)."""
OFFLOAD_STEPS = (0.0, 0.5, 1.0)
"""Ratios that are tried where a search turns to offload."""

Value = int | float | str | bool


@dataclass(frozen=True)
class PlanSpace:
    """The plans that are searched: every combination of the values, with degrees whose product is a device count."""

    device_counts: tuple[int, ...]
    """Devices that a plan may use."""
    values: dict[str, tuple[Value, ...]]
    """Field -> the values it may take, the simplest first (ties go to the first). ``dp_shard`` and ``dp`` are absent
    where they may take any value that the other degrees leave."""
    pinned: frozenset[str] = frozenset()
    """Fields whose values were given."""
    scopes: tuple[Scope, ...] = ("universal",)
    """Rules of these scopes remove plans."""
    even_stages: bool = False
    """Whether all stages between the first and the last must have equally many layers (``SoftwareFigures``)."""
    whole_periods: bool = False
    """Whether a stage must have as many layers as the recompute period: stacks count recomputed layers by stage."""

    @functools.cached_property
    def codes(self) -> dict[str, np.ndarray]:
        """Field -> its values as numbers: words as codes, switches as 0 and 1."""
        return {name: encode_values(name, values) for name, values in self.values.items()}

    @functools.cached_property
    def degrees(self) -> np.ndarray:
        """``[m, 5]`` degrees in the order of ``DEGREES``, every row with a product in ``device_counts``."""
        grid = np.array(np.meshgrid(*(self.codes[name] for name in DEGREES[:-1]), indexing="ij")).reshape(4, -1)
        product = grid.prod(axis=0)
        found = []
        for count in self.device_counts:
            fits = count % product == 0
            rows = np.concatenate([grid[:, fits], count // product[None, fits]])
            keep = np.ones(rows.shape[1], dtype=bool)
            if "dp_shard" in self.codes:
                keep &= np.isin(rows[4], self.codes["dp_shard"])
            if "dp" in self.codes:
                keep &= np.isin(rows[3] * rows[4], self.codes["dp"])
            found.append(rows[:, keep])
        return np.concatenate(found, axis=1).T.astype(np.int64)

    @property
    def num_combinations(self) -> int:
        """Size of the product of all values, legal or not."""
        return len(self.degrees) * self.num_per_degrees

    @property
    def num_per_degrees(self) -> int:
        """Combinations of the other fields."""
        return math.prod(len(self.values[name]) for name in (*OUTER_FIELDS, *INNER_FIELDS))

    def changed(self, **values: Sequence[Value]) -> PlanSpace:
        """The space with other values of some fields (``device_counts`` included)."""
        counts = tuple(int(v) for v in values.pop("device_counts", self.device_counts))
        changed = self.values | {name: tuple(allowed) for name, allowed in values.items()}
        return replace(self, device_counts=counts, values=changed)

    def fixed(self, name: str) -> Value | None:
        """The one value of a field, None where there are several."""
        values = self.values.get(name, ())
        return values[0] if len(values) == 1 else None


def encode_values(name: str, values: Sequence[Value]) -> np.ndarray:
    """Values of a field as numbers."""
    if name == "layers_per_stage":
        return np.array([LAYER_SPLITS.index(str(value)) for value in values])
    if name == "etp":
        return np.array([WHOLE_EXPERT_TENSOR if value == "tp" else int(value) for value in values])
    if name in WORD_FIELDS:
        return np.array([words_of(name).index(str(value)) for value in values])
    return np.array(values, dtype=np.float64 if name.endswith("_ratio") else np.int64)


def plan_space(
    model: ModelSpec,
    cluster: ClusterSpec,
    *,
    global_batch_sizes: Sequence[int],
    sequence_lengths: Sequence[int],
    pins: Sequence[str] = (),
    fewer_devices: bool = False,
    scopes: tuple[Scope, ...] = ("universal",),
    stack: SoftwareFigures | None = None,
) -> PlanSpace:
    """The space of a model on its machines.

    Args:
        model: The architecture.
        cluster: The machines.
        global_batch_sizes: Sequences per step; several make the batch an axis.
        sequence_lengths: Tokens per sequence; several make it an axis.
        pins: ``field=value`` or ``field=value,value`` texts; they replace the values that a field has by default.
        fewer_devices: Whether plans may leave devices idle (for the objectives devices, cost and energy).
        scopes: Rules that remove plans: ``universal`` for any stack, with ``engine`` for what ours builds.
        stack: The training stack: its pipelines are the ones searched, where none is pinned. None: any.

    Raises:
        UserError: A pin that can't be read, an unknown field (with the nearest), a value that is not allowed (with
            those that are), pins that no device count can be split into.
    """
    given = _read_pins(pins)
    counts = given.pop("devices", None) or _device_counts(cluster, fewer_devices)
    too_many = [count for count in counts if int(count) > cluster.num_devices]
    if too_many:
        raise UserError(
            f"devices={too_many[0]} is pinned, the cluster has {cluster.num_devices}",
            hint=f"allowed are 1 to {cluster.num_devices}",
        )
    values = _default_values(model, cluster, [int(c) for c in counts], global_batch_sizes, sequence_lengths)
    if stack is not None:
        values |= _pipelines_of(stack, values["schedule"], is_pinned=not PIPELINE_FIELDS.isdisjoint(given))
        values["cp_attention"] = stack.cp_attention
        _check_cp_attention(stack, given)
    values |= given
    even = stack is not None and _needs_even_stages(stack, model) and "layers_per_stage" not in given
    whole = stack is not None and "engine" not in scopes and given.keys().isdisjoint({"recompute", "recompute_period"})
    space = PlanSpace(tuple(int(c) for c in counts), values, frozenset(given), scopes, even, whole)
    _check_degrees(space)
    return space


def _default_values(
    model: ModelSpec, cluster: ClusterSpec, counts: list[int], batches: Sequence[int], lengths: Sequence[int]
) -> dict[str, tuple[Value, ...]]:
    degrees = sorted({d for count in counts for d in divisors(count)})
    longest = max(lengths)
    moe = model.moe
    values: dict[str, tuple[Value, ...]] = {
        "tp": tuple(d for d in degrees if d <= min(model.num_heads, MAX_TENSOR_DEGREE)),
        "pp": tuple(d for d in degrees if d <= model.num_layers),
        "cp": tuple(d for d in degrees if d <= max(1, longest // MIN_CONTEXT_SLICE)),
        "dp_replicate": tuple(degrees),
        "schedule": ("1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"),
        "virtual_stages": tuple(v for v in range(1, 9) if v in (1, 2, 4, 8) or model.num_layers % v == 0),
        "layers_per_stage": LAYER_SPLITS,
        "ep": tuple(d for d in divisors(moe.num_experts) if d <= max(counts)) if moe else (1,),
        "etp": (1, "tp") if moe else (1,),
        "sequence_length": tuple(lengths),
        "global_batch_size": tuple(batches),
        "micro_batch_size": _micro_batches(max(batches), min(lengths)),
        "precision": (_precision(cluster),),
        "gradient_compression": ("none",),
        "rank_order": words_of("rank_order"),
        "cp_attention": ("ring",),
        "zero_stage": (1, 2, 3),
        "sequence_parallel": (False, True),
        "vocab_parallel": (True,),
        "recompute": words_of("recompute"),
        "recompute_period": (2, 4),
        "offload_parameters_ratio": (0.0,),
        "offload_optimizer_ratio": (0.0,),
        "offload_activations_ratio": (0.0,),
        "overlap_dp": (True,),
        "overlap_tp": (False, True),
        "overlap_pp": (True,),
    }
    return values


def _pipelines_of(stack: SoftwareFigures, schedules: Sequence[Value], is_pinned: bool) -> dict[str, tuple[Value, ...]]:
    """The values of a pipeline's fields that a stack has, of the schedules worth a search; a stack without pipelines is
    given some where something of a pipeline is pinned."""
    run = tuple(schedule for schedule in schedules if schedule in stack.schedules)
    if run or is_pinned:
        return {"schedule": run or ("1f1b",)}
    return {"pp": (1,), "schedule": ("1f1b",), "virtual_stages": (1,)}


def _check_cp_attention(stack: SoftwareFigures, given: Mapping[str, tuple[Value, ...]]) -> None:
    """Refuse what a stack's context ranks can't be told."""
    lacking = [value for value in given.get("cp_attention", ()) if value not in stack.cp_attention]
    if lacking:
        raise UserError(
            f"cp_attention={lacking[0]} is pinned, {stack.title} has {' and '.join(stack.cp_attention)}",
            hint="leave it unpinned, or take another --software or --engine",
        )


def _needs_even_stages(stack: SoftwareFigures, model: ModelSpec) -> bool:
    is_odd = model.num_layers % 2 == 1
    return stack.uneven_stages == "never" or (stack.uneven_stages == "odd_layers" and not is_odd)


def _device_counts(cluster: ClusterSpec, fewer: bool) -> tuple[int, ...]:
    """All devices; or also parts of a node, and nodes by divisors and powers of two."""
    if not fewer:
        return (cluster.num_devices,)
    nodes = {*divisors(cluster.num_nodes), *(2**k for k in range(cluster.num_nodes.bit_length()))}
    return tuple(sorted({*divisors(cluster.devices_per_node), *(n * cluster.devices_per_node for n in nodes)}))


def _micro_batches(batch: int, length: int) -> tuple[int, ...]:
    largest = max(1, min(batch, MAX_MICRO_BATCH_TOKENS // length))
    return tuple(2**k for k in range(largest.bit_length()))


def _precision(cluster: ClusterSpec) -> str:
    """The usual precision of the device: bf16, or fp32 where there is no faster one."""
    known = set(cluster.figures.matmul) if cluster.figures else set(cluster.peak_flops)
    if cluster.device == "cpu" or (known and not known & {"bf16", "fp16"}):
        return "fp32"
    return "fp16" if known and "bf16" not in known else "bf16"


# ---------------------------------------------------------------------------------------------------------------- pins


def _read_pins(pins: Sequence[str]) -> dict[str, tuple[Value, ...]]:
    read: dict[str, tuple[Value, ...]] = {}
    for pin in pins:
        name, separator, text = pin.partition("=")
        name = name.strip().replace("-", "_").lower()
        if not separator or not text.strip():
            raise UserError(
                f"a pin is field=value, got {pin!r}", hint="examples: tp=8, recompute=none,full, micro_batch_size=1"
            )
        check_is_priced(name)
        if name not in (*FIELDS, *DERIVED_PINS):
            raise UserError(f"{name!r} is no field of a plan", hint=_nearest_field(name))
        if name in read:
            raise UserError(f"{name} is pinned twice", hint=f"give all its values at once: {name}=1,2")
        values = [_parse_value(name, part.strip()) for part in text.strip().strip("[]").split(",")]
        read[name] = tuple(dict.fromkeys(values))
    return read


def check_pipeline_pins(space: PlanSpace) -> None:
    """Refuse pins of a pipeline that contradict each other, with all that must change.

    Raises:
        UserError: No schedule that is pinned goes with the pinned pp and virtual_stages.
    """
    given = {name: space.values[name] for name in PIPELINE_FIELDS & space.pinned}
    pinned = " ".join(f"{n}={','.join(map(str, given[n]))}" for n in ("schedule", "virtual_stages", "pp") if n in given)
    schedules = [str(name) for name in given.get("schedule", VIRTUAL_STAGES)]
    stages = [int(value) for value in given.get("virtual_stages", ())]
    runs = {name: (least, most or math.inf) for name, (least, most) in VIRTUAL_STAGES.items()}
    pinned_schedule = "schedule" in given and "1f1b" not in schedules
    if given.get("pp") == (1,) and (pinned_schedule or (stages and min(stages) > 1)):
        changes = [name for name in ("schedule", "virtual_stages") if name in given]
        needed = "" if not pinned_schedule else f" and virtual_stages={_stages_words(schedules[0])}"
        raise UserError(
            f"the pins {pinned} contradict each other: with pp=1 there is no pipeline to be scheduled",
            hint=f"leave {' and '.join(changes)} unpinned, or pin pp to 2 or more{needed}",
        )
    if stages and not any(runs[name][0] <= value <= runs[name][1] for name in schedules for value in stages):
        others = [name for name, (a, b) in runs.items() if any(a <= value <= b for value in stages)]
        told = "; ".join(
            f"{name} runs {_stages_words(name)} stage{'s' if runs[name][1] > 1 else ''} per rank" for name in schedules
        )
        raise UserError(
            f"the pins {pinned} contradict each other: {told}",
            hint=f"pin virtual_stages={_stages_words(schedules[0])}, or schedule={' or '.join(others)}",
        )


def check_is_priced(name: str) -> None:
    """Refuse a pin of what estimates do not depend on.

    Raises:
        UserError: It is such a field.
    """
    if name in NOT_PRICED:
        raise UserError(
            f"{name} can't be pinned: no estimate depends on it ({NOT_PRICED[name]})",
            hint="search it by real runs: 'autotune sweep' with it under space.plan",
        )


def _stages_words(schedule: str) -> str:
    least, most = VIRTUAL_STAGES[schedule]
    return str(least) if most else f"{least} or more"


def _nearest_field(name: str) -> str:
    known = (*FIELDS, *DERIVED_PINS)
    short = {"mbs": "micro_batch_size", "vp": "virtual_stages", "vpp": "virtual_stages", "zero": "zero_stage",
             "sp": "sequence_parallel", "gbs": "global_batch_size", "seq_len": "sequence_length",
             "world_size": "devices", "fsdp": "dp_shard"}  # fmt: skip
    close = [short[name]] if name in short else difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return (f"did you mean {close[0]}? " if close else "") + f"fields are {', '.join(known)}"


def _parse_value(name: str, text: str) -> Value:
    """A value as written, checked against what the field allows."""
    allowed = allowed_words(name)
    if name in ("sequence_parallel", "vocab_parallel") or name.startswith("overlap_"):
        switch = {
            "true": True,
            "on": True,
            "yes": True,
            "1": True,
            "false": False,
            "off": False,
            "no": False,
            "0": False,
        }
        if text.lower() in switch:
            return switch[text.lower()]
        raise UserError(f"{name} is a switch, got {text!r}", hint="allowed are true and false")
    if name == "etp" and text == "tp":
        return "tp"
    if allowed and name not in ("zero_stage", "etp"):
        if text in allowed:
            return text
        close = difflib.get_close_matches(text, allowed, n=1)
        raise UserError(
            f"{name} can't be {text!r}",
            hint=(f"did you mean {close[0]}? " if close else "") + f"allowed are {', '.join(allowed)}",
        )
    if name.endswith("_ratio"):
        return _parse_ratio(name, text)
    number = parse_count(text, what=name)
    if name == "zero_stage" and number not in (0, 1, 2, 3):
        raise UserError(f"zero_stage can't be {number}", hint="allowed are 0, 1, 2, 3")
    if name != "zero_stage" and number < 1:
        raise UserError(f"{name} must be 1 or more, got {text!r}", hint=f"example: {name}=1,2,4")
    return number


def _parse_ratio(name: str, text: str) -> float:
    match = re.fullmatch(r"([0-9.]+)(%?)", text)
    try:
        value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise UserError(f"{name} is a ratio from 0 to 1, got {text!r}", hint=f"examples: {name}=0.5, {name}=0,0.5,1")
    return value


def allowed_words(name: str) -> tuple[str, ...]:
    """The words that a field may take; empty for numbers and switches."""
    if name == "layers_per_stage":
        return LAYER_SPLITS
    return words_of(name) if name in WORD_FIELDS else ()


def _check_degrees(space: PlanSpace) -> None:
    """Refuse degrees that leave nothing to search."""
    if len(space.degrees):
        return
    told = ", ".join(str(count) for count in space.device_counts)
    for name in (*DEGREES, "dp"):
        fits = [v for v in space.values.get(name, ()) if any(count % int(v) == 0 for count in space.device_counts)]
        if name in space.pinned and not fits:
            allowed = sorted({d for count in space.device_counts for d in divisors(count)})
            raise UserError(
                f"{name} {' or '.join(map(str, space.values[name]))} does not divide the devices ({told})",
                hint=f"allowed are {', '.join(map(str, allowed))}; or pin devices to a multiple of it",
            )
    degrees = " ".join(f"{name}={','.join(map(str, space.values[name]))}" for name in _pinned_degrees(space.pinned))
    raise UserError(
        f"no product of the degrees {degrees} with others is the number of devices ({told})",
        hint="unpin a degree, or pin devices to a product of them",
    )


def _pinned_degrees(pinned: Collection[str]) -> list[str]:
    return [name for name in (*DEGREES, "dp") if name in pinned]
