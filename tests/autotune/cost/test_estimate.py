"""Estimates: parts that add up, directions that must hold, one row as in a table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from autotune.cost.columns import encode
from autotune.cost.estimate import HIDDEN_PARTS, MEMORY_PARTS, TIME_PARTS, EstimateTable, estimate
from autotune.cost.parameters import rank_blocks
from autotune.cost.shapes import ModelShape
from autotune.cost.software import software_catalogue, software_figures
from autotune.cost.step_time import beside, blocks_of, smooth_maximum
from autotune.specs.cluster import ClusterSpec, parse_cluster
from engine.errors import UserError
from engine.plan import Plan, plan_table
from engine.spec import ModelSpec

pytestmark = pytest.mark.unit

CLUSTER = parse_cluster("h100x8:8")
DENSE = ModelSpec(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336, vocab_size=128256
)
MOE = DENSE.changed(moe={"num_experts": 64, "experts_per_token": 4, "ffn_size": 1536, "num_dense_layers": 2})
PLANS: tuple[dict[str, Any], ...] = (
    {"dp_shard": 64},
    {"dp_shard": 8, "tp": 8, "sequence_parallel": True, "zero_stage": 1},
    {"dp_shard": 4, "tp": 4, "pp": 4, "zero_stage": 1, "recompute": "full"},
    {"dp_shard": 4, "tp": 2, "pp": 8, "zero_stage": 2, "recompute": "selective"},
    {"dp_shard": 8, "cp": 8, "zero_stage": 3, "recompute": "every_k", "recompute_period": 2},
    {"dp_shard": 16, "pp": 4, "schedule": "interleaved_1f1b", "virtual_stages": 2, "overlap_pp": False},
    {"dp_shard": 16, "pp": 4, "schedule": "zbv", "virtual_stages": 2},
    {"dp_shard": 16, "dp_replicate": 4, "precision": "fp8", "overlap_dp": False},
    {
        "dp_shard": 64,
        "offload_optimizer_ratio": 0.5,
        "offload_activations_ratio": 0.25,
        "offload_parameters_ratio": 0.1,
    },
)


def seconds(*plans: dict[str, Any], **options: Any) -> np.ndarray:
    return table(*plans, **options).step_seconds


def table(
    *plans: dict[str, Any],
    model: ModelSpec = DENSE,
    cluster: ClusterSpec = CLUSTER,
    batch: int = 1024,
    length: int = 4096,
    **options: Any,
) -> EstimateTable:
    rows = [(Plan(**{"precision": "bf16", **plan}), batch, length) for plan in plans]
    return estimate(model, cluster, plan_table(rows), **options)


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_parts_add_up_and_none_is_negative(model: ModelSpec) -> None:
    found = table(*PLANS, model=model)
    assert set(found.time) == set(TIME_PARTS)
    assert set(found.hidden) == set(HIDDEN_PARTS)
    assert np.sum(list(found.time.values()), axis=0) == pytest.approx(found.step_seconds)
    assert np.sum([found.memory[part] for part in MEMORY_PARTS], axis=0) == pytest.approx(found.memory_bytes)
    for part, values in {**found.time, **found.hidden}.items():
        assert (values >= -1e-12).all(), part
    assert (found.step_seconds_low < found.step_seconds).all()
    assert (found.step_seconds < found.step_seconds_high).all()


@pytest.mark.parametrize("model", [DENSE, MOE], ids=["dense", "moe"])
def test_a_row_of_a_table_is_the_table_of_that_row(model: ModelSpec) -> None:
    together = table(*PLANS, model=model)
    for row, plan in enumerate(PLANS):
        alone = table(plan, model=model)
        assert alone.step_seconds[0] == pytest.approx(together.step_seconds[row])
        assert alone.memory_bytes[0] == pytest.approx(together.memory_bytes[row])
        for part in TIME_PARTS:
            assert alone.time[part][0] == pytest.approx(together.time[part][row], abs=1e-12)


def test_words_and_codes_give_the_same() -> None:
    rows = plan_table([(Plan(precision="bf16", dp_shard=64), 1024, 4096)])
    coded = estimate(DENSE, CLUSTER, encode(rows, DENSE.num_layers))
    assert coded.step_seconds == pytest.approx(estimate(DENSE, CLUSTER, rows).step_seconds)


def test_more_work_takes_longer() -> None:
    plan = {"dp_shard": 64}
    assert seconds(plan, batch=2048) > seconds(plan, batch=1024)
    assert seconds(plan, length=8192) > 1.5 * seconds(plan, length=4096)
    assert seconds(plan, model=DENSE.changed(num_layers=64)) > 1.5 * seconds(plan)
    assert seconds({**plan, "recompute": "full"}) > seconds({**plan, "recompute": "selective"}) >= seconds(plan)


def test_more_devices_make_a_step_shorter() -> None:
    small = seconds({"dp_shard": 64})
    large = seconds({"dp_shard": 256}, cluster=parse_cluster("h100x8:32"))
    assert small / 4 < large < small


def test_a_pipeline_of_few_micro_batches_idles() -> None:
    plan = {"dp_shard": 16, "pp": 4, "zero_stage": 1}
    few, many = table(plan, batch=64), table(plan, batch=2048)
    assert few.time["bubble"][0] / few.step_seconds[0] > 3 * many.time["bubble"][0] / many.step_seconds[0]
    interleaved = {**plan, "schedule": "interleaved_1f1b", "virtual_stages": 4}
    assert table(interleaved, batch=64).time["bubble"] < few.time["bubble"]


def test_overlap_hides_data_parallel_communication() -> None:
    plan = {"dp_shard": 64, "zero_stage": 1}
    hidden, shown = table({**plan, "overlap_dp": True}), table({**plan, "overlap_dp": False})
    assert hidden.time["dp"] < shown.time["dp"]
    assert (hidden.hidden["dp"] > 0).all()
    assert (shown.hidden["dp"] == 0).all()


def test_small_layers_wait_for_the_host() -> None:
    tiny = DENSE.changed(hidden_size=256, num_heads=4, num_kv_heads=4, head_dim=64, ffn_size=512)
    small = table({"dp_shard": 64}, model=tiny, batch=64, length=256)
    assert small.time["host"][0] > 0.3 * small.step_seconds[0]
    large = table({"dp_shard": 64})
    assert large.time["host"][0] < 0.1 * large.step_seconds[0]


def test_uneven_stages_wait_for_the_fullest() -> None:
    plan = {"dp_shard": 16, "pp": 4, "zero_stage": 1}
    even, uneven = seconds(plan), seconds({**plan, "layers_per_stage": (4, 4, 4, 20)})
    assert uneven > 1.5 * even


def test_blocks_of_all_ranks_are_the_blocks_of_the_model() -> None:
    rows = [(Plan(**plan), 1024, 4096) for plan in PLANS]
    for model in (DENSE, MOE):
        blocks = blocks_of(ModelShape.of(model), encode(plan_table(rows), model.num_layers))
        pp = np.array([plan.pp for plan, _, _ in rows])
        moe_layers = sum(model.is_moe_layer(layer) for layer in range(model.num_layers))
        mean = [np.asarray(count)[3] * pp for count in blocks]
        assert mean[0] + mean[1] == pytest.approx(np.full(len(rows), model.num_layers))
        assert mean[1] == pytest.approx(np.full(len(rows), moe_layers))
        assert mean[2] == pytest.approx(np.ones(len(rows)))
        assert mean[3] == pytest.approx(np.ones(len(rows)))


def test_the_pace_is_set_by_a_rank_that_exists() -> None:
    """61 layers, three dense ones in front: kinds of ranks are ranks of the model, among them the one with most."""
    experts = {"num_experts": 64, "experts_per_token": 4, "ffn_size": 1536, "num_dense_layers": 3}
    model = DENSE.changed(num_layers=61, moe=experts)
    shape = ModelShape.of(model)
    for pp, v, schedule in ((4, 1, "1f1b"), (6, 1, "1f1b"), (8, 4, "interleaved_1f1b"), (4, 2, "zbv"), (30, 1, "1f1b")):
        plan = Plan(pp=pp, virtual_stages=v, schedule=schedule, zero_stage=1)
        c = encode(plan_table([(plan, 1024, 4096)]), model.num_layers)
        kinds = blocks_of(shape, c)
        ranks = rank_blocks(shape, c, np.arange(pp)[:, None])
        assert sum(ranks.dense_layers + ranks.moe_layers) == pytest.approx(61)
        found = {(float(d), float(m)) for d, m in zip(kinds.dense[:3, 0], kinds.moe[:3, 0], strict=True)}
        real = {(float(d), float(m)) for d, m in zip(ranks.dense_layers[:, 0], ranks.moe_layers[:, 0], strict=True)}
        assert found <= real
        assert max(m for _, m in found) == max(m for _, m in real)


def test_smooth_maximum_lies_between_maximum_and_sum() -> None:
    a, b = np.array([1.0, 2.0, 0.0]), np.array([1.0, 1.0, 3.0])
    found = smooth_maximum(a, b, 4.0)
    assert (found >= np.maximum(a, b)).all()
    assert (found <= a + b).all()
    assert found[2] == 3.0


def test_hidden_communication_slows_the_compute_beside_it() -> None:
    wait = beside(1.0, 10.0, 0.5, 0.2)
    assert wait.hidden == 1.0
    assert wait.exposed == pytest.approx(0.2)
    wait = beside(8.0, 10.0, 0.5, 0.0)
    assert wait.hidden == 5.0
    assert wait.exposed == pytest.approx(3.0)


def test_every_stack_estimates_and_none_is_absurd() -> None:
    times = {name: float(seconds(PLANS[1], software=name)[0]) for name in software_catalogue()}
    middle = np.median(list(times.values()))
    assert all(middle / 3 < value < middle * 3 for value in times.values()), times


def test_a_stack_that_is_not_known_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError) as caught:
        software_figures("torchtitann")
    assert "torchtitan" in str(caught.value.hint)


def test_a_cluster_without_figures_is_refused() -> None:
    with pytest.raises(UserError, match="knows nothing"):
        table({"dp_shard": 64}, cluster=CLUSTER.changed(figures=None))
