"""The whole path on this machine, by the commands a user would type: profile, sweep, report, apply, and a live-retuned
run.

The last run starts at a quarter of the chosen learning rate on purpose, so that there is something to retune.
Everything goes below ``runs/``; a demonstration that was interrupted goes on where it was.

    python benchmarks/demo.py [--runs-dir runs] [--trials N]
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from autotune.paths import DEFAULT_RUNS
from engine.units import format_duration

STUDY = "demo"
JOB = "demo"
START_SCALE = 0.25
RUN_TOKENS = "1M"


def main() -> int:
    """Run the commands one after the other; stop at the first that fails."""
    parser = argparse.ArgumentParser(description="Sweep, report, apply and live-retuned training, on this machine.")
    parser.add_argument("--runs-dir", type=Path, default=DEFAULT_RUNS, help="where results go")
    parser.add_argument("--trials", type=int, default=20, help="trials of the sweep")
    options = parser.parse_args()
    runs = options.runs_dir
    chosen = runs / "studies" / STUDY / "run.yaml"
    runs.mkdir(parents=True, exist_ok=True)
    machine = runs / "machine.yaml"
    there = ["--runs-dir", str(runs)]
    start = time.monotonic()
    steps = [
        ("1/5 This machine measured, for estimates of what each layout will take",
         ["profile", "--cluster", "cpu:2", "--quick", "-o", str(machine)]),
        ("2/5 A sweep of real training over layouts and hyperparameters",
         ["sweep", "demo", "--study", STUDY, "--cluster", str(machine), "--trials", str(options.trials), *there]),
        ("3/5 Its report", ["report", STUDY, *there]),
        ("4/5 The knee of the front, written as a run file",
         ["apply", STUDY, "--pick", "knee", "-o", str(chosen), "--total-tokens", RUN_TOKENS, "--force", *there]),
        (f"5/5 That run, started on purpose at {START_SCALE:g} of the chosen learning rate, retuned while it trains",
         ["train", str(chosen), "--name", JOB, "--start-lr-scale", str(START_SCALE), "--retune-every", "4s", *there]),
    ]  # fmt: skip
    for title, arguments in steps:
        if arguments[0] == "profile" and machine.exists():
            continue
        print(f"\n━━ {title}\n$ autotune {shlex.join(arguments)}\n", flush=True)
        code = subprocess.run([sys.executable, "-P", "-m", "autotune.cli", *arguments], check=False).returncode
        if code:
            print(f"\nThe step ended with exit code {code}; the same command goes on where it was.", file=sys.stderr)
            return code
    where = "" if runs == DEFAULT_RUNS else f" --runs-dir {shlex.quote(str(runs))}"
    print(
        f"""
━━ Done in {format_duration(time.monotonic() - start)}

  the page            {runs / "studies" / STUDY / "report.html"}
  all trials          {runs / "studies" / STUDY / "trials"}
  the chosen run      {chosen}
  the training        {runs / "jobs" / JOB}
  the retuner's book  {runs / "jobs" / JOB / "ledger.jsonl"}

Next:
  open the page in a browser
  autotune monitor {JOB}{where}
      look at the training
  autotune sweep demo --trials {2 * options.trials}{where}
      make the same study longer
  autotune sweep MY_SPACE.yaml --dry-run
      your own model, data and machines: see search_spaces/README.md
"""
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
