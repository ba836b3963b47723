"""What plans send: bytes in closed form, layouts by rank order, and the laws of time.

That the bytes are those of the engine's collectives: tests/engine/test_trace.py.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from autotune.cost.columns import PlanColumns, encode
from autotune.cost.communication import BUCKET_ELEMENTS, Communication, LinkColumns, WireFacts, communication
from autotune.cost.distinct import Columns
from autotune.cost.rank_groups import Groups
from autotune.cost.shapes import ModelShape
from autotune.specs.cluster import ClusterSpec, parse_cluster
from engine.errors import UserError
from engine.flops import parameter_counts
from engine.plan import Plan, plan_table
from engine.spec import ModelSpec

pytestmark = pytest.mark.unit

H100 = parse_cluster("h100x8:128")
DENSE = ModelSpec(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336, vocab_size=128256
)
WIRE_FACTS = {field.name for field in fields(WireFacts)}
EXPERTS: dict[str, Any] = {"num_experts": 64, "experts_per_token": 4, "ffn_size": 1536}
MOE = DENSE.changed(moe=EXPERTS)


def columns(*plans: dict[str, Any], model: ModelSpec = DENSE, batch: int = 512, length: int = 4096) -> PlanColumns:
    rows = [(Plan(**{"precision": "bf16", **plan}), batch, length) for plan in plans]
    return encode(plan_table(rows), model.num_layers)


def sent(
    *plans: dict[str, Any],
    model: ModelSpec = DENSE,
    cluster: ClusterSpec = H100,
    batch: int = 512,
    length: int = 4096,
    **options: Any,
) -> Communication:
    c = columns(*plans, model=model, batch=batch, length=length)
    elements = np.where(c.precision == columns({"precision": "fp32"}).precision[0], 4, 2)
    facts = WireFacts(**{name: options.pop(name) for name in list(options) if name in WIRE_FACTS})
    return communication(
        ModelShape.of(model), LinkColumns.of(cluster), c, facts=facts, **{"element_bytes": elements, **options}
    )


# ------------------------------------------------------------------------------------------------- bytes in closed form


def parameters_per_rank(model: ModelSpec, tp: int) -> float:
    """Of a model without a pipeline: norms are whole on every rank, all else is split."""
    counts = parameter_counts(model)
    norms = counts.layers.norms + counts.final_norm
    return (counts.total - norms) / tp + norms


def test_gradients_and_parameters_by_zero_stage() -> None:
    plans = [{"tp": 4, "dp_shard": 16, "zero_stage": stage} for stage in range(4)]
    plans.append({"tp": 4, "dp_replicate": 16, "zero_stage": 1})
    result = sent(*plans, batch=64)  # 4 micro-batches
    held, ring = parameters_per_rank(DENSE, 4), 15 / 16
    whole = 2 * ring * held * 4
    np.testing.assert_allclose(result.dp_reduce_bytes, [whole, whole / 2, whole / 2, 4 * whole / 2, whole], rtol=1e-12)
    gathered = ring * held * 2
    np.testing.assert_allclose(result.dp_gather_bytes, [0, gathered, gathered, 0, 0], rtol=1e-12)
    head = ring * (DENSE.vocab_size / 4 + 1) * DENSE.hidden_size * 2
    np.testing.assert_allclose(result.shard_gather_bytes, [0, 0, 0, gathered - head / 2, 0], rtol=1e-12)
    np.testing.assert_array_equal(result.shard_passes, [0, 0, 0, 8, 0])
    assert np.all((result.dp_reduce_bytes > 0) == (result.dp_reduce > 0))


def test_gradients_in_the_compute_dtype() -> None:
    plan = {"dp_shard": 16, "zero_stage": 1}
    wide, narrow = sent(plan), sent(plan, narrow_gradients=1)
    assert narrow.dp_reduce_bytes == wide.dp_reduce_bytes / 2
    assert narrow.dp_gather_bytes == wide.dp_gather_bytes
    assert sent(plan | {"precision": "fp32"}, narrow_gradients=1).dp_reduce_bytes == wide.dp_reduce_bytes


def test_hybrid_sharding_reduces_shards_over_the_replicas() -> None:
    result = sent({"dp_replicate": 8, "dp_shard": 8, "zero_stage": 3}, batch=64)
    held = parameters_per_rank(DENSE, 1)
    assert result.dp_reduce_bytes == pytest.approx(7 / 8 * held * 4 + 2 * 7 / 8 * held / 8 * 4)
    head = (DENSE.vocab_size + 1) * DENSE.hidden_size
    assert result.shard_gather_bytes == pytest.approx(7 / 8 * (held - head / 2) * 2)


def test_expert_gradients_are_reduced_over_their_own_ranks() -> None:
    counts = parameter_counts(MOE)
    shared, experts = counts.total - counts.layers.experts, counts.layers.experts
    for ep in (1, 8, 64):
        result = sent({"dp_shard": 64, "ep": ep, "zero_stage": 1}, model=MOE)
        edp = 64 // ep
        expected = 63 / 64 * shared * 4 + (edp - 1) / edp * experts / ep * 4
        assert result.dp_reduce_bytes == pytest.approx(expected, rel=1e-9)


def test_dispatch_and_combine_move_a_copy_per_expert() -> None:
    result = sent({"dp_shard": 64, "ep": 16, "micro_batch_size": 2}, model=MOE)
    copies = 2 * 4096 * 4 * MOE.hidden_size * 2
    assert result.ep_forward_bytes == result.ep_backward_bytes == 2 * 15 / 16 * copies
    loaded = sent({"dp_shard": 64, "ep": 16, "micro_batch_size": 2}, model=MOE, imbalance_ratio=0.2 * 16 / 15)
    assert loaded.ep_forward_bytes == pytest.approx(1.2 * result.ep_forward_bytes)
    assert loaded.ep_forward > result.ep_forward
    # To two domains of 8, once each: 1 - 1/2^4 of the other domain's tokens instead of 4 copies, half of them there.
    once = sent({"dp_shard": 64, "ep": 16, "micro_batch_size": 2}, model=MOE, sends_once=1)
    inside, outside = 2 * 7 / 16 * copies, 2 * 8 / 16 * copies
    assert once.ep_forward_bytes == pytest.approx(inside + outside * 2 * (1 - 0.5**4) / 4)
    assert once.ep_forward < result.ep_forward
    limited = MOE.changed(moe=EXPERTS | {"num_groups": 8, "groups_per_token": 1})
    to_one = sent({"dp_shard": 64, "ep": 16, "micro_batch_size": 2}, model=limited, sends_once=1)
    assert to_one.ep_forward_bytes == pytest.approx(inside + outside / 4)


def test_experts_with_tensor_ranks_dispatch_shares_of_the_tokens() -> None:
    plan = {"tp": 4, "dp_shard": 16, "sequence_parallel": True}
    whole, sliced = sent(plan | {"ep": 16, "etp": 1}, plan | {"ep": 4, "etp": 4}, model=MOE).ep_forward_bytes
    copies = 4096 * 4 * MOE.hidden_size * 2 / 4
    assert (whole, sliced) == pytest.approx((2 * 15 / 16 * copies, 2 * 3 / 4 * copies))
    both = sent(plan | {"ep": 16, "etp": 1}, plan | {"ep": 4, "etp": 4}, model=MOE)
    attention = 2 * 3 / 4 * 4096 * MOE.hidden_size * 2
    np.testing.assert_allclose(both.tp_moe_forward_bytes, [attention, attention + 2 * 3 / 4 * copies * 4])


def test_a_dense_model_has_no_expert_traffic() -> None:
    result = sent({"tp": 4, "dp_shard": 8})
    assert result.ep_forward == result.tp_moe_forward == result.tp_moe_backward == 0
    assert result.tp_forward > 0


def test_context_ring_passes_keys_and_values() -> None:
    result = sent({"cp": 4, "dp_shard": 8}, {"cp": 4, "tp": 16, "dp_shard": 2}, batch=64, length=8192)
    per_head = 8192 / 4 * 2 * 128 * 2
    np.testing.assert_allclose(result.cp_forward_bytes, [3 * 8 * per_head, 3 * per_head])
    np.testing.assert_allclose(result.cp_backward_bytes, 2 * result.cp_forward_bytes)
    wide = sent({"cp": 4, "dp_shard": 8}, batch=64, length=8192, wide_key_gradients=1)
    assert wide.cp_backward_bytes == 1.5 * result.cp_backward_bytes[0]
    # All at once, the four ranks of a node use all its network cards; a ring crosses with one.
    plan = {"cp": 16, "dp_shard": 2}
    ring, gathered = sent(plan, length=65536), sent(plan, length=65536, gathers_keys=1)
    assert gathered.cp_forward_bytes == ring.cp_forward_bytes
    assert gathered.cp_forward < ring.cp_forward / 3
    chosen = sent(plan | {"cp_attention": "all_gather"}, length=65536)
    assert chosen.cp_forward == gathered.cp_forward


def test_zero_1_that_sums_whole_gradients_gathers_what_is_stored() -> None:
    plan = {"dp_shard": 16, "zero_stage": 1}
    shards, whole = sent(plan), sent(plan, sums_whole_gradients=1)
    assert whole.dp_reduce_bytes == 2 * shards.dp_reduce_bytes
    assert whole.dp_gather_bytes == 2 * shards.dp_gather_bytes  # fp32, not bf16
    for stage in (0, 2, 3):
        other = plan | {"zero_stage": stage}
        assert sent(other, sums_whole_gradients=1).dp_reduce_bytes == sent(other).dp_reduce_bytes


def test_replicas_of_shards_may_sum_once() -> None:
    plan = {"dp_replicate": 8, "dp_shard": 8, "micro_batch_size": 2}
    often, once = sent(plan), sent(plan, sums_replicas_once=1)
    shards = sent({"dp_shard": 8, "micro_batch_size": 2}, batch=64).dp_reduce_bytes
    assert (often.dp_reduce_bytes - shards) / (once.dp_reduce_bytes - shards) == pytest.approx(4)


def test_slices_of_experts_that_each_dispatch_all_tokens() -> None:
    plan = {"tp": 4, "dp_shard": 16, "ep": 4, "etp": 4, "sequence_parallel": True}
    shares, whole = sent(plan, model=MOE), sent(plan, model=MOE, dispatches_whole=1)
    assert whole.ep_forward_bytes == 4 * shares.ep_forward_bytes
    assert whole.tp_moe_forward_bytes == whole.tp_forward_bytes
    experts = plan | {"etp": 1}
    assert sent(experts, model=MOE, dispatches_whole=1).ep_forward == sent(experts, model=MOE).ep_forward


def test_a_backward_pass_of_the_weights_finds_them_gathered() -> None:
    plan = {"pp": 4, "dp_shard": 8, "virtual_stages": 2, "schedule": "zbv"}
    assert sent(plan).shard_passes == 65
    assert sent(plan, split_backward_keeps_gathered=1).shard_passes == 1
    one = plan | {"virtual_stages": 1, "schedule": "1f1b"}
    assert sent(one, split_backward_keeps_gathered=1).shard_passes == 65


def test_a_sequence_gathered_again() -> None:
    plan = {"tp": 4, "dp_shard": 8, "sequence_parallel": True}
    kept, again = sent(plan), sent(plan, regathers=1)
    assert again.tp_backward_bytes == 1.5 * kept.tp_backward_bytes
    assert again.tp_forward_bytes == kept.tp_forward_bytes


def test_tensor_ranks_that_share_what_a_stage_sends() -> None:
    plan = {"tp": 4, "pp": 8, "dp_shard": 2, "micro_batch_size": 2}
    whole, shared = sent(plan), sent(plan, shares_sends=1)
    hidden = 2 * 4096 * DENSE.hidden_size * 2
    assert whole.pp_send_bytes == hidden
    assert shared.pp_send_bytes == hidden / 4 + 3 / 4 * hidden
    assert shared.pp_send < whole.pp_send / 2
    split = plan | {"sequence_parallel": True}
    assert sent(split, shares_sends=1).pp_send_bytes == sent(split).pp_send_bytes == hidden / 4


def test_tied_embeddings_are_summed_between_the_ends_of_a_pipeline() -> None:
    tied = DENSE.changed(tied_embeddings=True)
    result = sent({"pp": 4, "tp": 2, "dp_shard": 2}, {"tp": 2, "dp_shard": 2}, model=tied)
    assert result.tied_reduce_bytes[0] == DENSE.vocab_size * DENSE.hidden_size / 2 * 4
    assert result.tied_reduce[1] == result.tied_reduce_bytes[1] == 0
    assert sent({"pp": 4, "dp_shard": 2}).tied_reduce == 0
    shards = sent({"pp": 4, "tp": 2, "dp_shard": 2}, model=tied, sums_tied_shards=1)
    assert shards.tied_reduce_bytes == result.tied_reduce_bytes[0] / 2


def test_compression_shrinks_gradients_alone() -> None:
    words = ("none", "int8", "topk", "int8_topk", "powersgd")
    plans = [{"dp_shard": 16, "zero_stage": 1, "gradient_compression": word} for word in words]
    result = sent(*plans)
    ratios = result.dp_reduce_bytes / result.dp_reduce_bytes[0]
    np.testing.assert_allclose(ratios, [1, 0.25, 0.02, 0.0125, 8 / 4096])
    assert np.all(np.diff(result.dp_reduce) < 0)
    narrow = sent(*plans, narrow_gradients=1)
    np.testing.assert_allclose((narrow.dp_reduce_bytes / narrow.dp_reduce_bytes[0])[:3], [1, 0.5, 0.03])


def test_sparse_gradients_are_gathered_from_all_replicas() -> None:
    """Their places differ, so that nothing is added on the way."""
    words = ("none", "topk")
    few, many = (
        sent(*({"dp_replicate": size, "gradient_compression": word} for word in words)).dp_reduce_bytes
        for size in (8, 128)
    )
    assert few[1] / few[0] == pytest.approx(8 * 0.02 / 2)
    assert many[1] / many[0] == pytest.approx(128 * 0.02 / 2)


def test_zero_shards_over_context_ranks_too() -> None:
    """With one data-parallel rank, parameters are still gathered over the context ranks that hold their shards."""
    plan = {"cp": 8, "dp_shard": 1}
    result = sent(*({**plan, "zero_stage": stage} for stage in (0, 1, 3)), batch=16, length=8192)
    held, ring = parameters_per_rank(DENSE, 1), 7 / 8
    np.testing.assert_allclose(result.dp_gather_bytes, [0, ring * held * 2, 0], rtol=1e-12)
    np.testing.assert_array_equal(result.shard_passes, [0, 0, 32])
    assert result.shard_gather_bytes[2] > 0


def test_gradients_of_the_fullest_rank_whatever_its_stages() -> None:
    """Embedding, head and the remainder of the layers lie where the schedule puts them."""
    model = DENSE.changed(num_layers=30)
    whole = parameters_per_rank(model, 1)
    ends = model.vocab_size * model.hidden_size
    layer = (whole - 2 * ends) / 30
    plans = (
        {
            "virtual_stages": 2,
            "schedule": "zbv",
        },  # embedding and head on the first rank, with stages 0 and 7 of 4 and 3 layers
        {"virtual_stages": 3, "schedule": "interleaved_1f1b"},  # the first 6 of 12 stages have 3 layers, the others 2
    )
    sizes = [sent({"pp": 4, "dp_replicate": 2, **plan}, model=model).dp_reduce_bytes[0] / 4 for plan in plans]
    assert sizes == pytest.approx([7 * layer + 2 * ends, 8 * layer + ends], rel=1e-3)


def test_small_gradients_travel_in_buckets_and_sharded_ones_by_layer() -> None:
    small = DENSE.changed(num_layers=30, hidden_size=512, num_heads=8, head_dim=64, ffn_size=1024, vocab_size=1000)
    assert parameter_counts(small).total < 2 * BUCKET_ELEMENTS
    bucketed, by_layer = sent(
        {"dp_shard": 64, "zero_stage": 1}, {"dp_shard": 64, "zero_stage": 2}, model=small
    ).dp_reduce
    assert bucketed < by_layer


# ---------------------------------------------------------------------------------------------- layouts and their times


def test_groups_by_rank_order() -> None:
    orders = ("tp-cp-dp-pp", "tp-cp-pp-dp", "tp-pp-cp-dp")
    plan = {"tp": 2, "cp": 2, "pp": 4, "dp_shard": 16}
    c = columns(*({**plan, "rank_order": order} for order in orders))
    groups = Groups(LinkColumns.of(H100), c)
    np.testing.assert_array_equal(groups.tp.members[0], [2, 2, 2])
    np.testing.assert_array_equal(groups.cp.members[0], [2, 2, 1])  # 8 ranks apart behind two tensor and four stages
    np.testing.assert_array_equal(groups.dp.members[0], [4, 2, 1])
    np.testing.assert_array_equal(groups.dp.size, [32, 32, 32])
    np.testing.assert_array_equal(groups.pp.members[0], [1, 1, 2])  # stages of 64 and 4 ranks, then in the node
    np.testing.assert_array_equal(groups.pp.size, [2, 2, 2])


def test_expert_groups_are_spread_over_tensor_context_and_data_ranks() -> None:
    plan = {"tp": 2, "pp": 2, "dp_shard": 32, "ep": 16}
    c = columns(
        plan | {"rank_order": "tp-cp-dp-pp"},
        plan | {"rank_order": "tp-cp-pp-dp"},
        plan | {"etp": 2},
        plan | {"ep": 4},
        model=MOE,
    )
    groups = Groups(LinkColumns.of(H100), c)
    # Two of the tensor group and every second node's half, where the pipeline's ranks lie between.
    np.testing.assert_array_equal(groups.ep.members[0], [8, 4, 4, 4])
    np.testing.assert_array_equal(groups.edp.size, [4, 4, 2, 16])
    np.testing.assert_array_equal(groups.edp.members[0], [1, 1, 1, 2])


def test_placement_changes_what_waits_for_the_network() -> None:
    plan = {"tp": 2, "pp": 4, "dp_shard": 16, "zero_stage": 1}
    stages_apart, stages_near = (sent(plan | {"rank_order": order}) for order in ("tp-cp-dp-pp", "tp-pp-cp-dp"))
    assert stages_near.pp_send < stages_apart.pp_send / 3
    assert stages_near.dp_reduce > 3 * stages_apart.dp_reduce


def test_a_tensor_group_beyond_the_node_costs_its_network() -> None:
    plans = [{"tp": tp, "dp_shard": 128 // tp} for tp in (4, 8, 16)]
    h100 = sent(*plans, batch=128).tp_forward
    rack = sent(*plans, batch=128, cluster=parse_cluster("gb200x4:32")).tp_forward
    assert h100[2] / h100[1] > 1.25
    assert rack[2] / rack[1] < 1.15
    twelve = sent({"tp": 16, "dp_shard": 8}, batch=128, cluster=parse_cluster("h100x4:32")).tp_forward
    assert twelve > 1.5 * h100[2]


def test_gathers_get_slower_with_more_nodes_and_hybrid_sharding_stays_in_the_node() -> None:
    plans = [{"dp_shard": size} for size in (8, 64, 512)]
    plans.append({"dp_shard": 8, "dp_replicate": 64})
    one, eight, many, hybrid = sent(*plans).shard_gather
    assert one < eight < many
    assert hybrid == pytest.approx(one)


def random_table(n: int, model: ModelSpec) -> PlanColumns:
    draws = np.random.default_rng(0)
    plans = []
    while len(plans) < n:
        tp, pp, cp, shard, replicate = (int(2 ** draws.integers(0, high)) for high in (4, 3, 3, 5, 3))
        ep = int(2 ** draws.integers(0, 6)) if model.moe else 1
        if (tp * cp * shard * replicate) % ep:
            continue
        plans.append(
            {
                "tp": tp, "pp": pp, "cp": cp, "dp_shard": shard, "dp_replicate": replicate, "ep": ep,
                "zero_stage": int(draws.integers(0, 4)), "micro_batch_size": int(2 ** draws.integers(0, 3)),
                "sequence_parallel": bool(tp > 1 and draws.integers(0, 2)),
                "vocab_parallel": bool(draws.integers(0, 2)),
                "virtual_stages": 2 if pp > 1 and draws.integers(0, 2) else 1,
                "precision": str(draws.choice(["bf16", "fp32"])),
                "rank_order": str(draws.choice(["tp-cp-dp-pp", "tp-cp-pp-dp", "tp-pp-cp-dp"])),
                "gradient_compression": str(draws.choice(["none", "int8"])),
            }
        )  # fmt: skip
    return columns(*plans, model=model, batch=4096)


@pytest.mark.parametrize("model", [DENSE, MOE])
def test_a_table_of_one_model_equals_one_model_per_row(model: ModelSpec) -> None:
    c = random_table(300, model)
    elements = np.where(c.precision == columns({"precision": "fp32"}).precision[0], 4.0, 2.0)
    shape, index = ModelShape.of(model), np.zeros(len(c), dtype=np.int64)
    once = communication(shape, LinkColumns.of(H100), c, element_bytes=elements)
    per_row = communication(
        ModelShape.rows([shape], index),
        LinkColumns.rows([H100, parse_cluster("l40s")], index),
        c,
        element_bytes=elements,
    )
    for field in fields(Communication):
        ours, theirs = getattr(once, field.name), getattr(per_row, field.name)
        assert ours.shape == (300,)
        assert np.all(np.isfinite(ours))
        assert np.all(ours >= 0)
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, err_msg=field.name)


def test_networks_of_different_depth_share_a_table() -> None:
    plans = [{"tp": 8, "dp_shard": 8, "zero_stage": 1}] * 3
    clusters = [parse_cluster(name) for name in ("h100x8:8", "l40sx8:8", "cpu:1")]
    c = columns(*plans)
    shape, index = ModelShape.of(DENSE), np.arange(3)
    together = communication(ModelShape.rows([shape], 0 * index), LinkColumns.rows(clusters, index), c, element_bytes=2)
    for row, cluster in enumerate(clusters):
        alone = communication(shape, LinkColumns.of(cluster), columns(plans[row]), element_bytes=2)
        for field in fields(Communication):
            assert getattr(together, field.name)[row] == pytest.approx(getattr(alone, field.name)[0]), field.name


def test_a_cluster_without_links_is_told() -> None:
    with pytest.raises(UserError, match="says nothing of its links") as caught:
        LinkColumns.of(H100.changed(links=()))
    assert "autotune profile" in str(caught.value.hint)


# ---------------------------------------------------------------------------------------------------------- equal rows


def test_distinct_rows_stand_for_all() -> None:
    draws = np.random.default_rng(1)
    table = {
        "few": draws.integers(-2, 3, 2000),
        "wide": draws.choice([1, 7, 10**12, -5], 2000),
        "many": draws.integers(0, 10**6, 2000),
        "same": np.full(2000, 9),
        "number": np.int64(3),
    }
    for names in (
        ["few"],
        ["few", "wide"],
        ["same", "number"],
        ["few", "wide", "many", "same"],
        ["many", "few", "many"],
    ):
        first, kind = Columns(table).distinct(names)
        rows = {name: np.broadcast_to(table[name], 2000) for name in names}
        for column in rows.values():
            np.testing.assert_array_equal(column[first][kind], column)
        assert len(first) == len({tuple(row) for row in zip(*(c.tolist() for c in rows.values()), strict=True)})
