"""Estimated against measured step time and peak memory of 30 runs of the engine on two CPU cores.

    python benchmarks/planner_cpu.py [--cluster cluster.yaml]

First ``autotune profile`` measures the machine (unless a cluster file is given), then every plan is estimated, and only
then run, exactly as a trial of a sweep is: three small models over data, tensor and pipeline parallelism,
micro-batches, recompute, ZeRO stages and two precisions. Nothing is fitted to these runs; none of their models is one
that the profile measures. Takes about eight minutes. Other work on the machine makes it meaningless.

Writes ``benchmarks/results/planner_cpu.json``.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autotune.cost.estimate import estimate
from autotune.cost.machine_fit import measured_cluster
from autotune.space.space import TrialLimits
from autotune.specs.cluster import ClusterSpec, parse_cluster
from autotune.study.devices import DevicePool
from autotune.study.measuring import measure
from autotune.study.runner import run_trial
from engine.atomic import write_json
from engine.config import CheckpointOptions, EvaluationOptions, RunConfig, RuntimeOptions
from engine.outcome import Outcome
from engine.plan import Plan, plan_table
from engine.rules import check_run
from engine.spec import DataSpec, Hyperparameters, ModelSpec, Workload

RESULT = Path(__file__).resolve().parent / "results" / "planner_cpu.json"
NUM_STEPS = 8
"""Of each run: two warm up, one of them under the memory tracker."""


def _model(name: str, hidden: int, layers: int, kv_heads: int, ffn: int, vocab: int) -> ModelSpec:
    return ModelSpec(
        name=name, num_layers=layers, hidden_size=hidden, num_heads=hidden // 64, num_kv_heads=kv_heads, head_dim=64,
        ffn_size=ffn, vocab_size=vocab, max_positions=256,
    )  # fmt: skip


SMALL = _model("small", 256, 4, 4, 704, 2048)
MEDIUM = _model("medium", 384, 6, 6, 1024, 4096)
WIDE = _model("wide", 512, 4, 4, 1408, 8192)
EVERY_SECOND: dict[str, Any] = {"recompute": "every_k", "recompute_period": 2}
CASES: tuple[tuple[ModelSpec, int, int, Plan], ...] = (
    (SMALL, 128, 8, Plan(micro_batch_size=4)),
    (SMALL, 128, 16, Plan(micro_batch_size=16)),
    (SMALL, 128, 16, Plan(micro_batch_size=16, recompute="full")),
    (SMALL, 128, 8, Plan(tp=2, micro_batch_size=4)),
    (SMALL, 128, 16, Plan(tp=2, micro_batch_size=16, sequence_parallel=True)),
    (SMALL, 128, 16, Plan(tp=2, micro_batch_size=16, recompute="full")),
    (SMALL, 128, 16, Plan(dp_shard=2, micro_batch_size=4)),
    (SMALL, 128, 16, Plan(dp_shard=2, micro_batch_size=8, zero_stage=2)),
    (SMALL, 128, 16, Plan(pp=2, micro_batch_size=4)),
    (SMALL, 128, 16, Plan(pp=2, micro_batch_size=8, recompute="full")),
    (MEDIUM, 256, 4, Plan(micro_batch_size=1)),
    (MEDIUM, 256, 4, Plan(micro_batch_size=4)),
    (MEDIUM, 256, 4, Plan(micro_batch_size=2, **EVERY_SECOND)),
    (MEDIUM, 256, 4, Plan(tp=2, micro_batch_size=2, vocab_parallel=False)),
    (MEDIUM, 256, 4, Plan(tp=2, micro_batch_size=4)),
    (MEDIUM, 256, 4, Plan(tp=2, micro_batch_size=4, recompute="full", sequence_parallel=True)),
    (MEDIUM, 256, 4, Plan(dp_shard=2, micro_batch_size=1)),
    (MEDIUM, 256, 4, Plan(dp_shard=2, micro_batch_size=2, zero_stage=2)),
    (MEDIUM, 256, 8, Plan(dp_shard=2, micro_batch_size=2, zero_stage=2, recompute="full")),
    (MEDIUM, 256, 4, Plan(pp=2, micro_batch_size=1)),
    (MEDIUM, 256, 8, Plan(pp=2, micro_batch_size=4, recompute="full")),
    (WIDE, 256, 4, Plan(micro_batch_size=1)),
    (WIDE, 256, 4, Plan(micro_batch_size=4)),
    (WIDE, 256, 4, Plan(micro_batch_size=2, recompute="full")),
    (WIDE, 256, 4, Plan(micro_batch_size=4, precision="bf16")),
    (WIDE, 256, 4, Plan(dp_shard=2, micro_batch_size=2)),
    (WIDE, 256, 8, Plan(dp_shard=2, micro_batch_size=4, precision="bf16")),
    (WIDE, 256, 4, Plan(dp_shard=2, micro_batch_size=1, **EVERY_SECOND)),
    (WIDE, 256, 4, Plan(pp=2, micro_batch_size=1)),
    (WIDE, 256, 8, Plan(pp=2, micro_batch_size=2, recompute="full")),
)
"""Model, sequence length, global batch, plan."""


@dataclass(frozen=True)
class Judged:
    """One run."""

    model: str
    plan: str
    axis: str
    """``single``, ``tp``, ``dp`` or ``pp``."""
    global_batch_size: int
    estimated_seconds: float
    in_interval: bool
    """Whether the measured step lies in the estimate's interval."""
    measured_seconds: float
    estimated_bytes: float
    measured_bytes: float

    @property
    def time_error(self) -> float:
        """Estimate over measurement, less one."""
        return self.estimated_seconds / self.measured_seconds - 1

    @property
    def memory_error(self) -> float:
        """The same of the peak of live tensors."""
        return self.estimated_bytes / self.measured_bytes - 1


