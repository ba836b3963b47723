"""`autotune profile`: a quick run of one device, and measurements made up for more."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.cli import main
from autotune.cost.estimate import estimate
from autotune.cost.machine_fit import StepModel, fit_steps, measured_cluster
from autotune.specs.cluster import ClusterSpec, parse_cluster
from engine.measurement import Measurement, StepSample
from engine.plan import Plan, plan_table
from engine.schema import parse
from engine.spec import ModelSpec
from engine.yaml_file import dump_yaml

MODEL = ModelSpec(
    num_layers=2, hidden_size=256, num_heads=4, num_kv_heads=4, head_dim=64, ffn_size=704, vocab_size=1024
)

TINY = MODEL.changed(hidden_size=32, num_heads=2, num_kv_heads=2, head_dim=16, ffn_size=64, vocab_size=128)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a quick run on one core."""
    folder = tmp_path_factory.mktemp("profile")
    core, path = folder / "core.yaml", folder / "one.yaml"
    core.write_text(dump_yaml(parse_cluster("cpu:1").changed(threads_per_device=1).to_data()))
    assert main(["profile", "--cluster", str(core), "--quick", "--output", str(path)]) == 0
    return path


def measurement(num_ranks: int = 1) -> dict[str, Any]:
    """Data of a machine whose products run at 50 GFLOP/s and whose memory moves 10 GB/s."""
    matmul = [
        {"precision": "fp32", "part": "forward", "rows": m, "columns": n, "depth": k, "seconds": 2 * m * n * k / 50e9}
        for m, n, k in ((256, 256, 256), (512, 512, 512), (1024, 512, 128))
    ]
    attention = [
        {
            "precision": "fp32", "batch": 1, "num_heads": 4, "head_dim": 64, "length": length,
            "forward_seconds": length * length / 1e8, "backward_seconds": length * length / 4e7,
        }
        for length in (256, 512, 1024)
    ]  # fmt: skip
    stream = [
        {"operator": "add", "precision": "fp32", "elements": n, "seconds": 12 * n / 10e9} for n in (2**18, 2**20, 2**22)
    ]
    return {
        "machine": {
            "host": "made-up", "device": "cpu", "device_name": "made up", "memory_bytes": 2**34,
            "num_ranks": num_ranks, "num_nodes": 1, "threads_per_rank": 1,
            "backend": "none", "versions": {}, "started": "2026-01-01T00:00:00",
            "seconds": 1.0, "busy_cpus": 0.0,
        },
        "launch_seconds": 1e-9, "matmul": matmul, "attention": attention, "stream": stream,
        "input_tokens_per_second": 1e6, "noise_ratio": 0.0,
    }  # fmt: skip


@pytest.mark.dist
def test_a_measured_cluster_is_one_that_commands_take(quick: Path) -> None:
    cluster = parse_cluster(str(quick))
    assert cluster.measured is not None
    assert cluster.measured.is_quick
    assert not cluster.is_rough
    assert cluster.figures is not None
    assert {"fp32", "bf16"} <= set(cluster.figures.matmul)
    assert quick.read_text().startswith("# 1 cpu")
    table = plan_table([(Plan(micro_batch_size=2, precision=word), 4, 128) for word in ("fp32", "bf16")])  # type: ignore[arg-type]
    found = estimate(MODEL, cluster, table, software="paretune")
    assert np.isfinite(found.step_seconds).all()
    assert (found.step_seconds > 0).all()


@pytest.mark.unit
def test_figures_from_a_measurement_of_another_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "m.json", tmp_path / "made.yaml"
    source.write_text(json.dumps(measurement()))
    arguments = ["profile", "--cluster", "cpu:1", "--from", str(source), "--output", str(output), "--json"]
    assert main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["output"] == str(output)
    cluster = parse_cluster(str(output))
    assert cluster.to_data() == printed["cluster"]
    assert cluster.figures is not None
    assert cluster.figures.matmul["fp32"].tflops == pytest.approx(0.05, rel=1e-2)
    assert cluster.figures.memory_gb_per_second == pytest.approx(10, rel=1e-2)


@pytest.mark.unit
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "h100x8:4"], "only this machine can be measured"),
        (["--cluster", "cpu:1", "--output", "machine.json"], "ends in .yaml"),
        (["--cluster", "cpu:1", "--output", "nowhere/machine.yaml"], "does not exist"),
        (["--cluster", "cpu:1", "--from", "nowhere.json"], "cannot read the measurement"),
    ],
)
def test_mistakes_are_told_before_anything_is_measured(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.unit
def test_a_measurement_of_other_machines_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "m.json"
    source.write_text(json.dumps(measurement(num_ranks=4)))
    assert main(["profile", "--cluster", "cpu:1", "--from", str(source), "--output", str(tmp_path / "o.yaml")]) == 2
    assert "4 cpu devices a node" in capsys.readouterr().err


def steps_of(cluster: ClusterSpec, planted: dict[str, float]) -> list[StepSample]:
    """Steps that take what the cost model says under planted figures."""
    four = Plan(micro_batch_size=4)
    rows = [(MODEL, four, 4, 256, 1), (MODEL, four, 8, 256, 3), (MODEL, four.changed(precision="bf16"), 4, 256, 3)]
    rows += [(MODEL, Plan(), 4, 256, 3), (TINY, Plan(), 1, 8, 2), (TINY, Plan(), 4, 8, 2), (TINY, Plan(), 1, 8, 6)]
    blank = [
        StepSample(
            model=model.changed(num_layers=layers), plan=plan, global_batch_size=batch, sequence_length=length,
            compute_seconds=1.0, optimizer_seconds=1.0,
        )
        for model, plan, batch, length, layers in rows
    ]  # fmt: skip
    parts = StepModel(cluster, blank).parts(planted)
    compute = np.sum([seconds for part, seconds in parts.items() if part != "optimizer"], axis=0)
    return [
        sample.changed(compute_seconds=float(c), optimizer_seconds=float(o))
        for sample, c, o in zip(blank, compute, parts["optimizer"], strict=True)
    ]


@pytest.mark.unit
def test_steps_tell_what_single_operations_leave_open() -> None:
    data = measurement()
    data["matmul"] += [sample | {"precision": "bf16"} for sample in data["matmul"]]
    data["launch_seconds"] = 4e-6
    cluster = measured_cluster(parse_cluster("cpu:1"), parse(Measurement, data))
    planted = {"memory_bound_ratio": 3.0, "host_ratio": 2.0, "half_precision_ratio": 0.8, "optimizer_bytes": 60.0}
    fit = fit_steps(cluster, steps_of(cluster, planted))
    assert fit.error < 0.03
    assert fit.software["memory_bound_ratio"] == pytest.approx(3.0, rel=0.15)
    assert fit.software["host_ratio"] == pytest.approx(2.0, rel=0.15)
    assert fit.coefficients["optimizer_bytes"] == pytest.approx(60.0, rel=0.15)


@pytest.mark.unit
def test_a_cpu_of_the_catalogue_is_rough() -> None:
    assert parse_cluster("cpu:1").is_rough
    assert not parse_cluster("h100x8").is_rough
