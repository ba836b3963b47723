"""``autotune sweep`` and ``autotune studies`` as a user calls them."""

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autotune.cli import main
from autotune.commands.sweep_view import SweepView
from autotune.prior.rows import ROWS_VARIABLE, MetaRow
from autotune.space.grammar import load_space
from autotune.space.objectives import Objective
from autotune.specs.cluster import ClusterSpec
from autotune.study.assignment import Assignment
from autotune.study.snapshot import StudySnapshot, TrialRow
from autotune.study.study import Study, load_snapshot
from engine.errors import UserError
from engine.outcome import Outcome
from engine.yaml_file import dump_yaml

SPACE = """
use: [tiny_llama]
cluster: cpu:2
workload: {total_tokens: 2k}
objectives: [speed, quality]
space:
  plan: {micro_batch_size: [1, 2]}
  hyperparameters: {global_batch_size: [4, 8], learning_rate: {log_float: [1e-3, 1e-2]}}
evaluation: {max_tokens: 1024}
"""


@pytest.fixture
def space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A space file, in a working folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # device locks of this test alone, in its children
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # and here
    path = tmp_path / "small.yaml"
    path.write_text(SPACE)
    return path


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.unit
def test_dry_run_counts_and_writes_nothing(space: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "sweep", str(space), "--dry-run", "--cluster", "h100x8")
    assert data["num_legal"] == 4
    assert len(data["candidates"]) == 5
    assert main(["sweep", str(space), "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert "4 combinations of plan values, 4 are legal" in text
    assert "mb2 fp32" in text
    assert not (tmp_path / "runs").exists()


@pytest.mark.unit
def test_candidates_are_ranked_by_their_estimates_unless_told_otherwise(
    space: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("sweep", str(space), "--dry-run", "--cluster", "h100x8", "--set", "space.plan.tp=[1, 2]")
    data = run_json(capsys, *arguments)
    assert 0 < data["num_left"] < data["num_legal"]
    assert data["removed"]["estimate.dominated"] == data["num_legal"] - data["num_left"], "splitting a tiny model"
    assert all(0 < forecast["speed"]["low"] < forecast["speed"]["high"] for forecast in data["forecasts"])
    every = run_json(capsys, *arguments, "--no-estimates")
    assert every["forecasts"] is None
    assert every["num_left"] == every["num_legal"] == data["num_legal"]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ([], "no budget", "--trials"),
        (["--trials", "2", "--workers", "3"], "3 workers need 3 devices", "--workers 2"),
        (["--trials", "2", "--cluster", "h100x8:4"], "4 nodes", "--dry-run"),
        (["--trials", "2", "--cluster", "h100x8"], "this machine is", "--cluster local"),
        (["--trials", "2", "--study", "../up"], "study name", "letters"),
        (["--time", "soon"], "duration", "10m"),
        (["--trials", "2", "--storage", "nonsense"], "not a database address", "sqlite"),
        (["--trials", "2", "--set", "space.plan.tq=2"], "unknown key", "tp"),
        (["--trials", "2", "--try", "guess.yaml"], "learning_rte", "did you mean hyperparameters.learning_rate"),
        (["--trials", "2", "--try", "missing.yaml"], "missing.yaml", ""),
        (["--trials", "2", "--sampler", "joynt"], "no sampler 'joynt'", "joint"),
    ],
)
def test_mistakes_end_in_one_message(
    space: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str, hint: str
) -> None:
    Path("guess.yaml").write_text("hyperparameters: {learning_rte: 1e-3}\n")
    assert main(["sweep", str(space), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert hint in error.partition("hint:")[2]
    assert "Traceback" not in error


@pytest.mark.unit
def test_a_cluster_file_cannot_invent_cpus(space: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ClusterSpec(name="c", device_kind="cpu", device="cpu", devices_per_node=5000, memory_bytes=2**30)
    (tmp_path / "big.yaml").write_text(dump_yaml(cluster.to_data()))
    assert main(["sweep", str(space), "--trials", "2", "--cluster", "big.yaml"]) == 2
    assert "5000 cpu" in capsys.readouterr().err


@pytest.mark.unit
def test_words_of_a_study_are_no_markup(
    space: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    condition = "plan.micro_batch_size in [plan.tp]"
    assert main(["sweep", str(space), "--dry-run", "--set", f'space.constraints=["{condition}"]']) == 0
    assert f"constraint: {condition}" in capsys.readouterr().out

    loaded, enumeration = load_space(space)
    study = Study.create_or_open(tmp_path / "runs" / "studies" / "s", loaded, enumeration, num_trials=1)
    assignment = study.ask()
    assert isinstance(assignment, Assignment)
    study.tell(assignment, Outcome(kind="infra", detail="no such file [/bold]", corpus_hash="text"))
    study.close()
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["studies", "show", "s"]) == 0
    assert "no such file [/bold]" in capsys.readouterr().out


@pytest.mark.unit
def test_unknown_studies_end_in_one_message(space: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("show", "stop"):
        assert main(["studies", command, "nobody"]) == 2
        assert "there is no study 'nobody'" in capsys.readouterr().err
    assert main(["studies"]) == 0
    assert "no studies" in capsys.readouterr().out


def test_a_sweep_of_real_training_and_what_studies_say_of_it(
    space: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ROWS_VARIABLE, "rows.jsonl")
    Path("guess.yaml").write_text("hyperparameters: {learning_rate: 2e-3, global_batch_size: 4}\n")
    guess = ("--try", "guess.yaml", "--enough", "0.01")
    result = run_json(capsys, "sweep", str(space), "--trials", "1", "--repeat-best", "1", *guess)
    assert result["first_guesses"] == [0]
    assert result["front"][0]["parameters"]["hyperparameters.learning_rate"] == 2e-3
    assert any("prior" in remark for remark in result["remarks"]), "a tiny run is far from what it was fitted to"
    assert result["least_violated"] is None
    assert result["outcomes"] == {"ok": 2}
    assert result["front"][0]["values"].keys() == {"speed", "quality"}
    assert result["repeats"]["values"]["quality"]["count"] == 1
    assert result["forecasts"]["speed"]["num_trials"] == 1, "estimated before the trial, held against what it measured"
    assert main(["sweep", str(space), "--trials", "1", "--set", "workload.total_tokens=3k"]) == 2
    assert "changed  workload.total_tokens: 2000 -> 3000" in capsys.readouterr().err

    (summary,) = run_json(capsys, "studies")
    assert (summary["name"], summary["state"], summary["num_finished"]) == ("small", "done", 1)
    shown = run_json(capsys, "studies", "show", "small")
    assert [trial["repeat_of"] for trial in shown["trials"]] == [None, 0]
    assert main(["studies", "show", "small"]) == 0
    assert "Pareto front" in capsys.readouterr().out
    assert run_json(capsys, "studies", "stop", "small") == {"study": "small", "was_running": False}

    assert run_json(capsys, "prior", "add", "small")["num_added"] == 1
    seen: list[int] = []

    def condition(space: object, rows: list[MetaRow]) -> None:
        seen.append(len(rows))
        raise UserError("nothing more is run")

    monkeypatch.setattr("autotune.search.warm_start.task_prior_of", condition)
    for name in ("small", "another"):
        assert main(["sweep", str(space), "--trials", "1", "--study", name]) == 2
    assert seen == [0, 1], "a study learns nothing from its own rows, another one does"


def test_ctrl_c_ends_the_children_and_says_how_to_go_on(space: Path, tmp_path: Path, repo_root: Path) -> None:
    command = [sys.executable, "-P", "-m", "autotune.cli", "sweep", str(space), "--trials", "2"]
    command += ["--set", "runtime.step_delay_seconds=0.2"]
    environment = os.environ | {"PYTHONPATH": str(repo_root)}
    sweep = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    telemetry = tmp_path / "runs" / "studies" / "small" / "trials" / "0" / "telemetry.jsonl"
    deadline = time.monotonic() + 240
    while not telemetry.exists():
        assert time.monotonic() < deadline
        assert sweep.poll() is None
        time.sleep(0.05)
    sweep.send_signal(signal.SIGINT)
    text, _ = sweep.communicate(timeout=60)
    assert sweep.returncode == 130
    assert "goes on where it was" in text
    rows = load_snapshot(tmp_path / "runs" / "studies" / "small").trials
    assert [(row.number, row.state) for row in rows] == [(0, "waiting")]


@pytest.mark.unit
def test_what_the_search_says_is_told_once(tmp_path: Path) -> None:
    """At the start and when the trials have doubled: what is new."""
    said = [["the prior extrapolates"]]
    outcome = Outcome(kind="ok", tokens_per_second=1.0, held_out_loss=2.0)
    console = Console(width=120, file=io.StringIO())
    snapshot = StudySnapshot("small", tmp_path, (Objective(name="quality"),), ())
    view = SweepView(console, snapshot, 6, 1, lambda: said[-1])
    with view.shown():
        for number in range(4):
            said.append([*said[-1], f"seen {number}"])
            view.finished(Assignment(number, 1, tmp_path, {}, "", 0), outcome)
    file = console.file
    assert isinstance(file, io.StringIO)
    lines = file.getvalue().splitlines()
    assert [line for line in lines if not line.startswith("[")] == [
        "the prior extrapolates", "seen 0", "seen 1", "seen 2", "seen 3"
    ]  # fmt: skip
    assert lines[0] == "the prior extrapolates"


@pytest.mark.unit
def test_the_live_view_shows_trials_failures_and_time_left(tmp_path: Path) -> None:
    from engine.config import RunConfig
    from engine.schema import parse

    model = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 32}
    data = {"model": model | {"vocab_size": 256}, "workload": {"sequence_length": 16, "total_tokens": 1024}}
    config = parse(RunConfig, data)
    objectives = (Objective(name="speed"), Objective(name="quality", bound=3.0))
    failed = TrialRow(0, "finished", {}, Outcome(kind="oom"), None, False)
    snapshot = StudySnapshot("small", tmp_path, objectives, (failed,))
    console = Console(force_terminal=True, width=120, record=True, file=io.StringIO())
    view = SweepView(console, snapshot, 6, 1)
    for number, loss in enumerate((2.5, 2.0, 4.0), start=1):
        chosen = {"hyperparameters.learning_rate": 0.00123}
        assignment = Assignment(number, 1, tmp_path, chosen, config.plan.describe(), 0, config)
        view.started(assignment)
        outcome = Outcome(kind="ok", tokens_per_second=100.0 * number, held_out_loss=loss, wall_seconds=10.0)
        view.finished(assignment, outcome)
    view.started(Assignment(9, 1, tmp_path, {}, "single", 0, config))
    console.print(view._render())
    text = console.export_text()
    assert "4 of 6 trials" in text
    assert "about 20.0s left" in text
    assert "1 beyond a bound, 1 oom" in text
    assert "learning_rate=0.00123" in text
    assert "best so far: 200 tokens/s (trial 2), 2 nats/token (trial 2)" in text
    assert "running" in text
