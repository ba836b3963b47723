"""Counts what the engine's collectives send in one step, on rank 0 of a fake process group (no other rank exists).

python tests/autotune/cost/engine_traffic.py CASES.json      # prints one JSON list, a mapping of counts for each case

A case: ``model``, ``plan``, ``global_batch_size``, ``sequence_length``. Counts: ``axis operation`` -> bytes this rank
sends in all, where a ring sends ``(g - 1) / g`` of a gather's whole, and twice that of an all-reduce's.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import stage as pipelining
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from engine.config import RunConfig, RuntimeOptions
from engine.context import ParallelContext, open_context
from engine.parallel.pipeline import _hidden
from engine.plan import Plan
from engine.precision.policy import precision_policy
from engine.spec import Hyperparameters, ModelSpec, Workload
from engine.step import Stepper

GATHERS = ("all_gather_into_tensor", "_allgather_base_")
SCATTERS = ("reduce_scatter_tensor", "_reduce_scatter_base_")
REDUCES = ("all_reduce", "allreduce_")


class Traffic(TorchDispatchMode):
    """Counts the collectives of three or more elements: smaller ones are counters and norms of the whole step."""

    def __init__(self, axes: dict[str, str]) -> None:
        super().__init__()
        self.sent: Counter[str] = Counter()
        self._axes = axes

    def __torch_dispatch__(
        self, func: Any, types: tuple[type, ...], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its own dispatch comes first, and ends in plain tensors
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name.partition("::")[2], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple[Any, ...]) -> None:
        group = next((g for g in map(_group, args) if g is not None), None)
        if group is None or group.group_name not in self._axes:
            return
        tensors = list(_tensors(args))
        largest = max(tensors, key=lambda tensor: tensor.numel())
        whole = largest.numel() * largest.element_size()
        size, axis = group.size(), self._axes[group.group_name]
        if name == "all_gather_into_tensor":
            whole *= size
        if largest.numel() < 8:
            return
        if name in GATHERS or name in SCATTERS:
            self.sent[f"{axis} {'gather' if name in GATHERS else 'scatter'}"] += whole * (size - 1) // size
        elif name in REDUCES:
            self.sent[f"{axis} reduce"] += 2 * whole * (size - 1) // size
        elif name == "send":
            self.sent[f"{axis} send"] += whole


def _group(argument: Any) -> dist.ProcessGroup | None:
    if isinstance(argument, str):
        try:
            return dist.distributed_c10d._resolve_process_group(argument)
        except RuntimeError:
            return None
    if isinstance(argument, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(argument)
        except RuntimeError:
            return None
    return None


def _tensors(argument: Any) -> Iterator[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from _tensors(item)


@contextmanager
def shapes_without_neighbours(hidden: torch.Tensor) -> Iterator[None]:
    """Let a pipeline stage take the shape of ``hidden`` for what its neighbours, who don't exist, would tell it."""
    asked: Callable[..., Any] = pipelining.PipelineStage._recv_meta  # type: ignore[attr-defined]
    kinds = pipelining._StageForwardMeta, pipelining._StageBackwardMeta  # type: ignore[attr-defined]

    def told(self: Any, source: int) -> Any:
        return kinds[source > self.stage_index](pipelining.extract_tensor_metas((hidden,)))  # type: ignore[attr-defined]

    pipelining.PipelineStage._recv_meta = told  # type: ignore[attr-defined]
    try:
        yield
    finally:
        pipelining.PipelineStage._recv_meta = asked  # type: ignore[attr-defined]


def count(case: dict[str, Any]) -> dict[str, int]:
    """Bytes by axis and operation of one step."""
    plan, model, length = Plan(**case["plan"]), ModelSpec(**case["model"]), case["sequence_length"]
    batch = case["global_batch_size"]
    config = RunConfig(
        model=model,
        workload=Workload(sequence_length=length, total_tokens=batch * length),
        hyperparameters=Hyperparameters(global_batch_size=batch),
        plan=plan,
        runtime=RuntimeOptions(seed=1),
    )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=plan.world_size)
    try:
        context = open_context(plan, config.runtime)
        shape = _hidden(model, plan, precision_policy(plan.precision), length)
        with shapes_without_neighbours(torch.empty_like(shape, device="cpu").requires_grad_()):
            return _count_step(config, context, torch.randint(0, model.vocab_size, (batch // plan.dp, length)))
    finally:
        dist.destroy_process_group()


def _count_step(config: RunConfig, context: ParallelContext, tokens: torch.Tensor) -> dict[str, int]:
    stepper = Stepper.build(config, context, vocab_size=1)
    stepper.train_step(tokens, tokens, 0.0)  # the first step also tells shapes
    axes = {context.group(a).group_name: a for a in ("dp", "tp", "pp") if context.has_axis(a)}
    with Traffic(axes) as traffic:
        stepper.train_step(tokens, tokens, 0.0)
    return {key: math.floor(value) for key, value in sorted(traffic.sent.items())}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    print(json.dumps([count(case) for case in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))]))
