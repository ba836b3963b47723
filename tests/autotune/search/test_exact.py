"""The search over plans equals brute force, whatever it leaves out, cuts up or shares."""

from __future__ import annotations

import dataclasses
import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from autotune.cost.compute import Basis, compute_work
from autotune.cost.estimate import Estimator, work_and_wire
from autotune.search import exact
from autotune.search.archive import Front
from autotune.search.blocks import MANY_COMBINATIONS, Expander, Part
from autotune.search.bounds import least_seconds, memory_bounds, time_bounds
from autotune.search.exact import SearchResult, search
from autotune.search.plan_objectives import Prices, objective_costs
from autotune.search.plan_space import DEGREES, FIELDS, INNER_FIELDS, NOT_PRICED, OUTER_FIELDS, PlanSpace, plan_space
from autotune.specs.cluster import ClusterSpec, parse_cluster
from engine.errors import UserError
from engine.plan import Plan, plan_table
from engine.rule import RuleContext
from engine.rules import violations
from engine.spec import LatentAttentionSpec, ModelSpec, MoESpec

pytestmark = pytest.mark.unit

PRICES = Prices(dollars_per_device_hour=2.0, watts_per_device=700.0)


def dense_model(**changes: Any) -> ModelSpec:
    values = {
        "num_layers": 6, "hidden_size": 1024, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64, "ffn_size": 4096,
        "vocab_size": 32000,
    }  # fmt: skip
    return ModelSpec(**(values | changes))


def moe_model() -> ModelSpec:
    return dense_model(moe=MoESpec(num_experts=8, experts_per_token=2, ffn_size=2048, num_dense_layers=1))


CLUSTER = parse_cluster("h100x4:2")


def brute_force(model: ModelSpec, cluster: ClusterSpec, space: PlanSpace, objectives: tuple[str, ...], limit: float):
    """Every combination as a Plan, one by one: points of the front, counts of all and of legal plans."""
    choices = {name: space.values[name] for name in (*OUTER_FIELDS, *INNER_FIELDS) if name != "layers_per_stage"}
    rows = []
    for degrees in space.degrees.tolist():
        for picked in itertools.product(*choices.values()):
            values = dict(zip(DEGREES, degrees, strict=True)) | dict(zip(choices, picked, strict=True))
            batch, length = values.pop("global_batch_size"), values.pop("sequence_length")
            values["etp"] = values["tp"] if values["etp"] == "tp" else values["etp"]
            rows.append((Plan(**values), batch, length))
    table = plan_table(rows)
    broken = np.any(list(violations(RuleContext(model, cluster.num_devices), table, space.scopes).values()), axis=0)
    legal = [row for row, wrong in zip(rows, broken, strict=True) if not wrong]
    found = exact.plan_rows(job_of(model, cluster, space, objectives), legal)
    costs = objective_costs(
        objectives, found.estimates.step_seconds, found.estimates.memory_bytes, found.columns, PRICES
    )
    costs = costs[found.estimates.memory_bytes_high <= limit]
    points = np.unique(costs, axis=0)
    on_front = [not (((points <= p).all(axis=1)) & ((points < p).any(axis=1))).any() for p in points]
    return points[on_front], len(rows), len(legal)


def job_of(model: ModelSpec, cluster: ClusterSpec, space: PlanSpace, objectives: tuple[str, ...]) -> exact.Job:
    return exact.Job(
        model, cluster, space, objectives, cluster.memory_bytes, 5, (), "default", "adamw", PRICES, 2**12, True, 0.0
    )


def points_of(result: SearchResult) -> np.ndarray:
    rows = result.front
    return objective_costs(
        result.objectives, rows.estimates.step_seconds, rows.estimates.memory_bytes, rows.columns, PRICES
    )


