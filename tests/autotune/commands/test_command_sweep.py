"""``autotune sweep --command`` and the studies it makes, as a user calls them."""

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

from autotune.cli import main
from autotune.space.command_grammar import load_command_space
from autotune.space.load import inline_overrides
from autotune.study.study import load_snapshot

FAKE = Path(__file__).parents[1] / "study" / "fake_program.py"
INLINE = ["--param", "x=float(0, 1)", "--objective", "loss:minimize", "--sampler", "random"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the program, and device locks of this test alone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "fake.py").write_text(FAKE.read_text())
    return tmp_path


def command(*arguments: str) -> str:
    return " ".join([sys.executable, "fake.py", *arguments])


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    return capsys.readouterr().err


def test_a_dry_run_shows_commands_and_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "sweep", "--command", command("ok", "{x}", "{seed}"), *INLINE, "--dry-run")
    assert data["dimensions"] == {"x": "0 to 1"}
    assert data["commands"][0][2] == "ok"
    assert float(data["commands"][0][3]) == data["candidates"][0]["x"]
    assert not (folder / "runs").exists()


def test_a_bound_is_told_with_its_objective() -> None:
    overrides = inline_overrides("python {x}", ["x=[1, 2]"], ["loss:minimize:4", "speed:maximize"])
    objectives = load_command_space(None, overrides).objectives
    assert [(o.name, o.direction, o.bound) for o in objectives] == [
        ("loss", "minimize", 4.0),
        ("speed", "maximize", None),
    ]


@pytest.mark.dist
def test_a_study_from_sweep_to_apply(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["sweep", "--command", command("ok", "{x}", "{seed}"), *INLINE, "--study", "s", "--trials"]
    result = run_json(capsys, *sweep, "4", "--workers", "2")
    assert result["outcomes"] == {"ok": 4}
    result = run_json(capsys, *sweep, "6")
    assert result["outcomes"] == {"ok": 6}
    assert result["num_trials_asked"] == 6
    best = min(load_snapshot(folder / "runs" / "studies" / "s").trials, key=lambda row: row.values["loss"])  # type: ignore[index]
    for pick in ("loss", "best"):
        chosen = run_json(capsys, "apply", "s", "--pick", pick, "-o", "best.json", "--force")
        assert chosen["trial"] == best.number
    assert "run its command: " in error_of(capsys, "train", "best.json")
    assert chosen["values"] == best.parameters == json.loads((folder / "best.json").read_text())["values"]
    assert "ok" in chosen["command"]
    assert run_json(capsys, "report", "s")["knee"] == best.number
    page = (folder / "runs" / "studies" / "s" / "report.html").read_text()
    assert "--pick loss" in page or "--pick knee" in page
    assert (folder / "runs" / "studies" / "s" / "front.csv").read_text().startswith("trial,knee,plan,loss,x\n")
    exported = run_json(capsys, "studies", "export", "s")
    assert len(exported["trials"]) == 6
    run_json(capsys, *sweep[:-3], "--study", "t", "--trials", "2", "--seed", "5")
    merged = run_json(capsys, "studies", "merge", "s", "t", "--into", "u")
    assert merged["num_trials"] == 8
    assert [study["name"] for study in run_json(capsys, "studies")] == ["s", "t", "u"]
    assert "another space" in error_of(capsys, *sweep, "8", "--param", "y=[1, 2]", "--command", command("{x}", "{y}"))


GROWS = """
import json, os, pathlib, sys
rate, epochs, folder = float(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
state = folder / "checkpoints" / "epoch"
begun = int(state.read_text()) if state.exists() else 0
state.parent.mkdir(exist_ok=True)
state.write_text(str(epochs))
result = {"loss": (rate - 0.3) ** 2 + 1 / epochs, "begun": begun, "epochs": epochs, "seed": int(sys.argv[4])}
pathlib.Path(os.environ["AUTOTUNE_RESULT"]).write_text(json.dumps(result))
"""


def test_rungs_of_the_command_line_leave_what_grows_as_the_file_has_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "space.yaml").write_text(
        f"command: {command('ok', '{x}', '{epochs}', '{trial_folder}')}\n"
        "objectives: {loss: minimize}\n"
        "space: {x: [1, 2], epochs: 27}\n"
        "fidelity: {of: epochs, min: 0.1, eta: 9, resumes: true}\n"
    )
    for written, lengths in (
        ("[0.333, 1]", [9, 27]),
        ("{min: 0.1, eta: 3}", [3, 9, 27]),
        ("{eta: 5}", [5, 27]),
        ("on", [3, 27]),
        ("off", []),
    ):
        data = run_json(capsys, "sweep", "space.yaml", "--fidelity", written, "--dry-run")
        assert data["rungs"] == [{"epochs": length} for length in lengths]
    assert main(["sweep", "space.yaml", "--fidelity", "[0.333, 1]", "--dry-run"]) == 0
    assert "epochs 9, 27; each goes on from the part before" in capsys.readouterr().out


