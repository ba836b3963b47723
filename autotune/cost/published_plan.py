"""The machines and the plan of a published run: the words of tables, and what they leave open, in our own terms."""

from __future__ import annotations

import functools
import math
import re

from pydantic import ValidationError

from autotune.cost.published_cells import Row
from autotune.cost.published_model import Assumptions, Unreadable
from autotune.cost.published_source import DeviceWord, Stack, device_of, node_link_rate
from autotune.specs.cluster import ClusterSpec, catalogue, parse_cluster
from engine.plan import Plan, Precision, Schedule
from engine.spec import ModelSpec
from engine.units import GIB

ATTAINED_LINK_RATIO = 0.9
"""Share of a network's line rate that large messages attain (RDMA writes over InfiniBand and RoCE: 0.88 to 0.95)."""

MAX_EP = 64
"""Largest expert-parallel degree that is assumed where a row says none."""

MICRO_TOKENS = 8192
"""Most tokens of a micro-batch that is assumed where a row says none."""

SAME_LINK_RATIO = 0.15
"""A network within so much of the catalogue's is taken to be the catalogue's."""

# ------------------------------------------------------------------------------------------------------------- cluster


def cluster_of(row: Row, num_devices: int, assumptions: Assumptions) -> ClusterSpec:
    """The machines of a row.

    Args:
        row: The row.
        num_devices: Devices of the run.
        assumptions: Gets what was completed.

    Raises:
        Unreadable: The device is not in the catalogue.
    """
    word = row.word("gpu")
    found = device_of(word) if word else None
    if found is None:
        raise Unreadable(f"gpu {word!r} is not in the catalogue of devices" if word else "gpu unknown")
    kind, device = found
    if device.assumption:
        assumptions.add(f"gpu {word}: {device.assumption}")
    per_node = row.count("gpus_per_node")
    if per_node is None:
        per_node = catalogue()[kind].devices_per_node
        if num_devices > per_node:
            assumptions.add(f"gpus_per_node unknown: {per_node}, the catalogue's")
    per_node = min(per_node, num_devices)
    num_nodes = math.ceil(num_devices / per_node)
    rate = None
    if num_nodes > 1:
        rate = node_link_rate(row.word("inter_node_link"), per_node)
        if rate is None:
            told = "holds no rate" if row.word("inter_node_link") else "unknown"
            assumptions.add(f"inter_node_link {told}: the catalogue's network of {kind}")
    return _cluster(kind, device, per_node, num_nodes, rate)


@functools.lru_cache(maxsize=4096)
def _cluster(kind: str, device: DeviceWord, per_node: int, num_nodes: int, rate: float | None) -> ClusterSpec:
    cluster = parse_cluster(f"{kind}x{per_node}:{num_nodes}")
    if device.memory_gib:
        cluster = cluster.changed(memory_bytes=int(device.memory_gib * GIB))
    if rate is None or not cluster.links:
        return cluster
    outer, attained = cluster.links[-1], rate * ATTAINED_LINK_RATIO
    if abs(attained / outer.gb_per_second - 1) <= SAME_LINK_RATIO:
        return cluster
    return cluster.changed(links=(*cluster.links[:-1], outer.changed(gb_per_second=attained)))


# ---------------------------------------------------------------------------------------------------------------- plan


