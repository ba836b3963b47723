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
    print(f"\n{len(result.kills)} kills, {result.num_driver_starts} starts of the driver")
    print(f"{result.num_trials} trials of {result.num_trials_asked} asked, outcomes {result.outcomes}")
    print("; ".join(problems) or "nothing lost, nothing doubled, nothing left running")
    write_json(RESULT, {"seed": options.seed, **asdict(result), "problems": problems})
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
