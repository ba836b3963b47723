"""Who published a run, with which software, on which device and network: the words of tables, as tables of patterns.

A run's **family** is the publisher or repository it comes from, not the page: pages of one repository, its releases
and a paper's tables share it, since they repeat configurations. One repository is one family; the results of all
rounds of a benchmark are one family; a paper is one family; pages that one publisher moved between repositories (the
NeMo performance summary) are one family, its repositories for other software are their own.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal

from autotune.specs.cluster import catalogue
from engine.units import GIB

MemoryKind = Literal["allocated", "reserved", "device"]
"""What a memory figure counts: live tensors, what the allocator took, or all that the driver shows as used."""

# ------------------------------------------------------------------------------------------------------------- families

_FAMILIES = (
    (r"mlcommons/|mlperf", "MLPerf"),
    (r"NVIDIA/NeMo\b|NeMo-Framework-Launcher|nemo-framework|NVIDIA NeMo (Framework|docs|long)", "NeMo"),
    (r"Narayanan|2104\.04473", "Narayanan 2021"),
    (r"Korthikanti|2205\.05198", "Korthikanti 2022"),
    (r"MegaScale|2402\.15627", "MegaScale"),
    (r"Turing NLG|2201\.11990", "MT-NLG"),
    (r"Llama 3 Herd|2407\.21783", "Llama 3"),
    (r"BloombergGPT|2303\.17564", "BloombergGPT"),
    (r"Pythia|2304\.01373", "Pythia"),
    (r"^LLaMA \(|2302\.13971", "LLaMA"),
)
"""Pattern in the source and its address -> family, where the address alone doesn't name a repository."""

_REPOSITORY = re.compile(
    r"(?:github\.com|gitlab\.com|huggingface\.co|raw\.githubusercontent\.com)[/:]([\w.-]+/[\w.-]+)"
)
_PAGE = re.compile(r"[,;(\[]|\b(?:table|tab\.|figure|fig\.|section|sec\.|appendix|page|§|v?\d+(?:\.\d+)+)\b", re.I)


@functools.lru_cache(maxsize=4096)
def family_of(source: str, address: str) -> str:
    """The publisher or repository of a run.

    Args:
        source: Title of what the run was read from.
        address: Where that stands; a repository's address names the family by itself.
    """
    text = f"{source} {address}"
    for pattern, family in _FAMILIES:
        if re.search(pattern, text, re.IGNORECASE):
            return family
    repository = _REPOSITORY.search(address) or _REPOSITORY.search(source)
    if repository:
        return repository[1].split("@")[0].rstrip(".").removesuffix(".git")
    publisher = _PAGE.split(source, maxsplit=1)[0].strip(" :-")
    host = re.match(r"(?:https?://)?(?:www\.)?([\w-]+(?:\.[\w-]+)+)", address)
    return publisher or (host[1] if host else "") or "unknown"


# ------------------------------------------------------------------------------------------------------------- software


@dataclass(frozen=True)
class Stack:
    """A training stack in one generation, and what its runs do where their table doesn't say.

    Args:
        name: Its name in ``software.yaml``.
        pattern: Found in the source, address and remarks of its runs.
        first_year: First year of the generation.
        zero_stage: ZeRO stage it uses.
        sequence_parallel: Whether it splits the sequence where tp > 1.
        recompute: Recomputation it uses.
        overlap_dp: Whether gradients are reduced beside the backward pass.
        overlap_tp: Whether tensor-parallel collectives run beside the products.
        overlap_pp: Whether pipeline sends run beside compute.
    """

    name: str
    pattern: str
    first_year: int = 0
    zero_stage: int = 0
    sequence_parallel: bool = False
    recompute: str = "none"
    overlap_dp: bool = True
    overlap_tp: bool = False
    overlap_pp: bool = True