def degrees_of(row: Row, assumptions: Assumptions) -> tuple[int, int, int, int, int]:
    """Degrees tp, pp, cp, dp of a row and its devices, each derived from the others where one is unknown.

    Raises:
        Unreadable: They can't be told, or they contradict each other.
    """
    tp, pp, cp, dp = (row.count(name) for name in ("tp", "pp", "cp", "dp"))
    num_devices = row.count("num_gpus")
    unknown = [name for name, value in (("tp", tp), ("pp", pp)) if value is None]
    if unknown == ["tp", "pp"] and dp is not None and dp == num_devices:
        unknown = []
        assumptions.add("tp and pp unknown: 1, since dp is the number of devices")
    if unknown and not (row.count("zero_stage") == 3 and dp is None and len(unknown) == 2):
        raise Unreadable(f"{' and '.join(unknown)} unknown: the plan can't be told")
    if unknown:
        assumptions.add("tp and pp unknown: 1, with ZeRO stage 3")
    tp, pp = tp or 1, pp or 1
    if cp is None:
        cp = 1
        if dp and num_devices and num_devices % (tp * pp * dp) == 0:
            cp = num_devices // (tp * pp * dp)
        assumptions.add(f"cp unknown: {cp}")
    if dp is None:
        if num_devices is None:
            raise Unreadable("dp and num_gpus unknown")
        if num_devices % (tp * pp * cp):
            raise Unreadable(f"num_gpus {num_devices} is not a multiple of tp {tp} * pp {pp} * cp {cp}")
        dp = num_devices // (tp * pp * cp)
        assumptions.add(f"dp unknown: {dp}, from num_gpus")
    world = tp * pp * cp * dp
    if num_devices is None:
        num_devices = world
        assumptions.add(f"num_gpus unknown: {world}, from the degrees")
    if world != num_devices:
        raise Unreadable(f"tp {tp} * pp {pp} * cp {cp} * dp {dp} = {world} devices contradict num_gpus {num_devices}")
    return tp, pp, cp, dp, num_devices


