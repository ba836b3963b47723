"""The examples of the manual pages about Python and commands do what the pages say."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from autotune.cli import main
from autotune.study.study import load_snapshot

NOT_RUN = "# not run here"


def blocks(repo_root: Path, page: str, language: str) -> list[str]:
    """Code blocks of a page in order."""
    text = (repo_root / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands(repo_root: Path, page: str) -> list[list[str]]:
    """Lines of its command line."""
    lines = [line for block in blocks(repo_root, page, "bash") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def run(arguments: list[str]) -> None:
    assert main(arguments) == 0, arguments


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder whose ``python`` is this one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    return tmp_path


@pytest.mark.dist
def test_examples_of_command_sweeps(repo_root: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = "command_sweeps.md"
    (folder / "train.py").write_text(blocks(repo_root, page, "python")[0])
    (folder / "space.yaml").write_text(blocks(repo_root, page, "yaml")[0])
    for arguments in commands(repo_root, page):
        run(arguments)
    rows = load_snapshot(folder / "runs" / "studies" / "mine").trials
    assert [row.outcome.kind for row in rows if row.outcome] == ["ok"] * 12
    assert (folder / "runs" / "studies" / "mine" / "report.html").exists()
    assert "command: python train.py --lr" in (folder / "best.yaml").read_text()
    small = load_snapshot(folder / "runs" / "studies" / "small").trials
    assert [row.outcome.kind for row in small if row.outcome] == ["ok"] * 6


def test_examples_of_python(repo_root: Path, folder: Path) -> None:
    import optuna

    page = "python_api.md"
    names: dict[str, object] = {"__name__": "example"}
    for block in blocks(repo_root, page, "python"):
        if NOT_RUN not in block:
            exec(compile(block, page, "exec"), names)
    other = next(block for block in blocks(repo_root, page, "python") if "mine" in block).replace("mine", "other")
    exec(compile(other, page, "exec"), {**names})
    source = optuna.create_study(storage="sqlite:///optuna.db", study_name="theirs", direction="minimize")
    source.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=2)
    for arguments in commands(repo_root, page):
        run(arguments)
    assert (folder / "trials.csv").read_text().count("\n") == 9
    assert len(load_snapshot(folder / "runs" / "studies" / "ours").trials) == 2
    run(["report", "mine"])
    run(["apply", "mine"])
    assert "values:" in (folder / "best.yaml").read_text()
