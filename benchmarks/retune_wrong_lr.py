"""Runs that start at 8 times too high or too low a learning rate, left alone and retuned, against the best of a sweep.

    python benchmarks/retune_wrong_lr.py [--seeds 3] [--steps 800] [--folder runs/benchmarks/retune_wrong_lr]

Prints the held-out losses and what retuning cost, and writes ``benchmarks/results/retune_wrong_lr.json``. Finished runs
are kept in the folder: started again, it goes on where it was.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from autotune.retune.ledger import Ledger, costs
from autotune.retune.supervisor import Supervisor
from engine.atomic import make_folder, write_json, write_text
from engine.config import CheckpointOptions, EvaluationOptions, RunConfig, RuntimeOptions, dump_run
from engine.outcome import read_outcome
from engine.plan import Plan
from engine.spec import DataSpec, Hyperparameters, ModelSpec, Workload
from engine.telemetry import StepRecord, read_telemetry

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "retune_wrong_lr.json"
SWEEP = (7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2)
WRONG = {"8x too low": 1 / 8, "8x too high": 8.0}
RETUNE_EVERY = "3s"
COST_FILE = "cpu_seconds.txt"


@dataclass
class Run:
    """One finished run."""

    held_out_loss: float
    """Nats per token at the end."""
    cpu_seconds: float
    """Engine, retuner and forks."""
    wall_seconds: float
    final_scale: float
    """Factor on the schedule at the end."""
    num_changes: int
    """Changes that the trainer acknowledged."""
    retuner_cpu_seconds: float
    canary_cpu_seconds: float
    canary_wall_seconds: float
    num_canaries: int


def config(learning_rate: float, seed: int, num_steps: int, scale: float = 1.0) -> RunConfig:
    """A small model on the source of Python's standard library: about 70 ms of CPU time a step."""
    return RunConfig(
        name="retune-wrong-lr",
        model=ModelSpec(
            num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn_size=176, vocab_size=257
        ),
        workload=Workload(data=DataSpec(max_bytes=8_000_000), sequence_length=128, total_tokens=num_steps * 16 * 128),
        hyperparameters=Hyperparameters(global_batch_size=16, learning_rate=learning_rate, schedule="cosine"),
        plan=Plan(micro_batch_size=16),
        runtime=RuntimeOptions(seed=seed, learning_rate_scale=scale, measure_memory=False),
        evaluation=EvaluationOptions(max_tokens=65536),
        checkpoint=CheckpointOptions(at_end=False),
    )


def run(folder: Path, wanted: RunConfig, *, every: str | None) -> Run:
    """Do a run, or read it when it is there already."""
    outcome = read_outcome(folder)
    if outcome is None or outcome.kind != "ok":
        make_folder(folder)
        write_text(folder / "run.yaml", dump_run(wanted))
        before = children_cpu_seconds()
        Supervisor(folder, every=every).run()
        earlier = float((folder / COST_FILE).read_text()) if (folder / COST_FILE).exists() else 0.0
        write_text(folder / COST_FILE, str(earlier + children_cpu_seconds() - before))
        outcome = read_outcome(folder)
    if outcome is None or outcome.held_out_loss is None or outcome.wall_seconds is None:
        sys.exit(f"the run in {folder} ended as {outcome.kind if outcome else 'nothing'}: see {folder / 'stdout.log'}")
    entries = Ledger(folder).entries()
    cost = costs(entries)
    scales = [record.learning_rate_scale for record in read_telemetry(folder) if isinstance(record, StepRecord)]
    return Run(
        held_out_loss=outcome.held_out_loss,
        cpu_seconds=float((folder / COST_FILE).read_text()),
        wall_seconds=outcome.wall_seconds,
        final_scale=scales[-1],
        num_changes=sum(e.kind in ("commit", "roll_back") and bool(e.data["accepted"]) for e in entries),
        retuner_cpu_seconds=cost.retuner_cpu_seconds,
        canary_cpu_seconds=cost.canary_cpu_seconds,
        canary_wall_seconds=cost.canary_wall_seconds,
        num_canaries=cost.num_canaries,
    )