def plan_of(row: Row, model: ModelSpec, cluster: ClusterSpec, stack: Stack, assumptions: Assumptions) -> Plan:
    """The plan of a row.

    Args:
        row: The row.
        model: Its architecture.
        cluster: Its machines.
        stack: Its training stack, for what the row doesn't say.
        assumptions: Gets what was completed.

    Raises:
        Unreadable: The plan can't be told, or contradicts itself.
    """
    quiet = Assumptions()
    tp, pp, cp, dp, _ = degrees_of(row, quiet)
    schedule, virtual_stages = _schedule(row, pp, assumptions)
    micro_batch = _micro_batch(row, stack, pp, virtual_stages, dp, assumptions)
    zero_stage = _zero_stage(row, stack, dp, assumptions)
    recompute, period = _recompute(row, stack, model, assumptions)
    dp_shard = dp
    remarks = row.word("notes")
    if zero_stage == 3 and re.search(r"\bHSDP\b", remarks):
        dp_shard = math.gcd(dp, max(cluster.devices_per_node // (tp * cp), 1))
        assumptions.add(f"shards over {dp_shard} ranks: the notes say HSDP")
    group = re.search(r"zero-?1?[^;,]{0,20}?(?:group|size|over|within)[^;,0-9]{0,20}(\d+)", remarks, re.IGNORECASE)
    if zero_stage and group and dp % int(group[1] or 1) == 0:
        dp_shard = max(int(group[1]), 1)
        assumptions.add(f"shards over {dp_shard} ranks, as the notes say")
    precision, _ = _precision(row, assumptions)
    if cluster.figures is not None and precision not in cluster.figures.matmul:
        raise Unreadable(f"{cluster.device_kind} has no figures for precision {precision}")
    overlap_off = re.search(r"overlap off|no [\w ]*overlap", remarks, re.IGNORECASE) is not None
    try:
        return Plan(
            tp=tp,
            pp=pp,
            cp=cp,
            dp_replicate=dp // dp_shard,
            dp_shard=dp_shard,
            ep=_expert_parallel(row, model, cluster, dp * cp * tp, zero_stage, assumptions),
            etp=1,
            schedule=schedule,
            virtual_stages=virtual_stages,
            layers_per_stage=_layers_per_stage(model.num_layers, pp * virtual_stages, assumptions),
            micro_batch_size=micro_batch,
            zero_stage=zero_stage,  # type: ignore[arg-type]  # checked by the model
            sequence_parallel=_sequence_parallel(row, stack, tp, assumptions),
            recompute=recompute,  # type: ignore[arg-type]
            recompute_period=period,
            precision=precision,
            overlap_dp=stack.overlap_dp and not overlap_off,
            overlap_tp=_overlap_tp(remarks, stack) and tp > 1 and not overlap_off,
            overlap_pp=stack.overlap_pp and not overlap_off,
        )
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in problem["loc"])
        raise Unreadable(f"not a possible plan: {place}: {problem['msg']}") from None


def _schedule(row: Row, pp: int, assumptions: Assumptions) -> tuple[Schedule, int]:
    """The schedule and the stages per rank."""
    if pp == 1:
        return "1f1b", 1
    word, stages = row.word("schedule"), row.count("vpp")
    text = word.lower()
    vague = "not stated" in text or "/" in text
    if re.search(r"dualpipe", text):
        if "dualpipev" not in text:
            assumptions.add("schedule DualPipe: priced as dualpipev, which holds the parameters once")
        return "dualpipev", 2
    if re.search(r"zb-?v|zero[ -]bubble v", text):
        return "zbv", 2
    if re.search(r"zero[ -]?bubble|\bzb", text) and (stages or 1) > 1:
        return "interleaved_zero_bubble", stages or 2
    if "interleaved" in text and not vague and (stages or 2) > 1:
        if stages is None:
            assumptions.add("vpp unknown: 2, the least of an interleaved schedule")
        return "interleaved_1f1b", stages or 2
    if (stages or 1) > 1:
        if "interleaved" not in text:
            assumptions.add(f"schedule {word or 'unknown'}: interleaved_1f1b, since vpp is {stages}")
        return "interleaved_1f1b", stages or 2
    if "gpipe" in text:
        return "gpipe", 1
    if "1f1b" not in text or vague:
        assumptions.add(f"schedule {word or 'unknown'}: 1f1b")
    return "1f1b", 1


def _micro_batch(row: Row, stack: Stack, pp: int, virtual_stages: int, dp: int, assumptions: Assumptions) -> int:
    stated = row.count("micro_batch")
    if stated is not None:
        return stated
    batch = row.count("global_batch") or dp
    local = max(batch // dp, 1)
    if pp == 1:
        # Without a pipeline nothing is gained by splitting further than memory demands.
        tokens = row.count("seq_len") or 1
        micro_batch = max(
            size for size in (1, 2, 4) if local % size == 0 and (size == 1 or size * tokens <= MICRO_TOKENS)
        )
    elif stack.name.startswith("torchtitan") and local % (pp * virtual_stages) == 0:
        micro_batch = local // (pp * virtual_stages)
    else:
        micro_batch = 1
    assumptions.add(f"micro_batch unknown: {micro_batch}")
    return micro_batch


def _zero_stage(row: Row, stack: Stack, dp: int, assumptions: Assumptions) -> int:
    stated = row.count("zero_stage")
    if stated is None:
        stated = 3 if "fsdp" in row.word("schedule").lower() else stack.zero_stage
        if dp > 1:
            assumptions.add(f"zero_stage unknown: {stated}, usual with {stack.name}")
    if stated > 3:
        raise Unreadable(f"zero_stage {stated} is not one of 0, 1, 2, 3")
    return stated


def _expert_parallel(
    row: Row, model: ModelSpec, cluster: ClusterSpec, num_ranks: int, zero_stage: int, assumptions: Assumptions
) -> int:
    stated = row.count("ep")
    if stated is None:
        if model.moe is None:
            return 1
        most = math.gcd(model.moe.num_experts, num_ranks)
        # Where parameters are sharded, experts that stay with their rank need not be gathered.
        within = MAX_EP if zero_stage == 3 else cluster.devices_per_node
        stated = max(ep for ep in range(1, within + 1) if most % ep == 0)
        assumptions.add(
            f"ep unknown: {stated}, the most {f'of up to {MAX_EP}' if zero_stage == 3 else 'within a node'}"
        )
    return stated


def _sequence_parallel(row: Row, stack: Stack, tp: int, assumptions: Assumptions) -> bool:
    if tp == 1:
        return False
    stated = row.flag("sequence_parallel")
    if stated is None:
        stated = stack.sequence_parallel
        assumptions.add(f"sequence_parallel unknown: {int(stated)}, usual with {stack.name}")
    return stated


def _recompute(row: Row, stack: Stack, model: ModelSpec, assumptions: Assumptions) -> tuple[str, int]:
    """What is recomputed, and of how many layers one."""
    word = row.word("recompute")
    text = word.lower()
    if not text or text in ("unknown", "?", "n/a", "not stated"):
        assumptions.add(f"recompute unknown: {stack.recompute}, usual with {stack.name}")
        return stack.recompute, 1
    every = re.search(r"every[ _-]*(\d+)", text)
    if every:
        return "every_k", min(max(int(every[1]), 1), model.num_layers)
    if "selective layer" in row.word("notes").lower():
        assumptions.add("recompute selective by layer: every second layer")
        return "every_k", min(2, model.num_layers)
    if "select" in text:
        modules = re.search(r"modules=?:? ?([\w,]+)", row.word("notes"))
        if modules:
            assumptions.add(f"recompute of the modules {modules[1]}: priced as selective")
        return "selective", 1
    if text in ("0", "no", "false", "off", "none"):
        return "none", 1
    if re.search(r"full|block|uniform|yes|true|^1$", text):
        return "full", 1
    raise Unreadable(f"recompute {word!r} is none of none, selective, full, every N")


def _layers_per_stage(num_layers: int, num_stages: int, assumptions: Assumptions) -> tuple[int, ...] | None:
    """Uneven stages: where embedding and head count as layers, the first and last stage have one less."""
    if num_stages == 1 or num_layers % num_stages == 0 or num_layers < num_stages:
        return None
    if (num_layers + 2) % num_stages == 0 and num_stages > 2:
        inner = (num_layers + 2) // num_stages
        if inner > 1:
            assumptions.add(f"{num_layers} layers on {num_stages} stages: {inner} each, the first and last one less")
            return (inner - 1, *(inner for _ in range(num_stages - 2)), inner - 1)
    assumptions.add(f"{num_layers} layers on {num_stages} stages: split as evenly as possible")
    return None


def _precision(row: Row, assumptions: Assumptions) -> tuple[Precision, str]:
    """The precision of the matrix products, and the recipe of low precisions (empty for the others)."""
    word = row.word("precision")
    text = word.lower().replace("_", "-")
    if not text:
        assumptions.add("precision unknown: bf16")
        return "bf16", ""
    if "fp4" in text:
        assumptions.add(f"precision {word}: products of 4 bits, priced as fp8 with a factor")
        return "fp8", "nvfp4"
    if "fp8" in text or "float8" in text:
        recipe = "mxfp8" if "mx" in text else "fp8-rowwise" if re.search("row|sub|block", text) else "fp8"
        return "fp8", recipe
    for known in ("bf16", "fp16", "fp32", "fp64"):
        if known in text or (known == "bf16" and "bfloat16" in text) or (known == "fp32" and "tf32" in text):
            return known, ""
    raise Unreadable(f"precision {word!r} is none of fp32, fp16, bf16, fp8, mxfp8, nvfp4")


def recipe_of(row: Row) -> str:
    """Recipe of a low precision: ``fp8``, ``fp8-rowwise``, ``mxfp8``, ``nvfp4``; empty for the others."""
    return _precision(row, Assumptions())[1]


def _overlap_tp(remarks: str, stack: Stack) -> bool:
    if re.search(r"async[ -]?tp|tp-comm-overlap", remarks, re.IGNORECASE):
        return True
    if re.search(r"vanilla tp|overlap off", remarks, re.IGNORECASE):
        return False
    return stack.overlap_tp
