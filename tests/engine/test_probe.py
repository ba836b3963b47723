"""The probe measures what it says, on tiny sizes; no test looks at how fast anything is."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import probe_compute
from engine.context import ParallelContext
from engine.measurement import CollectiveSample, OverlapSample, StepSample
from engine.plan import Plan
from engine.probe_collectives import group_sizes
from engine.probe_timing import Timer, low_quantile
from engine.schema import parse

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def timer() -> Timer:
    return Timer(ParallelContext(Plan(), torch.device("cpu")), 0.001, min_blocks=3)


@pytest.mark.unit
def test_a_matmul_is_sampled_as_the_three_products_of_a_layer(timer: Timer) -> None:
    samples = probe_compute.measure_matmul(timer, "fp32", [(4, 8, 16)])
    shapes = {sample.part: (sample.rows, sample.columns, sample.depth) for sample in samples}
    assert shapes == {"forward": (4, 16, 8), "input_gradient": (4, 8, 16), "weight_gradient": (16, 8, 4)}


@pytest.mark.unit
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_operators_of_each_class(timer: Timer, precision: str) -> None:
    samples = probe_compute.measure_stream(timer, precision, [4096, 8192])  # type: ignore[arg-type]
    assert [sample.operator for sample in samples] == 2 * ["add", "activation", "norm", "loss"]
    assert {sample.elements for sample in samples} == {4096, 8192}


@pytest.mark.unit
def test_attention_optimizer_and_launches(timer: Timer) -> None:
    (attention,) = probe_compute.measure_attention(timer, "fp32", [(2, 16)], num_heads=2, head_dim=8)
    assert (attention.batch, attention.length) == (2, 16)
    (optimizer,) = probe_compute.measure_optimizer(timer, [1024])
    assert optimizer.elements == 1024
    assert probe_compute.measure_launch(timer) > 0
    assert probe_compute.measure_host_link(timer) is None


@pytest.mark.unit
def test_a_disturbed_call_does_not_count() -> None:
    assert low_quantile([1.0] * 8 + [50.0] * 2) == 1.0


@pytest.mark.unit
def test_cpu_time_limits_a_call_of_one_thread_only(timer: Timer) -> None:
    assert timer.longest(0.5, 2.0) == 1.0
    assert Timer(timer.context, 0.1, threads=2).longest(0.5, 2.0) == math.inf


@pytest.mark.unit
def test_groups_inside_a_node_and_across() -> None:
    assert group_sizes(8, 8) == [(2, 1), (4, 1), (8, 1)]
    assert group_sizes(16, 8) == [(2, 1), (2, 8), (4, 1), (8, 1), (16, 1)]
    assert group_sizes(6, 6) == [(2, 1), (6, 1)]
    assert group_sizes(1, 1) == []


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two ranks measured together."""
    output = tmp_path_factory.mktemp("probe") / "found.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, "-m", "tests.engine.probe_worker", str(output)],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(output.read_text())
    return found


@pytest.mark.dist
def test_collectives_of_two_ranks(two_ranks: dict[str, Any]) -> None:
    samples = [parse(CollectiveSample, data) for data in two_ranks["collectives"]]
    found = {(sample.operation, sample.bytes) for sample in samples}
    operations = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"}
    assert found == {(operation, size) for operation in operations for size in (64, 2**16)}
    parse(OverlapSample, two_ranks["overlap"])


@pytest.mark.dist
def test_steps_under_every_kind_of_plan(two_ranks: dict[str, Any]) -> None:
    samples = [parse(StepSample, data) for data in two_ranks["steps"]]
    assert {sample.plan.mesh for sample in samples} == {"single", "tp2", "dp2", "pp2"}
    assert {sample.plan.zero_stage for sample in samples if sample.plan.dp_shard > 1} == {2, 3}
    assert all(sample.compute_seconds > 0 and sample.optimizer_seconds > 0 for sample in samples)
