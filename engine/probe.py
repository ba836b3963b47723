"""What torch makes of this machine, as JSON. A program of its own, so that a broken torch breaks nobody else:
``python -P -m engine.probe``."""

from __future__ import annotations

import json
import tempfile
from datetime import timedelta
from typing import Any

from engine.data.corpus import writable_cache
from engine.errors import UserError

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


def main() -> None:
    """Print the facts as one line of JSON, the last of what is printed (libraries may print while they are loaded)."""
    print("\n" + json.dumps(probe()))


if __name__ == "__main__":
    main()
