"""Our own file formats: round trips, strictness, and messages that name the place, the value and the way out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import RunConfig, dump_run, load_run
from engine.errors import UserError
from engine.plan import Plan, plan_table
from engine.schema import parse
from engine.spec import Hyperparameters, ModelSpec, MoESpec, Workload
from engine.yaml_file import dump_yaml, parse_yaml

pytestmark = pytest.mark.unit

MODEL = {
    "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "ffn_size": 128, "vocab_size": 264,
}  # fmt: skip


def make_run(**sections: object) -> RunConfig:
    data = {"model": MODEL, "workload": {"sequence_length": 64, "total_tokens": 10_000}, **sections}
    return parse(RunConfig, data)


@given(
    learning_rate=st.floats(1e-6, 1.0),
    tp=st.integers(1, 8),
    recompute=st.sampled_from(["none", "full", "every_k"]),
    stages=st.one_of(st.none(), st.just([1, 3])),
)
def test_a_run_file_reads_back_equal(
    learning_rate: float, tp: int, recompute: str, stages: list[int] | None, tmp_path_factory
) -> None:
    plan = {"tp": tp, "recompute": recompute, "layers_per_stage": stages, "pp": 2 if stages else 1}
    run = make_run(hyperparameters={"learning_rate": learning_rate}, plan=plan)
    path = tmp_path_factory.mktemp("run") / "run.yaml"
    path.write_text(dump_run(run))
    assert load_run(path) == (run, [])


@pytest.mark.parametrize(
    ("change", "message", "hint"),
    [
        ({"modl": {}}, "unknown key 'modl'", "did you mean 'model'"),
        ({"plan": {"dp": 2}}, "unknown key 'plan.dp'", "write dp_shard"),
        ({"plan": {"tpp": 2}}, "unknown key 'plan.tpp'", "did you mean"),
        ({"plan": {"tp": 0}}, "'plan.tp': must be greater than or equal to 1, got 0", ""),
        ({"plan": {"tp": 2**70}}, "'plan.tp': must be less than or equal to 1000000000000000", ""),
        ({"plan": {"tp": "2"}}, "'plan.tp': must be a valid integer, got '2'", ""),
        ({"plan": {"sequence_parallel": "on"}}, "got 'on'", "true or false"),
        ({"plan": {"precision": "fp31"}}, "'fp64', 'fp32', 'bf16'", ""),
        ({"hyperparameters": {"learning_rate": -1.0}}, "greater than 0, got -1.0", ""),
        ({"hyperparameters": {"warmup_ratio": 0.9, "schedule": "wsd"}}, "exceed the whole run", ""),
        ({"model": {**MODEL, "num_kv_heads": 3}}, "num_kv_heads 3 must divide num_heads 4", ""),
        (
            {"model": {**MODEL, "sliding_window": 8, "sliding_layers": [0, 4]}},
            "sliding_layers names layer 4, layers are",
            "",
        ),
        ({"workload": {"sequence_length": 64}}, "'workload.total_tokens' is missing", "add 'total_tokens'"),
        ({"plan": 3}, "plan", ""),
        ({"plan": {"layers_per_stage": 3}}, "'plan.layers_per_stage': must be a list, got 3", ""),
        ({"runtime": {"refresh_topology": True}}, "plan.all_reduce topology, which is native here", ""),
    ],
)
def test_mistakes_are_told_with_what_was_given_and_what_is_allowed(change: dict, message: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        make_run(**change)
    assert message in error.value.message
    assert hint in str(error.value.hint)


def test_a_check_of_the_whole_file_names_no_class() -> None:
    with pytest.raises(UserError, match=r"^hyperparameters\.router_z_loss_coefficient is for mixtures of experts"):
        make_run(hyperparameters={"router_z_loss_coefficient": 0.1})


def test_the_line_of_a_wrong_value_is_named() -> None:
    document = parse_yaml("sequence_length: 64\ntotal_tokens: -5\n", "w.yaml")
    with pytest.raises(UserError) as error:
        parse(Workload, document.data, document=document)
    assert error.value.where == "w.yaml:2"


def test_batches_in_tokens_are_rounded_to_a_legal_value_and_said(tmp_path) -> None:
    path = tmp_path / "run.yaml"
    text = dump_run(make_run(plan={"dp_shard": 2, "micro_batch_size": 2}))
    path.write_text(text.replace("global_batch_size: 32", "global_batch_size: 1k-tokens"))
    run, notes = load_run(path)
    assert run.hyperparameters.global_batch_size == 16
    assert "15.625 sequences" in notes[0]


def test_relative_paths_are_taken_from_the_files_folder(tmp_path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(dump_run(make_run()).replace("- python-stdlib", "- corpus\n    - python-stdlib"))
    assert load_run(path)[0].workload.data.paths == (str(tmp_path / "corpus"), "python-stdlib")
    branch = {"checkpoint": "old/step-1", "num_steps": 1, "learning_rate_scale": 1.0}
    path.write_text(dump_run(make_run(branch=branch, runtime={"init_from": "weights"})))
    run = load_run(path)[0]
    assert (run.branch.checkpoint, run.runtime.init_from) == (str(tmp_path / "old/step-1"), str(tmp_path / "weights"))


def test_a_model_is_found_beside_the_file_or_at_home(tmp_path, monkeypatch) -> None:
    run = make_run()
    (tmp_path / "model.yaml").write_text(dump_yaml(run.model.to_data()))
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "runs" / "run.yaml"
    path.parent.mkdir()
    for name in ("../model.yaml", "~/model.yaml"):
        path.write_text(dump_yaml(run.to_data() | {"model": name}))
        assert load_run(path)[0].model == run.model


def test_a_changed_copy_is_validated() -> None:
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Plan().changed(tp=0)


def test_plan_degrees_and_words() -> None:
    plan = Plan(tp=2, pp=4, dp_replicate=2, dp_shard=3, cp=1, ep=2, virtual_stages=2)
    assert (plan.dp, plan.world_size, plan.num_stages, plan.edp) == (6, 48, 8, 6)
    assert plan.mesh == "dpr2-dp3-tp2-pp4-vp2-ep2"
    assert Plan().mesh == "single"
    assert [len(layers) for layers in Plan(pp=4).stage_layers(10)] == [3, 3, 2, 2]
    assert Plan(pp=2, layers_per_stage=(1, 3)).stage_layers(4) == [range(1), range(1, 4)]


def test_plan_tables_hold_every_field() -> None:
    table = plan_table([(Plan(), 8, 64), (Plan(tp=2, pp=2, layers_per_stage=(1, 1)), 16, 64)])
    assert set(table) == {*Plan.model_fields, "global_batch_size", "sequence_length"}
    assert table["tp"].tolist() == [1, 2]
    assert table["layers_per_stage"][1] == (1, 1)
    assert len(plan_table([])["tp"]) == 0


def test_moe_layers_follow_the_dense_ones() -> None:
    moe = MoESpec(num_experts=4, experts_per_token=2, ffn_size=8, num_dense_layers=1, layer_period=2)
    spec = ModelSpec(**{**MODEL, "num_layers": 6}, moe=moe)
    assert [layer for layer in range(6) if spec.is_moe_layer(layer)] == [2, 4]


def test_every_field_of_a_file_format_is_documented() -> None:
    for schema in (RunConfig, Plan, Hyperparameters, ModelSpec, Workload, MoESpec):
        undocumented = [name for name, field in schema.model_fields.items() if not field.description]
        assert not undocumented, f"{schema.__name__}: {undocumented}"