@st.composite
def small_spaces(draw: st.DrawFn) -> tuple[ModelSpec, PlanSpace]:
    """Spaces of some thousand combinations: most fields pinned to one or two drawn values."""
    latent = LatentAttentionSpec(query_rank=256, kv_rank=128, nope_head_dim=64, rope_head_dim=32, value_head_dim=64)
    models = [dense_model(), dense_model(num_layers=5, tied_embeddings=True), moe_model()]
    model = draw(st.sampled_from([*models, moe_model().changed(latent_attention=latent)]))
    pins = {
        "schedule": draw(
            st.sampled_from(["1f1b", "1f1b,interleaved_1f1b", "zbv,dualpipev", "interleaved_zero_bubble"])
        ),
        "virtual_stages": draw(st.sampled_from(["1", "1,2", "2", "1,3"])),
        "micro_batch_size": draw(st.sampled_from(["1", "1,2", "2,4", "3"])),
        "zero_stage": draw(st.sampled_from(["0", "1,2,3", "1,3", "2"])),
        "recompute": draw(st.sampled_from(["none", "full,none", "selective,every_k", "none,selective,full"])),
        "recompute_period": draw(st.sampled_from(["2", "3,2"])),
        "sequence_parallel": draw(st.sampled_from(["true", "false", "false,true", "true,false"])),
        "overlap_tp": draw(st.sampled_from(["true", "true,false"])),
        "rank_order": draw(st.sampled_from(["tp-cp-dp-pp", "tp-cp-dp-pp,tp-pp-cp-dp"])),
        "cp": draw(st.sampled_from(["1", "1,2"])),
        "dp_replicate": draw(st.sampled_from(["1", "1,2"])),
        "layers_per_stage": "even",
        "precision": draw(st.sampled_from(["bf16", "fp8"])),
        "overlap_dp": draw(st.sampled_from(["true", "true,false"])),
        "offload_optimizer_ratio": draw(st.sampled_from(["0", "0,1"])),
        "gradient_compression": draw(st.sampled_from(["none", "int8"])),
    }
    if model.moe:
        pins |= {"ep": draw(st.sampled_from(["1,2", "2,4", "1,8"])), "etp": draw(st.sampled_from(["1,tp", "tp", "1"]))}
    return model, plan_space(
        model,
        CLUSTER,
        global_batch_sizes=draw(st.sampled_from([[16], [16, 24]])),
        sequence_lengths=draw(st.sampled_from([[1024], [512, 2048]])),
        pins=[f"{name}={value}" for name, value in pins.items()],
        fewer_devices=draw(st.booleans()),
        scopes=draw(st.sampled_from([("universal",), ("universal", "engine")])),
    )


