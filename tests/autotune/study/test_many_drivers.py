"""Several drivers, each a process, share one study in every kind of storage: nothing is lost, nothing runs twice."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.study.study import load_snapshot
from tests.autotune.study.postgres import PostgresServer, find_binaries

FAST_DRIVE = Path(__file__).with_name("fast_drive.py")


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A running server."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed (initdb and pg_ctl)")
    pytest.importorskip("psycopg2", reason="the driver for PostgreSQL is not installed")
    server = PostgresServer.in_temporary_folder(binaries)
    server.start()
    yield server
    server.remove()


@pytest.fixture
def storage_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Address of a fresh storage of the kind that the test asks for, ``-`` for the journal."""
    if request.param == "journal":
        return "-"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/studies.db"
    return request.getfixturevalue("postgres").create(f"db{time.monotonic_ns()}")


class Drivers:
    """Drivers of one study of trials that take no time, and what they ran."""

    def __init__(self, tmp_path: Path, repo_root: Path, url: str) -> None:
        self.folder = tmp_path / "studies" / "s"
        self.ran = tmp_path / "ran"
        self.ran.mkdir()
        self._space, self._url = tmp_path / "small.yaml", url
        self._environment = os.environ | {"PYTHONPATH": str(repo_root)}
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, num_trials: int, *, workers: int = 1, delay: float = 0.0) -> subprocess.Popen[bytes]:
        """One more driver."""
        ran = self.ran / str(len(self._started))
        command = [sys.executable, str(FAST_DRIVE), str(self._space), str(self.folder), str(num_trials)]
        command += [str(workers), self._url, str(ran), str(delay)]
        self._started.append(subprocess.Popen(command, env=self._environment))
        return self._started[-1]

    def finish(self) -> None:
        """Wait for the end of all that were not killed."""
        for driver in self._started:
            assert driver.wait(240) in (0, -signal.SIGKILL)

    def starts(self) -> list[tuple[int, int]]:
        """Number and attempt of each start of a trial."""
        lines = [line.split() for path in sorted(self.ran.iterdir()) for line in path.read_text().splitlines()]
        return [(int(number), int(attempt)) for number, attempt, _ in lines]

    def end(self) -> None:
        """Kill what still runs."""
        for driver in self._started:
            driver.kill()
            driver.wait()


@pytest.fixture
def drivers(tmp_path: Path, repo_root: Path, make_space: Callable[..., Any], storage_url: str) -> Iterator[Drivers]:
    """Starts drivers of a study in the storage."""
    make_space()
    drivers = Drivers(tmp_path, repo_root, storage_url)
    yield drivers
    drivers.end()


@pytest.mark.parametrize(
    ("storage_url", "num_drivers", "num_trials"),
    [("postgresql", 2, 100), ("sqlite", 4, 60), ("journal", 4, 60)],
    indirect=["storage_url"],
)
def test_drivers_that_start_at_once_share_a_study(drivers: Drivers, num_drivers: int, num_trials: int) -> None:
    """Also the creation of the study and of its tables is shared."""
    for _ in range(num_drivers):
        drivers.start(num_trials, workers=2)
    drivers.finish()
    rows = load_snapshot(drivers.folder).trials
    assert len(rows) == num_trials
    assert all(row.outcome is not None and row.outcome.kind == "ok" for row in rows)
    assert sorted(number for number, _ in drivers.starts()) == [row.number for row in rows]
    assert {attempt for _, attempt in drivers.starts()} == {1}
    assert len({str(row.parameters) for row in rows}) == num_trials


@pytest.mark.parametrize("storage_url", ["postgresql", "sqlite", "journal"], indirect=True)
def test_an_orphan_is_taken_over_once_and_only_once(drivers: Drivers) -> None:
    """One of three drivers is killed in the middle of its trials; the others finish what it began, each trial once."""
    victim = drivers.start(12, workers=2, delay=60.0)
    wait_for(lambda: len(drivers.starts()) == 2)
    orphans = {number for number, _ in drivers.starts()}
    victim.kill()
    victim.wait()
    for _ in range(2):
        drivers.start(12, workers=2)
    drivers.finish()
    rows = load_snapshot(drivers.folder).trials
    assert len(rows) == 12
    assert all(row.outcome is not None and row.outcome.kind == "ok" for row in rows)
    counts = Counter(number for number, _ in drivers.starts())
    assert {number for number, count in counts.items() if count == 2} == orphans
    assert max(counts.values()) == 2
    assert {row.number for row in rows if row.attempts == 2} == orphans


@pytest.mark.parametrize("storage_url", ["postgresql"], indirect=True)
def test_a_database_that_goes_away_and_comes_back_loses_nothing(drivers: Drivers, postgres: PostgresServer) -> None:
    driver = drivers.start(40, workers=2, delay=0.1)
    wait_for(lambda: len(drivers.starts()) >= 6)
    postgres.stop()
    time.sleep(1.0)
    postgres.start()
    drivers.finish()
    assert driver.returncode == 0
    rows = load_snapshot(drivers.folder).trials
    assert len(rows) == 40
    assert all(row.outcome is not None and row.outcome.kind == "ok" for row in rows)
    assert sorted({number for number, _ in drivers.starts()}) == [row.number for row in rows]


@pytest.mark.parametrize("storage_url", ["sqlite"], indirect=True)
def test_reports_are_made_while_drivers_write(drivers: Drivers) -> None:
    """Public fault: a dashboard on the same SQLite file ended the sweep."""
    for _ in range(2):
        drivers.start(30, workers=2)
    wait_for(lambda: len(drivers.starts()) >= 1)
    counts = [0]
    while counts[-1] < 30:
        counts.append(sum(row.outcome is not None for row in load_snapshot(drivers.folder).trials))
    drivers.finish()
    assert counts == sorted(counts)


def wait_for(condition: Callable[[], bool], timeout: float = 120.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