def run_config(model: ModelSpec, length: int, batch: int, plan: Plan) -> RunConfig:
    """A run of a few steps on the standard library's source."""
    config = RunConfig(
        name="planner-cpu",
        model=model,
        workload=Workload(
            data=DataSpec(max_bytes=2_000_000), sequence_length=length, total_tokens=length * batch * NUM_STEPS
        ),
        hyperparameters=Hyperparameters(global_batch_size=batch, schedule="constant"),
        plan=plan,
        runtime=RuntimeOptions(threads_per_rank=1),
        evaluation=EvaluationOptions(max_tokens=length),
        checkpoint=CheckpointOptions(at_end=False),
    )
    check_run(config)
    return config


def run(config: RunConfig, pool: DevicePool) -> Outcome:
    """The run as a trial; it must succeed."""
    devices = pool.acquire(config.plan.world_size)
    assert devices is not None
    try:
        with tempfile.TemporaryDirectory() as folder:
            outcome = run_trial(config, Path(folder) / "trial", limits=TrialLimits(), devices=devices)
    finally:
        pool.release(devices)
    if outcome.kind != "ok" or outcome.step_seconds is None or outcome.peak_memory_bytes is None:
        raise SystemExit(f"{config.model.name} {config.plan.describe()} ended as {outcome.kind}: {outcome.detail}")
    return outcome


def judge(cluster: ClusterSpec) -> list[Judged]:
    """Estimate all, then run all."""
    estimates = [
        estimate(model, cluster, plan_table([(plan, batch, length)]), software="paretune")
        for model, length, batch, plan in CASES
    ]
    pool, judged = DevicePool(cluster), []
    for (model, length, batch, plan), estimated in zip(CASES, estimates, strict=True):
        outcome = run(run_config(model, length, batch, plan), pool)
        assert outcome.step_seconds is not None
        assert outcome.peak_memory_bytes is not None
        axis = next(
            (name for name, degree in (("tp", plan.tp), ("dp", plan.dp), ("pp", plan.pp)) if degree > 1), "single"
        )
        judged.append(
            Judged(
                model.name, plan.describe(), axis, batch,
                float(estimated.step_seconds[0]),
                bool(estimated.step_seconds_low[0] <= outcome.step_seconds <= estimated.step_seconds_high[0]),
                outcome.step_seconds,
                float(estimated.allocated_bytes[0]), float(outcome.peak_memory_bytes),
            )
        )  # fmt: skip
        newest = judged[-1]
        print(
            f"{newest.model:7} {newest.plan:28} {newest.measured_seconds:6.3f} s,"
            f" estimated {newest.estimated_seconds:6.3f} ({100 * newest.time_error:+.0f} %);"
            f" {newest.measured_bytes / 2**20:4.0f} MiB"
            f" ({100 * newest.memory_error:+.1f} %)",
            flush=True,
        )
    return judged