STACKS = (
    Stack("simumax-megatron", r"simumax", 0, 1, True, overlap_dp=False, overlap_pp=False),
    Stack("megatron-deepspeed-node", r"vtrain.*single-node", 0, 0, overlap_dp=False, overlap_pp=False),
    Stack("megatron-deepspeed-nodes", r"vtrain", 0, 0, overlap_dp=False, overlap_pp=False),
    Stack(
        "megatron-deepspeed",
        r"megatron.?deepspeed|bigscience|vtrain|turing.?nlg|mt.nlg",
        0,
        0,
        overlap_dp=False,
        overlap_pp=False,
    ),
    Stack(
        "megatron-bridge-2606", r"megatron.?bridge.*\b(26\.(0[6-9]|1\d)|2[7-9]\.\d\d)\b", 2026, 1, True, overlap_tp=True
    ),
    Stack("megatron-bridge-2026", r"megatron.?bridge|MoE-ModelZoo", 2026, 1, True, overlap_tp=True),
    Stack("megatron-bridge", r"megatron.?bridge|MoE-ModelZoo", 0, 1, True, overlap_tp=True),
    Stack("automodel", r"automodel", 0, 3),
    Stack("xla", r"maxtext|paxml|\bpax\b|rosetta|jax", 0, 3, recompute="selective"),
    Stack("mlperf-2025", r"mlperf|mlcommons", 2025, 1, True, overlap_tp=True),
    Stack("mlperf-2024", r"mlperf|mlcommons", 2024, 1, True, overlap_tp=True),
    Stack("mlperf-2023", r"mlperf|mlcommons", 0, 1, True, overlap_tp=True),
    Stack("nemo-2024", r"dgxc.*v25\.0[12]", 0, 1, True, overlap_tp=True),
    Stack("nemo-2025", r"nemo|dgxc", 2025, 1, True, overlap_tp=True),
    Stack("nemo-2024", r"nemo|dgxc", 0, 1, True, overlap_tp=True),
    Stack("megascale", r"(figure|table)[^;|]*, megascale\b", 0, 2, True, overlap_tp=True),
    Stack("llm-foundry-pure", r"llm-foundry.*mode pure", 0, 3),
    Stack("llm-foundry", r"llm-foundry|mosaicml", 0, 3),
    Stack("megatron-2024", r"llama 3 herd", 0, 2, True, overlap_tp=True),
    Stack("torchtitan-eager", r"torchtitan.*\beager\b", 0, 3, recompute="selective"),
    Stack("torchtitan-2025", r"torchtitan|torchao", 2025, 3, True, recompute="selective"),
    Stack("torchtitan", r"torchtitan|torchao", 0, 3, True, recompute="selective"),
    Stack("fsdp", r"fms-fsdp|\bfsdp\b", 0, 3),
    Stack("internevo", r"internevo|internlm", 0, 1),
    Stack("primus", r"primus", 0, 1, True),
    Stack("deepseek", r"deepseek", 0, 1),
    Stack("colossalai", r"colossal", 0, 1),
    Stack("deepspeed", r"deepspeed|neox|zero-3|bloomberg", 0, 1, overlap_dp=False),
    Stack("megatron-bridge", r"megatron.?(lm|core)", 2025, 1, True, overlap_tp=True),
    Stack("megatron-2024", r"megatron|megascale", 2024, 1, True),
    Stack(
        "megatron-2022", r"megatron|korthikanti|turing.?nlg|mt.nlg", 2022, 0, True, overlap_dp=False, overlap_pp=False
    ),
    Stack("megatron-2021", r"megatron|narayanan", 0, 0, overlap_dp=False, overlap_pp=False),
)
"""Every stack that runs are told apart by; the first that fits counts."""

DEFAULT_STACK = Stack("default", "", zero_stage=1, sequence_parallel=True)
"""A stack that the table doesn't name."""


@functools.lru_cache(maxsize=4096)
def stack_of(source: str, address: str, remarks: str, year: int) -> Stack:
    """The training stack of a run, told from what its table says of its origin."""
    text = f"{source} | {address} | {remarks}"
    for stack in STACKS:
        if year >= stack.first_year and re.search(stack.pattern, text, re.IGNORECASE):
            return stack
    return DEFAULT_STACK


# -------------------------------------------------------------------------------------------------------------- devices


@dataclass(frozen=True)
class DeviceWord:
    """How tables write a device.

    Args:
        pattern: Found in the name, upper and lower case alike.
        kinds: Devices of the catalogue that stand for it; the first that the catalogue has is taken.
        memory_gib: Memory where it differs from the catalogue's device.
        assumption: What is assumed by that; empty when nothing is.
    """

    pattern: str
    kinds: tuple[str, ...]
    memory_gib: float | None = None
    assumption: str = ""


_DEVICE_WORDS = (
    DeviceWord(r"gb300", ("gb300",)),
    DeviceWord(r"gb200", ("gb200",)),
    DeviceWord(r"b300", ("b300",)),
    DeviceWord(r"b200", ("b200",)),
    DeviceWord(r"blackwell", ("b200",), assumption="taken as B200"),
    DeviceWord(r"h200.*nvl", ("h200-nvl", "h200"), assumption="links between pairs and over PCIe are not described"),
    DeviceWord(r"gh200", ("h200",), 96, assumption="taken as an H200 with 96 GiB"),
    DeviceWord(r"h200", ("h200",)),
    DeviceWord(r"h800", ("h800",)),
    DeviceWord(r"h20\b", ("h20",)),
    DeviceWord(r"h100.*pcie", ("h100-pcie",)),
    DeviceWord(
        r"h100.*(96|hbm2e)", ("h100-hbm2e", "h100"), 96, assumption="an H100 with HBM2e and a lower power limit"
    ),
    DeviceWord(r"h100.*nvl", ("h100-nvl", "h100-pcie"), 94, assumption="taken as an H100 PCIe with 94 GiB"),
    DeviceWord(r"h100", ("h100",)),
    DeviceWord(r"a800", ("a100",), assumption="taken as an A100, whose links are faster"),
    DeviceWord(r"a100.*pcie", ("a100-pcie", "a100"), assumption="links over PCIe are not described"),
    DeviceWord(r"a100.*40", ("a100-40g",)),
    DeviceWord(r"a100.*80", ("a100",)),
    DeviceWord(r"a100", ("a100",), assumption="memory size not stated: taken as 80 GB, SXM"),
    DeviceWord(r"v100", ("v100",)),
    DeviceWord(r"l40s", ("l40s",)),
    DeviceWord(r"mi355x?", ("mi355x",)),
    DeviceWord(r"mi350x?", ("mi350x", "mi355x"), assumption="taken as an MI355X, which has a higher power limit"),
    DeviceWord(r"mi325x?", ("mi325x",)),
    DeviceWord(r"mi300x?", ("mi300x",)),
    DeviceWord(r"mi250x?", ("mi250x",)),
)


