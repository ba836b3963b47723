"""What a sweep says before its first trial and after its last."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from autotune.cli import main
from autotune.commands.sweep import ending_remarks
from autotune.commands.sweep_view import SweepView
from autotune.space.objectives import Objective
from autotune.study.assignment import Assignment
from autotune.study.snapshot import StudySnapshot, TrialRow
from autotune.study.study import Nothing
from engine.outcome import Outcome

pytestmark = pytest.mark.unit

INLINE = ["--command", "echo {x}", "--param", "x=float(0, 1)", "--objective", "loss:minimize"]


def study(*costs: float) -> StudySnapshot:
    rows = tuple(
        TrialRow(number, "finished", {}, Outcome(kind="ok"), {"loss": 1.0}, True, cost=cost)
        for number, cost in enumerate(costs)
    )
    return StudySnapshot("small", Path(), (Objective(name="loss"),), rows)


def test_a_sweep_that_ends_below_its_budget_says_why() -> None:
    (remark,) = ending_remarks(Nothing.DONE, study(), study(0.25, 0.75, 0.25, 0.25), 2)
    assert "1.5 of 2" in remark
    assert "0.5 of a full training is left" in remark
    assert ending_remarks(Nothing.DONE, study(), study(1.0, 1.0), 2) == []
    assert ending_remarks(None, study(), study(1.0), 2) == [], "stopped, or its time was up"
    assert ending_remarks(Nothing.EXHAUSTED, study(), study(1.0), 2) == ["every candidate of the space was tried"]


def test_a_sweep_that_runs_nothing_says_so() -> None:
    done = study(*[1.0] * 20)
    (remark,) = ending_remarks(Nothing.DONE, done, done, 10)
    assert "nothing was run" in remark
    assert "20 trials already" in remark
    assert "--trials" in remark


def test_a_dry_run_shows_guesses_and_calls_the_rest_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("guess.yaml").write_text("x: 0.125\n")
    arguments = ["sweep", *INLINE, "--try", "guess.yaml", "--dry-run"]
    assert main(arguments) == 0
    guesses, _, examples = capsys.readouterr().out.partition("examples of candidates")
    assert "tried first\n  echo 0.125" in guesses
    assert "nor in this order" in examples
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["first_guesses"] == [{"x": 0.125}]


def test_a_dry_run_shows_the_rungs_and_guesses_of_a_training_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("guess.yaml").write_text("hyperparameters.learning_rate: 1.25e-3\n")
    assert main(["sweep", "demo", "--try", "guess.yaml", "--fidelity", "[0.25, 1]", "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "25 %, 100 %" in text
    assert "learning_rate=0.00125" in text.partition("tried first")[2].partition("examples of candidates")[0]


def test_values_without_a_unit_are_told_by_name(tmp_path: Path) -> None:
    """Two figures of a user's own program could be either."""
    objectives = (Objective(name="loss"), Objective(name="seconds"), Objective(name="quality"))
    console = Console(width=120, file=io.StringIO())
    view = SweepView(console, StudySnapshot("small", tmp_path, objectives, ()), 2, 1)
    outcome = Outcome(kind="ok", metrics={"loss": 0.25, "seconds": 3.0}, held_out_loss=2.0)
    view.finished(Assignment(0, 1, tmp_path, {}, "x=1", 0), outcome)
    file = console.file
    assert isinstance(file, io.StringIO)
    assert "loss 0.25, seconds 3, 2 nats/token" in file.getvalue()
    assert "loss 0.25 (trial 0)" in view._best_line().plain
