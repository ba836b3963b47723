"""Trials on a real Ray cluster of this machine: a head and two nodes, each a set of processes, with one CPU each."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from autotune.space.grammar import load_space
from autotune.specs.cluster import probe_cluster
from autotune.study.child import STOP_GRACE_SECONDS
from autotune.study.driver import Driver
from autotune.study.ray_cluster import Bundles, RayCluster, joined
from autotune.study.ray_pool import RayExecutor, open_ray
from autotune.study.study import Study, load_snapshot
from engine.errors import UserError
from tests.autotune.study.conftest import FAKE_TRAINER, SPACE, Log

ray = pytest.importorskip("ray", reason="Ray is not installed")

ONE_DEVICE = "space.plan.dp_shard=1"
WAIT_SECONDS = 240.0

pytestmark = pytest.mark.timeout(900)  # a hang guard: to start a worker takes a minute on a machine that is busy


class Cluster:
    """The cluster; nodes may be killed and added."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster as RayTestCluster

        self._cluster = RayTestCluster()
        self._add(num_cpus=0, include_dashboard=False)
        self.nodes = [self._add(num_cpus=1) for _ in range(2)]
        self.address = self._cluster.address

    def _add(self, **options: Any) -> Any:
        """Another node; on a busy machine a start may take longer than Ray waits for it."""
        for _ in range(3):
            try:
                return self._cluster.add_node(**options)
            except Exception as error:
                if "timed out" not in str(error):
                    raise
        raise AssertionError("no node of a Ray cluster can be started here")

    def replace(self, node: Any) -> None:
        """Kill a node's raylet as the loss of a machine would, and start another node."""
        self._cluster.remove_node(node, allow_graceful=False)
        self.nodes.remove(node)
        self.nodes.append(self._add(num_cpus=1))

    def end(self) -> None:
        """End all of it."""
        self._cluster.shutdown()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster that notices lost nodes soon."""
    settings = {"RAY_health_check_period_ms": "1000", "RAY_health_check_failure_threshold": "5"}
    before = dict(os.environ)
    os.environ.update(settings)
    started = Cluster()
    yield started
    started.end()
    os.environ.clear()
    os.environ.update(before)


class Sweeps:
    """Runs studies with the fake trainer on one executor."""

    def __init__(self, executor: RayExecutor) -> None:
        self.executor = executor
        self.arguments: tuple[str, ...] = ("ok",)

    def command(self, _: Any) -> list[str]:
        """What to run as a trial."""
        return [sys.executable, FAKE_TRAINER, *self.arguments]

    def start(self, study: Study, *arguments: str, log: Log | None = None) -> tuple[Driver, threading.Thread]:
        """A driver at work."""
        self.arguments = arguments
        driver = Driver(study, self.executor, log or Log(), 2)
        thread = threading.Thread(target=driver.run)
        thread.start()
        return driver, thread

    def run(self, study: Study, *arguments: str) -> Log:
        """Run all trials of a study."""
        log = Log()
        self.start(study, *arguments, log=log)[1].join()
        return log


@pytest.fixture(scope="module")
def sweeps(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweeps]:
    """One executor for the tests of this module, because to join a cluster takes seconds."""
    folder = tmp_path_factory.mktemp("ray")
    (folder / "space.yaml").write_text(SPACE)
    space, _ = load_space(folder / "space.yaml")
    holder: list[Sweeps] = []
    with open_ray(
        cluster.address,
        space.cluster,
        folder / "study",
        num_devices=1,
        num_workers=2,
        command=lambda assignment: holder[0].command(assignment),
    ) as executor:
        holder.append(Sweeps(executor))
        yield holder[0]


def test_trials_run_on_the_nodes_and_leave_nothing_else_behind(
    sweeps: Sweeps, open_study: Callable[..., Study], tmp_path: Path
) -> None:
    study = open_study("s", ONE_DEVICE, num_trials=4)
    log = sweeps.run(study, "ok")
    rows = study.snapshot().trials
    assert sorted(log.finished_numbers) == [0, 1, 2, 3]
    assert [row.outcome and row.outcome.kind for row in rows] == ["ok"] * 4
    assert all(row.values is not None and row.attempts == 1 for row in rows)
    names = {path.name for row in rows for path in row.folder.iterdir()}
    assert names == {"run.yaml", "outcome.json", "telemetry.jsonl", "stdout.log", "process.json"}
    assert not [path for path in study.folder.iterdir() if path.name.startswith((".", "stop"))]


def test_numbers_that_are_not_finite_never_reach_ray(sweeps: Sweeps, open_study: Callable[..., Study]) -> None:
    """Public faults: a NaN metric left a trial running for ever, and was called the best."""
    study = open_study("s", ONE_DEVICE, num_trials=2)
    log = sweeps.run(study, "nan")
    assert [row.outcome and row.outcome.kind for row in study.snapshot().trials] == ["nan", "nan"]
    assert log.retried_numbers == []


def test_a_trial_whose_worker_process_is_killed_runs_once_more(
    sweeps: Sweeps, open_study: Callable[..., Study], tmp_path: Path
) -> None:
    study, log = open_study("s", ONE_DEVICE, num_trials=1), Log()
    _, thread = sweeps.start(study, "until", str(tmp_path / "go"), log=log)
    wait_for(lambda: trial_processes(study))
    (child,) = trial_processes(study)
    child.parent().kill()
    (tmp_path / "go").touch()
    thread.join()
    (row,) = study.snapshot().trials
    assert log.retried_numbers == [0]
    assert (row.outcome and row.outcome.kind, row.attempts) == ("ok", 2)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_the_trials_of_a_lost_node_run_once_more_elsewhere(
    cluster: Cluster, sweeps: Sweeps, open_study: Callable[..., Study], tmp_path: Path
) -> None:
    study, log = open_study("s", ONE_DEVICE, num_trials=2), Log()
    _, thread = sweeps.start(study, "until", str(tmp_path / "go"), log=log)
    wait_for(lambda: len(trial_processes(study)) == 2)
    cluster.replace(cluster.nodes[0])
    (tmp_path / "go").touch()
    thread.join()
    rows = study.snapshot().trials
    assert [row.outcome and row.outcome.kind for row in rows] == ["ok", "ok"]
    assert len(log.retried_numbers) == 1
    assert sorted(row.attempts for row in rows) == [1, 2]


def test_a_stopped_driver_gives_its_trials_back(sweeps: Sweeps, open_study: Callable[..., Study]) -> None:
    study, log = open_study("s", ONE_DEVICE, num_trials=1), Log()
    driver, thread = sweeps.start(study, "polite", log=log)
    wait_for(lambda: (study.folder / "trials" / "0" / "telemetry.jsonl").exists())
    time.sleep(0.5)  # until it handles the signal
    driver.stop_soon()
    thread.join(STOP_GRACE_SECONDS + WAIT_SECONDS)
    (row,) = study.snapshot().trials
    assert row.state == "waiting"
    assert log.released_numbers == [0]
    assert (row.folder / "said-goodbye").exists()
    again = open_study("s", ONE_DEVICE, num_trials=1)
    sweeps.run(again, "ok")
    (row,) = again.snapshot().trials
    assert (row.state, row.attempts) == ("finished", 2)


def test_a_killed_driver_takes_its_trials_along_and_the_next_one_finishes_them(
    cluster: Cluster, sweeps: Sweeps, tmp_path: Path, make_space: Callable[..., Any], repo_root: Path
) -> None:
    make_space(text=SPACE.replace("dp_shard: [1, 2]", "dp_shard: 1"))
    folder = tmp_path / "studies" / "s"
    program = [sys.executable, str(Path(__file__).with_name("ray_drive.py")), str(tmp_path / "small.yaml"), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(repo_root)}
    first = subprocess.Popen([*program, "3", cluster.address, "until", "never"], env=environment)
    try:
        wait_for(lambda: len(list(folder.glob("trials/*/telemetry.jsonl"))) == 2)
        children = [process for process in psutil.process_iter() if is_trial_of(process, folder)]
        assert len(children) == 2
    finally:
        first.kill()
        first.wait()
    _, alive = psutil.wait_procs(children, timeout=WAIT_SECONDS)
    assert alive == []
    subprocess.run([*program, "3", cluster.address, "ok"], env=environment, check=True, timeout=240)
    rows = load_snapshot(folder).trials
    assert [row.outcome and row.outcome.kind for row in rows] == ["ok"] * 3
    assert [row.attempts for row in rows] == [2, 2, 1]


@pytest.mark.dist
def test_a_trial_larger_than_a_node_runs_over_several(
    cluster: Cluster, sweeps: Sweeps, open_study: Callable[..., Study]
) -> None:
    """Its ranks on two nodes find each other and train; the outcome is that of one run."""
    small = ("space.plan={dp_shard: 2, micro_batch_size: 2}", "workload.total_tokens=2k", "evaluation.max_tokens=1024")
    study = open_study("s", *small, num_trials=1)
    driver = Driver(study, sweeps.executor, Log(), 1)
    sweeps.arguments = ()
    driver.run()
    (row,) = study.snapshot().trials
    assert row.outcome is not None
    assert (row.outcome.kind, row.outcome.detail) == ("ok", "")
    assert row.values is not None
    assert (row.folder / "node1" / "stdout.log").exists()


def test_a_cluster_that_can_never_hold_a_trial_is_refused(sweeps: Sweeps) -> None:
    one = RayCluster("CPU", threads_per_device=1)
    assert one.bundles(1) == Bundles(1, 1)
    assert one.bundles(2) == Bundles(2, 1)
    with pytest.raises(UserError, match=r"needs 4 CPU devices, the Ray cluster has 2 on 2 nodes \(at most 1 on one\)"):
        one.require(4, 1)
    with pytest.raises(UserError, match="3 workers need 3 CPU devices"):
        one.require(1, 3)
    with pytest.raises(UserError, match="has no GPU devices"):
        RayCluster("GPU", threads_per_device=1).require(1, 1)


def test_a_folder_that_a_node_does_not_see_is_told(
    sweeps: Sweeps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = RayCluster("CPU", threads_per_device=1)
    cluster.check_nodes(tmp_path)
    monkeypatch.setattr("autotune.study.ray_worker.look_from_node", lambda path: (None, "far-away"))
    with pytest.raises(UserError, match="node far-away of the Ray cluster does not see the study's folder") as raised:
        cluster.check_nodes(tmp_path)
    assert "--runs-dir" in (raised.value.hint or "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "cannot join the Ray cluster 127.0.0.1:1: "),
        ("127.0.0.1:99999", "cannot join the Ray cluster 127.0.0.1:99999: "),
        ("ray://host:10001", "not an address of a Ray cluster: 'ray://host:10001'"),
        ("somewhere", "not an address of a Ray cluster: 'somewhere'"),
    ],
)
def test_a_cluster_that_is_not_there_is_told_at_once(address: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)), joined(address, probe_cluster()):
        pass


def trial_processes(study: Study) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if is_trial_of(process, study.folder)]


def is_trial_of(process: psutil.Process, folder: Path) -> bool:
    """Whether a process is a fake trainer in a trial's folder."""
    try:
        return FAKE_TRAINER in process.cmdline() and Path(process.cwd()).is_relative_to(folder.resolve())
    except psutil.Error:
        return False


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