some_objectives = st.sampled_from(
    [("step_time", "memory"), ("speed", "memory", "devices"), ("memory",), ("step_time", "memory", "devices", "cost")]
)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(drawn=small_spaces(), objectives=some_objectives, limit=st.sampled_from([2**40, 12 * 2**30, 5 * 2**30]))
def test_front_equals_brute_force(drawn: tuple[ModelSpec, PlanSpace], objectives: tuple[str, ...], limit: int) -> None:
    model, space = drawn
    assume(space.num_combinations <= 6000)
    settings_ = {"objectives": objectives, "max_memory_bytes": limit, "prices": PRICES, "num_processes": 1}
    result = search(model, CLUSTER, space, chunk_rows=256, **settings_)
    expected, num_all, num_legal = brute_force(model, CLUSTER, space, result.objectives, limit)
    np.testing.assert_allclose(points_of(result), expected, rtol=1e-9)
    counts = result.counts
    assert counts.combinations == num_all == space.num_combinations
    assert counts.combinations == counts.redundant + sum(counts.removed.values()) + counts.legal
    assert counts.legal <= num_legal  # brute force knows nothing of redundant ones

    unpruned = search(model, CLUSTER, space, prune=False, **settings_)
    assert unpruned.front.plans == result.front.plans
    assert {k: rows.plans for k, rows in unpruned.top.items()} == {k: rows.plans for k, rows in result.top.items()}
    assert unpruned.closest.plans == result.closest.plans
    assert unpruned.counts.evaluated == counts.legal
    assert unpruned.counts.evaluated_not_fitting >= counts.not_fitting
    assert unpruned.counts.removed == counts.removed


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(drawn=small_spaces())
def test_no_plan_is_below_its_blocks_bounds(drawn: tuple[ModelSpec, PlanSpace]) -> None:
    model, space = drawn
    blocks_of = Expander(space, RuleContext(model, CLUSTER.num_devices))
    estimator = Estimator.of(model, CLUSTER)
    for part in blocks_of.parts():
        blocks = blocks_of.blocks(part)
        held = memory_bounds(estimator, blocks, 4096)
        seconds = time_bounds(estimator, blocks, np.arange(len(blocks)), 4096)
        for chunk, _ in blocks.chunks(np.arange(len(blocks)), 4096):
            table = estimator.estimate(chunk.plans)
            block = np.searchsorted(blocks.index, chunk.numbers // blocks.num_inner)
            assert (table.step_seconds >= seconds[block]).all()
            assert (table.step_seconds >= least_seconds(model, CLUSTER, chunk.plans)).all()
            assert (table.memory_bytes >= held.memory_bytes[block]).all()
            assert (table.memory_bytes_high >= held.memory_bytes_high[block]).all()


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(drawn=small_spaces())
def test_shared_work_changes_nothing(drawn: tuple[ModelSpec, PlanSpace]) -> None:
    """Estimates of like plans that share their work equal those of each plan alone."""
    model, space = drawn
    blocks_of = Expander(space, RuleContext(model, CLUSTER.num_devices))
    estimator = Estimator.of(model, CLUSTER)
    blocks = blocks_of.blocks(Part(slice(None)))
    for chunk, same_memory in blocks.chunks(np.arange(len(blocks)), 512):
        shared = estimator.estimate(chunk.plans, same_work=chunk.same_work, same_memory=same_memory)
        alone = estimator.estimate(chunk.plans)
        np.testing.assert_allclose(shared.step_seconds, alone.step_seconds, rtol=1e-12)
        np.testing.assert_allclose(shared.memory_bytes, alone.memory_bytes, rtol=1e-12)
        scope = estimator.scope(chunk.plans)
        whole = compute_work(Basis(scope.shape, scope.device, scope.software, scope.coefficients, chunk.plans))
        once, _ = work_and_wire(scope, chunk.plans)
        for a, b in zip(numbers_in(whole), numbers_in(once), strict=True):
            np.testing.assert_array_equal(
                np.broadcast_to(a, len(chunk.numbers)), np.broadcast_to(b, len(chunk.numbers))
            )
        decoded = blocks_of.columns(chunk.numbers)
        for field in dataclasses.fields(decoded):
            np.testing.assert_array_equal(getattr(decoded, field.name), getattr(chunk.plans, field.name), field.name)


def numbers_in(value: Any) -> list[Any]:
    """All numbers and arrays in nested tuples and dataclasses."""
    if dataclasses.is_dataclass(value):
        value = tuple(getattr(value, field.name) for field in dataclasses.fields(value))
    return [leaf for part in value for leaf in numbers_in(part)] if isinstance(value, tuple) else [value]


def test_one_plan_under_several_orders_of_ranks_has_memory_for_each() -> None:
    model = dense_model()
    pins = ("tp=2", "pp=2", "cp=2", "dp_replicate=1", "recompute=none", "micro_batch_size=1", "zero_stage=1")
    space = medium_space(model, *pins, "schedule=1f1b", "virtual_stages=1", "sequence_parallel=true", "overlap_tp=true")
    result = search(model, CLUSTER, space, objectives=("speed", "memory"), num_processes=1, prune=False)
    assert result.counts.evaluated == len(space.values["rank_order"]) - 1  # with dp 1, two orders place ranks alike
    assert result.fits


def medium_space(model: ModelSpec, *pins: str, **options: Any) -> PlanSpace:
    return plan_space(model, CLUSTER, global_batch_sizes=[32], sequence_lengths=[2048], pins=pins, **options)


def test_chunks_change_nothing() -> None:
    model = moe_model()
    space = medium_space(model, "schedule=1f1b,zbv")
    one = search(model, CLUSTER, space, num_processes=1)
    other = search(model, CLUSTER, space, num_processes=1, chunk_rows=1000)
    assert other.front.plans == one.front.plans
    assert {k: rows.plans for k, rows in other.top.items()} == {k: rows.plans for k, rows in one.top.items()}
    np.testing.assert_allclose(one.front.values[:, 0], np.sort(one.front.values[:, 0]))


def test_pins_are_honoured_everywhere() -> None:
    model = dense_model()
    space = medium_space(model, "tp=2", "recompute=full", "micro_batch_size=1,2", "zero_stage=3", "dp=2,4")
    result = search(model, CLUSTER, space, num_processes=1)
    rows = [*result.front.plans, *(plan for rows in result.top.values() for plan in rows.plans)]
    assert rows
    for plan in rows:
        assert (plan.tp, plan.recompute, plan.zero_stage) == (2, "full", 3)
        assert plan.micro_batch_size in (1, 2)
        assert plan.dp in (2, 4)
        assert plan.world_size == CLUSTER.num_devices


def test_best_plans_differ_in_their_mesh_unless_told_otherwise() -> None:
    model = dense_model()
    space = medium_space(model)
    meshes = [plan.mesh for plan in search(model, CLUSTER, space, top=8).top["step_time"].plans]
    assert len(set(meshes)) == len(meshes) == 8
    twins = search(model, CLUSTER, space, top=8, distinct=()).top["step_time"]
    assert len(set(twins.plans)) == 8
    assert len({plan.mesh for plan in twins.plans}) < 8
    assert (np.diff(twins.values[:, 0]) >= 0).all()


def test_rules_count_and_our_engine_is_told_apart() -> None:
    model = dense_model()
    free = search(model, CLUSTER, medium_space(model), num_processes=1)
    assert any(free.front.not_built)
    assert free.counts.removed["schedule.virtual_stages"] > 0
    ours = search(model, CLUSTER, medium_space(model, scopes=("universal", "engine")), num_processes=1)
    assert not any(ours.front.not_built)
    assert any(rule.startswith("engine.") and number > 0 for rule, number in ours.counts.removed.items())


def test_when_nothing_fits_the_closest_are_told() -> None:
    model = dense_model(num_layers=48, hidden_size=8192, num_heads=64, num_kv_heads=8, head_dim=128, ffn_size=28672)
    space = medium_space(model)
    result = search(model, CLUSTER, space, max_memory_bytes=8 * 2**30)
    assert not result.fits
    assert result.counts.not_fitting == result.counts.legal > 0
    least = search(model, CLUSTER, space, max_memory_bytes=2**50, objectives=("memory",)).top["memory"]
    assert result.closest.plans == least.plans
    assert (result.closest.estimates.memory_bytes_high > 8 * 2**30).all()


def test_more_devices_are_used_only_where_they_pay() -> None:
    model = dense_model()
    space = medium_space(model, fewer_devices=True)
    result = search(model, CLUSTER, space, objectives=("speed", "devices", "energy"), prices=PRICES)
    used = result.front.columns.world_size
    assert set(used.tolist()) == {1, 2, 4, 8}
    assert result.front.values[used == 8, 0].max() == result.front.values[:, 0].max()


def test_plans_are_held_against_others_of_as_many_devices() -> None:
    model = dense_model()
    space = medium_space(model, fewer_devices=True)
    result = search(model, CLUSTER, space, objectives=("speed", "memory", "devices"), chunk_rows=512, num_processes=1)
    assert result.counts.evaluated < result.counts.legal / 2


def test_objectives_need_their_prices() -> None:
    model = dense_model()
    with pytest.raises(UserError, match="dollars"):
        search(model, CLUSTER, medium_space(model), objectives=("cost",))
    with pytest.raises(UserError, match="unknown objective 'sped'"):
        search(model, CLUSTER, medium_space(model), objectives=("sped",))


def test_a_bound_that_does_not_hold_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dense_model()
    space = medium_space(model)
    expected = search(model, CLUSTER, space, num_processes=1)
    monkeypatch.setattr(exact, "time_bounds", lambda *args: 1.3 * time_bounds(*args))
    wrong = search(model, CLUSTER, space, num_processes=1)
    assert wrong.front.plans == expected.front.plans
    assert wrong.counts.evaluated == wrong.counts.legal


def test_with_a_tolerance_every_plan_has_a_point_nearly_as_good() -> None:
    model = moe_model()
    space = medium_space(model)
    exactly = search(model, CLUSTER, space, num_processes=1)
    nearly = search(model, CLUSTER, space, num_processes=1, tolerance=0.1)
    assert exactly.gaps == {"step_time": 0.0, "memory": 0.0}
    assert nearly.gaps == {"step_time": 0.1, "memory": 0.1}
    assert nearly.counts.evaluated < exactly.counts.evaluated
    for point in exactly.front.values:
        assert (nearly.front.values <= point * 1.1 * (1 + 1e-9)).all(axis=1).any()


def test_a_search_ended_early_says_how_much_better_the_rest_could_be() -> None:
    model = moe_model()
    space = medium_space(model)
    whole = search(model, CLUSTER, space, num_processes=1)
    part = search(model, CLUSTER, space, num_processes=1, max_seconds=0.0)
    assert part.counts.not_searched > 0
    assert part.counts.not_searched + part.counts.combinations == space.num_combinations
    best, possible = whole.front.values[:, 0].min(), part.front.values[:, 0].min() / (1 + part.gaps["step_time"])
    assert 0 < possible <= best <= part.front.values[:, 0].min()
    assert part.gaps["memory"] == np.inf


def test_progress_ends_at_one() -> None:
    model = moe_model()
    told: list[float] = []
    search(model, CLUSTER, medium_space(model), num_processes=1, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0


def test_memory_stays_bounded_however_large_the_space() -> None:
    model = dense_model(num_layers=64, num_heads=64, num_kv_heads=64)
    big = parse_cluster("h100x8:512")
    batches = [4096 * k for k in range(1, 21)]
    space = plan_space(model, big, global_batch_sizes=batches, sequence_lengths=[4096, 8192])
    expander = Expander(space, RuleContext(model, big.num_devices))
    parts = expander.parts()
    sizes = [expander.size(part) for part in parts]
    assert sum(sizes) == space.num_combinations > 10**9
    assert max(sizes) <= MANY_COMBINATIONS * 1.5
    job = dataclasses.replace(job_of(model, big, space, ("step_time", "memory")), chunk_rows=2**15)
    tracemalloc.start()
    exact._search_part(job, exact.Archive.empty(job), parts[0])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 300e6


def test_few_degrees_with_many_batches_are_cut_by_batch() -> None:
    model = dense_model()
    batches = [16 * k for k in range(1, 300)]
    pins = ("tp=2", "pp=2", "cp=1", "dp_replicate=1")
    space = plan_space(model, CLUSTER, global_batch_sizes=batches, sequence_lengths=[512, 1024], pins=pins)
    expander = Expander(space, RuleContext(model, CLUSTER.num_devices))
    sizes = [expander.size(part) for part in expander.parts()]
    assert len(space.degrees) == 1
    assert sum(sizes) == space.num_combinations > 5 * 10**7
    assert max(sizes) <= MANY_COMBINATIONS
    for part in expander.parts()[:20]:
        blocks = expander.blocks(part)
        assert set(blocks.outer["global_batch_size"].tolist()) <= {batches[part.fixed["global_batch_size"]]}
        assert blocks.counts.combinations == expander.size(part)


@given(
    st.lists(st.tuples(*[st.integers(1, 6)] * 3), min_size=1, max_size=60),
    st.integers(1, 3),
    st.permutations(range(60)),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_front_does_not_depend_on_the_order_of_rows(rows: list[Any], num_costs: int, order: list[int]) -> None:
    costs = np.array(rows, dtype=np.float64)[:, :num_costs]
    numbers = np.arange(len(costs))
    whole, pieces = Front(num_costs), Front(num_costs)
    whole.add(costs, numbers)
    shuffled = np.array([i for i in order if i < len(costs)])
    for piece in np.array_split(shuffled, 5):
        pieces.add(costs[piece], numbers[piece])
    np.testing.assert_array_equal(whole.costs, pieces.costs)
    np.testing.assert_array_equal(whole.numbers, pieces.numbers)
    dominated = [((costs <= c).all(axis=1) & (costs < c).any(axis=1)).any() for c in costs]
    np.testing.assert_array_equal(whole.costs, np.unique(costs[~np.array(dominated)], axis=0))
    told = whole.dominates(costs)
    assert not (told & ~np.array(dominated)).any()


def test_every_field_of_a_plan_is_an_axis_or_known_to_be_none() -> None:
    assert set(Plan.model_fields) - {"schema_version"} == {*FIELDS, *NOT_PRICED} & set(Plan.model_fields)
    assert set(FIELDS).isdisjoint(NOT_PRICED)
