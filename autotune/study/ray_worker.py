"""What runs on the nodes of a Ray cluster: one trial, as a child of the worker process that Ray has started for it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from autotune.space.space import TrialLimits
from autotune.study.assignment import Assignment
from autotune.study.child import STDOUT_FILE, STOP_GRACE_SECONDS, Stop, end_recorded, start_child
from autotune.study.command_runner import run_program
from autotune.study.executor import with_memory_share
from autotune.study.processes import end_marked, new_mark
from autotune.study.ray_cluster import Bundles, RayCluster
from autotune.study.runner import RUN_FILE, run_trial
from engine.atomic import make_folder
from engine.errors import UserError
from engine.outcome import Outcome

LOOK_SECONDS = 0.5
"""Time between looks at the stop file."""
LOST_PEER_SECONDS = 10.0
"""When another node's ranks have ended, those here get so long to say why."""


@dataclass(frozen=True)
class RayTask:
    """A trial for a worker."""

    assignment: Assignment
    limits: TrialLimits
    command: tuple[str, ...] | None
    """Stands in for the engine."""
    stop_file: Path
    """Says how urgently the trial is to end (a name of ``Stop``, or nothing), for as long as somebody waits for it."""
    cluster: RayCluster
    bundles: Bundles


class TrialOnWorker(tune.Trainable):
    """A trial as Ray Tune sees it: one step, whose result is the outcome as text. Tune never sees a figure, so none can
    upset it."""

    def setup(self, config: dict[str, Any]) -> None:
        """Take the task."""
        self._task: RayTask = config["task"]

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take another task, in the same process."""
        self._task = new_config["task"]
        return True

    def step(self) -> dict[str, Any]:
        """Run the trial to its end."""
        return {"answer": answer(self._task), "done": True}


def answer(task: RayTask) -> str:
    """Run a task; its outcome, or an error that ends the whole sweep, as text."""
    try:
        return json.dumps({"outcome": _outcome(task).to_data()})
    except (UserError, OSError) as error:
        hint = error.hint if isinstance(error, UserError) else "see the node's disk and its permissions"
        return json.dumps({"error": f"{socket.gethostname()}: {error}", "hint": hint})


def read_answer(text: str) -> Outcome:
    """The inverse of ``answer``.

    Raises:
        UserError: Something that ends the sweep.
    """
    data = json.loads(text)
    if "error" in data:
        raise UserError(data["error"], hint=data["hint"])
    return Outcome(**data["outcome"])


def look_from_node(path: str) -> tuple[str | None, str]:
    """What a file holds as seen from here (None: it isn't there), and the name of this machine."""
    try:
        return Path(path).read_text(encoding="utf-8"), socket.gethostname()
    except OSError:
        return None, socket.gethostname()


class StopFile:
    """The stop file as a task sees it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._next_look = 0.0
        self._found = Stop.NO

    def read(self) -> Stop:
        """How urgently to end. Opening a file makes a network file system ask for its newest content."""
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            try:
                word = self._path.read_text(encoding="ascii")
                self._found = max(self._found, Stop[word] if word in Stop.__members__ else Stop.NO)
            except OSError:
                self._found = Stop.NOW
        return self._found


def _outcome(task: RayTask) -> Outcome:
    if not task.stop_file.exists():
        detail = f"node {socket.gethostname()} does not see the trial's folder: --runs-dir has to be shared"
        return Outcome(kind="infra", detail=detail)
    return _over_nodes(task) if task.bundles.num_nodes > 1 else _run(task, StopFile(task.stop_file).read, task.command)


def _run(task: RayTask, stop: Any, command: Any) -> Outcome:
    here = task.cluster.devices_by_node().get(ray.get_runtime_context().get_node_id(), task.bundles.devices_per_node)
    limits = with_memory_share(task.limits, task.bundles.devices_per_node, here)
    assignment = task.assignment
    if assignment.program is not None:
        return run_program(assignment, assignment.program, limits=limits, stop=stop)
    assert assignment.config is not None, "a run of the engine or a program"
    return run_trial(assignment.config, assignment.folder, limits=limits, stop=stop, command=command)


# One trial over several nodes: each runs torchrun for its ranks; the first also watches telemetry and tells the outcome


def _over_nodes(task: RayTask) -> Outcome:
    asked = StopFile(task.stop_file)
    first = (ray.util.get_node_ip_address(), _free_port())  # type: ignore[no-untyped-call]
    followers = _start_followers(task, first)
    lost_since: float | None = None

    def stop() -> Stop:
        nonlocal lost_since
        if lost_since is None and _have_failed(followers):
            lost_since = time.monotonic()
        is_lost = lost_since is not None and time.monotonic() > lost_since + LOST_PEER_SECONDS
        return Stop.NOW if is_lost else asked.read()

    try:
        outcome = _run(task, stop, _command(task, 0, first))
    finally:
        is_asked = asked.read() > Stop.NO
        _end_followers(task, followers)
    if outcome.kind == "interrupted" and lost_since is not None and not is_asked:
        return outcome.changed(kind="infra", detail="ranks on another node ended first")
    return outcome


def _command(task: RayTask, node_rank: int, first: tuple[str, int]) -> list[str]:
    """torchrun for the ranks of one node.

    Args:
        task: The task.
        node_rank: Of the node.
        first: Address and port of the node that ranks find each other at.
    """
    launch = [sys.executable, "-P", "-m", "torch.distributed.run", f"--log-dir={os.devnull}"]
    launch += [f"--nnodes={task.bundles.num_nodes}", f"--node-rank={node_rank}"]
    launch += [f"--nproc-per-node={task.bundles.devices_per_node}"]
    launch += [f"--master-addr={first[0]}", f"--master-port={first[1]}"]
    folder = task.assignment.folder.absolute()
    return [*launch, "-m", "engine.train", str(folder / RUN_FILE), "--folder", str(folder)]


def _start_followers(task: RayTask, first: tuple[str, int]) -> list[Any]:
    group = get_current_placement_group()
    assert group is not None, "trials over several nodes have one"
    resources = task.cluster.resources(task.bundles.devices_per_node)
    follower = ray.remote(num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), max_retries=0)(_follow)
    return [
        follower.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        ).remote(task, rank, _command(task, rank, first))
        for rank in range(1, task.bundles.num_nodes)
    ]


def _have_failed(followers: list[Any]) -> bool:
    """Whether ranks on another node ended otherwise than well."""
    ended, _ = ray.wait(followers, num_returns=len(followers), timeout=0)
    try:
        return any(status != 0 for status in ray.get(ended))
    except ray.exceptions.RayError:
        return True


def _end_followers(task: RayTask, followers: list[Any]) -> None:
    """Have the other nodes end their ranks, and wait for it: the next trial may be started on them."""
    if task.stop_file.exists():
        task.stop_file.write_text(Stop.NOW.name, encoding="ascii")
    ray.wait(followers, num_returns=len(followers), timeout=STOP_GRACE_SECONDS)


def _follow(task: RayTask, node_rank: int, command: list[str]) -> int:
    """Run the ranks of another node than the first; the exit status of their launcher."""
    config = task.assignment.config
    assert config is not None
    asked = StopFile(task.stop_file)
    folder = make_folder(task.assignment.folder / f"node{node_rank}")
    end_recorded(folder)
    mark = new_mark(folder)
    while not (task.assignment.folder / RUN_FILE).exists() and asked.read() < Stop.NOW:
        time.sleep(LOOK_SECONDS / 5)
    with open(folder / STDOUT_FILE, "ab") as output:
        child = start_child(
            command,
            task.assignment.folder,
            mark=mark,
            devices=None,
            threads_per_rank=config.runtime.threads_per_rank,
            death_signal=signal.SIGTERM,
            stdout=output.fileno(),
            stderr=subprocess.STDOUT,
        )
    is_told = False
    try:
        while child.poll() is None and (urgency := asked.read()) < Stop.NOW:
            if urgency == Stop.SOON and not is_told:
                child.send_signal(signal.SIGTERM)
                is_told = True
            time.sleep(LOOK_SECONDS / 5)
    finally:
        end_marked(mark)
        child.wait()
    return child.returncode


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
