"""Dry runs of the engine as a cross-check of the formulas: what one rank sends, and its peak memory.

The dry run is a child process (``engine.trace``), because it needs torch; its result is kept by the content of what it
depends on.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

import engine
from autotune.cost.activations import element_bytes
from autotune.cost.columns import encode
from autotune.cost.communication import Communication, LinkColumns, WireFacts, communication
from autotune.cost.device_columns import SoftwareColumns
from autotune.cost.memory import memory_of_ranks
from autotune.cost.memory_recipe import recipe
from autotune.cost.shapes import ModelShape
from autotune.cost.software import OWN_ENGINE, software_figures
from autotune.specs.cluster import parse_cluster
from engine.atomic import make_folder, write_json
from engine.config import RunConfig, dump_run
from engine.errors import UserError
from engine.plan import plan_table
from engine.schema import parse
from engine.stage_split import rank_stages, stage_rank
from engine.traced import Axis, RankTrace

MEMORY_RECIPE = "paretune_cpu"
"""What the engine keeps where it is dry-run."""
_COUNTER_BYTES = 64
"""Messages up to so many bytes are counters and norms of the whole step."""


@dataclass(frozen=True)
class CrossCheck:
    """A figure of one rank by formula and by dry run."""

    name: str
    """``tp``, ``dp``, ``pp``, ``cp``, ``ep``: bytes that the rank sends in a step; ``memory``: live bytes at its
    peak."""
    formula: float
    """Bytes."""
    trace: float
    """Bytes."""

    @property
    def error_ratio(self) -> float:
        """Formula over dry run, less one; 0 where both are nothing."""
        return self.formula / self.trace - 1 if self.trace else float(self.formula > 0)


def trace_rank(config: RunConfig, rank: int = 0, *, cache: Path) -> RankTrace:
    """The dry run of one rank, from the cache if it was made before.

    Args:
        config: A run that our engine can make.
        rank: Of the plan's ranks.
        cache: Folder of earlier results.

    Raises:
        UserError: The engine refuses the run or the rank; or the dry run failed.
    """
    path = cache / f"{_content_hash(config, rank)}.json"
    if path.is_file():
        return parse(RankTrace, json.loads(path.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run.yaml"
        run.write_text(dump_run(config), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "engine.trace", str(run), "--rank", str(rank), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise UserError(
            f"the dry run of rank {rank} failed: {lines[-1]}", hint="run python -P -m engine.trace yourself"
        )
    found = parse(RankTrace, json.loads(done.stdout.strip().splitlines()[-1]))
    make_folder(cache)
    write_json(path, found.to_data())
    return found


def _content_hash(config: RunConfig, rank: int) -> str:
    """A hash of all that the dry run depends on: the run, the rank, the engine's sources and torch."""
    digest = hashlib.sha256()
    data = config.to_data()
    needed = [data["model"], data["plan"], data["hyperparameters"], config.workload.sequence_length]
    digest.update(json.dumps([needed, rank, version("torch")], sort_keys=True).encode())
    for source in sorted(Path(engine.__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:32]


def cross_check(config: RunConfig, trace: RankTrace) -> tuple[CrossCheck, ...]:
    """Bytes sent by axis, and peak memory, by formula and by dry run.

    The formulas of data-parallel traffic are of the fullest pipeline rank.

    Args:
        config: The run.
        trace: Its dry run.
    """
    model, plan = config.model, config.plan
    batch, length = config.hyperparameters.global_batch_size, config.workload.sequence_length
    c = encode(plan_table([(plan, batch, length)]), model.num_layers)
    shape = ModelShape.of(model)
    links = LinkColumns.of(parse_cluster(f"h100x8:{-(-plan.world_size // 8)}"))  # bytes depend on no link
    stack = SoftwareColumns.of(software_figures(OWN_ENGINE))
    wire = communication(shape, links, c, element_bytes=element_bytes(c), facts=WireFacts.of(stack))
    formula = _sent_bytes(config, wire, trace.pipeline_rank)
    traced = dict.fromkeys(formula, 0.0)
    for use in trace.collectives:
        if use.axis in traced and use.message_bytes > _COUNTER_BYTES * use.calls:
            traced[use.axis] += use.sent_bytes
    _, live = memory_of_ranks(
        shape, c, recipe(MEMORY_RECIPE), np.array([[trace.pipeline_rank]]),
        num_states=2 if config.hyperparameters.optimizer == "adamw" else 1,
        fused_attention=True,
        dropout=int(config.hyperparameters.dropout > 0),
        imbalance_ratio=0.0,
    )  # fmt: skip
    checks = [CrossCheck(axis, formula[axis], traced[axis]) for axis in formula if formula[axis] or traced[axis]]
    return (*checks, CrossCheck("memory", float(live[0, 0]), trace.peak_bytes))


def _sent_bytes(config: RunConfig, wire: Communication, pipeline_rank: int) -> dict[Axis, float]:
    """Bytes that a pipeline rank sends in a step, by axis, without recomputed layers' forward passes."""
    plan, model = config.plan, config.model
    m = plan.num_micro_batches(config.hyperparameters.global_batch_size)
    stages = rank_stages(plan, pipeline_rank)
    layers = [layer for stage in stages for layer in plan.stage_layers(model.num_layers)[stage]]
    num_moe = sum(map(model.is_moe_layer, layers))
    is_first, is_last = 0 in stages, plan.num_stages - 1 in stages
    # Forward to the stage after, backward to the one before, unless it is on this rank too.
    beside = [near for stage in stages for near in (stage - 1, stage + 1) if 0 <= near < plan.num_stages]
    num_sends = sum(stage_rank(plan, stage) != pipeline_rank for stage in beside)

    def one(name: str) -> float:
        return float(np.ravel(getattr(wire, name))[0])

    def both(name: str) -> float:
        return one(f"{name}_forward_bytes") + one(f"{name}_backward_bytes")

    passes = (len(layers) - num_moe) * both("tp") + num_moe * both("tp_moe")
    passes += is_first * both("vocab_first") + is_last * both("vocab_last")
    return {
        "tp": m * passes + one("tp_step_bytes"),
        "dp": one("dp_reduce_bytes") + one("dp_gather_bytes") + one("shard_passes") * one("shard_gather_bytes"),
        "pp": m * one("pp_send_bytes") * num_sends + (is_first or is_last) * one("tied_reduce_bytes"),
        "cp": m * len(layers) * both("cp"),
        "ep": m * num_moe * both("ep"),
    }
