"""The space of plans: sensible values by default, pins as people write them, and what is said of wrong ones."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest

from autotune.cost.columns import words_of
from autotune.cost.software import OWN_ENGINE, software_figures
from autotune.search.blocks import Expander, Part, plan_at, stage_layers
from autotune.search.plan_space import LAYER_SPLITS, PlanSpace, check_pipeline_pins, plan_space
from autotune.specs.cluster import ClusterSpec, parse_cluster
from engine.errors import UserError
from engine.plan import Schedule
from engine.rule import RuleContext
from engine.spec import ModelSpec, MoESpec

pytestmark = pytest.mark.unit

MODEL = ModelSpec(
    num_layers=8, hidden_size=1024, num_heads=16, num_kv_heads=8, head_dim=64, ffn_size=4096, vocab_size=32000
)
CLUSTER = parse_cluster("h100x8:4")


def space_of(*pins: str, model: ModelSpec = MODEL, cluster: ClusterSpec = CLUSTER, **options: Any) -> PlanSpace:
    given: dict[str, Any] = {"global_batch_sizes": [64], "sequence_lengths": [4096]}
    return plan_space(model, cluster, pins=pins, **(given | options))


def test_degrees_multiply_to_the_devices() -> None:
    space = space_of()
    assert set(np.prod(space.degrees, axis=1).tolist()) == {32}
    assert len(np.unique(space.degrees, axis=0)) == len(space.degrees)
    assert space.values["tp"] == (1, 2, 4, 8, 16)
    assert space.values["pp"] == (1, 2, 4, 8)
    assert space.values["cp"] == (1, 2, 4)


def test_fewer_devices_are_whole_nodes_or_parts_of_one() -> None:
    assert space_of(fewer_devices=True).device_counts == (1, 2, 4, 8, 16, 32)
    assert space_of("devices=24").device_counts == (24,)


def test_size_is_the_product_of_all_values() -> None:
    space = space_of(global_batch_sizes=[64, 128], sequence_lengths=[2048, 4096])
    others = math.prod(len(v) for name, v in space.values.items() if name not in ("tp", "pp", "cp", "dp_replicate"))
    assert space.num_combinations == len(space.degrees) * others
    assert space.fixed("precision") == "bf16"
    assert space.fixed("tp") is None


def test_experts_are_spread_only_where_there_are_some() -> None:
    assert space_of().values["ep"] == (1,)
    moe = MODEL.changed(moe=MoESpec(num_experts=64, experts_per_token=4, ffn_size=512))
    values = space_of(model=moe).values
    assert values["ep"] == (1, 2, 4, 8, 16, 32)
    assert values["etp"] == (1, "tp")


def test_pins_replace_values() -> None:
    space = space_of(
        "tp=8", "recompute=full,none", "overlap-tp=on", "offload_optimizer_ratio=0,50%", "dp=2,4", "etp=tp"
    )
    assert space.values["tp"] == (8,)
    assert space.values["recompute"] == ("full", "none")
    assert space.values["overlap_tp"] == (True,)
    assert space.values["offload_optimizer_ratio"] == (0.0, 0.5)
    assert set((space.degrees[:, 3] * space.degrees[:, 4]).tolist()) == {2, 4}
    assert {"tp", "recompute", "dp"} <= space.pinned


@pytest.mark.parametrize(
    ("pin", "message", "hint"),
    [
        ("tp", "field=value", "tp=8"),
        ("tpp=8", "'tpp' is no field", "did you mean tp?"),
        ("zero=3", "'zero' is no field", "did you mean zero_stage?"),
        ("recompute=ful", "recompute can't be 'ful'", "did you mean full?"),
        ("schedule=afab", "schedule can't be 'afab'", "1f1b"),
        ("zero_stage=4", "zero_stage can't be 4", "0, 1, 2, 3"),
        ("tp=0", "tp must be 1 or more", "tp=1,2,4"),
        ("tp=two", "must be a whole number", "4096"),
        ("sequence_parallel=maybe", "is a switch", "true and false"),
        ("offload_optimizer_ratio=2", "a ratio from 0 to 1", "0.5"),
        ("layers_per_stage=7", "layers_per_stage can't be '7'", "even, light_ends"),
        ("devices=64", "the cluster has 32", "1 to 32"),
        ("tp=3", "tp 3 does not divide the devices", "1, 2, 4, 8, 16, 32"),
    ],
)
def test_wrong_pins_are_explained(pin: str, message: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        space_of(pin)
    assert message in error.value.message
    assert hint in (error.value.hint or "")


def test_pins_that_leave_nothing_are_refused() -> None:
    with pytest.raises(UserError, match="no product of the degrees tp=16 pp=8"):
        space_of("tp=16", "pp=8")
    with pytest.raises(UserError, match="pinned twice"):
        space_of("tp=1", "tp=2")


def test_values_without_effect_are_counted_once() -> None:
    space = space_of("tp=1", "pp=1", "cp=1", "dp_replicate=1", "micro_batch_size=1")
    blocks = Expander(space, RuleContext(MODEL, 32)).blocks(Part(slice(None)))
    # On data-parallel ranks alone: recompute (none, full, selective, every 2nd, every 4th) and three ZeRO stages.
    assert int(blocks.num_plans.sum()) == 5 * 3
    assert blocks.counts.combinations == blocks.counts.redundant + sum(blocks.counts.removed.values()) + 15


def test_orders_of_the_ranks_count_once_where_they_place_them_alike() -> None:
    pins = ("micro_batch_size=1", "zero_stage=1", "recompute=none", "overlap_tp=false", "schedule=1f1b", "tp=1",
            "virtual_stages=1", "dp_replicate=1", "layers_per_stage=even")  # fmt: skip
    orders = {}
    for degrees in ("pp=1", "pp=2 cp=1", "pp=2 cp=2", "pp=8 cp=4"):
        blocks = Expander(space_of(*pins, *degrees.split()), RuleContext(MODEL, 32)).blocks(Part(slice(None)))
        orders[degrees] = int(blocks.num_plans.sum()) // len(np.unique(blocks.outer["cp"]))
    assert orders == {"pp=1": 1, "pp=2 cp=1": 2, "pp=2 cp=2": 3, "pp=8 cp=4": 2}


def test_light_ends_are_lighter_and_no_stage_is_larger() -> None:
    for num_layers in range(2, 70):
        stages = np.arange(1, num_layers + 1)
        columns = {"pp": stages, "virtual_stages": np.ones_like(stages)}
        even, light = (stage_layers(np.full(len(stages), i), num_layers, columns) for i in range(len(LAYER_SPLITS)))
        for sizes in (even, light):
            first, last, largest = (sizes[f"{name}_stage_layers"] for name in ("first", "last", "largest"))
            assert (np.minimum(first, last) >= 1).all()
            assert (np.maximum(first, last) <= largest).all()
            assert (first + last + (stages - 2) * largest >= num_layers)[stages > 2].all()
        assert (light["largest_stage_layers"] <= even["largest_stage_layers"]).all()
        assert (light["first_stage_layers"] <= even["first_stage_layers"]).all()


def test_light_ends_become_a_list_of_layers() -> None:
    model = MODEL.changed(num_layers=30)
    pins = ("pp=8", "tp=1", "cp=1", "dp_replicate=1", "schedule=1f1b", "layers_per_stage=light_ends")
    expander = Expander(space_of(*pins, model=model), RuleContext(model, 32))
    blocks = expander.blocks(Part(slice(None)))
    assert set(blocks.outer["first_stage_layers"].tolist()) == {3}
    chunk, _ = next(blocks.chunks(np.arange(1), 10))
    plan, batch, length = plan_at(chunk.plans, 0, model.num_layers)
    assert plan.layers_per_stage == (3, 4, 4, 4, 4, 4, 4, 3)
    assert (batch, length) == (64, 4096)


def test_pipelines_are_those_of_the_stack() -> None:
    megatron, sharded = software_figures("default"), software_figures("fsdp")
    assert space_of(stack=megatron).values["schedule"] == ("1f1b", "interleaved_1f1b")
    assert space_of(stack=software_figures("deepspeed")).values["schedule"] == ("1f1b",)
    assert "zbv" in space_of(stack=software_figures("torchtitan")).values["schedule"]
    assert space_of(stack=sharded).values["pp"] == (1,)
    pinned = space_of("schedule=zbv", "pp=2", stack=sharded).values
    assert (pinned["schedule"], pinned["pp"]) == (("zbv",), (2,)), "what is pinned is honoured"


def test_keys_reach_context_ranks_as_the_stack_has_it() -> None:
    assert space_of(stack=software_figures("default")).values["cp_attention"] == ("ring",)
    assert space_of(stack=software_figures("torchtitan")).values["cp_attention"] == ("all_gather",)
    assert space_of(stack=software_figures("paretune")).values["cp_attention"] == ("ring", "all_gather")
    with pytest.raises(UserError, match="cp_attention=ring is pinned"):
        space_of("cp_attention=ring", stack=software_figures("torchtitan"))


def test_our_engine_runs_every_schedule() -> None:
    assert set(software_figures(OWN_ENGINE).schedules) == set(get_args(Schedule))


@pytest.mark.parametrize(("stack", "num_layers", "stages"), [
    ("default", 10, {1, 2, 4}),  # with lighter ends 2 3 3 2
    ("default", 9, {1, 2, 4, 8}),
    ("megatron-2024", 9, {1, 2}),  # 5 4
    ("torchtitan", 10, {1, 2, 4, 8}),
])  # fmt: skip
def test_stages_have_equally_many_layers_where_the_stack_needs_it(
    stack: str, num_layers: int, stages: set[int]
) -> None:
    model = MODEL.changed(num_layers=num_layers)
    space = space_of("virtual_stages=1", "schedule=1f1b", "pp=1,2,4,8", model=model, stack=software_figures(stack))
    expander = Expander(space, RuleContext(model, CLUSTER.num_devices))
    blocks = [expander.blocks(part) for part in expander.parts()]
    assert {int(pp) for block in blocks for pp in np.unique(block.outer["pp"])} == stages
    assert ("stack.even_stages" in blocks[0].counts.removed) == (stages != {1, 2, 4, 8})


@pytest.mark.parametrize(("pins", "message", "hint"), [
    (("schedule=zbv", "pp=1"), "schedule=zbv pp=1 contradict", "pp to 2 or more and virtual_stages=2"),
    (("virtual_stages=2", "pp=1"), "virtual_stages=2 pp=1 contradict", "pp to 2 or more"),
    (("schedule=zbv", "virtual_stages=4"), "zbv runs 2 stages", "virtual_stages=2, or schedule=interleaved_1f1b"),
    (("schedule=1f1b", "virtual_stages=2,4"), "1f1b runs 1 stage per rank", "virtual_stages=1, or schedule="),
])  # fmt: skip
def test_pins_of_a_pipeline_that_contradict_each_other(pins: tuple[str, ...], message: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        check_pipeline_pins(space_of(*pins))
    assert message in str(caught.value)
    assert hint in (caught.value.hint or "")
    check_pipeline_pins(space_of("schedule=1f1b,zbv", "pp=1"))
    assert 2 in space_of("schedule=zbv", stack=software_figures("fsdp")).values["pp"]


def test_a_stage_has_as_many_layers_as_the_recompute_period() -> None:
    pins = ("virtual_stages=1", "schedule=1f1b", "pp=1,4,8")
    space = space_of(*pins, stack=software_figures("default"))
    expander = Expander(space, RuleContext(MODEL, CLUSTER.num_devices))
    periodic = [(int(pp), int(period)) for part in expander.parts() for block in [expander.blocks(part)]
                for pp, kind, period in zip(block.outer["pp"], block.outer["recompute"],
                                            block.outer["recompute_period"], strict=True)
                if words_of("recompute")[kind] == "every_k"]  # fmt: skip
    assert set(periodic) == {(1, 2), (1, 4), (4, 2)}
    assert not space_of("recompute_period=4", stack=software_figures("default")).whole_periods
