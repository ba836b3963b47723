"""The journal survives what killed writers leave behind, and says so where it can't."""

import json
import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest

from autotune.study.assignment import Assignment
from autotune.study.store import (
    BACKUP_FILE,
    JOURNAL_FILE,
    absolute_url,
    cut_torn_tail,
    hide_password,
    open_database,
    open_journal,
    read_journal,
)
from autotune.study.study import Study, load_snapshot
from engine.errors import UserError
from engine.file_lock import file_lock, is_locked
from engine.outcome import Outcome

pytestmark = pytest.mark.unit


def trials_of(folder: Path) -> int:
    study = optuna.load_study(study_name="s", storage=open_journal(folder))
    return len(study.trials)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A journal with five trials."""
    study = optuna.create_study(study_name="s", storage=open_journal(tmp_path))
    for value in range(5):
        study.tell(study.ask(), float(value))
    return tmp_path


@pytest.mark.parametrize("num_bytes", [1, 20, 80])
def test_a_torn_last_record_is_cut_and_the_next_is_not_glued_to_it(folder: Path, num_bytes: int) -> None:
    path = folder / JOURNAL_FILE
    path.write_bytes(path.read_bytes()[:-num_bytes])
    study = optuna.load_study(study_name="s", storage=open_journal(folder))
    study.tell(study.ask(), 1.0)
    assert trials_of(folder) >= 5
    for line in path.read_text().splitlines():
        json.loads(line)


def test_a_tail_torn_while_another_driver_writes_is_cut_too(folder: Path) -> None:
    study = optuna.load_study(study_name="s", storage=open_journal(folder))
    with open(folder / JOURNAL_FILE, "a") as file:
        file.write('{"op_code": 4, "worker_id": "killed in the middle of')
    for _ in range(2):
        study.tell(study.ask(), 1.0)
    assert len(study.trials) == 7
    assert trials_of(folder) == 7


def test_damage_in_the_middle_is_told_and_nothing_changed(folder: Path) -> None:
    open_journal(folder)
    path = folder / JOURNAL_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = b"\x00\x00garbage\n"
    damaged = b"".join(lines)
    path.write_bytes(damaged)
    for open_ in (open_journal, read_journal):
        with pytest.raises(UserError, match="damaged") as raised:
            open_(folder)
        assert raised.value.where == f"{path}:4"
        assert BACKUP_FILE in (raised.value.hint or "")
    assert path.read_bytes() == damaged
    (folder / BACKUP_FILE).replace(path)  # what the hint says
    assert trials_of(folder) == 5


def test_an_empty_journal_is_a_new_one(tmp_path: Path) -> None:
    (tmp_path / JOURNAL_FILE).write_bytes(b"")
    optuna.create_study(study_name="s", storage=open_journal(tmp_path))
    assert trials_of(tmp_path) == 0


@pytest.mark.parametrize(("text", "rest"), [(b"", b""), (b"a", b""), (b"a\n", b"a\n"), (b"a\n" + b"b" * 70000, b"a\n")])
def test_cut_torn_tail(tmp_path: Path, text: bytes, rest: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(text)
    assert cut_torn_tail(path) == len(text) - len(rest)
    assert path.read_bytes() == rest


def test_a_lock_is_free_when_its_owner_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    context = multiprocessing.get_context("fork")
    ready = context.Event()

    def hold() -> None:
        with file_lock(path):
            ready.set()
            threading.Event().wait(60)

    owner = context.Process(target=hold)
    owner.start()
    assert ready.wait(30)
    assert is_locked(path)
    owner.kill()
    owner.join()
    assert not is_locked(path)
    with file_lock(path):
        pass


def test_reading_goes_on_while_others_write(open_study: Callable[..., Study]) -> None:
    study = open_study(num_trials=30)
    done = threading.Event()

    def write() -> None:
        while isinstance(assignment := study.ask(), Assignment):
            study.tell(assignment, Outcome(kind="ok", tokens_per_second=1.0, held_out_loss=2.0))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    counts = []
    while not done.is_set():
        counts.append(len(load_snapshot(study.folder).trials))
    writer.join()
    assert counts == sorted(counts)
    assert len(load_snapshot(study.folder).trials) == 30


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "not a database address"),
        ("nosuchdb://host/name", "not a database address"),
        ("sqlite:////no/such/folder/studies.db", "cannot open the storage"),
        ("postgresql://me:secret@127.0.0.1:1/name", "postgresql://me@127.0.0.1:1/name"),
    ],
)
def test_databases_that_cannot_be_opened(url: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        open_database(url)
    assert message in raised.value.message
    assert raised.value.hint
    assert "secret" not in str(raised.value)


def test_passwords_are_kept_nowhere() -> None:
    assert hide_password("postgresql://me:secret@host:5432/name") == "postgresql://me@host:5432/name"
    assert hide_password("postgresql://me@host/name") == "postgresql://me@host/name"
    assert hide_password("sqlite:////tmp/a.db") == "sqlite:////tmp/a.db"
    assert hide_password("postgresql://host/name?user=me&password=secret&port=1") == (
        "postgresql://host/name?user=me&port=1"
    )
    assert hide_password("postgresql://host/name?password=secret") == "postgresql://host/name"


def test_database_files_mean_the_same_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute_url("sqlite:///studies.db") == f"sqlite:///{tmp_path}/studies.db"
    for url in ("sqlite:////tmp/studies.db", "sqlite:///:memory:", "postgresql://host/name"):
        assert absolute_url(url) == url