def children_cpu_seconds() -> float:
    """CPU time of all ended children, with theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Sweep, then every wrong start alone and retuned, for each seed."""
    parser = argparse.ArgumentParser(description="A wrong learning rate, retuned and left alone.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/retune_wrong_lr"))
    options = parser.parse_args()
    folder, num_steps = options.folder.absolute(), options.steps

    sweep = {rate: run(folder / f"sweep-{rate:g}", config(rate, 0, num_steps), every=None) for rate in SWEEP}
    for rate, one in sweep.items():
        print(f"learning rate {rate:<8g} held-out loss {one.held_out_loss:.4f}", flush=True)
    best = min(sweep, key=lambda rate: sweep[rate].held_out_loss)
    print(f"best: {best:g}\n")

    rows: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        right = run(folder / f"best-{seed}", config(best, seed, num_steps), every=None)
        for name, scale in WRONG.items():
            wrong = config(best, seed, num_steps, scale)
            word = name.replace(" ", "-")
            alone = run(folder / f"{word}-alone-{seed}", wrong, every=None)
            retuned = run(folder / f"{word}-retuned-{seed}", wrong, every=RETUNE_EVERY)
            gap = alone.held_out_loss - right.held_out_loss
            closed = (alone.held_out_loss - retuned.held_out_loss) / gap
            rows.append(
                {
                    "seed": seed,
                    "start": name,
                    "best": asdict(right),
                    "alone": asdict(alone),
                    "retuned": asdict(retuned),
                    "gap_closed_ratio": closed,
                }
            )
            print(
                f"seed {seed}  {name:<12} best {right.held_out_loss:.4f}  alone {alone.held_out_loss:.4f}"
                f"  retuned {retuned.held_out_loss:.4f}  gap closed {100 * closed:.0f} %"
                f"  final scale {retuned.final_scale:.3g}; {retuned.num_canaries} canaries:"
                f" {retuned.canary_cpu_seconds:.0f} CPU s, {retuned.canary_wall_seconds:.0f} s;"
                f" retuner {retuned.retuner_cpu_seconds:.1f} CPU s; run alone {alone.cpu_seconds:.0f} CPU s",
                flush=True,
            )
    summary = {
        name: {
            "gap_closed_ratio": mean(row["gap_closed_ratio"] for row in rows if row["start"] == name),
            "extra_cpu_ratio": mean(
                row["retuned"]["cpu_seconds"] / row["alone"]["cpu_seconds"] - 1 for row in rows if row["start"] == name
            ),
            "all_closer": all(row["gap_closed_ratio"] > 0 for row in rows if row["start"] == name),
        }
        for name in WRONG
    }
    lines = [
        "| seed | start | best | left alone | retuned | gap closed | canaries | canaries, CPU s | canaries, s |"
        " retuner, CPU s | run alone, CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
        *(_table_row(row) for row in rows),
        "",
        *(
            f"{name}: {100 * figures['gap_closed_ratio']:.0f} % of the gap to the best closed on average, for"
            f" {100 * figures['extra_cpu_ratio']:.0f} % more CPU time."
            for name, figures in summary.items()
        ),
    ]
    print("\n".join(["", *lines]))
    write_json(
        RESULT,
        {
            "title": "A wrong learning rate, retuned and left alone",
            "setup": f"{os.cpu_count()} cores ({platform.machine()}) shared with other work; {num_steps} steps,"
            f" retuned every {RETUNE_EVERY}; losses are held-out, in nats per token; best: learning rate {best:g}",
            "lines": lines,
            "num_steps": num_steps,
            "retune_every": RETUNE_EVERY,
            "best_learning_rate": best,
            "sweep": {f"{rate:g}": asdict(one) for rate, one in sweep.items()},
            "runs": rows,
            "summary": summary,
        },
    )
    return 0


def _table_row(row: dict[str, Any]) -> str:
    retuned = row["retuned"]
    cells = [
        str(row["seed"]),
        row["start"],
        *(f"{row[run]['held_out_loss']:.4f}" for run in ("best", "alone", "retuned")),
        f"{100 * row['gap_closed_ratio']:.0f} %",
        str(retuned["num_canaries"]),
        f"{retuned['canary_cpu_seconds']:.0f}",
        f"{retuned['canary_wall_seconds']:.0f}",
        f"{retuned['retuner_cpu_seconds']:.1f}",
        f"{row['alone']['cpu_seconds']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
