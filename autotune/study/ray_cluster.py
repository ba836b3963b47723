"""A Ray cluster as a place for trials: joined (or started for this machine), asked for its devices, and checked."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.specs.cluster import ClusterSpec
from engine.errors import UserError

CHECK_SECONDS = 180.0
"""A node that does not answer for so long is told of."""
REACH_SECONDS = 10.0
"""Who listens at the cluster's address answers within this."""

_START_HINT = (
    "start one with 'ray start --head' and give its HOST:PORT, or leave --address out: one is started here then"
)
_SETTINGS = {
    "RAY_AIR_NEW_OUTPUT": "0",  # the new one prints a box whatever its verbosity
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_MAX_PENDING_TRIALS_PG": "1000",  # what is asked for is limited by the driver's workers
}


@dataclass(frozen=True)
class Bundles:
    """Where a trial's ranks go: equally many devices on each of some nodes."""

    num_nodes: int
    devices_per_node: int


@dataclass(frozen=True)
class RayCluster:
    """A cluster that this process has joined.

    Attributes:
        device: ``GPU`` or ``CPU``, as Ray calls them.
        threads_per_device: CPUs that go with each device.
    """

    device: str
    threads_per_device: int

    def resources(self, num_devices: int) -> dict[str, float]:
        """What Ray is asked for."""
        cpus = float(num_devices * self.threads_per_device)
        return {"CPU": cpus} if self.device == "CPU" else {"CPU": cpus, "GPU": float(num_devices)}

    def devices_by_node(self) -> dict[str, int]:
        """Living node -> devices that it has, free or not; nodes without any are left out."""
        import ray

        each = self.resources(1)
        devices = {
            node["NodeID"]: min(int(node["Resources"].get(kind, 0) // need) for kind, need in each.items())
            for node in ray.nodes()  # type: ignore[no-untyped-call]
            if node["Alive"]
        }
        return {node: count for node, count in devices.items() if count}

    def bundles(self, num_devices: int, max_nodes: int | None = None) -> Bundles | None:
        """Where a trial fits: on one node, else on the fewest with equally many devices each; None for nowhere."""
        counts = list(self.devices_by_node().values())
        for num_nodes in range(1, min(len(counts), max_nodes or len(counts)) + 1):
            each, rest = divmod(num_devices, num_nodes)
            if not rest and each and sum(count >= each for count in counts) >= num_nodes:
                return Bundles(num_nodes, each)
        return None

    def require(self, num_devices: int, num_workers: int, max_nodes: int | None = None) -> None:
        """Make sure that the largest trial fits, and that workers do.

        Raises:
            UserError: They don't.
        """
        counts = sorted(self.devices_by_node().values(), reverse=True)
        has = f"the Ray cluster has {_count_text(counts, self.device)}"
        if self.threads_per_device > 1:
            has += f" ({self.threads_per_device} CPUs to a device)"
        if self.bundles(num_devices, max_nodes) is None:
            where = " on one node" if max_nodes == 1 else ""
            raise UserError(
                f"a trial of this space needs {num_devices} {self.device} devices{where}, {has}",
                hint="start more Ray nodes, or narrow the parallel degrees of the space",
            )
        if num_workers > sum(counts):
            raise UserError(
                f"{num_workers} workers need {num_workers} {self.device} devices, {has}",
                hint=f"use at most --workers {sum(counts)}",
            )

    def check_nodes(self, folder: Path) -> None:
        """Make sure that trials on every node see the study's folder, and that this version of ours is there.

        Raises:
            UserError: Some node doesn't, with its name.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from autotune.study.ray_worker import look_from_node

        token = uuid.uuid4().hex
        marker = folder / f".shared-{token}"
        marker.write_text(token, encoding="utf-8")
        try:
            look = ray.remote(num_cpus=0, max_retries=0)(look_from_node)
            asked = {
                node: look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(
                    str(marker)
                )
                for node in self.devices_by_node()
            }
            for node, answer in asked.items():
                try:
                    found, host = ray.get(answer, timeout=CHECK_SECONDS)
                except Exception as error:
                    raise UserError(
                        f"node {_host(node)} of the Ray cluster can't run trials: {_reason(error)}",
                        hint="every node needs the same Python, Ray and Paretune",
                    ) from None
                if found != token:
                    raise UserError(
                        f"node {host} of the Ray cluster does not see the study's folder {folder}",
                        hint="put --runs-dir on a file system that all nodes share, at the same path",
                    )
        finally:
            marker.unlink(missing_ok=True)


@contextmanager
def joined(address: str | None, spec: ClusterSpec) -> Iterator[RayCluster]:
    """Be part of a Ray cluster while the block runs.

    Args:
        address: ``auto`` or ``HOST:PORT``; None to start one for this machine, ended with the block.
        spec: The devices trials are planned for.

    Raises:
        UserError: Ray is not installed, or the cluster can't be reached.
    """
    if address not in (None, "auto"):
        _reach(address)
    with _settings():
        try:
            import ray
        except ImportError:
            raise UserError("Ray is not installed", hint="pip install 'paretune[ray]'") from None
        options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        scratch = None
        if address is None:
            scratch = tempfile.mkdtemp(prefix="ray-", dir=_short_folder())
            options |= {
                "address": "local",
                "num_cpus": spec.num_devices * spec.threads_per_device,
                "num_gpus": spec.num_devices if spec.device == "cuda" else 0,
                "include_dashboard": False,
                "_temp_dir": scratch,
            }
        else:
            options["address"] = address
        try:
            try:
                ray.init(**options)
            except Exception as error:
                raise UserError(
                    f"cannot join the Ray cluster {address or 'of this machine'}: {_reason(error)}",
                    hint=_START_HINT,
                ) from None
            _silence()
            yield RayCluster("GPU" if spec.device == "cuda" else "CPU", spec.threads_per_device)
        finally:
            ray.shutdown()
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)


def _reach(address: str) -> None:
    """Make sure that somebody listens at ``HOST:PORT``: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        raise UserError(
            f"not an address of a Ray cluster: {address!r}",
            hint="give auto or HOST:PORT of its head, on a machine that is a node of it",
        )
    try:
        socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise UserError(
            f"cannot join the Ray cluster {address}: {getattr(error, 'strerror', None) or error}", hint=_START_HINT
        ) from None


@contextmanager
def _settings() -> Iterator[None]:
    """Ray's settings that are environment variables, taken back at the end; the user's own win."""
    added = {name: value for name, value in _SETTINGS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _silence() -> None:
    """Ray prints what happens to its workers, even to standard output, where our results go. What matters of it is told
    by the sweep: a trial whose worker was lost is run again."""
    from ray._private import worker

    logging.getLogger("ray").setLevel(logging.CRITICAL)
    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *_, **__: None


def _short_folder() -> str | None:
    """Ray's sockets lie below it, and their paths may have about 100 characters."""
    return "/tmp" if sys.platform != "win32" and os.access("/tmp", os.W_OK) else None


def _count_text(counts: Sequence[int], device: str) -> str:
    if not counts:
        return f"no {device} devices"
    return f"{sum(counts)} on {len(counts)} node{'s' if len(counts) > 1 else ''} (at most {counts[0]} on one)"


def _host(node_id: str) -> str:
    import ray

    names = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes()}  # type: ignore[no-untyped-call]
    return str(names.get(node_id, node_id[:8]))


def _reason(error: Exception) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[-1][:300]
