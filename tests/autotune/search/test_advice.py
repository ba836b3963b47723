"""Why a plan is best, and what would help: differences, ties, changes, the ladder, and what makes a plan fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune.cost.parts import MEMORY_PARTS, TIME_PARTS
from autotune.search.advice import choices, memory_binds, shares, what_would_help
from autotune.search.answer import Answer
from autotune.search.changes import batch_variants, network_variants, variants
from autotune.search.compare import NOISE_RATIO, compare, differing_choices
from autotune.search.estimated import EstimatedPlan, Figure
from autotune.search.ladder import climb
from autotune.search.neighbourhood import explore, space_around
from autotune.search.question import Question, ask, read_pins
from autotune.search.solve import best_of, solve
from autotune.search.words import MEMORY_NAMES, RESOURCES, TIME_NAMES, layout_words, settings
from autotune.specs.cluster import parse_cluster
from engine.errors import UserError
from engine.plan import Plan
from engine.spec import ModelSpec

pytestmark = pytest.mark.unit

MODEL = ModelSpec(
    name="m", num_layers=16, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336,
    vocab_size=32000, max_positions=8192,
)  # fmt: skip
PINS = ("dp_replicate=1", "cp=1", "schedule=1f1b", "layers_per_stage=even", "rank_order=tp-cp-dp-pp", "overlap_tp=true")


def question(cluster: str = "h100x8:4", batch: str = "128", **more: Any) -> Question:
    more = {"pins": PINS, "sequence_length": 4096} | more
    return ask(model=MODEL, cluster=parse_cluster(cluster), global_batch=batch, **more)


@pytest.fixture(scope="module")
def answer() -> Answer:
    return solve(question(), top=5, ladder=True)


def made(seconds: dict[str, float], batch: int = 8, plan: Plan | None = None) -> EstimatedPlan:
    """A plan with the given seconds by part and an interval of 20 %."""
    time = dict.fromkeys(TIME_PARTS, 0.0) | seconds
    step = sum(time.values())
    memory = dict.fromkeys(MEMORY_PARTS, 1.0)
    return EstimatedPlan(
        plan=plan or Plan(), global_batch_size=batch, sequence_length=1024,
        step_seconds=Figure(step, step * 0.8, step * 1.2), tokens_per_second=Figure(1, 1, 1),
        memory_bytes=Figure(7, 6, 8), allocated_bytes=6, memory_limit_bytes=10, mfu=None, hfu=None,
        dollars_per_billion_tokens=None, kwh_per_billion_tokens=None, time=time, hidden={}, memory=memory,
        fullest_stage=0,
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------------------- comparison


def test_every_part_has_a_name_and_a_resource() -> None:
    assert set(TIME_NAMES) == set(TIME_PARTS)
    assert set(MEMORY_NAMES) == set(MEMORY_PARTS)
    assert sorted(part for parts in RESOURCES.values() for part in parts) == sorted(TIME_PARTS)


def test_what_two_plans_share_cancels() -> None:
    """An error of the matrix products is in both: 3 % more bubble is a difference, although the interval is 20 %."""
    better = made({"matmul": 10.0, "bubble": 0.0})
    assert not compare(better, made({"matmul": 10.0, "bubble": 0.3})).is_tie
    assert compare(better, made({"matmul": 10.0, "bubble": 0.9 * NOISE_RATIO * 10})).is_tie
    large_and_opposed = compare(better, made({"matmul": 7.0, "bubble": 3.5}))
    assert large_and_opposed.seconds == pytest.approx(0.5)
    assert large_and_opposed.is_tie  # half a second of 3.5 and of 3.0, each known to 20 %


def test_batches_are_compared_by_token() -> None:
    found = compare(made({"matmul": 1.0}), made({"matmul": 2.0}, batch=16))
    assert found.seconds == pytest.approx(0)
    assert found.ratio == pytest.approx(0)


def test_largest_parts_explain_the_difference() -> None:
    found = compare(made({"matmul": 5.0, "tp": 1.0}), made({"matmul": 5.0, "tp": 0.5, "bubble": 2.0, "dp": 0.01}))
    assert found.largest_parts() == [("bubble", 2.0), ("tp", -0.5)]
    assert sum(found.time.values()) == pytest.approx(found.seconds)


def test_choices_without_effect_do_not_differ() -> None:
    one, other = Plan(schedule="gpipe", zero_stage=1), Plan(schedule="1f1b", zero_stage=3, sequence_parallel=True)
    assert differing_choices(one, other) == {}
    assert differing_choices(Plan(tp=2), Plan(tp=2, sequence_parallel=True)) == {"sequence_parallel": (False, True)}


def test_plans_in_words() -> None:
    plan = Plan(tp=8, pp=4, virtual_stages=2, dp_shard=4, schedule="interleaved_1f1b", recompute="every_k",
                recompute_period=3, zero_stage=1, precision="bf16")  # fmt: skip
    assert layout_words(plan) == "tp8 pp4x2 dp4"
    assert settings(plan)["recompute"] == "recompute 1 layer in 3"
    assert settings(plan)["zero_stage"] == "ZeRO-1"
    assert settings(Plan(cp=4, zero_stage=2))["zero_stage"] == "ZeRO-2", "shards are spread over context ranks too"
    assert settings(Plan(cp=4, dp_shard=2, dp_replicate=2, zero_stage=3))["zero_stage"] == "ZeRO-3 over 8"
    assert layout_words(Plan()) == "one device"
    assert "schedule" not in settings(Plan())


# --------------------------------------------------------------------------------------------------------------- advice


def test_shares_add_up(answer: Answer) -> None:
    assert sum(share.seconds for share in answer.shares) == pytest.approx(answer.plans[0].step_seconds.value)
    assert [share.seconds for share in answer.shares] == sorted((s.seconds for s in answer.shares), reverse=True)
    assert answer.shares == shares(answer.plans[0])


def test_the_best_plan_is_the_best_of_its_neighbourhood(answer: Answer) -> None:
    seeds = [plan.plan for plan in answer.plans]
    nearby = space_around(answer.question, seeds)
    around = explore(answer.question, nearby)
    assert around is not None
    best = around.best()
    assert best is not None
    assert best.step_seconds.value == pytest.approx(answer.plans[0].step_seconds.value)
    by_choice = [choice for choice in choices(around, nearby, seeds) if choice.name == "tp"]
    assert min(choice.loss_ratio for choice in by_choice if choice.plan) == pytest.approx(0)
    promising = around.promising()
    assert promising.best() == best


def test_tied_plans_that_are_alike_are_told_as_one() -> None:
    found = solve(question(pins=("layers_per_stage=even", "micro_batch_size=1,2"), sequence_length=8192), top=6)
    meshes = [(plan.plan.tp, plan.plan.pp) for plan in found.plans]
    assert len(found.num_alike) == len(meshes)
    assert sum(found.num_alike) > 0
    for i, plan in enumerate(found.plans):
        for better, mesh in zip(found.plans[:i], meshes, strict=False):
            assert mesh != meshes[i] or not compare(better, plan).is_tie


def test_what_a_choice_loses_is_exact_or_an_upper_bound() -> None:
    asked = question(pins=("layers_per_stage=even", "micro_batch_size=1,2"))
    answer = solve(asked)
    checked = [choice for choice in answer.choices if choice.name in ("zero_stage", "tp", "recompute")]
    assert {choice.is_exact for choice in checked if choice.loss_ratio} == {False}
    assert {choice.value for choice in checked if choice.name == "zero_stage"} == {1, 2, 3}
    for choice in checked:
        if choice.is_looked_at and choice.plan:
            pinned, _, _ = best_of(asked.changed(pins=[*asked.pins, f"{choice.name}={choice.value}"]))
            assert pinned is not None
            loss = pinned.seconds_per_token / answer.plans[0].seconds_per_token - 1
            assert loss <= choice.loss_ratio + 1e-9
    small = question(pins=(*PINS, "tp=2", "pp=1", "zero_stage=1,3"))
    zero = [choice for choice in solve(small, top=1).choices if choice.name == "zero_stage"]
    assert len(zero) == 2
    assert all(choice.is_exact for choice in zero)


def test_a_gain_is_one_that_the_search_confirms(answer: Answer) -> None:
    """What the neighbourhood tells is reached, and hardly surpassed, by a search of the whole changed space."""
    found = {variant.id: variant for variant in variants(answer.question)}
    assert {"inter_node_bandwidth_x2", "memory_x2", "devices_x2", "batch_x2", "precision_fp8"} <= set(found)
    for change in answer.changes:
        best, _, _ = best_of(found[change.id].question)
        assert best is not None
        gain = answer.plans[0].seconds_per_token / best.seconds_per_token - 1
        assert change.gain_ratio <= gain + 1e-6
        assert change.gain_ratio >= gain - 0.05


def test_memory_binds_where_more_of_it_helps() -> None:
    roomy, tight = question(), question(max_memory="12GiB")
    for asked, binds in ((roomy, False), (tight, True)):
        plans = [plan.plan for plan in solve(asked, advise=False).plans]
        around = explore(asked, space_around(asked, plans))
        assert around is not None
        assert (memory_binds(around) is not None) is binds
        helps = {change.id for change in what_would_help(around, plans)}
        assert ("memory_x2" in helps) is binds


def test_only_levels_that_are_crossed_can_be_faster() -> None:
    one_node = {variant.id for variant in network_variants(question("h100x8:1"))}
    assert one_node == {"intra_node_bandwidth_x2"}
    assert "inter_node_bandwidth_x2" in {variant.id for variant in network_variants(question())}


def test_an_awkward_batch_has_a_rounder_one_near() -> None:
    ids = {variant.id: variant.question.global_batch_size for variant in batch_variants(question(batch="122"))}
    assert ids == {"batch_x2": 244, "batch_round": 128}
    assert "batch_round" not in {variant.id for variant in batch_variants(question(batch="128"))}


def test_pins_are_released_one_by_one() -> None:
    found = solve(question(pins=(*PINS, "tp=8", "recompute=full")), top=3)
    gains = {change.id: change.gain_ratio for change in found.changes}
    assert gains["unpin_recompute"] > 0.05
    assert gains["unpin_tp"] > 0


# ---------------------------------------------------------------------------------------------------- ladder, what fits


def test_the_ladder_leads_to_the_best_plan(answer: Answer) -> None:
    assert answer.ladder[0].id == "data_parallel"
    last = answer.ladder[-1].plan
    assert last is not None
    assert last.step_seconds.value == pytest.approx(answer.plans[0].step_seconds.value)
    steps = [rung.plan.step_seconds.value for rung in answer.ladder if rung.plan and not rung.reason]
    assert steps == sorted(steps, reverse=True)
    assert {"context_parallel", "rank_order"}.isdisjoint(rung.id for rung in answer.ladder)  # pinned: no freedom


def test_gains_are_those_of_the_first_objective() -> None:
    """The fewer devices, the less energy: the best plan is a slow one, which no word of the answer calls a loss."""
    found = solve(question("h100x8:1", objectives=("energy",)), top=3, ladder=True)
    assert found.plans[0].plan.world_size < 8
    assert all(rung.gain_ratio is None or rung.gain_ratio > -1e-9 for rung in found.ladder)
    assert all("a device" not in change.words.partition(": ")[2] for change in found.changes)
    last = found.ladder[-1].plan
    assert last is not None
    assert last.kwh_per_billion_tokens == found.plans[0].kwh_per_billion_tokens


def test_rungs_that_do_not_fit_say_so() -> None:
    asked = question(max_memory="24GiB")
    rungs = climb(asked, None, best_of)
    first = rungs[0]
    assert first.plan is not None
    assert first.plan.plan.mesh == "dp32"
    assert "out of memory" in first.reason
    assert first.gain_ratio is None
    assert not rungs[-1].reason


def test_the_ladder_begins_with_all_devices_and_ends_with_fewer() -> None:
    rungs = solve(question(objectives=("devices",)), top=1, ladder=True).ladder
    assert rungs[0].plan is not None
    assert rungs[0].plan.plan.mesh == "dp32"
    assert rungs[-1].id == "fewer_devices"
    assert rungs[-1].plan is not None
    assert rungs[-1].plan.plan.world_size < 32


def test_the_engines_ladder_begins_with_what_it_builds() -> None:
    rungs = solve(question(pins=(), software="paretune", engine_only=True), top=1, ladder=True).ladder
    assert rungs[0].plan is not None
    assert rungs[0].plan.plan.overlap_pp
    assert all("no legal plan" not in rung.reason for rung in rungs)


def test_when_nothing_fits_every_fix_is_verified() -> None:
    asked = question("h100x8:1", max_memory="6GiB", pins=(*PINS, "zero_stage=1"))
    misfit = solve(asked).misfit
    assert misfit is not None
    assert misfit.closest.excess_bytes > 0
    assert misfit.largest_part in MEMORY_PARTS
    ids = [fix.id for fix in misfit.fixes]
    assert any(name.startswith("memory_") for name in ids)
    for fix in misfit.fixes:
        assert fix.plan is not None
        assert fix.plan.fits
    raised = next(fix.plan for fix in misfit.fixes if fix.id.startswith("memory_"))
    assert raised is not None
    assert raised.memory_limit_bytes >= misfit.closest.memory_bytes.high


def test_no_memory_is_advised_that_no_device_has() -> None:
    answer = solve(question("a100x8", batch="8", sequence_length=2**40))
    assert answer.misfit is not None
    assert not [fix for fix in answer.misfit.fixes if fix.id.startswith("memory")]


def test_rules_that_exclude_every_plan_are_named() -> None:
    with pytest.raises(UserError, match=r"pp 32 \* virtual_stages 1 = 32 stages for 16 layers \[pp.layers\]"):
        solve(question(pins=(*PINS, "pp=32")))


# ------------------------------------------------------------------------------------------------------------ questions


def test_what_is_not_priced_is_said() -> None:
    assert question().notes == ()
    asked = ask(
        model=MODEL.changed(num_mtp_layers=1), cluster=parse_cluster("h100x8"), sequence_length=4096, global_batch="64"
    )
    assert "multi-token prediction (1 layer) is not priced" in asked.notes[0]


def test_pins_are_read_one_by_one() -> None:
    assert read_pins(["tp=8,pp=4", "mb=1,2", "zero=1"]) == [
        "tp=8", "pp=4", "micro_batch_size=1,2", "zero_stage=1",
    ]  # fmt: skip


def test_a_changed_question_has_its_own_space() -> None:
    asked = question()
    larger = asked.changed(cluster=asked.cluster.changed(num_nodes=8))
    assert larger.space.device_counts == (64,)
    faster = asked.changed(cluster=asked.cluster.changed(links=asked.cluster.links[:1]))
    assert faster.space is asked.space
    assert replace(asked, space=faster.space) == asked
