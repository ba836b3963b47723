"""Space files: every form, composition, conditions, candidates, and mistakes with their line."""

from pathlib import Path

import numpy as np
import pytest

from autotune.space.grammar import load_space
from autotune.space.layers import shipped_spaces
from autotune.space.training import MESH
from autotune.specs.cluster import parse_cluster
from engine.errors import UserError
from engine.plan import Plan
from engine.yaml_file import dump_yaml

pytestmark = pytest.mark.unit

BASE = """\
use: [tiny_llama]
cluster: h100x4:1
objectives: [speed, quality]
space:
  plan:
    tp: {divisors_of: devices}
    pp: [1, 2]
    dp_shard: [1, 2, 4]
    zero_stage: [2, 3]
    micro_batch_size: [1, 2, 64]
  hyperparameters:
    global_batch_size: [16, 4k-tokens]
    learning_rate: {log_float: [1e-4, 1e-2]}
    schedule: [cosine, wsd]
    decay_ratio: {float: [0.1, 0.5], when: hyperparameters.learning_rate > 1e-3}
  constraints:
    - plan.world_size == devices
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    return path


def test_parallel_degrees_become_one_dimension_of_legal_meshes(tmp_path) -> None:
    space, enumeration = load_space(write(tmp_path, BASE))
    mesh = space.dimensions[0]
    assert mesh.name == MESH
    # Of two key and value heads each is held by two of four tensor ranks.
    assert set(mesh.values) == {"dp4", "dp2-tp2", "dp2-pp2", "tp2-pp2", "tp4"}
    assert enumeration.num_combinations == 3 * 2 * 3 * 2 * 3 * 2
    assert enumeration.removed["constraint: plan.world_size == devices"] > 0
    assert enumeration.removed["redundant"] > 0
    assert set(np.unique(enumeration.table["micro_batch_size"])) == {1, 2}


def test_every_enumerated_mesh_gives_a_candidate_and_every_refusal_names_its_rule(tmp_path) -> None:
    space, _ = load_space(write(tmp_path, BASE))
    chosen = {MESH: "dp2-tp2", "plan.micro_batch_size": 2, "hyperparameters.global_batch_size": 16}
    chosen |= {"hyperparameters.learning_rate": 5e-3, "hyperparameters.schedule": "wsd"}
    run = space.candidate({**chosen, "hyperparameters.decay_ratio": 0.3, "plan.zero_stage": 2}).run
    assert run is not None
    assert (run.plan.tp, run.plan.dp_shard, run.plan.zero_stage) == (2, 2, 2)
    assert run.hyperparameters.decay_ratio == 0.3
    assert run.hyperparameters.global_batch_size == 16
    assert space.candidate({**chosen, "plan.micro_batch_size": 64}).rule == "batch.divides"
    assert space.candidate({**chosen, MESH: "dp3"}).rule == "value"
    assert space.candidate({**chosen, "hyperparameters.learning_rate": 1.0}).rule == "value"


def test_a_value_without_effect_is_not_searched(tmp_path) -> None:
    space, _ = load_space(write(tmp_path, BASE))
    by_name = {dimension.name: dimension for dimension in space.dimensions}
    zero, decay = by_name["plan.zero_stage"], by_name["hyperparameters.decay_ratio"]
    assert space.is_active(zero, {MESH: "dp4"})
    assert not space.is_active(zero, {MESH: "tp2-pp2"})
    wsd = {"hyperparameters.schedule": "wsd", "hyperparameters.learning_rate": 5e-3}
    assert space.is_active(decay, wsd)
    assert not space.is_active(decay, {**wsd, "hyperparameters.learning_rate": 5e-4})
    assert not space.is_active(decay, {**wsd, "hyperparameters.schedule": "cosine"})


def test_a_single_value_with_a_condition_holds_only_there(tmp_path) -> None:
    text = BASE.replace(
        "schedule: [cosine, wsd]", "dropout: {values: [0.1], when: hyperparameters.learning_rate > 1e-3}"
    )
    space, _ = load_space(
        write(
            tmp_path,
            text.replace("    decay_ratio: {float: [0.1, 0.5], when: hyperparameters.learning_rate > 1e-3}\n", ""),
        )
    )
    dropout = next(d for d in space.dimensions if d.name == "hyperparameters.dropout")
    assert space.is_active(dropout, {"hyperparameters.learning_rate": 5e-3})
    assert not space.is_active(dropout, {"hyperparameters.learning_rate": 5e-4})
    assert "hyperparameters.dropout" not in space.fixed


def test_the_base_of_a_parametrization_is_searched_under_mup_alone(tmp_path) -> None:
    added = "schedule: [cosine, wsd]\n    parametrization: [standard, mup]\n    base_hidden_size: [32, 64]"
    space, _ = load_space(write(tmp_path, BASE.replace("schedule: [cosine, wsd]", added)))
    base = next(d for d in space.dimensions if d.name == "hyperparameters.base_hidden_size")
    assert space.is_active(base, {"hyperparameters.parametrization": "mup"})
    assert not space.is_active(base, {"hyperparameters.parametrization": "standard"})


def test_own_constraints_refuse_candidates(tmp_path) -> None:
    text = BASE + "    - hyperparameters.learning_rate * hyperparameters.global_batch_size < 0.1\n"
    space, _ = load_space(write(tmp_path, text))
    chosen = {MESH: "dp4", "plan.micro_batch_size": 1, "plan.zero_stage": 3, "hyperparameters.schedule": "cosine"}
    chosen |= {"hyperparameters.global_batch_size": 32, "hyperparameters.learning_rate": 9e-3}
    assert space.candidate(chosen).rule == "constraint"
    assert space.candidate({**chosen, "hyperparameters.learning_rate": 1e-3}).run is not None


@pytest.mark.parametrize(
    "condition", ["learning_rate * hyperparameters.global_batch_size < 0.02", "learning_rate < 5e-4"]
)
def test_a_constraint_on_what_is_not_enumerated_is_left_to_each_candidate(tmp_path, condition: str) -> None:
    _, free = load_space(write(tmp_path, BASE))
    space, enumeration = load_space(write(tmp_path, BASE + f"    - hyperparameters.{condition}\n"))
    assert enumeration.num_legal == free.num_legal  # neither is true of the default rate at the largest batch
    chosen = {MESH: "dp4", "plan.micro_batch_size": 1, "plan.zero_stage": 3, "hyperparameters.schedule": "cosine"}
    chosen |= {"hyperparameters.global_batch_size": 32}
    assert space.candidate({**chosen, "hyperparameters.learning_rate": 3e-4}).is_legal
    assert space.candidate({**chosen, "hyperparameters.learning_rate": 9e-3}).rule == "constraint"


def test_the_resolved_data_is_a_space_file_of_the_same_space(tmp_path) -> None:
    space, _ = load_space(write(tmp_path, BASE))
    (tmp_path / "resolved.yaml").write_text(dump_yaml(space.data))
    again, _ = load_space(tmp_path / "resolved.yaml")
    assert again.data == space.data
    assert again.dimensions == space.dimensions


def test_later_files_and_overrides_win(tmp_path) -> None:
    (tmp_path / "below.yaml").write_text(
        "space: {plan: {tp: [1, 2, 4], micro_batch_size: [1, 2]}}\nbudget: {trials: 3}\n"
    )
    text = "use: [tiny_llama, below.yaml]\ncluster: cpu:2\nspace: {plan: {tp: {divisors_of: 2}}}\n"
    space, _ = load_space(write(tmp_path, text), ["budget.trials=7", "workload.total_tokens=1M"])
    assert {dimension.name for dimension in space.dimensions} == {MESH, "plan.micro_batch_size"}
    assert set(space.meshes) == {"single", "tp2"}
    assert (space.budget.trials, space.workload.total_tokens) == (7, 1_000_000)


@pytest.mark.parametrize("name", shipped_spaces())
def test_shipped_spaces_load(tmp_path, name: str) -> None:
    needed = "" if name in ("demo", "tiny_llama") else "tiny_llama, "
    text = f"use: [{needed}{name}]\ncluster: cpu:2\nspace: {{hyperparameters: {{weight_decay: [0.0, 0.1]}}}}\n"
    space, enumeration = load_space(write(tmp_path, text))
    assert enumeration.num_legal >= 1
    assert space.dimensions


def test_paths_are_relative_to_the_file_that_names_them(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("base", "elsewhere"):
        (tmp_path / folder / "corpus").mkdir(parents=True)
    (tmp_path / "base" / "machine.yaml").write_text(dump_yaml(parse_cluster("h100x4").to_data()))
    (tmp_path / "base" / "base.yaml").write_text("cluster: machine.yaml\nworkload: {data: {paths: [corpus]}}\n")
    text = BASE.replace("cluster: h100x4:1\n", "").replace("[tiny_llama]", "[tiny_llama, base/base.yaml]")
    space, _ = load_space(write(tmp_path, text))
    assert space.cluster.device_kind == "h100"
    assert space.workload.data.paths == (str(tmp_path / "base" / "corpus"),)
    monkeypatch.chdir(tmp_path / "elsewhere")
    space, _ = load_space(tmp_path / "space.yaml", ["workload.data.paths=[corpus]"])
    assert space.workload.data.paths == (str(tmp_path / "elsewhere" / "corpus"),)


def test_relative_files_are_found_beside_the_space(tmp_path) -> None:
    (tmp_path / "corpus").mkdir()
    text = BASE + "workload: {data: {paths: [corpus], tokenizer: bytes}}\n"
    space, _ = load_space(write(tmp_path, text))
    assert space.workload.data.paths == (str(tmp_path / "corpus"),)


@pytest.mark.parametrize(
    ("old", "new", "message", "line"),
    [
        ("tp: {divisors_of: devices}", "tpp: [1]", "unknown key 'space.plan.tpp'", 6),
        ("pp: [1, 2]", "pp: [1, two]", "must be a valid integer, got 'two'", 7),
        ("pp: [1, 2]", "pp: [0, 2]", "greater than or equal to 1, got 0", 7),
        ("pp: [1, 2]", "pp: [2, 2]", "a value twice", 7),
        ("pp: [1, 2]", "pp: {range: [1, 2]}", "unknown key 'space.plan.pp.range'", 7),
        ("pp: [1, 2]", "pp: {int: [1, 2], values: [1]}", "needs one of", 7),
        ("pp: [1, 2]", "pp: {values: [1, 2], when: devices > 1}", "can't have a condition", 7),
        ("pp: [1, 2]", "pp: {float: [1, 2]}", "whole number", 7),
        ("pp: [1, 2]", "pp: {int: [2, 1]}", "low < high", 7),
        ("pp: [1, 2]", "pp: {int: [1, 2], step: 0}", "step", 7),
        ("[1e-4, 1e-2]", "[0.0, 1e-2]", "must be greater than 0, got 0.0", 13),
        ("log_float: [1e-4, 1e-2]", "log_float: 3", "must be \\[low, high\\]", 13),
        ("when: hyperparameters.learning_rate", "when: hyperparameters.lr", "unknown name", 15),
        ("{divisors_of: devices}", "{divisors_of: gpus}", "divisors_of", 6),
        ("schedule: [cosine, wsd]", "schedule: [cosine, linear]", "'wsd'", 14),
        ("- plan.world_size == devices", "- plan.world_size = devices", "not a condition", 17),
        ("objectives: [speed, quality]", "objectives: [speed, accuracy]", "choose from speed, memory", 3),
        ("objectives: [speed, quality]", "objectives: []", "must be a list", 3),
        ("objectives: [speed, quality]", "objectives: [speed, speed]", "stands twice", 3),
        ("cluster: h100x4:1", "cluster: h1000x8", "h1000", 2),
        ("cluster: h100x4:1", "budjet: {trials: 3}", "unknown key 'budjet'", 2),
        ("cluster: h100x4:1", "budget: {trials: 0}", "trials", 2),
        (
            "cluster: h100x4:1\nobjectives: [speed, quality]",
            "cluster: cpu:1\nobjectives: [memory]\nruntime: {measure_memory: false}",
            "needs runtime.measure_memory",
            4,
        ),
        ("cluster: h100x4:1", "runtime: {device: cuda}", "decided by 'cluster'", 2),
        ("cluster: h100x4:1", "runtime: {stop_after_steps: 3}", "decided by 'workload.total_tokens'", 2),
        ("cluster: h100x4:1", "limits: {time: soon}", "limits.time", 2),
        ("use: [tiny_llama]", "use: [tiny_lama]", "tiny_lama", 1),
        ("use: [tiny_llama]", "use: tiny_llama", "must be a list", 1),
        ("use: [tiny_llama]", "use: [space.yaml]", "circle", 1),
        ("plan.world_size == devices", "plan.world_size > 100", "none of the", 4),
        ("plan.world_size == devices", "plan.recompute < 3", "can't be computed", 17),
        ("use: [tiny_llama]", "use: []", "'model' is missing", 1),
    ],
)
def test_mistakes_name_their_line(tmp_path, old: str, new: str, message: str, line: int) -> None:
    assert old in BASE
    with pytest.raises(UserError, match=message) as error:
        load_space(write(tmp_path, BASE.replace(old, new, 1)))
    assert error.value.where is not None
    assert error.value.where.endswith(f"space.yaml:{line}"), error.value.where
    assert error.value.hint


def test_conditions_in_a_circle_are_refused(tmp_path) -> None:
    text = BASE.replace(
        "schedule: [cosine, wsd]", "schedule: {values: [cosine, wsd], when: hyperparameters.beta1 > 0.5}"
    )
    text = text.replace(
        "  constraints:", "    beta1: {float: [0, 0.9], when: hyperparameters.schedule == 'wsd'}\n  constraints:"
    )
    with pytest.raises(UserError, match="in a circle"):
        load_space(write(tmp_path, text))


def test_a_space_of_too_many_combinations_says_which_values_make_it(tmp_path) -> None:
    wide = "micro_batch_size: {int: [1, 4000]}"
    text = BASE.replace("micro_batch_size: [1, 2, 64]", wide).replace("[16, 4k-tokens]", "{int: [1, 4000]}")
    with pytest.raises(UserError, match="micro_batch_size 4000"):
        load_space(write(tmp_path, text))


def test_the_enumeration_equals_the_candidates_one_by_one(tmp_path) -> None:
    space, enumeration = load_space(write(tmp_path, BASE))
    legal = set()
    for mesh in space.meshes:
        for micro_batch in (1, 2, 64):
            for batch in (16, 32):
                for zero in (2, 3):
                    chosen = {
                        MESH: mesh,
                        "plan.micro_batch_size": micro_batch,
                        "hyperparameters.global_batch_size": batch,
                    }
                    chosen |= {"hyperparameters.learning_rate": 1e-3, "hyperparameters.schedule": "cosine"}
                    if "dp" in mesh:
                        chosen["plan.zero_stage"] = zero
                    run = space.candidate(chosen).run
                    if run is not None:
                        legal.add((run.plan, run.hyperparameters.global_batch_size))
    assert len(legal) == enumeration.num_legal
    rows = zip(
        *(enumeration.table[key] for key in ("tp", "pp", "dp_shard", "zero_stage", "micro_batch_size")), strict=True
    )
    plans = {
        Plan(**dict(zip(("tp", "pp", "dp_shard", "zero_stage", "micro_batch_size"), map(int, row), strict=True)))
        for row in rows
    }
    assert plans == {plan for plan, _ in legal}
