"""A sweep of real training whose driver, a process of a trial, or both are killed at random moments with SIGKILL, and
which is started again each time. At its end it must have exactly the trials that were asked for, each with one outcome,
and no process of it may be left.

    python benchmarks/kill_sweep.py [--kills 20] [--seed 0]

Writes ``benchmarks/results/kill_sweep.json``.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from autotune.study.processes import MARK
from autotune.study.study import load_snapshot
from engine.atomic import write_json
from engine.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "kill_sweep.json"
STUDY = "kill-sweep"

SPACE = """
use: [tiny_llama]
cluster: cpu:2
workload: {total_tokens: 16k}
objectives: [speed, memory, quality]
space:
  plan: {dp_shard: [1, 2], tp: [1, 2], micro_batch_size: [1, 2, 4]}
  hyperparameters:
    global_batch_size: [8, 16]
    learning_rate: {log_float: [5e-4, 2e-2]}
limits: {time: 5m}
evaluation: {max_tokens: 4096}
"""


@dataclass
class Result:
    """What was done and what came out."""

    kills: list[dict[str, str | float]] = field(default_factory=list)
    """Seconds after the driver's start, and what was killed."""
    num_driver_starts: int = 0
    num_trials_asked: int = 0
    num_trials: int = 0
    num_without_outcome: int = 0
    num_orphans: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    attempts: list[int] = field(default_factory=list)
    """Starts of each trial."""

    def problems(self) -> list[str]:
        """What should not be."""
        found = []
        if self.num_trials != self.num_trials_asked:
            found.append(f"{self.num_trials} trials, asked were {self.num_trials_asked}")
        if self.num_without_outcome:
            found.append(f"{self.num_without_outcome} trials have no outcome")
        if self.num_orphans:
            found.append(f"{self.num_orphans} processes are left")
        return found

    def lines(self) -> list[str]:
        """The result in words, for people and for the documentation."""
        outcomes = ", ".join(f"{count} {kind}" for kind, count in sorted(self.outcomes.items()))
        victims = Counter(str(kill["killed"]) for kill in self.kills)
        killed = ", ".join(f"{count} times {name}" for name, count in sorted(victims.items()))
        return [
            f"{len(self.kills)} kills with SIGKILL ({killed}), {self.num_driver_starts} starts of the driver.",
            f"{self.num_trials} trials of {self.num_trials_asked} asked, outcomes: {outcomes};"
            f" {self.num_orphans} processes left; at most {max(self.attempts, default=0)} starts of one trial.",
        ]


def kill_sweep(
    start_driver: Callable[[int], subprocess.Popen[bytes]],
    folder: Path,
    *,
    num_kills: int,
    num_trials: int,
    longest_seconds: float,
    seed: int,
) -> Result:
    """Run a sweep, killing it ``num_kills`` times.

    Args:
        start_driver: Starts (or continues) the sweep for so many trials in total.
        folder: The study's folder.
        num_kills: Kills to land; where the sweep ends before, it is made longer.
        num_trials: Trials to begin with.
        longest_seconds: A kill comes at most so long after the one before.
        seed: Of moments and victims.
    """
    rng = random.Random(seed)
    result = Result(num_trials_asked=num_trials)
    driver = start_driver(result.num_trials_asked)
    result.num_driver_starts += 1
    started = time.monotonic()
    while True:
        is_last_run = len(result.kills) == num_kills
        moment = time.monotonic() + rng.uniform(0.0, longest_seconds)
        while driver.poll() is None and (is_last_run or time.monotonic() < moment):
            time.sleep(0.02)
        if driver.returncode:
            raise SystemExit(f"the sweep ended by itself with exit code {driver.returncode}")
        if driver.returncode is not None and is_last_run:
            break
        if driver.returncode is None:
            victims = _victims(rng, driver, folder)
            for process in victims.values():
                _kill(process)
            killed = " and ".join(victims)
            result.kills.append({"seconds": round(time.monotonic() - started, 2), "killed": killed})
            if "driver" not in victims:
                continue
            driver.wait()
        else:
            result.num_trials_asked += 2
        driver = start_driver(result.num_trials_asked)
        result.num_driver_starts += 1
        started = time.monotonic()
    snapshot = load_snapshot(folder)
    result.num_trials = len(snapshot.trials)
    result.num_without_outcome = sum(row.outcome is None for row in snapshot.trials)
    result.outcomes = dict(Counter(row.outcome.kind for row in snapshot.trials if row.outcome is not None))
    result.attempts = [row.attempts for row in snapshot.trials]
    result.num_orphans = len(trial_processes(folder))
    return result


def _victims(rng: random.Random, driver: subprocess.Popen[bytes], folder: Path) -> dict[str, psutil.Process]:
    """What to kill next, by its part in the sweep. The driver stands in for a child where none runs."""
    children = trial_processes(folder)
    target = rng.choice(("driver", "child", "both")) if children else "driver"
    victims = {}
    if target != "driver":
        victims["child"] = rng.choice(children)
    if target != "child":
        victims["driver"] = psutil.Process(driver.pid)
    return victims


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:  # it ended by itself a moment ago
        return


def trial_processes(folder: Path) -> list[psutil.Process]:
    """Living processes of the trials of a study, whichever attempt started them."""
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = MARK in process.environ() and Path(process.cwd()).is_relative_to(folder)
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def report(result: Result, seed: int) -> dict[str, Any]:
    """What goes into the result file."""
    return {
        "title": "A sweep killed at random moments",
        "setup": f"{os.cpu_count()} cores, seed {seed}; real training on one and two processes",
        "lines": result.lines(),
        "seed": seed,
        **asdict(result),
        "problems": result.problems(),
    }


def main() -> int:
    """Run it, print what came out, and write the result file."""
    parser = argparse.ArgumentParser(description="Kill a sweep at random moments; nothing may be lost or doubled.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--trials", type=int, default=10, help="trials to begin with")
    parser.add_argument("--longest", type=float, default=40.0, help="most seconds between kills")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paretune-kill-sweep-") as scratch:
        runs = Path(scratch).resolve()
        space = runs / "space.yaml"
        space.write_text(SPACE, encoding="utf-8")

        def start_driver(num_trials: int) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-P", "-m", "autotune.cli", "sweep", str(space), "--study", STUDY]
            command += ["--trials", str(num_trials), "--runs-dir", str(runs)]
            return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True)

        folder = runs / "studies" / STUDY
        try:
            result = kill_sweep(
                start_driver,
                folder,
                num_kills=options.kills,
                num_trials=options.trials,
                longest_seconds=options.longest,
                seed=options.seed,
            )
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    problems = result.problems()
    print("", *result.lines(), "; ".join(problems) or "Nothing lost, nothing doubled, nothing left running.", sep="\n")
    write_json(RESULT, report(result, options.seed))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
