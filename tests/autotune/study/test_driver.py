"""A driver runs every trial once on devices of its own, however it or its children end."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from autotune.study.study import Study, load_snapshot, request_stop
from engine.errors import UserError

DRIVE = Path(__file__).with_name("drive.py")


@pytest.fixture
def start_driver(tmp_path: Path, repo_root: Path, make_space: Callable[..., Any]) -> Any:
    """Starts a driver in a process of its own; ended at the end."""
    make_space()
    started: list[subprocess.Popen[bytes]] = []

    def start(num_trials: int, *arguments: str) -> subprocess.Popen[bytes]:
        folder = tmp_path / "studies" / "s"
        command = [sys.executable, str(DRIVE), str(tmp_path / "small.yaml"), str(folder), str(num_trials), *arguments]
        driver = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(repo_root)})
        started.append(driver)
        return driver

    yield start
    for driver in started:
        driver.kill()
        driver.wait()


@pytest.fixture(scope="module")
def kill_sweep(repo_root: Path) -> ModuleType:
    """The benchmark's module."""
    spec = importlib.util.spec_from_file_location("kill_sweep", repo_root / "benchmarks" / "kill_sweep.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kill_sweep"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_four_kills_lose_nothing_and_double_nothing(
    tmp_path: Path, start_driver: Callable[..., subprocess.Popen[bytes]], kill_sweep: ModuleType
) -> None:
    result = kill_sweep.kill_sweep(
        lambda num_trials: start_driver(num_trials, "ok", "0.5"),
        tmp_path / "studies" / "s",
        num_kills=4,
        num_trials=6,
        longest_seconds=3.0,
        seed=2,
    )
    assert result.problems() == []
    assert len(result.kills) == 4
    assert result.num_driver_starts >= 2


def test_two_drivers_share_one_study(
    tmp_path: Path, start_driver: Callable[..., subprocess.Popen[bytes]], kill_sweep: ModuleType
) -> None:
    drivers = [start_driver(6, "ok"), start_driver(6, "ok")]
    assert [driver.wait(60) for driver in drivers] == [0, 0]
    rows = load_snapshot(tmp_path / "studies" / "s").trials
    assert len(rows) == 6
    assert all(row.outcome is not None and row.outcome.kind == "ok" and row.attempts == 1 for row in rows)
    assert len({str(row.parameters) for row in rows}) == 6


def test_a_stopped_driver_gives_its_trials_back(
    tmp_path: Path, start_driver: Callable[..., subprocess.Popen[bytes]], kill_sweep: ModuleType
) -> None:
    folder = tmp_path / "studies" / "s"
    driver = start_driver(2, "polite")
    wait_for(lambda: len(list(folder.glob("trials/*/telemetry.jsonl"))) >= 1)
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(60) == 0
    rows = load_snapshot(folder).trials
    assert {row.state for row in rows} == {"waiting"}
    assert kill_sweep.trial_processes(folder) == []
    assert start_driver(2, "ok").wait(60) == 0
    assert [row.attempts for row in load_snapshot(folder).trials] == [2] * len(rows) + [1] * (2 - len(rows))


def test_a_stop_file_ends_a_driver(tmp_path: Path, start_driver: Callable[..., subprocess.Popen[bytes]]) -> None:
    folder = tmp_path / "studies" / "s"
    driver = start_driver(2, "polite")
    wait_for(lambda: len(list(folder.glob("trials/*/telemetry.jsonl"))) >= 1)
    request_stop(folder)
    assert driver.wait(60) == 0
    assert {row.state for row in load_snapshot(folder).trials} == {"waiting"}


def test_faults_of_the_machine_are_tried_once_more(open_study: Callable[..., Study], drive: Callable[..., Any]) -> None:
    study = open_study(num_trials=1)
    log = drive(study, "killed")
    assert log.retried_numbers == [0]
    (row,) = study.snapshot().trials
    assert row.outcome is not None
    assert row.outcome.kind == "infra"
    assert row.attempts == 2


def test_failures_of_candidates_are_not_tried_again(
    open_study: Callable[..., Study], drive: Callable[..., Any]
) -> None:
    study = open_study(num_trials=2)
    log = drive(study, "nan", workers=2)
    assert log.retried_numbers == []
    assert [row.attempts for row in study.snapshot().trials] == [1, 1]


def test_changed_text_ends_the_driver_with_a_message(
    open_study: Callable[..., Study], drive: Callable[..., Any]
) -> None:
    study = open_study(num_trials=1)
    drive(study, "ok", "0", "one text")
    more = open_study(num_trials=2)
    with pytest.raises(UserError, match="text changed"):
        drive(more, "ok", "0", "another text")
    assert [row.state for row in more.snapshot().trials] == ["finished", "waiting"]


def wait_for(condition: Callable[[], bool], timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def test_a_storage_that_fails_for_a_moment_is_tried_again(
    open_study: Callable[..., Study], drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from optuna.exceptions import StorageInternalError

    from autotune.study import driver

    monkeypatch.setattr(driver, "STORAGE_PAUSES_SECONDS", (0.01, 0.01))
    study = open_study(num_trials=1)
    failures = iter([True, True, False])
    tell = study.tell

    def failing_tell(*arguments: Any) -> bool:
        if next(failures):
            raise StorageInternalError("deadlock detected")
        return tell(*arguments)

    monkeypatch.setattr(study, "tell", failing_tell)
    assert drive(study, "ok").finished_numbers == [0]

    more = open_study(num_trials=2)
    monkeypatch.setattr(more, "tell", lambda *_: (_ for _ in ()).throw(StorageInternalError("gone")))
    with pytest.raises(UserError, match="storage can't be used: gone"):
        drive(more, "ok")