@functools.lru_cache(maxsize=1024)
def device_of(word: str) -> tuple[str, DeviceWord] | None:
    """The catalogue's device that a table's word stands for, and how; None when there is none."""
    known = catalogue()
    names = {alias.lower(): kind for kind, entry in known.items() for alias in (kind, *entry.aliases)}
    if word.lower() in names and word.lower() != "a100":
        return names[word.lower()], DeviceWord(word, (names[word.lower()],))
    for device in _DEVICE_WORDS:
        if re.search(device.pattern, word, re.IGNORECASE):
            kind = next(kind for kind in device.kinds if kind in known)
            exact = kind == device.kinds[0] and len(device.kinds) > 1
            return kind, DeviceWord(device.pattern, device.kinds) if exact else device
    return None


# ---------------------------------------------------------------------------------------------------------------- links

_RATE = re.compile(
    r"(?:(?P<count>\d+)\s*x\s*(?P<words>[A-Za-z][\w-]*(?:[ -][A-Za-z][\w-]*){0,3}?\s+)?)?(?P<rate>\d+(?:\.\d+)?)\s*"
    r"(?P<unit>Gb/s|Gbps|Gb/Sec|Gbit/s|GB/s)",
    re.IGNORECASE,
)
_BARE = re.compile(r"(?P<count>\d+)\s*x\s*(?P<what>Omni-?Path|OPA100|EDR|HDR|NDR|XDR)", re.IGNORECASE)
_PORT_GBITS = {"omnipath": 100, "opa100": 100, "edr": 100, "hdr": 200, "ndr": 400, "xdr": 800}


@functools.lru_cache(maxsize=1024)
def node_link_rate(text: str, devices_per_node: int) -> float | None:
    """Line rate of the network between nodes for each device, as a table's words say it.

    Args:
        text: For example ``8x400Gb/s InfiniBand``, ``800Gb/s per node``, ``4x Omni-Path (OPA100) per node``.
        devices_per_node: Devices that share what a node has.

    Returns:
        10^9 bytes/s of one device in one direction; None where the words hold no rate.
    """
    for wanted in (r"compute\s*:(.*)", r".*?\band\b(.*\bEW\b.*)"):
        part = re.search(wanted, text, re.IGNORECASE)
        if part:
            text = part[1]
            break
    matches = [
        match
        for match in _RATE.finditer(text)
        if "pcie" not in text[max(0, match.start() - 12) : match.start()].lower()
    ]
    rates = [_node_gbits(match, text, devices_per_node) for match in matches]
    if not rates:
        bare = [int(m["count"]) * _PORT_GBITS[m["what"].lower().replace("-", "")] for m in _BARE.finditer(text)]
        rates = [float(rate) for rate in bare]
    return max(rates) / devices_per_node / 8 if rates and max(rates) > 0 else None


def _node_gbits(match: re.Match[str], text: str, devices_per_node: int) -> float:
    """Gbit/s of a node that one rate in the text stands for."""
    rate = float(match["rate"]) * (8 if match["unit"] == "GB/s" else 1)
    if match["count"]:
        return rate * int(match["count"])
    shared = re.search(r"per (node|server|host)|\(printed\)", text, re.IGNORECASE)
    return rate if shared else rate * devices_per_node


# --------------------------------------------------------------------------------------------------------------- memory

_MEMORY_KINDS: tuple[tuple[str, MemoryKind], ...] = (
    (r"max allocated|memory_allocated|params\+optimizer|peak allocated", "allocated"),
    (r"nvidia-smi|rocm-smi", "device"),
    (r"torchtitan|torchao|memory_reserved|max reserved|peak reserved", "reserved"),
)


@functools.lru_cache(maxsize=4096)
def memory_kind_of(source: str, address: str, remarks: str) -> MemoryKind | None:
    """What a run's memory figure counts; None where nothing says it."""
    text = f"{source} | {address} | {remarks}"
    return next((kind for pattern, kind in _MEMORY_KINDS if re.search(pattern, text, re.IGNORECASE)), None)


_BINARY_MEMORY = r"torchao"
"""Sources that print GB where their program counts GiB (torchao's script copies TorchTitan's figure)."""


@functools.lru_cache(maxsize=4096)
def memory_unit_of(source: str, remarks: str) -> float:
    """What a run's memory figure is a multiple of, 10^9 bytes."""
    binary = re.search(_BINARY_MEMORY, source, re.IGNORECASE) and re.search("as printed", remarks, re.IGNORECASE)
    return GIB / 1e9 if binary else 1.0