def spearman(judged: list[Judged]) -> float:
    """Rank correlation of estimated and measured step times."""
    from scipy.stats import spearmanr

    return float(spearmanr([j.estimated_seconds for j in judged], [j.measured_seconds for j in judged]).statistic)


def summary(judged: list[Judged]) -> dict[str, Any]:
    """The figures that are claimed, and what is behind them."""
    time = np.abs([j.time_error for j in judged])
    memory = np.abs([j.memory_error for j in judged])
    models = sorted({j.model for j in judged})
    axes = sorted({j.axis for j in judged})
    return {
        "num_runs": len(judged),
        "spearman": spearman(judged),
        "spearman_within_models": {m: spearman([j for j in judged if j.model == m]) for m in models},
        "time_median_abs_error_pct": 100 * float(np.median(time)),
        "time_p90_abs_error_pct": 100 * float(np.quantile(time, 0.9)),
        "time_median_error_pct_by_axis": {
            axis: 100 * float(np.median([j.time_error for j in judged if j.axis == axis])) for axis in axes
        },
        "time_in_interval_ratio": float(np.mean([j.in_interval for j in judged])),
        "memory_median_abs_error_pct": 100 * float(np.median(memory)),
        "memory_max_abs_error_pct": 100 * float(memory.max()),
    }


def lines(judged: list[Judged], found: dict[str, Any], cluster: ClusterSpec) -> list[str]:
    """The result as Markdown."""
    assert cluster.measured is not None
    within = ", ".join(f"{model} {value:.2f}" for model, value in found["spearman_within_models"].items())
    by_axis = ", ".join(f"{axis} {value:+.0f} %" for axis, value in found["time_median_error_pct_by_axis"].items())
    rows = [
        f"| {j.model} | {j.plan} | {j.global_batch_size} | {j.measured_seconds:.3f} | {j.estimated_seconds:.3f} |"
        f" {100 * j.time_error:+.0f} % | {j.measured_bytes / 2**20:.0f} | {100 * j.memory_error:+.1f} % |"
        for j in judged
    ]
    return [
        f"Step time of {found['num_runs']} runs: Spearman {found['spearman']:.2f} (within one model: {within}), median"
        f" error {found['time_median_abs_error_pct']:.0f} %, 90th percentile {found['time_p90_abs_error_pct']:.0f} %,"
        f" {100 * found['time_in_interval_ratio']:.0f} % within their interval;"
        f" signed median by axis: {by_axis}. Peak of live tensors: median error"
        f" {found['memory_median_abs_error_pct']:.1f} %, largest {found['memory_max_abs_error_pct']:.1f} %.",
        "",
        f"Profile: {cluster.measured.seconds:.0f} s, while other processes kept {cluster.measured.busy_cpus:.2f} CPUs"
        " busy.",
        "",
        "| model | plan | batch | measured s | estimated s | error | measured MiB | error |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
    ]


def main() -> int:
    """Profile, estimate, run, write."""
    parser = argparse.ArgumentParser(description="Estimates against runs of the engine on two CPU cores.")
    parser.add_argument("--cluster", help="a cluster file that autotune profile wrote; measured now by default")
    options = parser.parse_args()
    if options.cluster:
        cluster = parse_cluster(options.cluster)
    else:
        machine = parse_cluster("cpu:2")
        cluster = measured_cluster(machine, measure(machine, quick=False))
    judged = judge(cluster)
    found = summary(judged)
    result = {
        "title": "Estimates against runs on two CPU cores",
        "setup": f"{os.cpu_count()} cores ({platform.machine()}), gloo; autotune profile, then {len(judged)} runs of"
        f" the engine, each {NUM_STEPS} steps, none of which the estimates had seen",
        "lines": lines(judged, found, cluster),
        **found,
        "cluster": cluster.to_data(),
        "runs": [
            {**vars(j), "time_error_pct": 100 * j.time_error, "memory_error_pct": 100 * j.memory_error} for j in judged
        ],
    }
    print("\n".join(result["lines"][:3]))
    write_json(RESULT, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
