"""``autotune report`` and ``autotune apply`` on a real study folder."""

import json
from pathlib import Path

import pytest

from autotune.cli import main
from autotune.space.grammar import load_space
from autotune.study.assignment import Assignment
from autotune.study.study import Study
from engine.atomic import make_folder, write_text
from engine.config import dump_run, load_run
from engine.outcome import Outcome
from engine.yaml_file import read_yaml

pytestmark = pytest.mark.unit

SPACE = """
use: [tiny_llama]
cluster: cpu:2
objectives: [speed, memory, quality]
space:
  plan: {dp_shard: [1, 2], micro_batch_size: [1, 2, 4]}
  hyperparameters: {global_batch_size: [8], learning_rate: {log_float: [1e-4, 1e-2]}}
"""
OUTCOMES = [  # of trials 0, 1, 2, 3; trial 1 is the knee
    {"kind": "ok", "tokens_per_second": 1000.0, "peak_memory_bytes": 8 * 2**30, "held_out_loss": 2.0},
    {"kind": "ok", "tokens_per_second": 900.0, "peak_memory_bytes": 2 * 2**30, "held_out_loss": 2.1},
    {"kind": "ok", "tokens_per_second": 300.0, "peak_memory_bytes": 1 * 2**30, "held_out_loss": 3.0},
    {"kind": "oom", "detail": "rank 1 needed 9 GiB"},
]


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A runs folder with the finished study ``s``; the working folder is its parent."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    write_text("s.yaml", SPACE)
    study = Study.create_or_open(Path("runs/studies/s"), *load_space("s.yaml", []), num_trials=len(OUTCOMES))
    try:
        for outcome in OUTCOMES:
            assignment = study.ask()
            assert isinstance(assignment, Assignment)
            write_text(make_folder(assignment.folder) / "run.yaml", dump_run(assignment.config))
            study.tell(assignment, Outcome(**outcome))
    finally:
        study.close()
    return tmp_path / "runs"


def test_report_writes_page_and_front(runs, capsys):
    assert main(["report", "s"]) == 0
    text = capsys.readouterr().out
    assert "★ 1" in text
    assert "oom (trial 3): rank 1 needed 9 GiB" in text
    assert "autotune apply s --pick knee -o run.yaml" in text
    assert (runs / "studies/s/report.html").stat().st_size > 1e6
    assert (runs / "studies/s/front.csv").read_text().count("\n") == 4


def test_report_as_json_and_elsewhere(runs, capsys):
    assert main(["report", "s", "--json", "-o", "pages/s.html", "--runs-dir", str(runs)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert Path(result["page"]) == Path("pages/s.html")
    assert Path("pages/s.html").is_file()
    assert (result["front"], result["knee"]) == ([0, 1, 2], 1)
    assert result["statuses"] == {"knee": 1, "front": 2, "oom": 1}


def test_apply_writes_a_run_that_can_be_loaded(runs, capsys):
    assert main(["apply", "s", "-o", "run.yaml", "--total-tokens", "1Mi", "--seed", "7"]) == 0
    text = capsys.readouterr().out
    assert "It is the knee" in text
    assert "autotune train run.yaml --retune-every 10m" in text
    run, notes = load_run("run.yaml")
    trial, _ = load_run(runs / "studies/s/trials/1/run.yaml")
    assert notes == []
    assert run.workload.total_tokens == 2**20
    assert (run.model, run.plan, run.hyperparameters) == (trial.model, trial.plan, trial.hyperparameters)
    assert (run.runtime.seed, run.runtime.measure_memory, run.checkpoint.at_end) == (7, False, True)
    assert run.checkpoint.every_steps > 0
    assert run.evaluation.every_tokens is not None
    assert run.evaluation.every_tokens % run.tokens_per_step == 0
    assert run.name == "s-1"
    assert run.origin["study"] == "s"
    chosen = read_yaml(runs / "studies/s/chosen.yaml").data
    assert (chosen["trial"], chosen["picked"]) == (1, "knee")
    assert chosen["run_file"] == str(Path("run.yaml").absolute())


@pytest.mark.parametrize(
    ("arguments", "trial"),
    [
        (["--pick", "fastest"], 0),
        (["--pick", "smallest"], 2),
        (["--pick", "best", "--max-memory", "4GiB"], 1),
        (["--pick", "smallest", "--min-speed", "500"], 1),
        (["--pick", "knee", "--max-loss", "2.05"], 0),
        (["--pick", "2"], 2),
    ],
)
def test_apply_picks(runs, capsys, arguments, trial):
    assert main(["apply", "s", *arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["trial"] == trial
    assert load_run("run.yaml")[0].origin["trial"] == str(trial)


def test_apply_never_replaces_another_file_unasked(runs, capsys):
    Path("run.yaml").write_text("mine\n")
    assert main(["apply", "s"]) == 2
    assert "--force" in capsys.readouterr().err
    assert Path("run.yaml").read_text() == "mine\n"
    assert not (runs / "studies/s/chosen.yaml").exists()
    assert main(["apply", "s", "--force"]) == 0
    assert main(["apply", "s"]) == 0  # the same again is no replacement


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--pick", "3"], "failed (oom): rank 1 needed 9 GiB"),
        (["--pick", "17"], "no trial 17"),
        (["--pick", "fastst"], "did you mean fastest"),
        (["--max-memory", "0.5GiB"], "the nearest is trial 2"),
        (["--max-memory", "much"], "a size in bytes is needed"),
        (["--min-speed", "nan"], "finite"),
        (["--total-tokens", "1.5"], "whole number"),
        (["-o", "runs"], "is a folder"),
        (["--total-tokens", "0"], "total_tokens"),
    ],
)
def test_mistakes_end_in_one_message(runs, capsys, arguments, words):
    assert main(["apply", "s", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert "hint:" in error
    assert "Traceback" not in error
    assert not Path("run.yaml").exists()


def test_a_lost_run_file_is_told(runs, capsys):
    (runs / "studies/s/trials/1/run.yaml").unlink()
    assert main(["apply", "s"]) == 2
    assert "run file of trial 1 cannot be used" in capsys.readouterr().err
