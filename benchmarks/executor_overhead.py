"""What it costs a trial to be asked, placed, run and told, beyond its own work: by executor, storage and drivers.

    python benchmarks/executor_overhead.py [--trials 60] [--shared 500] [--only NAME]

Storages: drivers, each a process, share a study whose trials take no time; seconds are those between two starts of
trials. Executors: one driver, trials that write their outcome and end, with one, two and four at a time. Nothing may be
lost or doubled. Cases that are in the result file are not run again (delete it to begin anew).

Writes ``benchmarks/results/executor_overhead.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from autotune.space.grammar import load_space  # noqa: E402
from autotune.specs.cluster import ClusterSpec  # noqa: E402
from autotune.study.devices import DevicePool  # noqa: E402
from autotune.study.driver import Driver  # noqa: E402
from autotune.study.executor import Executor, LocalExecutor  # noqa: E402
from autotune.study.study import Study, load_snapshot  # noqa: E402
from engine.atomic import write_json  # noqa: E402
from tests.autotune.study.fast_drive import Silent  # noqa: E402
from tests.autotune.study.postgres import PostgresServer, find_binaries  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "executor_overhead.json"
FAST_DRIVE = ROOT / "tests" / "autotune" / "study" / "fast_drive.py"
STORAGES = ("journal", "sqlite", "postgresql")
WORKERS = (1, 2, 4)
NUM_DEVICES = 4
"""Places for trials, whatever this machine has: they take no time."""

SPACE = """
use: [tiny_llama]
cluster: cpu:1
objectives: [speed, quality]
space:
  plan: {micro_batch_size: [1, 2, 4, 8]}
  hyperparameters: {global_batch_size: [8, 16], learning_rate: {log_float: [1e-4, 1e-2]}}
