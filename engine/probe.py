"""What torch makes of this machine, as JSON. A program of its own, so that a broken torch breaks nobody else.

``python -P -m engine.probe`` prints facts. ``--measure`` prints a Measurement (``engine.measurement``): how fast this
machine computes and communicates. For several devices it is started like a training run, one process a device, over
several nodes too::

    torchrun --nproc-per-node=8 --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 -m engine.probe --measure \
        --device cuda --output measurement.json

``--pairs`` instead of ``--measure`` prints a Topology (``engine.topology``): how fast every device reaches every other.
Started like a training run too; the devices are numbered by the processes' RANK.

The CUDA side (NCCL, pinned copies) and several nodes have been run on no such machine yet.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from engine.data.corpus import writable_cache
from engine.errors import USER_ERROR_EXIT_CODE, UserError

_GLOO_TIMEOUT = timedelta(seconds=20)


def probe() -> dict[str, Any]:
    """Facts about the installed torch.

    Returns:
        ``torch`` (version), ``accelerator`` (the build: ``CUDA 12.8``, ``ROCm 6.4`` or null), ``devices`` (name and
        memory_bytes each), ``gloo`` and ``nccl`` (an error as text, null when usable), ``cache`` (the folder of
        tokenised corpora) and ``cache_error``.
    """
    import torch

    usable = torch.cuda.is_available()
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count() if usable else 0)]
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "accelerator": _build(torch.version),
        "devices": [{"name": device.name, "memory_bytes": device.total_memory} for device in devices],
        "gloo": _gloo_error(),
        "nccl": _nccl_error(usable),
        "cache": None,
        "cache_error": None,
    }
    try:
        facts["cache"] = str(writable_cache())
    except UserError as error:
        facts["cache_error"] = str(error)
    return facts


def _build(version: Any) -> str | None:
    if version.cuda:
        return f"CUDA {version.cuda}"
    return f"ROCm {version.hip}" if version.hip else None


def _gloo_error() -> str | None:
    """Start a group of one and reduce over it: finds out whether gloo can bind to an address of this machine."""
    import torch
    from torch import distributed

    if not distributed.is_available() or not distributed.is_gloo_available():
        return "torch was built without gloo"
    try:
        with tempfile.TemporaryDirectory() as folder:
            place = f"file://{folder}/store"
            distributed.init_process_group("gloo", place, rank=0, world_size=1, timeout=_GLOO_TIMEOUT)
            distributed.all_reduce(torch.ones(1))
            distributed.destroy_process_group()
    except (RuntimeError, OSError) as error:
        return str(error).splitlines()[0]
    return None


def _nccl_error(usable: bool) -> str | None:
    from torch import distributed

    if not distributed.is_available() or not distributed.is_nccl_available():
        return "torch was built without NCCL"
    return None if usable else "no device that torch can use"


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="engine.probe", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--measure", action="store_true", help="measure this machine instead of asking for facts")
    parser.add_argument("--pairs", action="store_true", help="measure the links between every two devices instead")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="kind of device to measure")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each process")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
    parser.add_argument("--output", type=Path, help="also write the measurement into this file")
    return parser.parse_args(argv)


def measure(arguments: argparse.Namespace) -> None:
    """Measure as one rank of the machine; rank 0 prints the result as one line of JSON. Does not return.

    Raises:
        UserError: The device does not exist, or there is one process alone and so no pair.
    """
    if arguments.device == "cpu":
        os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # read when torch is imported

    from engine.atomic import write_json
    from engine.config import RuntimeOptions
    from engine.context import open_context
    from engine.plan import Plan
    from engine.probe_machine import measure_machine
    from engine.probe_pairs import measure_pairs
    from engine.schema import Schema

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if arguments.pairs and world == 1:
        raise UserError(
            "one process has no pairs to measure",
            hint="start one process per device: torchrun --nproc-per-node=... -m engine.probe --pairs",
        )
    runtime = RuntimeOptions(device=arguments.device, threads_per_rank=arguments.threads)
    context = open_context(Plan(dp_shard=world), runtime)
    found: Schema | None = (
        measure_pairs(context)
        if arguments.pairs
        else measure_machine(context, arguments.threads, quick=arguments.quick)
    )
    if found is not None and context.is_main:
        if arguments.output:
            write_json(arguments.output, found.to_data())
        print("\n" + json.dumps(found.to_data()), flush=True)
    context.barrier()  # a rank that leaves while another still talks to it ends badly
    # The groups of all measured plans are left to the system: taking down so many, gloo's threads sometimes abort.
    os._exit(0)


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line of JSON, the last of what is printed (libraries may print while they are loaded)."""
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    if not (arguments.measure or arguments.pairs):
        print("\n" + json.dumps(probe()))
        return 0
    try:
        measure(arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return USER_ERROR_EXIT_CODE
    return 0


if __name__ == "__main__":
    sys.exit(main())
