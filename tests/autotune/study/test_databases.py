"""Databases that fail in the middle of things, and how they are opened."""

import multiprocessing
import sqlite3
import threading
import time
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.exceptions import StorageInternalError

from autotune.study.assignment import Assignment
from autotune.study.lease import LeaseKeeper
from autotune.study.store import open_database
from autotune.study.study import Nothing, Study
from autotune.study.trial_table import TrialTable
from engine.errors import UserError
from engine.outcome import Outcome

pytestmark = pytest.mark.unit

OK = Outcome(kind="ok", tokens_per_second=100.0, held_out_loss=3.0, corpus_hash="text")


@pytest.fixture
def study(open_study: Callable[..., Study], tmp_path: Path) -> Study:
    """A study of three trials in SQLite."""
    return open_study(num_trials=3, storage_url=f"sqlite:///{tmp_path}/studies.db", sampler="random")


def fail_once(monkeypatch: pytest.MonkeyPatch, method: str, *, after: bool) -> None:
    """The first call of a method of the table loses the connection, before or after it was done."""
    original = getattr(TrialTable, method)
    is_failing = [True]

    def failing(*arguments: Any, **options: Any) -> Any:
        if is_failing[0] and not after:
            is_failing[0] = False
            raise StorageInternalError("the connection was lost")
        result = original(*arguments, **options)
        if is_failing[0]:
            is_failing[0] = False
            raise StorageInternalError("the connection was lost")
        return result

    monkeypatch.setattr(TrialTable, method, failing)


def finish(study: Study) -> None:
    """Ask and tell as a driver does, which tries again."""
    while True:
        try:
            asked = study.ask()
        except StorageInternalError:
            continue
        if not isinstance(asked, Assignment):
            break
        for _ in range(3):
            try:
                study.tell(asked, OK)
                break
            except StorageInternalError:
                continue
    assert asked is Nothing.DONE


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("method", ["create", "write_parameters", "write_record", "write_lease", "finish", "tell"])
def test_a_connection_that_is_lost_in_the_middle_loses_and_doubles_nothing(
    study: Study, monkeypatch: pytest.MonkeyPatch, method: str, after: bool
) -> None:
    fail_once(monkeypatch, method, after=after)
    finish(study)
    rows = study.snapshot().trials
    assert len(rows) == 3
    assert all(row.outcome is not None and row.outcome.kind == "ok" for row in rows)


def test_sixteen_processes_that_create_a_study_at_once_all_get_it(tmp_path: Path) -> None:
    """Public fault: 14 of 16 died of a locked database, or of tables that were there already."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(16)

    def create() -> None:
        barrier.wait()
        storage = open_database(f"sqlite:///{tmp_path}/studies.db")
        study = optuna.create_study(study_name="s", storage=storage, load_if_exists=True)
        study.tell(study.ask(), 1.0)

    processes = [context.Process(target=create) for _ in range(16)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(200)
    assert [process.exitcode for process in processes] == [0] * 16
    study = optuna.load_study(study_name="s", storage=open_database(f"sqlite:///{tmp_path}/studies.db"))
    assert [trial.number for trial in study.trials] == list(range(16))


def test_twenty_threads_and_hasty_renewals_do_each_other_no_harm(
    open_study: Callable[..., Study], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Public fault: a very short heartbeat ended the whole process."""
    monkeypatch.setattr(LeaseKeeper, "__init__", partialmethod(LeaseKeeper.__init__, every_seconds=0.01))
    study = open_study("hasty", num_trials=40, sampler="random")
    ran: list[int] = []

    def work() -> None:
        while (asked := study.ask()) is not Nothing.DONE:
            if isinstance(asked, Assignment):
                time.sleep(0.02)
                ran.append(asked.number)
                assert study.tell(asked, OK)

    threads = [threading.Thread(target=work) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ran) == len(set(ran)) == 40
    assert all(row.attempts == 1 for row in study.snapshot().trials)


def test_sqlite_lets_readers_go_on_while_one_writes(study: Study, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "studies.db") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_postgresql_works_with_whichever_driver_is_installed() -> None:
    """What the bare word means changed between versions of the library."""
    pytest.importorskip("psycopg2", reason="the driver for PostgreSQL is not installed")
    with pytest.raises(UserError, match=r"cannot open the storage postgresql://me@127\.0\.0\.1:1/name"):
        open_database("postgresql://me:secret@127.0.0.1:1/name")