"""

TRIAL = """
import json
outcome = {"kind": "ok", "tokens_per_second": 100.0, "held_out_loss": 3.0, "corpus_hash": "text"}
open("outcome.json", "w").write(json.dumps(outcome))
"""
"""A trial that ends at once: no more than a Python that starts without site packages."""


@contextmanager
def storage(kind: str, folder: Path) -> Iterator[str]:
    """Address of a fresh storage, as ``fast_drive.py`` takes it."""
    if kind == "postgresql":
        binaries = find_binaries()
        if binaries is None:
            raise SystemExit("PostgreSQL is not installed")
        server = PostgresServer.in_temporary_folder(binaries)
        server.start()
        try:
            yield server.create("overhead")
        finally:
            server.remove()
    else:
        yield "-" if kind == "journal" else f"sqlite:///{folder}/studies.db"


def of_storage(kind: str, num_drivers: int, num_trials: int) -> dict[str, Any]:
    """Drivers that share a study of trials that take no time."""
    with tempfile.TemporaryDirectory(prefix="paretune-overhead-") as scratch, storage(kind, Path(scratch)) as url:
        folder = Path(scratch).resolve()
        (folder / "space.yaml").write_text(SPACE, encoding="utf-8")

        def drive(count: int) -> None:
            """Run all drivers to their end."""
            command = [
                sys.executable,
                str(FAST_DRIVE),
                str(folder / "space.yaml"),
                str(folder / "s"),
                str(count),
                "1",
                url,
            ]
            environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            drivers = [
                subprocess.Popen([*command, str(folder / f"ran{index}-{count}")], env=environment)
                for index in range(num_drivers)
            ]
            if any(driver.wait() for driver in drivers):
                raise SystemExit("a driver failed")

        drive(1)
        empty_cpu = _children_cpu(lambda: drive(1))  # opening alone: the one trial is there already
        cpu = _children_cpu(lambda: drive(1 + num_trials))
        rows = load_snapshot(folder / "s").trials
        ran = [line.split() for path in folder.glob("ran*") for line in path.read_text().splitlines()]
    numbers = [number for number, _, _ in ran]
    moments = sorted(float(moment) for number, _, moment in ran if number != "0")
    return {
        "seconds_per_trial": (moments[-1] - moments[0]) / (num_trials - 1),
        "cpu_seconds_per_trial": max(0.0, cpu - empty_cpu) / num_trials,
        "num_trials": num_trials,
        "num_lost": 1 + num_trials - sum(row.outcome is not None for row in rows),
        "num_doubled": len(numbers) - len(set(numbers)),
    }


def of_executor(name: str, num_workers: int, num_trials: int) -> dict[str, Any]:
    """One driver with trials that end at once, beyond what they take alone."""
    with tempfile.TemporaryDirectory(prefix="paretune-overhead-") as scratch:
        folder = Path(scratch).resolve()
        (folder / "space.yaml").write_text(SPACE, encoding="utf-8")
        (folder / "trial.py").write_text(TRIAL, encoding="utf-8")
        command = [sys.executable, "-I", "-S", str(folder / "trial.py")]
        space, enumeration = load_space(folder / "space.yaml")

        def drive(executor: Executor, count: int) -> tuple[float, float]:
            study = Study.create_or_open(folder / "s", space, enumeration, num_trials=count, sampler="random")
            started, cpu = time.monotonic(), time.process_time()
            Driver(study, executor, Silent(), num_workers).run()
            figures = time.monotonic() - started, time.process_time() - cpu
            study.close()
            return figures

        cluster = space.cluster.changed(devices_per_node=NUM_DEVICES)
        with _executor(name, folder, cluster, command) as (executor, opening_seconds):
            first_seconds, _ = drive(executor, num_workers)
            seconds, cpu = drive(executor, num_workers + num_trials)
        rows = load_snapshot(folder / "s").trials
        alone = min(_seconds(lambda: subprocess.run(command, cwd=folder, check=True)) for _ in range(7))
    return {
        "seconds_per_trial": seconds / num_trials - alone / num_workers,
        "cpu_seconds_per_trial": cpu / num_trials,
        "opening_seconds": opening_seconds,
        "first_trials_seconds": first_seconds,
        "num_trials": num_trials,
        "num_lost": num_workers
        + num_trials
        - sum(row.outcome is not None and row.outcome.kind == "ok" for row in rows),
        "num_doubled": sum(row.attempts > 1 for row in rows),
    }


@contextmanager
def _executor(name: str, folder: Path, cluster: ClusterSpec, command: list[str]) -> Iterator[tuple[Executor, float]]:
    started = time.monotonic()
    if name == "local":
        yield LocalExecutor(DevicePool(cluster, folder / "devices"), lambda _: command), 0.0
        return
    from autotune.study.ray_pool import open_ray

    with open_ray(
        None, cluster, folder / "s", num_devices=1, num_workers=NUM_DEVICES, command=lambda _: command
    ) as executor:
        yield executor, time.monotonic() - started


def _children_cpu(call: Callable[[], object]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    call()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _seconds(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def cases(num_trials: int, num_shared: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """Name -> what measures it."""
    found: dict[str, Callable[[], dict[str, Any]]] = {}
    for name in ("local", "ray"):
        for workers in WORKERS:
            found[f"{name}, {workers} at a time"] = lambda n=name, w=workers: of_executor(n, w, num_trials)
    for kind in STORAGES:
        for workers in WORKERS:
            word = "driver" if workers == 1 else "drivers"
            found[f"{kind}, {workers} {word}"] = lambda k=kind, w=workers: of_storage(k, w, num_trials)
    for kind in ("journal", "sqlite"):
        found[f"{kind}, 4 drivers, {num_shared} trials"] = lambda k=kind: of_storage(k, 4, num_shared)
    return found


def lines(figures: dict[str, dict[str, Any]]) -> list[str]:
    """The table as Markdown."""
    table = ["| case | seconds a trial | CPU seconds a trial | trials | lost | doubled |", "|---|---|---|---|---|---|"]
    for name, figure in figures.items():
        table.append(
            f"| {name} | {figure['seconds_per_trial']:.3f} | {figure['cpu_seconds_per_trial']:.3f} |"
            f" {figure['num_trials']} | {figure['num_lost']} | {figure['num_doubled']} |"
        )
    return table


def main() -> int:
    """Run what is missing in the result file."""
    parser = argparse.ArgumentParser(description="Overhead of executors and storages.")
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--shared", type=int, default=500, help="trials of the long runs with four drivers")
    parser.add_argument("--only", default="", help="cases whose name begins so")
    options = parser.parse_args()
    figures: dict[str, dict[str, Any]] = {}
    if RESULT.exists():
        figures = json.loads(RESULT.read_text(encoding="utf-8"))["figures"]
    order = cases(options.trials, options.shared)
    for name, measure in order.items():
        if name in figures or not name.startswith(options.only):
            continue
        figures[name] = measure() | {"load_average": os.getloadavg()[0]}
        print(lines({name: figures[name]})[-1], flush=True)
        figures = {key: figures[key] for key in order if key in figures}
        report = {
            "title": "What a trial costs beyond its own work",
            "setup": f"{os.cpu_count()} cores, Python {platform.python_version()}. Seconds are those of a machine that"
            " did other work too (the load is in the file); CPU seconds are those of the drivers, not of Ray's own"
            " processes or the database's",
            "lines": lines(figures),
            "arguments": ["--trials", str(options.trials), "--shared", str(options.shared)],
            "figures": figures,
        }
        write_json(RESULT, report)
    print(*lines(figures), sep="\n")
    return int(any(figure["num_lost"] or figure["num_doubled"] for figure in figures.values()))


if __name__ == "__main__":
    sys.exit(main())
