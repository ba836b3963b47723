"""A sweep of real training on this machine: the front of a few trials of ours against that of more trials of Optuna's
TPE, which knows neither cost model nor prior. Same space, same engine, same text, several seeds.

What a sweep measured itself is partly luck, and more trials have more of it. So the members of both fronts are trained
once more, in turns, with a seed that no sweep has seen, and the hypervolumes of what that measures are compared in one
box.

    python benchmarks/real_sweep.py [--seeds 3] [--ours 15] [--theirs 60] [--folder runs/benchmarks/real_sweep]

What is in the folder is not run again, so that the benchmark can be interrupted. Writes
``benchmarks/results/real_sweep.json``.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from autotune.apply.select import front_trials
from autotune.search.pareto import Box, front_box, hypervolume, hypervolume_history
from autotune.search.seeds import derive_seed
from autotune.space.space import TrialLimits
from autotune.specs.cluster import parse_cluster
from autotune.study.devices import DevicePool
from autotune.study.runner import RUN_FILE, run_trial
from autotune.study.snapshot import StudySnapshot, TrialRow
from autotune.study.study import load_snapshot
from engine.atomic import write_json
from engine.config import load_run
from engine.outcome import read_outcome

ROOT = Path(__file__).resolve().parents[1]
SPACE = ROOT / "benchmarks" / "real_sweep.yaml"
RESULT = ROOT / "benchmarks" / "results" / "real_sweep.json"
MACHINE = "cpu:2"
DIRECTIONS = ("maximize", "minimize", "minimize")
NAMES = ("speed", "memory", "quality")
SETUP = (
    "2 CPU cores, no GPU; the engine on the text of Python's standard library, 60k tokens a trial, bytes as tokens; "
    "layouts on one and two ranks, precision, batch, learning rate, warm-up and weight decay together; the search was "
    "changed once after a look at the first sweep of ours with seed 0, which was then run anew"
)


def main() -> int:
    """Run what is missing, compare, write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ours", type=int, default=15, help="trials of ours")
    parser.add_argument("--theirs", type=int, default=60, help="trials of Optuna's TPE")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/real_sweep"))
    options = parser.parse_args()
    folder: Path = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    machine = folder / "machine.yaml"
    profile_seconds = folder / "profile_seconds"
    if not machine.exists():
        begun = time.monotonic()
        autotune("profile", "--cluster", MACHINE, "--quick", "-o", str(machine))
        profile_seconds.write_text(f"{time.monotonic() - begun:.1f}")
    pairs = []
    for seed in range(options.seeds):
        # The one that goes first changes, so that a slow drift of the machine is shared out.
        order = ("ours", "theirs") if seed % 2 == 0 else ("theirs", "ours")
        studies = {
            who: sweep(folder, machine, who, seed, options.ours if who == "ours" else options.theirs) for who in order
        }
        measure_again(folder, studies, seed)
        pairs.append(studies)
    result = compare(folder, pairs) | {
        "num_trials": {"ours": options.ours, "theirs": options.theirs},
        "profile_seconds": float(profile_seconds.read_text()),
    }
    lines = table(result)
    write_json(RESULT, {"title": "Real sweeps: few trials against many", "setup": SETUP, "lines": lines, **result})
    print("\n".join(lines))
    return 0


def autotune(*arguments: str) -> None:
    """Run a command as a user would."""
    subprocess.run([sys.executable, "-P", "-m", "autotune.cli", *arguments], check=True)


def sweep(folder: Path, machine: Path, who: str, seed: int, num_trials: int) -> StudySnapshot:
    """The finished study of one side; one that is there is only completed."""
    name = f"{who}-{seed}"
    arguments = ["sweep", str(SPACE), "--study", name, "--runs-dir", str(folder), "--seed", str(seed)]
    arguments += ["--trials", str(num_trials)]
    if who == "ours":
        arguments += ["--cluster", str(machine), "--sampler", "joint"]
    else:
        arguments += ["--cluster", MACHINE, "--sampler", "tpe", "--no-estimates", "--no-prior"]
    study = folder / "studies" / name
    if not study.exists() or sum(row.outcome is not None for row in load_snapshot(study).trials) < num_trials:
        autotune(*arguments)
    return load_snapshot(study)


def measure_again(folder: Path, studies: dict[str, StudySnapshot], seed: int) -> None:
    """Train the members of both fronts with a fresh seed, in turns."""
    pool = DevicePool(parse_cluster(MACHINE))
    fronts = [[(who, row) for row in front_trials(snapshot)] for who, snapshot in sorted(studies.items())]
    for who, row in filter(None, itertools.chain(*itertools.zip_longest(*fronts))):
        again = again_folder(folder, who, seed, row)
        outcome = read_outcome(again)
        if outcome is not None and outcome.kind == "ok":
            continue
        assert row.folder is not None
        config = load_run(row.folder / RUN_FILE)[0]
        config = config.changed(runtime=config.runtime.changed(seed=derive_seed(seed, "again")))
        devices = pool.acquire(config.plan.world_size, lambda: False)
        assert devices is not None
        try:
            run_trial(config, again, limits=TrialLimits(seconds=120.0), devices=devices)
        finally:
            pool.release(devices)


