"""Replayed estimates of finalists against the closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autotune.cost.columns import encode
from autotune.cost.estimate import EstimateTable, Estimator, estimate
from autotune.cost.replayed import replay_row, replay_rows, stage_seconds
from autotune.specs.cluster import parse_cluster
from engine.plan import Plan, plan_table
from engine.spec import ModelSpec, MoESpec

MODEL = ModelSpec(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336, vocab_size=128256,
    max_positions=8192,
)  # fmt: skip
CLUSTER = parse_cluster("h100x8:8")


def table_of(*plans: dict[str, Any]) -> dict[str, np.ndarray]:
    """Plans on 64 devices, 256 sequences of 4096 tokens."""
    rows = []
    for values in plans:
        pp = values.get("pp", 1)
        common = {"tp": 4, "dp_shard": 16 // pp, "zero_stage": 1, "precision": "bf16", "sequence_parallel": True}
        rows.append((Plan(**{**common, **values}), 256, 4096))
    return plan_table(rows)


def both(table: dict[str, np.ndarray], model: ModelSpec = MODEL) -> tuple[EstimateTable, EstimateTable]:
    """Closed form and replay."""
    return estimate(model, CLUSTER, table), replay_rows(model, CLUSTER, table)


@pytest.mark.unit
def test_close_to_the_closed_form_and_parts_add_up() -> None:
    table = table_of(
        {"pp": 1},
        {"pp": 4},
        {"pp": 8, "schedule": "gpipe"},
        {"pp": 4, "virtual_stages": 2, "schedule": "interleaved_1f1b"},
        {"pp": 4, "virtual_stages": 4, "schedule": "interleaved_zero_bubble"},
        {"pp": 4, "virtual_stages": 2, "schedule": "zbv"},
        {"pp": 4, "virtual_stages": 2, "schedule": "dualpipev"},
    )
    closed, replayed = both(table)
    assert replayed.method == "replay"
    np.testing.assert_allclose(closed.step_seconds, replayed.step_seconds, rtol=0.05)
    np.testing.assert_allclose(closed.step_seconds[:3], replayed.step_seconds[:3], rtol=0.002)
    np.testing.assert_allclose(sum(replayed.time.values()), replayed.step_seconds, rtol=1e-9)
    assert closed.step_seconds[0] == replayed.step_seconds[0]
    assert np.all(replayed.step_seconds_low < replayed.step_seconds)
    assert np.array_equal(closed.memory_bytes, replayed.memory_bytes)


@pytest.mark.unit
@pytest.mark.parametrize("stack", ["megatron-2022", "deepspeed", "torchtitan"])
def test_facts_of_a_stack_count_in_both(stack: str) -> None:
    """What it gathers again, how its tensor ranks share sends, how its context ranks get keys."""
    table = table_of({"pp": 4, "tp": 2, "cp": 2}, {"pp": 4, "sequence_parallel": False})
    closed = estimate(MODEL, CLUSTER, table, software=stack)
    replayed = replay_rows(MODEL, CLUSTER, table, software=stack)
    np.testing.assert_allclose(closed.step_seconds, replayed.step_seconds, rtol=0.002)
    for name in ("tp", "cp"):
        np.testing.assert_allclose(closed.time[name], replayed.time[name], rtol=0.005, err_msg=name)


@pytest.mark.unit
def test_a_remainder_of_layers_on_the_first_stages() -> None:
    """30 layers on 4, and 8 stages: the closed form takes filling and draining at the mean rank's pace."""
    model = MODEL.changed(num_layers=30)
    looped = {"virtual_stages": 2, "schedule": "interleaved_1f1b"}
    closed, replayed = both(table_of({"pp": 4}, {"pp": 4, **looped}, {"pp": 8}), model)
    np.testing.assert_allclose(closed.step_seconds, replayed.step_seconds, rtol=0.03)


@pytest.mark.unit
def test_layers_per_stage_are_taken_as_given() -> None:
    table = table_of(
        {"pp": 4}, {"pp": 4, "layers_per_stage": (9, 9, 9, 5)}, {"pp": 4, "layers_per_stage": (6, 6, 6, 14)}
    )
    even, lighter_end, heavy_end = replay_rows(MODEL, CLUSTER, table).step_seconds
    assert heavy_end > 1.3 * even
    assert lighter_end < heavy_end
    one_row = replay_rows(MODEL, CLUSTER, table, [2]).step_seconds
    assert one_row.tolist() == [heavy_end]


@pytest.mark.unit
def test_stages_know_their_dense_and_expert_layers() -> None:
    moe = MoESpec(num_experts=8, experts_per_token=2, ffn_size=1024, num_dense_layers=8)
    model = MODEL.changed(moe=moe)
    table = table_of({"pp": 4, "tp": 1, "sequence_parallel": False, "dp_shard": 16})
    c = encode(table, model.num_layers)
    (stages,) = stage_seconds(model, Estimator.of(model, CLUSTER).scope(c), c, table)
    assert stages is not None
    # Eight dense layers and the embedding; eight layers with experts each; the last with the head too.
    assert stages.forward[1] == pytest.approx(stages.forward[2])
    assert stages.forward[0] != pytest.approx(stages.forward[1], rel=0.001)
    assert stages.forward[3] > stages.forward[2]
    run = replay_row(c, 0, stages)
    assert run.makespan > run.busy.max()
    assert len(run.start) == 4