@pytest.mark.dist
def test_trials_of_a_program_grow_from_their_checkpoints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "grows.py").write_text(GROWS)
    line = f"{sys.executable} grows.py {{x}} {{epochs}} {{trial_folder}} {{seed}}"
    sweep = ["sweep", "--command", line, *INLINE, "--param", "epochs=9", "--study", "s"]
    sweep += ["--fidelity", "{of: epochs, rungs: [0.333, 1], resumes: true}", "--trials", "3"]
    assert run_json(capsys, *sweep, "--dry-run")["rungs"] == [{"epochs": 3}, {"epochs": 9}]
    run_json(capsys, *sweep)
    rows = {row.number: row for row in load_snapshot(folder / "runs" / "studies" / "s").trials}
    figures = {number: row.outcome.metrics for number, row in rows.items() if row.outcome}
    grown = [row for row in rows.values() if row.continues is not None]
    assert grown
    for row in grown:
        before = figures[row.continues]  # type: ignore[index]
        assert (before["epochs"], before["begun"]) == (3, 0)
        assert (figures[row.number]["epochs"], figures[row.number]["begun"]) == (9, 3)
        assert figures[row.number]["seed"] == before["seed"]
    assert sum(row.cost for row in rows.values()) == pytest.approx(3, abs=0.7)
    (listed,) = run_json(capsys, "studies")
    assert (listed["state"], listed["is_growing"], listed["num_finished"]) == ("done", True, len(rows))
    assert listed["num_trainings"] == pytest.approx(sum(row.cost for row in rows.values()))
    chosen = run_json(capsys, "apply", "s", "-o", "best.json")
    assert rows[chosen["trial"]].share == 1
    assert chosen["values"]["epochs"] == 9
    assert " 9 " in chosen["command"]


@pytest.mark.dist
def test_failures_are_told_and_the_sweep_goes_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "space.yaml").write_text(
        f"command: {command('{how}', '{what}')}\n"
        "objectives: {loss: minimize}\n"
        "space:\n"
        "  how: [raise, fail, kill, text]\n"
        "  what: {values: [value, memory], default: diverged, when: how == 'raise'}\n"
        "limits: {time: 30s}\n"
    )
    assert main(["sweep", "space.yaml", "--trials", "5", "--sampler", "random", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["outcomes"] == {"diverged": 1, "infra": 1, "oom": 1, "user": 2}


@pytest.mark.dist
def test_a_program_that_can_only_fail_ends_the_sweep(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["sweep", "--command", command("nothing", "{x}"), *INLINE, "--study", "s", "--trials", "30"]
    error = error_of(capsys, *sweep)
    assert "first 3 trials all failed alike: it ended well, but it wrote no result" in error
    assert len(load_snapshot(folder / "runs" / "studies" / "s").trials) == 3


@pytest.mark.dist
def test_a_killed_sweep_leaves_nothing_behind_and_goes_on(
    folder: Path, repo_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = ["sweep", "--command", command("hang", "{x}"), *INLINE, "--study", "s", "--trials", "2"]
    environment = os.environ | {"PYTHONPATH": str(repo_root)}
    driver = subprocess.Popen([sys.executable, "-m", "autotune.cli", *sweep], env=environment)
    record = folder / "runs" / "studies" / "s" / "trials" / "0" / "process.json"
    while not record.exists():
        assert driver.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    (waiting,) = load_snapshot(folder / "runs" / "studies" / "s").trials
    assert waiting.state == "waiting"
    (folder / "fake.py").write_text(
        FAKE.read_text().replace('"hang"', '"never"').replace('how == "ok"', 'how == "hang"')
    )
    result = run_json(capsys, *sweep)
    assert result["outcomes"] == {"ok": 2}
    first = load_snapshot(folder / "runs" / "studies" / "s").trials[0]
    assert first.attempts == 2
    assert first.parameters == waiting.parameters


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sweep"], "no space is given"),
        (["sweep", "--command", "python {y}", *INLINE], "unknown placeholder {y}"),
        (["sweep", "--command", "no-such-program {x}", *INLINE, "--trials", "1"], "no-such-program"),
        (["sweep", "--command", "python {x}", *INLINE], "no budget"),
        (["sweep", "--command", "python {x}", *INLINE, "--set", "folder=/none", "--trials", "1"], "does not exist"),
        (["sweep", "--command", "python {x}", "--param", "x", "--trials", "1"], "--param needs NAME=VALUES"),
        (["sweep", "--command", "python {x}", "--param", "x=[1, 2]", "--objective", "loss"], "--objective needs"),
        (
            ["sweep", "--command", "python {x}", "--param", "x=[1, 2]", "--objective", "loss:min"],
            "--objective loss:min: '",
        ),
        (["sweep", "--command", "python {y}", *INLINE], "--command python {y}: the command"),
        (["sweep", "--command", "python {x}", "--param", "x=0..1", "--objective", "a:minimize"], "--param x=0..1: 'x'"),
        (["sweep", "tiny_llama", "--dry-run"], "tiny_llama is a part of a space: it has no 'space'\nhint: build on it"),
        (["sweep", "adamw", "--dry-run"], "adamw is a part of a space: it has no 'model' and no 'workload'"),
        (
            ["sweep", "--command", "python {x}", *INLINE, "--set", "constraints=[x > 5]", "--dry-run"],
            "none of 1000 candidates drawn",
        ),
        (["sweep", "--command", "python {x}", *INLINE[:-2], "--sampler", "wombat", "--dry-run"], "no sampler 'wombat'"),
        (["sweep", "--command", "python {x}", *INLINE, "--fidelity", "on", "--trials", "2"], "needs 'of'"),
        (["studies", "export", "none"], "there is no study"),
        (["studies", "merge", "a", "--into", "b"], "two different studies"),
        (["studies", "import", "sqlite:///none.db", "b"], "no database"),
    ],
)
def test_mistakes_are_told(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in error_of(capsys, *arguments)