def again_folder(folder: Path, who: str, seed: int, row: TrialRow) -> Path:
    """Where a member of a front is trained once more."""
    return folder / "again" / f"{who}-{seed}" / str(row.number)


def compare(folder: Path, pairs: Sequence[dict[str, StudySnapshot]]) -> dict[str, Any]:
    """Hypervolumes of both sides, measured again and as the sweeps themselves saw them."""
    again = [
        {who: values_again(folder, who, seed, snapshot) for who, snapshot in studies.items()}
        for seed, studies in enumerate(pairs)
    ]
    seen = [{who: values_seen(snapshot) for who, snapshot in studies.items()} for studies in pairs]
    box_again = common_box([values for side in again for values in side.values()])
    box_seen = common_box([values for side in seen for values in side.values()])
    seeds = []
    for seed, studies in enumerate(pairs):
        histories = {who: hypervolume_history(values, DIRECTIONS, box_seen) for who, values in seen[seed].items()}
        reached = np.flatnonzero(histories["theirs"] >= histories["ours"][-1])
        seeds.append(
            {
                "seed": seed,
                "again": {who: hypervolume(values, DIRECTIONS, box_again) for who, values in again[seed].items()},
                "front_size": {who: len(values) for who, values in again[seed].items()},
                "seen": {who: float(history[-1]) for who, history in histories.items()},
                "theirs_seen_after": {
                    str(count): float(histories["theirs"][count - 1])
                    for count in (5, 10, 15, 30, 45, 60)
                    if count <= len(histories["theirs"])
                },
                "theirs_trials_to_ours": int(reached[0]) + 1 if len(reached) else None,
                "best_loss_again": {who: float(np.nanmin(values[:, 2])) for who, values in again[seed].items()},
                "failed": {
                    who: sum(row.values is None for row in snapshot.trials) for who, snapshot in studies.items()
                },
                "wall_seconds": {
                    who: sum(row.seconds or 0.0 for row in snapshot.trials) for who, snapshot in studies.items()
                },
                "median_trial_seconds": median(row.seconds or 0.0 for s in studies.values() for row in s.trials),
            }
        )
    return {"seeds": seeds, "space": SPACE.name, "machine": MACHINE}


def values_again(folder: Path, who: str, seed: int, snapshot: StudySnapshot) -> np.ndarray:
    """``[n, 3]`` values of a front as they were measured again; NaN where that failed."""
    rows = []
    for row in front_trials(snapshot):
        outcome = read_outcome(again_folder(folder, who, seed, row))
        values = [objective.value_of(outcome) if outcome else None for objective in snapshot.objectives]
        rows.append([np.nan if value is None else value for value in values])
    return np.array(rows, dtype=float).reshape(-1, len(NAMES))


def values_seen(snapshot: StudySnapshot) -> np.ndarray:
    """``[n, 3]`` values of all trials as the sweep measured them; NaN where there are none."""
    return np.array([[(row.values or {}).get(name, np.nan) for name in NAMES] for row in snapshot.trials])


def common_box(sets: Sequence[np.ndarray]) -> Box:
    """The box of the front of all."""
    return front_box(np.concatenate(sets), DIRECTIONS)


def table(result: dict[str, Any]) -> list[str]:
    """The table for people, as Markdown."""
    counts = result["num_trials"]
    rows = []
    for row in result["seeds"]:
        again, seen, loss = row["again"], row["seen"], row["best_loss_again"]
        reached = row["theirs_trials_to_ours"] or "never"
        rows.append(
            f"| {row['seed']} | {again['ours']:.3f} | {again['theirs']:.3f} | {seen['ours']:.3f} | {seen['theirs']:.3f}"
            f" | {reached} | {loss['ours']:.3f} | {loss['theirs']:.3f} |"
        )
    ours = float(np.mean([row["again"]["ours"] for row in result["seeds"]]))
    theirs = float(np.mean([row["again"]["theirs"] for row in result["seeds"]]))
    seconds = float(np.median([row["median_trial_seconds"] for row in result["seeds"]]))
    return [
        f"{counts['ours']} trials of ours (cost model from a quick profile of {result['profile_seconds']:.0f} s, and"
        f" the prior) against {counts['theirs']} of Optuna's TPE, which starts with uniform draws from the legal"
        f" candidates; a trial takes {seconds:.0f} s in the median. Hypervolume of speed, memory and held-out loss."
        " *Again*: the members of both fronts trained once more, in turns, with a seed no sweep has seen.",
        "",
        f"| seed | ours ({counts['ours']}), again | TPE ({counts['theirs']}), again | ours, as its sweep saw it | TPE,"
        " as its sweep saw it | TPE's trials to ours, as seen | best loss of ours, again | of TPE |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        f"| mean | {ours:.3f} | {theirs:.3f} | | | | | |",
    ]


if __name__ == "__main__":
    sys.exit(main())
