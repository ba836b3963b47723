"""Measures the whole machine: the parts of the probe in order, with progress for whoever started it."""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist

from engine import probe_collectives as collectives
from engine import probe_compute as compute
from engine.context import ParallelContext
from engine.data.loader import Loader
from engine.data.sampler import Sampler
from engine.data.sequences import TokenSet
from engine.measurement import Machine, MatmulSample, Measurement, OverlapSample
from engine.plan import Precision
from engine.probe_steps import measure_steps
from engine.probe_timing import Timer

SECONDS, QUICK_SECONDS = 0.12, 0.025
"""Time of one measurement."""
STEP_SECONDS, QUICK_STEP_SECONDS = 0.8, 0.15
"""Time of one sample of training steps."""
INPUT_LENGTH, INPUT_BATCH = 1024, 64
"""Tokens per sequence and sequences per batch of the loader."""
PROGRESS = "progress:"
"""Beginning of a line on standard error that tells how far the measurement is: JSON with ``done`` and ``what``."""


def measure_machine(context: ParallelContext, threads: int, *, quick: bool) -> Measurement | None:
    """Measure as one of the ranks of ``context``, with so many CPU threads each.

    Returns:
        The measurement on rank 0, None on the others.
    """
    started, start = datetime.now(UTC), time.perf_counter()
    torch.manual_seed(0)
    busy = _Busy()
    found = _parts(context, threads, quick)
    cpu_seconds = sum(context.gather(busy.own_seconds()))
    machine = _machine(
        context,
        threads,
        started.isoformat(timespec="seconds"),
        time.perf_counter() - start,
        busy.others(cpu_seconds),
    )
    return Measurement(machine=machine.changed(is_quick=quick), **found) if context.is_main else None


def _parts(context: ParallelContext, threads: int, quick: bool) -> dict[str, Any]:
    """Everything but the facts of the machine."""
    timer = Timer(context, QUICK_SECONDS if quick else SECONDS, threads, min_blocks=3 if quick else 5)
    on_cpu = context.device.type == "cpu"
    every = 2 if quick else 1
    shapes = (compute.CPU_SHAPES if on_cpu else compute.CUDA_SHAPES)[::every]
    lengths = (compute.CPU_LENGTHS if on_cpu else compute.CUDA_LENGTHS)[::every]
    elements = (compute.CPU_ELEMENTS if on_cpu else compute.CUDA_ELEMENTS)[every - 1 :: every]
    message_bytes = (collectives.CPU_BYTES if on_cpu else collectives.CUDA_BYTES)[::every]
    heads, head_dim = (4, 64) if on_cpu else (16, 128)
    precisions = compute.precisions(context.device)
    world = context.world_size
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def matmul(word: Precision) -> list[MatmulSample]:
        return compute.measure_matmul(timer, word, shapes[:6:2] if word == "fp64" else shapes)

    steps: dict[str, tuple[str, Callable[[], Any]]] = {
        "launch_seconds": ("launches", lambda: compute.measure_launch(timer)),
        "matmul": ("matrix products", lambda: [x for word in precisions for x in matmul(word)]),
        "attention": (
            "attention",
            lambda: list(
                chain.from_iterable(
                    compute.measure_attention(timer, word, lengths, heads, head_dim) for word in precisions[:2]
                )
            ),
        ),
        "stream": (
            "memory-bound operators",
            lambda: [
                *chain.from_iterable(compute.measure_stream(timer, word, elements) for word in precisions[:2]),
                *compute.measure_optimizer(timer, elements),
            ],
        ),
        "host_link_bytes_per_second": ("host link", lambda: compute.measure_host_link(timer)),
        "input_tokens_per_second": ("input", lambda: _input_tokens_per_second(timer)),
    }
    if world > 1:
        steps["collectives"] = (
            "collectives",
            lambda: collectives.measure_collectives(timer, local, message_bytes),
        )
        steps["overlap"] = ("overlap", lambda: _overlap(timer, on_cpu))
    steps["steps"] = (
        "training steps",
        lambda: measure_steps(timer, seconds=QUICK_STEP_SECONDS if quick else STEP_SECONDS, quick=quick),
    )
    found: dict[str, Any] = {}
    for number, (name, (what, action)) in enumerate(steps.items()):
        _progress(context, number / len(steps), what)
        found[name] = action()
    _progress(context, 1.0, "done")
    return found | {"noise_ratio": timer.noise_ratio}


def _overlap(timer: Timer, on_cpu: bool) -> OverlapSample:
    side, num_bytes = (256, 2**21) if on_cpu else (4096, 2**27)
    return collectives.measure_overlap(timer, side, num_bytes)


def _input_tokens_per_second(timer: Timer) -> float:
    """Tokens per second of the loader on tokens in memory, read ahead by its one thread."""
    tokens = np.random.default_rng(0).integers(0, 256, INPUT_LENGTH * INPUT_BATCH * 8, dtype=np.uint16)
    source = TokenSet(tokens, np.ones_like(tokens), end_of_document=256, pad_tail=False)
    sequences = source.sequences(INPUT_LENGTH)
    loader = Loader(sequences, Sampler(len(sequences), 0), INPUT_BATCH)
    try:
        return INPUT_LENGTH * INPUT_BATCH / timer.waiting(loader.next)
    finally:
        loader.close()


class _Busy:
    """How much of this machine's CPU time others used."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._all = self._busy_seconds()
        self._own = time.process_time()

    def own_seconds(self) -> float:
        """CPU seconds of this process so far."""
        return time.process_time() - self._own

    def others(self, own_seconds: float) -> float:
        """CPUs' worth of work of other processes, on average.

        Args:
            own_seconds: Of all ranks on this machine.
        """
        elapsed = time.perf_counter() - self._start
        return max(0.0, (self._busy_seconds() - self._all - own_seconds) / elapsed)

    @staticmethod
    def _busy_seconds() -> float:
        times = psutil.cpu_times()
        return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _machine(context: ParallelContext, threads: int, started: str, seconds: float, busy_cpus: float) -> Machine:
    """Facts of the first node and how it was measured."""
    device = context.device
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        name, units, memory = properties.name, properties.multi_processor_count, properties.total_memory
        held = max(total - free - torch.cuda.memory_reserved(device), 0)
    else:
        name, units, memory, held = _cpu_name(), 1, psutil.virtual_memory().total, 0
    return Machine(
        host=socket.gethostname(),
        device="cuda" if device.type == "cuda" else "cpu",
        device_name=name,
        num_units=units,
        memory_bytes=memory,
        context_bytes=held,
        num_ranks=context.world_size,
        num_nodes=max(context.world_size // local, 1),
        threads_per_rank=threads,
        backend=dist.get_backend() if dist.is_initialized() else "none",
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "system": platform.platform(),
        },
        started=started,
        seconds=seconds,
        busy_cpus=busy_cpus,
    )


def _cpu_name() -> str:
    """What the processor calls itself, with the instructions torch uses."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def _progress(context: ParallelContext, done: float, what: str) -> None:
    if context.is_main:
        print(PROGRESS + json.dumps({"done": done, "what": what}), file=sys.stderr, flush=True)
