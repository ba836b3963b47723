"""Where trials live: Optuna's storages, opened so that nothing a killed process left behind is in the way."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import BaseJournalBackend, JournalFileBackend

from engine.atomic import make_folder
from engine.errors import UserError
from engine.file_lock import file_lock

JOURNAL_FILE = "journal.log"
BACKUP_FILE = "journal.log.bak"
"""The journal as it was when a driver last opened it whole."""
LOCK_FILE = "journal.flock"
NUM_OPEN_TRIES = 10

optuna.logging.set_verbosity(optuna.logging.WARNING)


class RepairingJournal(JournalFileBackend):
    """A journal file that a writer killed in the middle of a line does not spoil: before anything is appended, a torn
    last line is cut off (its writer was never told that it had been written). Its lock is ``file_lock``."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Append records, each one line, durably."""
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with file_lock(self._path.with_name(LOCK_FILE)):
            cut_torn_tail(self._path)
            with open(self._path, "ab") as file:
                file.write(lines.encode())
                file.flush()
                os.fsync(file.fileno())


class _JournalInMemory(BaseJournalBackend):
    """A journal as it was at one moment, for readers."""

    def __init__(self, logs: list[dict[str, Any]]) -> None:
        self._logs = logs

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """Records from a number on."""
        yield from self._logs[log_number_from:]

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Never called: readers write nothing."""
        raise AssertionError("a snapshot is read-only")


def cut_torn_tail(path: Path) -> int:
    """Remove what follows the last line end. The caller holds the journal's lock.

    Returns:
        Bytes removed.
    """
    with open(path, "r+b") as file:
        size = end = file.seek(0, os.SEEK_END)
        block = b""
        while end > 0 and b"\n" not in block:
            start = max(0, end - 65536)
            file.seek(start)
            block = file.read(end - start)
            end = start + block.rfind(b"\n") + 1 if b"\n" in block else start
        if end < size:
            file.truncate(end)
        return size - end


def open_journal(folder: Path) -> BaseStorage:
    """Open (or begin) the journal of a study for writing: its torn tail is cut, and a copy kept once it proved whole.

    Raises:
        UserError: It is damaged in the middle; nothing is changed then.
    """
    path = make_folder(folder) / JOURNAL_FILE
    try:
        with file_lock(folder / LOCK_FILE):
            if path.exists():
                cut_torn_tail(path)
                _parse(path)
                backup = folder / f".{BACKUP_FILE}.{os.getpid()}"
                shutil.copyfile(path, backup)
                os.replace(backup, folder / BACKUP_FILE)
        return JournalStorage(RepairingJournal(path))
    except OSError as error:
        raise UserError(
            f"cannot open the study's journal {path}: {error.strerror}",
            hint="check permissions and free space, or choose another folder with --runs-dir",
        ) from None


def read_journal(folder: Path) -> BaseStorage:
    """The journal as it is now: nothing is written, and writers are not disturbed.

    Raises:
        UserError: There is none, or it is damaged.
    """
    path = folder / JOURNAL_FILE
    try:
        return JournalStorage(_JournalInMemory(_parse(path)))
    except FileNotFoundError:
        raise UserError(
            f"the study in {folder} has no {JOURNAL_FILE}", hint="start it with: autotune sweep SPACE.yaml"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}", hint="check its permissions") from None


def _parse(path: Path) -> list[dict[str, Any]]:
    """The records of a journal; a last line without an end is left out (it is torn, or being written)."""
    *lines, _ = path.read_bytes().split(b"\n")
    logs: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            log = json.loads(line)
        except ValueError:
            log = None
        if not isinstance(log, dict):
            raise UserError(
                "the study's journal is damaged at this line; nothing was changed",
                hint=f"go back to the copy of the last start (in the study's folder: cp {BACKUP_FILE} {JOURNAL_FILE};"
                " later trials are run again), or begin another study (--study NAME; in Python another folder or name)",
                where=f"{path}:{number}",
            )
        logs.append(log)
    return logs


def open_database(url: str, *, is_foreign: bool = False) -> BaseStorage:
    """Open a database storage.

    Args:
        url: Its address.
        is_foreign: It is another program's, to be read and left as it is: no tables are made in it.

    Raises:
        UserError: Not a database address, its driver is missing, or it can't be reached.
    """
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

    options = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {"pool_pre_ping": True}
    logging.getLogger("alembic").setLevel(logging.WARNING)
    try:
        storage = _opened(_with_driver(url), options, makes_tables=not is_foreign)
        if url.startswith("sqlite") and not is_foreign:
            _speed_up_sqlite(storage)
        return optuna.storages.get_storage(storage)  # finished trials are read once
    except (ArgumentError, NoSuchModuleError, ValueError):
        raise UserError(
            f"not a database address: {hide_password(url)!r}",
            hint="examples: sqlite:////absolute/path/studies.db, postgresql://user@host/database",
        ) from None
    except ImportError as error:
        raise UserError(
            f"the driver for {hide_password(url)} is not installed: {error}",
            hint="for PostgreSQL: pip install 'paretune[postgres]'",
        ) from None
    except (SQLAlchemyError, StorageInternalError, RuntimeError) as error:  # the last: tables of another Optuna
        cause = error.__cause__ if isinstance(error, StorageInternalError) else error
        reason = str(getattr(cause, "orig", None) or cause or error).splitlines()[0]
        raise UserError(
            f"cannot open the storage {hide_password(url)}: {reason}",
            hint="check that the database runs, that its folder or name exists, and its rights; passwords are not"
            " kept with a study: give it in --storage, or where the database's own tools look for it (PGPASSWORD)",
        ) from None


def _opened(url: str, options: dict[str, Any], *, makes_tables: bool) -> optuna.storages.RDBStorage:
    """The storage, whose tables are made when it is new. Of several processes that make them at once all but one fail,
    and find them at the next try."""
    from sqlalchemy.exc import DatabaseError

    for tries_left in range(NUM_OPEN_TRIES - 1, -1, -1):
        try:
            return optuna.storages.RDBStorage(url, engine_kwargs=options, skip_table_creation=not makes_tables)
        except DatabaseError as error:
            is_race = any(word in str(error.orig) for word in ("already exists", "UNIQUE", "duplicate", "locked"))
            if not is_race or not tries_left:
                raise
            time.sleep(random.uniform(0.1, 0.5))
    raise AssertionError("the last try returns or raises")


def _with_driver(url: str) -> str:
    """A PostgreSQL address with the driver that is installed: which one the bare word means differs by version."""
    scheme, separator, rest = url.partition("://")
    if scheme in ("postgresql", "postgres"):
        drivers = [driver for driver in ("psycopg2", "psycopg") if importlib.util.find_spec(driver)]
        scheme = f"postgresql+{drivers[0] if drivers else 'psycopg2'}"
    return f"{scheme}{separator}{rest}"


def _speed_up_sqlite(storage: optuna.storages.RDBStorage) -> None:
    """Let readers go on while one writes, and sync at times only: what a process has written survives its death either
    way, and the file stays whole when the power fails. Where the file system can't do it, the file stays as it is."""
    from sqlalchemy import event

    def set_up(connection: Any, _: Any) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")

    event.listen(storage.engine, "connect", set_up)
    storage.engine.dispose()


def absolute_url(url: str) -> str:
    """A database address that means the same from every working folder: SQLite files by their absolute path."""
    prefix = "sqlite:///"
    path = url.removeprefix(prefix)
    is_relative_file = url.startswith(prefix) and path and not path.startswith(("/", ":"))
    return f"{prefix}{Path(path).absolute()}" if is_relative_file else url


def hide_password(url: str) -> str:
    """A database address without its password, for messages and files."""
    scheme, separator, rest = url.partition("://")
    account, at, place = rest.rpartition("@")
    user, colon, _ = account.partition(":")
    place, question, query = place.partition("?")
    kept = "&".join(part for part in query.split("&") if "pass" not in part.partition("=")[0].lower())
    return f"{scheme}{separator}{user if colon else account}{at}{place}{question if kept else ''}{kept}"
