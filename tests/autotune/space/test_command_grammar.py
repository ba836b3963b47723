"""Spaces of a user's own program: the file, the command's placeholders, and mistakes with their line."""

from pathlib import Path
from typing import Any

import pytest

from autotune.space.command import CommandSpace
from autotune.space.command_grammar import command_space, load_command_space, space_of_data
from autotune.space.program import Template
from engine.errors import UserError

pytestmark = pytest.mark.unit

FILE = """\
command: python train.py --lr={lr} --batch {batch} --opt '{opt}' --momentum {momentum} --seed {seed}
cluster: cpu:2
objectives:
  - {name: loss, direction: minimize, bound: 3}
  - {name: accuracy, direction: maximize}
space:
  lr: {log_float: [1e-4, 1e-2]}
  batch: {int: [8, 32], step: 8}
  opt: [sgd, adam]
  momentum: {float: [0, 0.99], when: opt == 'sgd', default: 0}
  layers: 4
constraints:
  - lr * batch < 0.2
devices: batch // 16
budget: {trials: 20, time: 10m}
limits: {time: 90s, memory: 1GiB}
task:
  num_parameters: 1000000
  roles: {learning_rate: lr, quality: loss}
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def space(tmp_path: Path) -> CommandSpace:
    return load_command_space(write(tmp_path, FILE))


def test_every_section_is_read(space: CommandSpace, tmp_path: Path) -> None:
    assert [d.name for d in space.dimensions] == ["lr", "batch", "opt", "momentum"]
    assert space.fixed == {"layers": 4, "momentum": 0}
    assert [(o.name, o.direction, o.bound) for o in space.objectives] == [
        ("loss", "minimize", 3.0),
        ("accuracy", "maximize", None),
    ]
    assert (space.budget.trials, space.budget.seconds) == (20, 600.0)
    assert (space.limits.seconds, space.limits.memory_bytes) == (90.0, 2**30)
    assert (space.name, space.folder) == ("space", tmp_path)
    assert (space.task, space.roles) == (
        {"num_parameters": 1000000},
        {"learning_rate": "lr", "quality": "loss"},
    )


def test_values_are_put_into_arguments_whatever_they_contain() -> None:
    template = Template.parse("run 'a {x}' --x={x} {{x}} \"{x}\"")
    assert template.filled({"x": "1; rm 'b' $HOME"}) == [
        "run",
        "a 1; rm 'b' $HOME",
        "--x=1; rm 'b' $HOME",
        "{x}",
        "1; rm 'b' $HOME",
    ]


def test_numbers_read_back_equal_and_defaults_stand_where_nothing_is_searched(space: CommandSpace) -> None:
    program = space.program({"lr": 1 / 3000, "batch": 16, "opt": "adam"}, 7)
    assert program is not None
    arguments = program.arguments(Path("trial"))
    assert float(arguments[2].removeprefix("--lr=")) == 1 / 3000
    assert arguments[3:] == ["--batch", "16", "--opt", "adam", "--momentum", "0", "--seed", "7"]
    assert program.num_devices == 1


def test_candidates_obey_constraints_and_devices(space: CommandSpace) -> None:
    good = {"lr": 1e-3, "batch": 16, "opt": "adam"}
    assert space.candidate(good).is_legal
    assert space.candidate(good).label == "lr=0.001 batch=16 opt=adam"
    assert space.candidate({**good, "lr": 1e-2, "batch": 32}).rule == "constraint"
    assert space.candidate({**good, "batch": 8}).rule == "devices"
    assert space.candidate({**good, "batch": 9}).rule == "value"
    assert space.candidate({**good, "batch": 24}).is_legal


@pytest.mark.parametrize("devices", ["opt", "batch / 32", "batch / 0", "-batch"])
def test_what_is_no_number_of_devices_refuses_a_candidate(tmp_path: Path, devices: str) -> None:
    space = load_command_space(write(tmp_path, FILE.replace("devices: batch // 16", f"devices: {devices}")))
    assert space.candidate({"lr": 1e-3, "batch": 16, "opt": "adam"}).rule == "devices"


def test_a_study_keeps_what_the_space_is_made_from(space: CommandSpace) -> None:
    again = space_of_data(space.data, "space")
    assert again.data == space.data
    assert again.dimensions == space.dimensions
    assert again.template == space.template


def test_a_space_may_stand_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["command=run {lr}", "space.lr={log_float: [1e-4, 1e-2]}", "objectives.loss=minimize"]
    space = load_command_space(None, given)
    assert (space.folder, space.objectives[0].name) == (tmp_path, "loss")


def test_overrides_and_used_files_replace_whole_values(tmp_path: Path) -> None:
    write(tmp_path, FILE)
    other = tmp_path / "other.yaml"
    other.write_text("use: [space.yaml]\nspace:\n  lr: [0.001, 0.002]\n")
    space = load_command_space(other, ["space.batch=16"])
    assert [d.name for d in space.dimensions] == ["lr", "opt", "momentum"]
    assert space.dimensions[0].values == (0.001, 0.002)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("--lr={lr}", "--lr={rl}", 1, "unknown placeholder {rl}"),
        ("--lr={lr} ", "", 7, "'lr' is searched but stands nowhere in the command"),
        ("'{opt}'", "'{opt}", 1, "can't be split"),
        (", default: 0", "", 10, "give it a 'default'"),
        ("  layers: 4", "  seed: 4", 11, "given by the sweep"),
        ("  layers: 4", "  layers: [4, [5]]", 11, "no plain value"),
        ("{int: [8, 32], step: 8}", "{int: [32, 8]}", 8, "low < high"),
        ("{int: [8, 32], step: 8}", "{integer: [8, 32]}", 8, "did you mean 'int'?"),
        ("{int: [8, 32], step: 8}", "{log_int: [8, 32], step: 8}", 8, "'step' goes with 'int' only"),
        ("{int: [8, 32], step: 8}", "{log_int: [0, 32]}", 8, "0 < low < high"),
        ("{int: [8, 32], step: 8}", "{log_int: [1.5, 32]}", 8, "is a range of whole numbers, got 1.5"),
        ("{int: [8, 32], step: 8}", "{log_int: [8.0, 32]}", 8, "write 8"),
        ("{int: [8, 32], step: 8}", "{log_int: [1k, 4k]}", 8, "a range of numbers, got '1k'"),
        ("{int: [8, 32], step: 8}", "log_int(8, 32)", 8, "write {log_int: [8, 32]}"),
        ("{int: [8, 32], step: 8}", "int(8, 64, step=8)", 8, "write {int: [8, 64], step: 8}"),
        ("direction: maximize", "bound: 1", 5, "needs a direction"),
        ("direction: maximize", "direction: up", 5, "got 'up'"),
        ("lr * batch", "lr * bath", 13, "did you mean 'batch'?"),
        ("memory: 1GiB", "heartbeat: 5s", 16, "unknown key 'limits.heartbeat'"),
        ("learning_rate: lr", "learning_rate: lrr", 19, "did you mean 'lr'?"),
        ("learning_rate: lr", "learning_rate: [lr]", 19, "nothing is called ['lr']"),
        ("quality: loss", "quality: lr", 17, "no objective is its held-out loss"),
        ("{name: loss, direction", "{name: failure, direction", 4, "says by 'failure' how it failed"),
        ("budget:", "buget:", 15, "did you mean 'budget'?"),
    ],
)
def test_mistakes_are_told_with_their_line(tmp_path: Path, old: str, new: str, line: int, words: str) -> None:
    path = write(tmp_path, FILE.replace(old, new))
    with pytest.raises(UserError) as error:
        load_command_space(path)
    assert f"space.yaml:{line}" in str(error.value)
    assert words in str(error.value)


def test_conditions_do_not_read_what_may_be_absent() -> None:
    space: dict[str, Any] = {"a": [1, 2], "b": {"values": [1, 2], "when": "a == 1"}}
    assert not command_space(space, {"loss": "minimize"}).fixed
    with pytest.raises(UserError, match="not always searched"):
        command_space({**space, "c": {"values": [1, 2], "when": "b == 1"}}, {"loss": "minimize"})
    with pytest.raises(UserError, match="not always searched"):
        command_space(space, {"loss": "minimize"}, constraints=["a + b < 4"])


def test_a_file_without_a_command_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no command to run"):
        load_command_space(write(tmp_path, "objectives: {loss: minimize}\nspace: {x: [1, 2]}\n"))


def test_a_task_may_be_written_with_quantities(tmp_path: Path) -> None:
    task = "  num_parameters: 100M\n  total_tokens: 2B\n  sequence_length: 2k\n"
    space = load_command_space(write(tmp_path, FILE.replace("  num_parameters: 1000000\n", task)))
    assert space.task == {"num_parameters": 10**8, "total_tokens": 2 * 10**9, "sequence_length": 2000}
    assert space.names({})["sequence_length"] == 2000


@pytest.mark.parametrize(
    ("written", "right"),
    [
        ("0..1", "{int: [0, 1]}"),
        ("0.0 .. 1.5", "{float: [0.0, 1.5]}"),
        ("1e-4...1e-1", "{float: [1e-4, 1e-1]}"),
        ("-1 to 1", "{int: [-1, 1]}"),
        ((0.0, 1.0), "{float: [0.0, 1.0]}"),
        ((1, 8), "{int: [1, 8]}"),
    ],
)
def test_a_range_in_other_words_is_no_value_and_the_right_form_is_told(written: Any, right: str) -> None:
    with pytest.raises(UserError) as error:
        command_space({"x": written, "y": [1, 2]}, {"loss": "minimize"})
    assert "'x'" in error.value.message
    assert right in str(error.value)


def test_words_and_tuples_that_are_no_ranges_stay_values() -> None:
    space = command_space({"x": "1.5", "y": ("a", "b"), "z": (1, 2, 4), "w": "from 1 to 2"}, {"loss": "minimize"})
    assert space.fixed == {"x": "1.5", "w": "from 1 to 2"}
    assert [dimension.values for dimension in space.dimensions] == [("a", "b"), (1, 2, 4)]


def test_what_stands_in_no_file_is_named_once() -> None:
    with pytest.raises(UserError) as error:
        command_space({"y": [1, 2]}, {"loss": "down"})
    assert str(error.value).count("objectives.loss.direction") == 1


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("on", "needs 'of'"),
        ("3", "must be a mapping"),
        ("[0.25, 1]", "needs 'of'"),
        ("{of: [layers]}", "nothing is called ['layers']"),
        ("{of: layer}", "did you mean 'layers'?"),
        ("{of: batch}", "give it one positive number"),
        ("{of: layers, rungs: [0.5, 1]}", "'layers' stands nowhere in the command"),
        ("{of: layers, min: 0.5}", "no rung lies between 'min' 0.5 and 1: take 'min' up to 0.333"),
        ("{of: layers, rungs: [2, 4]}", "'rungs' are shares of a full training"),
        ("{of: layers, min: 0.1}", "rungs come to the same layers: 1, 1, 4"),
        ("{of: layers, widths: [0.5, 1], rungs: [0.5, 1]}", "for training runs of the engine"),
        ("{of: layers, resume: true}", "resume"),
    ],
)
def test_mistakes_in_how_trials_grow_are_told(tmp_path: Path, written: str, words: str) -> None:
    path = write(tmp_path, FILE.replace("budget:", f"fidelity: {written}\nbudget:"))
    with pytest.raises(UserError) as error:
        load_command_space(path)
    assert "space.yaml:15" in str(error.value)
    assert words in str(error.value)


def test_a_value_of_the_space_says_how_far_a_rung_trains(tmp_path: Path) -> None:
    grows = FILE.replace("layers: 4", "layers: 4\n  hours: 0.5").replace(
        "--seed", "--layers {layers} -t {hours} --seed"
    )
    chosen = {"lr": 1e-3, "batch": 16, "opt": "adam"}
    for of, lengths, texts in (("layers", [1, 4], ["1", "4"]), ("hours", [0.125, 0.5], ["0.125", "0.5"])):
        path = write(tmp_path, f"{grows}fidelity: {{of: {of}, rungs: [0.25, 1]}}\n")
        space = load_command_space(path)
        assert [space.grown(rung)[of] for rung in range(2)] == lengths
        programs = [space.program(chosen, 7, space.grown(rung)) for rung in range(2)]
        assert [program.texts[of] for program in programs if program] == texts
        whole = space.program(chosen, 7)
        assert whole is not None
        assert whole.texts[of] == texts[-1]
        assert space.fidelity is not None
        assert [space.fidelity.cost(rung) for rung in range(2)] == [0.25, 1.0], "each part from the beginning"
        assert space_of_data(space.data, "x").fidelity == space.fidelity
    path = write(tmp_path, f"{grows}fidelity: {{of: layers, rungs: [0.25, 1], resumes: true}}\n")
    with pytest.raises(UserError, match="where its checkpoints are"):
        load_command_space(path)
    space = load_command_space(write(tmp_path, path.read_text().replace("--seed", "--out {trial_folder} --seed")))
    assert space.fidelity is not None
    assert [space.fidelity.cost(rung) for rung in range(2)] == [0.25, 0.75]
