"""Every rule of `engine.rules`: a plan that breaks it and no other, vectorised results, and what people are told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import RunConfig
from engine.errors import RuleError
from engine.plan import Plan, plan_table
from engine.rules import RULES, RuleContext, check_run, explain_row, violations
from engine.spec import Hyperparameters, ModelSpec, Workload

pytestmark = pytest.mark.unit

MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 16,
    "ffn_size": 192,
    "vocab_size": 256,
}
MOE: dict[str, Any] = {"num_experts": 8, "experts_per_token": 2, "ffn_size": 64}
LATENT: dict[str, Any] = {
    "query_rank": 32,
    "kv_rank": 16,
    "nope_head_dim": 16,
    "rope_head_dim": 8,
    "value_head_dim": 16,
}


@dataclass(frozen=True)
class Case:
    """A plan and model that break ``rule``, and ``others`` that can't be kept at the same time."""

    rule: str
    plan: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    batch: int = 48
    length: int = 64
    devices: int | None = None
    others: frozenset[str] = frozenset()

    @property
    def context(self) -> RuleContext:
        return RuleContext(ModelSpec(**(MODEL | self.model)), self.devices)

    @property
    def row(self) -> tuple[Plan, int, int]:
        return Plan(**self.plan), self.batch, self.length

    def broken(self) -> set[str]:
        found = violations(self.context, plan_table([self.row]))
        return {rule for rule, flags in found.items() if flags[0]}


def others(*rules: str) -> frozenset[str]:
    return frozenset(rules)


