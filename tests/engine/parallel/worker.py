"""One rank of the parallel tests: runs a list of cases in one process group and writes what rank 0 gathered.

Started by ``launch.py``, as ``ranks.py`` says. ``FOLDER/cases.json`` lists cases; the result of each becomes
``FOLDER/<name>.pt``. The first that raises ends the process, with its traceback in ``FOLDER/<name>.rank<r>.txt``.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.engine.parallel import cases


def collect(result: dict[str, Any]) -> dict[str, Any]:
    """The result with the gradients of all pipeline stages."""
    if "gradients" in result:
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, result["gradients"])
        result["gradients"] = {fqn: gradient for part in everyone for fqn, gradient in part.items()}
    return result


def function_named(name: str) -> Callable[..., dict[str, Any]]:
    """A function of ``cases``, or, as ``module:function``, of another module beside it."""
    module, _, function = name.rpartition(":")
    found: Callable[..., dict[str, Any]] = getattr(
        import_module(f"tests.engine.parallel.{module}") if module else cases, function
    )
    return found


def main(folder: Path) -> None:
    """Run every case."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for case in json.loads((folder / "cases.json").read_text()):
        try:
            config = cases.run_config(case["model"], case["plan"], case["hyperparameters"])
            options = case["options"]
            checkpoints = {key: str(folder / options[key]) for key in ("load", "save") if key in options}
            result = collect(function_named(case["function"])(config, **(options | checkpoints)))
            if dist.get_rank() == 0:
                torch.save(result, folder / f"{case['name']}.pt")
        except BaseException:
            (folder / f"{case['name']}.rank{dist.get_rank()}.txt").write_text(traceback.format_exc())
            raise
    dist.barrier()
