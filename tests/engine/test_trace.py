"""Dry runs of one rank: equal to what real steps need and to what the cost model's formulas say."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.cost.trace import CrossCheck, cross_check
from engine.config import RunConfig, dump_run
from engine.plan import Plan
from engine.schema import parse
from engine.trace import describe, main
from engine.traced import RankTrace

pytestmark = pytest.mark.unit

LENGTH = 128
MODEL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "ffn_size": 192,
    "vocab_size": 512, "max_positions": LENGTH,
}  # fmt: skip
MOE = MODEL | {"moe": {"num_experts": 4, "experts_per_token": 2, "ffn_size": 64}}
SHARED = MODEL | {"moe": MOE["moe"] | {"shared_ffn_size": 64}}
FOUR = MODEL | {"num_layers": 4}
GROUPED = MODEL | {"num_kv_heads": 2, "sliding_window": 32}
LATENT = MODEL | {
    "latent_attention": {
        "query_rank": 24, "kv_rank": 16, "nope_head_dim": 8, "rope_head_dim": 8, "value_head_dim": 16
    }
}  # fmt: skip
TIED = MODEL | {"tied_embeddings": True}
SP = {"tp": 2, "sequence_parallel": True}
VPP = {"pp": 2, "virtual_stages": 2}
BF16 = {"precision": "bf16"}


def run_of(model: dict[str, Any], plan: dict[str, Any], num_micro_batches: int) -> RunConfig:
    """A run that exists for its shapes."""
    plan = {"micro_batch_size": 2, **plan}
    unit = Plan(**plan).dp * 2
    return parse(
        RunConfig,
        {
            "model": model,
            "workload": {"data": {"paths": ["none"]}, "sequence_length": LENGTH, "total_tokens": 10**6},
            "hyperparameters": {"global_batch_size": num_micro_batches * unit},
            "plan": plan,
        },
    )


CASES: dict[str, tuple[RunConfig, int]] = {
    "one rank": (run_of(MODEL, {}, 2), 0),
    "zero 3": (run_of(MODEL, {"dp_shard": 2, "precision": "bf16"}, 2), 1),
    "zero 2": (run_of(MODEL, {"dp_shard": 8, "zero_stage": 2, "precision": "bf16"}, 2), 0),
    "replicas": (run_of(MODEL, {"dp_replicate": 2, "dp_shard": 2, "zero_stage": 0, **BF16}, 2), 1),
    "zero 1": (run_of(MODEL, {"dp_shard": 2, "zero_stage": 1, **BF16}, 2), 1),
    "hybrid": (run_of(MODEL, {"dp_replicate": 2, "dp_shard": 4, **BF16}, 2), 1),
    "sp": (run_of(MODEL, SP, 2), 0),
    "tp, whole vocabulary": (run_of(MODEL, {"tp": 2, "vocab_parallel": False}, 2), 0),
    "shared key heads": (run_of(GROUPED, {"tp": 4, "sequence_parallel": True}, 2), 0),
    "latent attention": (run_of(LATENT, SP, 2), 0),
    "experts": (run_of(MOE, {"etp": 2, **SP}, 2), 0),
    "experts apart": (run_of(SHARED, {"dp_shard": 4, "ep": 2, **BF16}, 2), 1),
    "experts apart, tp": (run_of(SHARED, {"tp": 2, "dp_shard": 2, "ep": 4, "zero_stage": 1}, 2), 1),
    "experts apart, sp": (run_of(SHARED, {"dp_shard": 2, "ep": 2, **SP}, 2), 1),
    "slices of experts apart": (run_of(SHARED, {"dp_shard": 2, "etp": 2, "ep": 2, **SP}, 2), 1),
    "first stage": (run_of(FOUR, {"pp": 4}, 5), 0),
    "last stage": (run_of(FOUR, {"pp": 4}, 5), 3),
    "interleaved": (run_of(FOUR, {"schedule": "interleaved_1f1b", **VPP}, 4), 1),
    "zero bubble": (run_of(FOUR, {"schedule": "interleaved_zero_bubble", "dp_shard": 2, **VPP, **BF16}, 4), 0),
    "zbv, last rank": (run_of(FOUR, {"schedule": "zbv", **VPP}, 4), 1),
    "dualpipev": (run_of(FOUR, {"schedule": "dualpipev", **VPP}, 6), 0),
    "tied ends, zero 2": (run_of(TIED, {"pp": 2, "dp_shard": 2, "zero_stage": 2}, 4), 0),
    "pipeline, zero 3": (run_of(FOUR, {"pp": 2, "dp_shard": 2, **BF16}, 4), 1),
    "many micro-batches": (run_of(MODEL, {"pp": 2}, 40), 0),
    "ring": (run_of(MODEL, {"cp": 2, "precision": "bf16"}, 2), 1),
    "gathered keys": (run_of(FOUR, {"cp": 4, "pp": 2, "zero_stage": 2, "cp_attention": "all_gather", **SP}, 4), 15),
    "8 ranks": (run_of(MODEL, {"pp": 2, "dp_shard": 2, "zero_stage": 2, "precision": "bf16", **SP}, 4), 7),
    "256 ranks": (run_of(FOUR, {"pp": 4, "dp_shard": 32, "zero_stage": 2, "precision": "bf16", **SP}, 5), 255),
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RankTrace]:
    """The dry runs of all cases, from one child process."""
    path = tmp_path_factory.mktemp("traces") / "cases.json"
    path.write_text(json.dumps([(config.to_data(), rank) for config, rank in CASES.values()]))
    worker = Path(__file__).with_name("trace_worker.py")
    done = subprocess.run([sys.executable, str(worker), str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: parse(RankTrace, data) for name, data in zip(CASES, found, strict=True)}


def checks_of(name: str, traces: dict[str, RankTrace]) -> dict[str, CrossCheck]:
    """Formula and dry run of a case, by name of the figure."""
    return {check.name: check for check in cross_check(CASES[name][0], traces[name])}


def test_peak_is_the_real_steps(traces: dict[str, RankTrace]) -> None:
    """The same step with values, tracked as a run tracks itself, needs the same bytes at its peak."""
    import torch

    from engine.context import open_context
    from engine.measure import _state_tensors
    from engine.memory.tracker import LiveStorageTracker
    from engine.step import Stepper

    config, _ = CASES["one rank"]
    stepper = Stepper.build(config, open_context(config.plan, config.runtime), 0)
    batch = torch.randint(0, config.model.vocab_size, (2, config.hyperparameters.global_batch_size, LENGTH))
    stepper.train_step(batch[0], batch[1], 1e-3)
    gc.collect()
    with LiveStorageTracker() as tracker:
        tracker.track([*_state_tensors(stepper), batch])
        stepper.train_step(batch[0], batch[1], 1e-3)
    trace = traces["one rank"]
    assert trace.peak_bytes == tracker.peak_bytes == sum(trace.peak_parts.values())
    weights = sum(p.numel() * p.element_size() for p in stepper.parts[0].parameters())
    assert trace.peak_parts["parameters"] == trace.peak_parts["gradients"] == weights
    assert 2 * weights <= trace.peak_parts["optimizer"] < 2.01 * weights
    assert not trace.collectives


@pytest.mark.parametrize("name", CASES)
def test_memory_is_near_the_formula(name: str, traces: dict[str, RankTrace]) -> None:
    assert abs(checks_of(name, traces)["memory"].error_ratio) < 0.08


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_the_formulas(name: str, traces: dict[str, RankTrace]) -> None:
    """Traffic to the byte, but for the counters of a step; data-parallel traffic is estimated for the stage with the
    most parameters."""
    checks = checks_of(name, traces)
    plan = CASES[name][0].plan
    degrees = {"tp": plan.tp, "pp": plan.pp, "cp": plan.cp, "ep": plan.ep, "dp": plan.dp * plan.cp}
    assert degrees.keys() & checks.keys() == {axis for axis, degree in degrees.items() if degree > 1}
    for axis, tolerance in (("tp", 3e-4), ("pp", 2e-4), ("cp", 0.0), ("ep", 2e-4), ("dp", 2e-3)):
        if axis in checks:
            assert checks[axis].formula == pytest.approx(checks[axis].trace, rel=tolerance)


def test_shards_split_parameters_and_states(traces: dict[str, RankTrace]) -> None:
    whole, sharded = traces["one rank"].peak_parts, traces["zero 3"].peak_parts
    assert sharded["parameters"] * 2 == whole["parameters"]
    assert sharded["optimizer"] == pytest.approx(whole["optimizer"] / 2, rel=1e-3)
    assert sharded["buffers"] > 0 == whole["buffers"]
    # ZeRO 2 keeps all gradients until the step's end, whole, and the gathered parameters.
    assert traces["zero 2"].peak_parts["gradients"] > whole["gradients"] / 2
    assert traces["zero 2"].peak_parts["buffers"] >= whole["parameters"] / 2 * 0.9


def test_stages_hold_as_many_micro_batches_as_the_schedule_says(traces: dict[str, RankTrace]) -> None:
    first, last = traces["first stage"], traces["last stage"]
    assert (first.pipeline_rank, last.pipeline_rank) == (0, 3)
    assert first.peak_parts["activations"] > 3 * last.peak_parts["activations"]
    assert last.peak_parts["logits"] > 0 == first.peak_parts["logits"]


def test_further_micro_batches_are_extrapolated(traces: dict[str, RankTrace]) -> None:
    trace = traces["many micro-batches"]
    assert (trace.num_micro_batches, trace.num_traced_micro_batches) == (40, 4)
    sends = {use.operation: use.calls for use in trace.collectives if use.axis == "pp"}
    assert sends["send"] == sends["receive"] == 40


def test_program_says_what_it_found_and_refuses_what_is_wrong(
    traces: dict[str, RankTrace], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = describe(traces["8 ranks"])
    assert "rank 7 of 8 (pipeline rank 1)" in text
    assert "reduce_scatter" in text
    path = tmp_path / "run.yaml"
    path.write_text(dump_run(CASES["sp"][0]))
    assert main([str(path), "--rank", "2"]) == 2
    assert "has no rank 2" in capsys.readouterr().err
    path.write_text(dump_run(run_of(MODEL, {"tp": 3}, 2)))
    assert main([str(path)]) == 2
    assert "tp.divides_heads" in capsys.readouterr().err
