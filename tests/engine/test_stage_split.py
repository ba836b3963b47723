"""Layers of pipeline stages by cost: against all splits there are, and from a run file to numbers."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from engine.config import load_run
from engine.errors import RuleError, UserError
from engine.flops import recomputed_flops_per_token, training_flops_per_token
from engine.plan import Plan
from engine.rules import check_run
from engine.spec import ModelSpec
from engine.stage_split import describe_split, layer_costs, split_by_cost, stage_costs, stage_rank
from engine.yaml_file import dump_yaml

pytestmark = pytest.mark.unit

MODEL: dict[str, Any] = {
    "num_layers": 9, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 64,
    "vocab_size": 400,
}  # fmt: skip
MOE = {"num_experts": 4, "experts_per_token": 2, "ffn_size": 96, "num_dense_layers": 2, "layer_period": 2}
LENGTH = 64
V = {"schedule": "zbv", "virtual_stages": 2}
INTERLEAVED = {"schedule": "interleaved_1f1b", "virtual_stages": 2}


@pytest.mark.parametrize("model", [{}, {"moe": MOE}, {"vocab_size": 5000}], ids=["dense", "moe", "vocabulary"])
@pytest.mark.parametrize("plan", [{"pp": 4}, {"pp": 2, **V}, {"pp": 3, **V}, {"pp": 2, **INTERLEAVED}], ids=str)
def test_no_other_split_has_a_less_busy_rank(model: dict[str, Any], plan: dict[str, Any]) -> None:
    spec, plan_ = ModelSpec(**(MODEL | model)), Plan(**plan)
    costs = layer_costs(spec, plan_, LENGTH)

    def busiest(sizes: tuple[int, ...]) -> float:
        ranks = [0.0] * plan_.pp
        for stage, cost in enumerate(stage_costs(costs, sizes)):
            ranks[stage_rank(plan_, stage)] += cost
        return max(ranks)

    chosen = split_by_cost(spec, plan_, LENGTH)
    assert sum(chosen) == spec.num_layers
    inner = combinations(range(1, spec.num_layers), plan_.num_stages - 1)
    all_splits = [tuple(end - start for start, end in zip((0, *i), (*i, spec.num_layers), strict=True)) for i in inner]
    assert busiest(chosen) == pytest.approx(min(map(busiest, all_splits)), rel=1e-12)


def test_many_splits_are_close_to_the_mean() -> None:
    spec = ModelSpec(**(MODEL | {"num_layers": 61, "moe": MOE | {"num_dense_layers": 3}}))
    plan = Plan(pp=8, **V)
    costs = layer_costs(spec, plan, LENGTH)
    ranks = [0.0] * 8
    for stage, cost in enumerate(stage_costs(costs, split_by_cost(spec, plan, LENGTH))):
        ranks[stage_rank(plan, stage)] += cost
    assert max(ranks) <= sum(ranks) / 8 + max(costs) / 2, "no rank is above the mean by more than half a layer"


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_costs_are_the_flops_of_the_whole_model_and_its_ends(recompute: str) -> None:
    spec = ModelSpec(**(MODEL | {"moe": MOE}))
    costs = layer_costs(spec, Plan(pp=2, recompute=recompute), LENGTH)  # type: ignore[arg-type]
    flops = training_flops_per_token(spec, LENGTH) + recomputed_flops_per_token(spec, LENGTH, recompute)
    assert sum(costs) == pytest.approx(flops + spec.hidden_size + 4 * spec.vocab_size, rel=1e-12)


def test_a_head_that_is_not_split_weighs_more() -> None:
    spec = ModelSpec(**(MODEL | {"vocab_size": 2000}))
    whole = split_by_cost(spec, Plan(pp=2, tp=4, vocab_parallel=False), LENGTH)
    assert whole[-1] < split_by_cost(spec, Plan(pp=2, tp=4), LENGTH)[-1] < spec.num_layers // 2


def run_file(folder: Path, plan: dict[str, Any]) -> Path:
    path = folder / "run.yaml"
    data = {"model": MODEL, "workload": {"sequence_length": LENGTH, "total_tokens": 4096}, "plan": plan}
    path.write_text(dump_yaml(data | {"hyperparameters": {"global_batch_size": 8}}))
    return path


def test_a_run_file_says_by_cost_and_is_told_the_layers(tmp_path: Path) -> None:
    config, notes = load_run(run_file(tmp_path, {"pp": 2, "layers_per_stage": "by_cost"}))
    assert config.plan.layers_per_stage == split_by_cost(config.model, config.plan, LENGTH)
    assert notes == [f"layers_per_stage by_cost is {list(config.plan.layers_per_stage or ())}"]
    told = describe_split(config.model, config.plan, LENGTH)
    assert told.count("%") == 2
    explicit, notes = load_run(run_file(tmp_path, {"pp": 2, "layers_per_stage": [8, 1]}))
    assert (explicit.plan.layers_per_stage, notes) == ((8, 1), [])


def test_more_stages_than_layers_are_told_by_the_rule(tmp_path: Path) -> None:
    config, _ = load_run(run_file(tmp_path, {"pp": 16, "layers_per_stage": "by_cost"}))
    with pytest.raises(RuleError, match="16 stages for 9 layers"):
        check_run(config)


def test_another_word_for_layers_is_refused_with_what_may_stand_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be a list of layers or by_cost, got 'even'") as refused:
        load_run(run_file(tmp_path, {"pp": 2, "layers_per_stage": "even"}))
    assert "leave it out for an even split" in str(refused.value.hint)