PIPE = {"pp": 2, "virtual_stages": 2}
PLACED = {"dp_shard": 2, "ep": 2, "expert_placement_steps": 10}
CASES = [
    Case(
        "tp.divides_heads",
        {"tp": 3},
        {"num_heads": 4, "num_kv_heads": 1},
    ),
    Case("tp.kv_heads", {"tp": 4}, {"num_heads": 24, "num_kv_heads": 6}),
    Case("tp.divides_ffn", {"tp": 4}, {"ffn_size": 194}),
    Case("tp.divides_ffn", {"tp": 4, "etp": 4}, {"moe": MOE | {"shared_ffn_size": 6}}),
    Case("sp.requires_tp", {"sequence_parallel": True}),
    Case("sp.divides_sequence", {"sequence_parallel": True, "tp": 4}, length=66),
    Case("cp.divides_sequence", {"cp": 2}, length=62),
    Case("schedule.virtual_stages", {"virtual_stages": 2}),
    Case("schedule.virtual_stages", {**PIPE, "schedule": "1f1b"}),
    Case("schedule.virtual_stages", {"pp": 2, "schedule": "interleaved_1f1b"}),
    Case("schedule.virtual_stages", {"pp": 2, "schedule": "zbv"}),
    Case("pp.layers", {"pp": 8}),
    Case("pp.layers", {"pp": 2, "layers_per_stage": [1, 2]}),
    Case("batch.divides", {"dp_shard": 2, "micro_batch_size": 2}, batch=6),
    Case("pp.micro_batches", {**PIPE, "schedule": "dualpipev"}, batch=3),
    Case("schedule.whole_rounds", {**PIPE, "schedule": "interleaved_1f1b"}, batch=5),
    Case("ep.requires_moe", {"ep": 2}),
    Case("capacity.requires_moe", {"expert_capacity_factor": 1.25}),
    Case("ep.divides_experts", {"ep": 3, "dp_shard": 3}, {"moe": MOE}),
    Case("ep.degrees", {"ep": 8, "dp_shard": 4}, {"moe": MOE}),
    Case("ep.placement", {"expert_placement_steps": 10}),
    Case("ep.placement", {"expert_placement_steps": 10}, {"moe": MOE}),
    Case("ep.placement", {"expert_replicas": 2}, {"moe": MOE}),
    Case("ep.replicas", PLACED | {"expert_replicas": 3}, {"moe": MOE}),
    Case("ep.replicas", PLACED | {"expert_replicas": 10}, {"moe": MOE}),
    Case("engine.expert_replicas", PLACED | {"expert_replicas": 2, "expert_placement_steps": 0}, {"moe": MOE}),
    Case("etp.values", {"tp": 4, "etp": 2}, {"moe": MOE}),
    Case("etp.divides_ffn", {"tp": 4, "etp": 4}, {"moe": MOE | {"ffn_size": 62}}),
    Case("recompute.period", {"recompute": "every_k", "recompute_period": 5}),
    Case("fp8.dims", {"precision": "fp8"}, {"ffn_size": 200}, others=others("engine.precision")),
    Case("fp8.dims", {"precision": "fp8"}, length=50, others=others("engine.precision")),
    Case("positions.max", model={"positions": "learned", "max_positions": 32}),
    Case("world.devices", {"tp": 2, "dp_shard": 2}, devices=3),
    Case(
        "engine.expert_mesh",
        {"ep": 3, "dp_replicate": 3, "dp_shard": 2},
        {"moe": MOE | {"num_experts": 6}},
    ),
    Case("engine.latent_attention", model={"latent_attention": LATENT, "qk_norm": True}),
    Case("engine.rope_scaling", model={"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}),
    Case("engine.rope_scaling", model={"rope_scaling": {"rope_type": "linear", "factr": 2.0}}),
    Case(
        "engine.rope_scaling",
        model={"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
    ),
    Case("engine.activation", model={"activation": "clamped_swiglu", "mlp": "plain"}),
    Case("engine.mtp", model={"num_mtp_layers": 1}),
    Case("engine.token_split", {"tp": 4}, {"moe": MOE}, length=66),
    Case("engine.micro_batches", {"pp": 4}, batch=3),
    Case("engine.recompute", {"recompute": "selective"}),
    Case("engine.offload", {"offload_parameters_ratio": 0.5}),
    Case("engine.offload", {"offload_optimizer_ratio": 0.5}),
    Case("engine.offload", {"offload_activations_ratio": 0.5}),
    Case("engine.precision", {"precision": "fp16"}),
    Case("engine.all_reduce", {"all_reduce": "topology", "dp_shard": 2, "zero_stage": 2}),
    Case("engine.gradient_compression", {"gradient_compression": "int8"}),
    Case("engine.overlap", {"overlap_tp": True}),
    Case("engine.overlap", {"overlap_pp": False}),
    Case("engine.vocab_rows", {"tp": 8}, {"vocab_size": 49}),
]

LEGAL = [
    Case("", {"dp_shard": 2, "tp": 2, "pp": 2, "sequence_parallel": True}, devices=8),
    Case("", {"tp": 2, "vocab_parallel": False}, {"vocab_size": 257}),
    Case("", {"tp": 8}, {"vocab_size": 48}),
    Case("", {"tp": 2, "etp": 2, "dp_shard": 2}, {"moe": MOE}),
    Case("", {"tp": 2, "ep": 4, "dp_shard": 2}, {"moe": MOE | {"shared_ffn_size": 32, "num_groups": 2}}),
    Case("", {"ep": 2, "dp_shard": 2}, {"moe": MOE | {"scoring": "sigmoid", "selection_bias": True}, "mlp": "plain"}),
    Case("", {"tp": 4, "etp": 4}, {"moe": MOE | {"router_bias": True, "expert_bias": True}}, length=66),
    Case("", {"pp": 2, "layers_per_stage": [3, 1]}),
    Case("", {"pp": 2, "schedule": "gpipe"}, batch=1),
    Case("", {**PIPE, "schedule": "zbv"}, {"tied_embeddings": True}, batch=1),
    Case("", {"zero_stage": 0}),
    Case("", {"schedule": "gpipe"}),
    Case("", {"recompute": "every_k", "recompute_period": 4, "precision": "bf16"}),
    Case("", model={"sliding_window": 32, "attention_sinks": True, "qk_norm": True, "activation": "clamped_swiglu"}),
    Case("", model={"latent_attention": LATENT, "rope_scaling": {"type": "yarn", "factor": 40}}),
    Case("", model={"tied_embeddings": True, "positions": "learned", "max_positions": 64}),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.plan or case.model}")
def test_a_broken_rule_is_found_alone(case: Case) -> None:
    assert case.broken() == {case.rule} | case.others


@pytest.mark.parametrize("case", LEGAL, ids=lambda case: str(case.plan or case.model))
def test_legal_plans_break_nothing(case: Case) -> None:
    assert case.broken() == set()


def test_every_rule_is_tested() -> None:
    assert {case.rule for case in CASES} == {rule.id for rule in RULES}


def test_ids_are_unique_and_tell_the_scope() -> None:
    assert len({rule.id for rule in RULES}) == len(RULES)
    assert all(rule.id.startswith("engine.") == (rule.scope == "engine") for rule in RULES)


def test_scopes_are_chosen() -> None:
    table = plan_table([(Plan(), 8, 64)])
    context = RuleContext(ModelSpec(**MODEL))
    universal = violations(context, table, scopes=("universal",))
    assert universal
    assert not any(rule.startswith("engine.") for rule in universal)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.plan or case.model}")
def test_every_message_has_a_number_or_a_name_and_a_hint(case: Case) -> None:
    message, hint = explain_row(case.rule, case.context, plan_table([case.row]), 0)
    assert message
    assert hint
    assert "{" not in message + hint or "rope" in message
    assert "np." not in message + hint


NUMBERS = st.sampled_from([1, 2, 3, 4, 8])
PLANS = st.builds(
    lambda values, sizes: Plan(**values, layers_per_stage=[sizes] * (values["pp"] * values["virtual_stages"]) or None),
    st.fixed_dictionaries(
        {
            **dict.fromkeys(("tp", "pp", "dp_replicate", "dp_shard", "cp", "ep", "etp", "virtual_stages"), NUMBERS),
            "micro_batch_size": NUMBERS,
            "recompute_period": NUMBERS,
            "schedule": st.sampled_from(["gpipe", "1f1b", "interleaved_1f1b", "zbv", "dualpipev"]),
            "zero_stage": st.integers(0, 3),
            "sequence_parallel": st.booleans(),
            "vocab_parallel": st.booleans(),
            "overlap_tp": st.booleans(),
            "recompute": st.sampled_from(["none", "full", "selective", "every_k"]),
            "precision": st.sampled_from(["fp32", "bf16", "fp8"]),
        }
    ),
    st.integers(1, 3),
)
MODELS = st.sampled_from(
    [
        {},
        {"moe": MOE},
        {"moe": MOE | {"num_dense_layers": 1, "shared_ffn_size": 48}},
        {"latent_attention": LATENT},
        {"positions": "learned", "max_positions": 48, "tied_embeddings": True},
    ]
)


@settings(max_examples=40, deadline=None)
@given(MODELS, st.lists(st.tuples(PLANS, st.integers(1, 64), st.sampled_from([32, 48, 60])), min_size=1, max_size=8))
def test_a_table_gives_what_its_rows_give_alone(model: dict[str, Any], rows: list[tuple[Plan, int, int]]) -> None:
    context = RuleContext(ModelSpec(**(MODEL | model)), num_devices=16)
    whole = violations(context, plan_table(rows))
    for index, row in enumerate(rows):
        alone = violations(context, plan_table([row]))
        assert {rule: flags[index] for rule, flags in whole.items()} == {rule: f[0] for rule, f in alone.items()}
        for rule in (rule for rule, flags in alone.items() if flags[0]):
            assert explain_row(rule, context, plan_table(rows), index) == explain_row(
                rule, context, plan_table([row]), 0
            )


def test_no_rows() -> None:
    found = violations(RuleContext(ModelSpec(**MODEL), 4), plan_table([]))
    assert {flags.shape for flags in found.values()} == {(0,)}


@pytest.mark.parametrize(
    "schedule", ["gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
)
def test_micro_batch_rules_agree_with_torch(schedule: str) -> None:
    """torch's own schedules accept exactly the numbers of micro-batches that the rules let through."""
    names = {"interleaved_1f1b": "Interleaved1F1B", "interleaved_zero_bubble": "InterleavedZeroBubble"}
    names |= {"zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV", "1f1b": "1F1B", "gpipe": "GPipe"}
    stages = 1 if schedule in ("gpipe", "1f1b") else 2
    context = RuleContext(ModelSpec(**(MODEL | {"num_layers": 16})))
    for pp in (2, 3):
        for micro_batches in range(1, 8):
            plan = Plan(pp=pp, schedule=schedule, virtual_stages=stages)  # type: ignore[arg-type]
            found = violations(context, plan_table([(plan, micro_batches, 64)]))
            legal = not any(flags[0] for flags in found.values())
            assert legal == _torch_accepts(names[schedule], pp, micro_batches, stages), (pp, micro_batches)


def _torch_accepts(name: str, pp: int, micro_batches: int, stages: int) -> bool:
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    try:
        get_schedule_ops(name, pp, micro_batches, num_stages_per_rank=stages, with_comms=False)
    except ValueError:
        return False
    return True


def run(plan: dict[str, Any], batch: int = 48) -> RunConfig:
    return RunConfig(
        model=ModelSpec(**MODEL),
        workload=Workload(sequence_length=64, total_tokens=10000),
        hyperparameters=Hyperparameters(global_batch_size=batch),
        plan=Plan(**plan),
    )


@pytest.mark.parametrize(
    ("rule", "plan", "model", "part"),
    [
        ("ep.degrees", {"ep": 2}, {"moe": MOE}, "or raise dp_shard, cp or tp until dp * cp * tp is a multiple of 2"),
        ("engine.mtp", {}, {"num_mtp_layers": 1}, "num_nextn_predict_layers to 0"),
    ],
)
def test_a_hint_offers_what_the_user_can_set(rule: str, plan: dict[str, Any], model: dict[str, Any], part: str) -> None:
    case = Case(rule, plan, model)
    assert rule in case.broken()
    assert part in explain_row(rule, case.context, plan_table([case.row]), 0)[1]


def test_what_the_model_forbids_is_told_before_the_batch() -> None:
    case = Case("", {"ep": 3, "dp_shard": 3, "micro_batch_size": 2}, {"moe": MOE}, batch=4)
    found = violations(case.context, plan_table([case.row]))
    assert [rule for rule, flags in found.items() if flags[0]] == ["ep.divides_experts", "batch.divides"]


def test_check_run_lets_a_legal_run_through() -> None:
    check_run(run({"tp": 2, "dp_shard": 2}), num_devices=4)


def test_check_run_tells_rule_numbers_and_nearest_legal_values() -> None:
    with pytest.raises(RuleError) as caught:
        check_run(run({"tp": 3}, batch=7), num_devices=4)
    error = caught.value
    assert error.rule == "tp.divides_heads"
    assert "tp 3 does not divide the model's 8 heads [tp.divides_heads]" in error.message
    assert "set tp to 2 or 4" in str(error.hint)


def test_check_run_tells_every_broken_rule_once() -> None:
    with pytest.raises(RuleError) as caught:
        check_run(run({"dp_shard": 4, "micro_batch_size": 2, "precision": "fp16"}, batch=12), num_devices=2)
    message = caught.value.message
    assert [message.count(f"[{rule}]") for rule in ("batch.divides", "world.devices", "engine.precision")] == [1, 1, 1]
    assert "set global_batch_size to 8 or 16" in str(caught.value.hint)


def test_large_tables_stay_arrays() -> None:
    """One call over many rows: no row is looked at on its own."""
    row = (Plan(tp=2), 8, 64)
    table = {name: np.repeat(column, 100_000) for name, column in plan_table([row]).items()}
    found = violations(RuleContext(ModelSpec(**MODEL), 4), table)
    assert {flags.shape for flags in found.values()} == {(100_000,)}
    assert not any(flags.any() for flags in found.values())
