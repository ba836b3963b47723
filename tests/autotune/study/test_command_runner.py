"""A user's program as a trial: however it ends there is a typed outcome with a reason, and nothing of it is left."""

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autotune.space.objectives import Objective
from autotune.space.program import Program, Template
from autotune.space.space import TrialLimits
from autotune.study.assignment import Assignment
from autotune.study.child import Stop
from autotune.study.command_runner import _OutputWatch, find_executable, program_evidence, run_program
from autotune.study.processes import marked_processes, recorded_mark
from engine.errors import UserError
from engine.outcome import Outcome, read_outcome

FAKE = str(Path(__file__).with_name("fake_program.py"))


def make(tmp_path: Path, *arguments: str, texts: dict[str, str] | None = None, number: int = 0) -> Assignment:
    template = Template((sys.executable, FAKE, *arguments))
    program = Program(template, texts or {}, (Objective(name="loss"),), tmp_path)
    return Assignment(number, 1, tmp_path / "trials" / str(number), {"x": 0.5}, "x=0.5", seed=7, program=program)


def run(tmp_path: Path, *arguments: str, texts: dict[str, str] | None = None, **limits: Any) -> Outcome:
    assignment = make(tmp_path, *arguments, texts=texts)
    assert assignment.program is not None
    outcome = run_program(assignment, assignment.program, limits=TrialLimits(**limits))
    assert read_outcome(assignment.folder) == outcome
    return outcome


def test_a_result_is_an_outcome_and_its_figures_are_kept(tmp_path: Path) -> None:
    outcome = run(tmp_path, "ok", "{x}", "{seed}", texts={"x": "0.5", "seed": "7"})
    assert outcome.kind == "ok"
    assert outcome.metrics == {"loss": pytest.approx(0.04), "seed": 7.0}
    assert outcome.wall_seconds is not None


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ('{"loss": 2.', "user", "not JSON"),
        ('{"los": 2.5}', "user", "no 'loss', only los"),
        ('{"loss": NaN}', "nan", "loss is nan"),
        ('{"loss": "low"}', "user", "wanted is a number"),
        ("[1, 2]", "user", "a mapping with loss"),
        ("[" * 100_000, "user", "not JSON"),
        ('{"failure": "unlucky"}', "user", "known are oom"),
    ],
)
def test_what_is_no_result_is_told(tmp_path: Path, text: str, kind: str, words: str) -> None:
    outcome = run(tmp_path, "text", "{text}", texts={"text": text})
    assert outcome.kind == kind
    assert words in outcome.detail


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        (["nothing"], "user", "wrote no result"),
        (["raise", "value"], "user", "exit status 1: ValueError: as asked"),
        (["raise", "memory"], "oom", "MemoryError"),
        (["fail", "diverged"], "diverged", "loss of 12"),
        (["kill"], "infra", "SIGKILL"),
        (["signal", "SIGTERM"], "infra", "from outside"),
        *((["signal", name], "user", f"it crashed with {name}") for name in ("SIGABRT", "SIGSEGV", "SIGBUS", "SIGFPE")),
    ],
)
def test_ends_without_a_result_are_told_apart(tmp_path: Path, arguments: list[str], kind: str, words: str) -> None:
    outcome = run(tmp_path, *arguments)
    assert outcome.kind == kind
    assert words in outcome.detail


def test_the_time_limit_ends_it(tmp_path: Path) -> None:
    outcome = run(tmp_path, "hang", seconds=2.0)
    assert outcome.kind == "hang"
    assert "nothing printed" in outcome.detail


def test_who_prints_until_the_time_limit_is_too_slow_and_does_not_hang(tmp_path: Path) -> None:
    printed = tmp_path / "stdout.log"
    printed.write_text("step\n")
    watch = _OutputWatch(printed, TrialLimits(seconds=10.0), time.monotonic() - 11.0, time.monotonic() - 11.0)
    watch.poll()
    printed.write_text("step\nstep\n")
    watch.poll()
    verdict = watch.verdict()
    assert verdict is not None
    assert (verdict.kind, "too slow" in verdict.detail) == ("interrupted", True)


def test_the_memory_limit_ends_it(tmp_path: Path) -> None:
    assert run(tmp_path, "memory", memory_bytes=200 * 2**20).kind == "oom"


def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    program = Program(Template(("./no-such-program",)), {}, (Objective(name="loss"),), tmp_path)
    with pytest.raises(UserError, match="no-such-program"):
        find_executable(program)
    assignment = Assignment(0, 1, tmp_path / "t", {}, "", seed=0, program=program)
    assert "no-such-program" in run_program(assignment, program, limits=TrialLimits()).detail


def test_what_it_leaves_running_is_ended(tmp_path: Path) -> None:
    assert run(tmp_path, "children").kind == "ok"
    mark = recorded_mark(tmp_path / "trials" / "0")
    assert mark is not None
    assert marked_processes(mark) == []


def test_it_runs_in_its_folder_and_quoted_values_stay_one_argument(tmp_path: Path) -> None:
    run(tmp_path, "where", "{name}", "{trial_folder}", texts={"name": "a b; $HOME"})
    said = (tmp_path / "trials" / "0" / "stdout.log").read_text()
    assert said == f"{tmp_path} a b; $HOME {tmp_path / 'trials' / '0'}\n"


def test_stopping_interrupts_it(tmp_path: Path) -> None:
    assignment = make(tmp_path, "hang")
    assert assignment.program is not None
    outcome = run_program(assignment, assignment.program, limits=TrialLimits(), stop=lambda: Stop.SOON)
    assert outcome.kind == "interrupted"


def test_evidence_is_of_the_same_trial_alone(tmp_path: Path) -> None:
    outcome = run(tmp_path, "ok", "0.5")
    same, other = make(tmp_path, "ok", "0.5"), make(tmp_path, "ok", "0.6")
    assert same.program is not None
    assert other.program is not None
    assert program_evidence(same, same.program) == outcome
    assert program_evidence(other, other.program) is None
