"""Measures this machine: ``engine.probe --measure`` as a child, on the devices and cores that trials run on."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from autotune.specs.cluster import ClusterSpec
from autotune.study.child import start_child
from autotune.study.devices import DevicePool
from autotune.study.processes import end_marked, new_mark
from autotune.study.runner import launch_command
from engine.errors import USER_ERROR_EXIT_CODE, UserError
from engine.measurement import Measurement
from engine.schema import parse

PROGRESS = "progress:"
"""How a line of the probe begins that tells how far it is."""
RESULT_FILE = "measurement.json"
ERRORS_FILE = "stderr.log"

Progress = Callable[[float, str], None]
"""Told the share that is done and what comes next."""


def measure(
    cluster: ClusterSpec,
    *,
    quick: bool,
    on_progress: Progress = lambda done, what: None,
    pool: DevicePool | None = None,
) -> Measurement:
    """Measure all devices of this machine at once, when no trial uses them.

    Args:
        cluster: This machine.
        quick: Fewer and shorter measurements.
        on_progress: Called as it goes on.
        pool: The devices; made from the cluster when None.

    Raises:
        UserError: The probe could not measure; its own words where it has some.
    """
    pool = pool or DevicePool(cluster)
    on_progress(0.0, "waiting for free devices")
    devices = pool.acquire(cluster.num_devices)
    assert devices is not None, "nobody asks this to stop"
    try:
        with tempfile.TemporaryDirectory(prefix="autotune-") as name:
            folder = Path(name)
            program = ["-m", "engine.probe", "--measure", "--device", cluster.device]
            program += ["--threads", str(cluster.threads_per_device), "--output", str(folder / RESULT_FILE)]
            program += ["--quick"] if quick else []
            mark = new_mark(folder)
            with open(folder / ERRORS_FILE, "wb") as errors:
                child = start_child(
                    launch_command(program, cluster.num_devices),
                    folder,
                    mark=mark,
                    devices=devices,
                    threads_per_rank=cluster.threads_per_device,
                    death_signal=signal.SIGTERM,
                    stdout=subprocess.DEVNULL,
                    stderr=errors.fileno(),
                )
            try:
                _follow(child, folder / ERRORS_FILE, on_progress)
            finally:
                end_marked(mark)
                child.wait()
            return _result(folder, child.returncode)
    finally:
        pool.release(devices)


def read_measurement(path: Path) -> Measurement:
    """A measurement from the file that ``engine.probe --measure --output`` wrote.

    Raises:
        UserError: There is none, or it is none.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
        hint = "write one with: torchrun ... -m engine.probe --measure --output measurement.json"
        raise UserError(f"cannot read the measurement {path}: {reason}", hint=hint) from None
    return parse(Measurement, data)


def _follow(child: subprocess.Popen[bytes], errors: Path, on_progress: Progress) -> None:
    """Pass progress on until the child has ended."""
    with open(errors, encoding="utf-8", errors="replace") as lines:
        while True:
            ended = _has_ended(child)
            progress = [line for line in lines.read().splitlines() if line.startswith(PROGRESS) and line.endswith("}")]
            for line in progress:
                data = json.loads(line.removeprefix(PROGRESS))
                on_progress(data["done"], data["what"])
            if ended:
                return


def _has_ended(child: subprocess.Popen[bytes], seconds: float = 0.2) -> bool:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _result(folder: Path, status: int) -> Measurement:
    if status == 0 and (folder / RESULT_FILE).exists():
        return read_measurement(folder / RESULT_FILE)
    text = (folder / ERRORS_FILE).read_text(encoding="utf-8", errors="replace")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith(PROGRESS)]
    told = [line for line in lines if line.startswith("error: ") or "Error: " in line]
    reason = (told or lines[-1:] or [f"it ended with exit status {status}"])[0].removeprefix("error: ")
    hint = None if status == USER_ERROR_EXIT_CODE else "autotune doctor says what is missing for training"
    raise UserError(f"this machine could not be measured: {reason.strip()[:500]}", hint=hint)
