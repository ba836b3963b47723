"""What it costs to tune the learning rate on a narrow proxy and train the wide target with it, under muP and standard.

    python benchmarks/mup_transfer.py [--seeds 2] [--rates 6] [--folder runs/benchmarks/mup_transfer]

A small decoder learns bytes of the Python standard library's source (AdamW with weight decay, clipping, cosine). Two
narrower models of it, made by ``engine.proxy``, train with the same grid of learning rates: as they are (standard), and
under muP relative to the target's width. The target itself is one and the same run under both. Each trial is the
engine's training program; its figure is the held-out loss at the end. The penalty of a proxy is the target's loss at
the proxy's best learning rate above that at the target's own best, each best by the mean over seeds.

Writes ``benchmarks/results/mup_transfer.json``. Finished trials are kept in the folder: started again, it goes on.
"""

from __future__ import annotations

import argparse
import math
import platform
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from engine.atomic import write_json
from engine.config import CheckpointOptions, EvaluationOptions, RunConfig, RuntimeOptions, dump_run
from engine.outcome import read_outcome
from engine.plan import Plan
from engine.proxy import proxy_model, proxy_run
from engine.spec import DataSpec, Hyperparameters, ModelSpec, Workload
from engine.train import main as train

RESULT = Path(__file__).resolve().parent / "results" / "mup_transfer.json"
Losses = dict[tuple[str, int, float, int], float]

PARAMETRIZATIONS = ("standard", "mup")
WIDTHS = (32, 64, 128)
"""The last is the target."""
RATES = tuple(1e-3 * 2**power for power in range(6))
TARGET = ModelSpec(
    num_layers=2, hidden_size=128, num_heads=8, num_kv_heads=4, head_dim=16, ffn_size=352, vocab_size=258,
    max_positions=64,
)  # fmt: skip
LENGTH, BATCH, STEPS = 64, 8, 200


def trial(parametrization: str, width: int, rate: float, seed: int) -> RunConfig:
    """One trial; that of the target is the same under both parametrizations."""
    run = RunConfig(
        model=TARGET,
        workload=Workload(
            data=DataSpec(max_bytes=2_000_000), sequence_length=LENGTH, total_tokens=LENGTH * BATCH * STEPS
        ),
        hyperparameters=Hyperparameters(global_batch_size=BATCH, learning_rate=rate, warmup_ratio=0.1),
        plan=Plan(precision="fp32", micro_batch_size=BATCH),
        runtime=RuntimeOptions(seed=seed, measure_memory=False),
        evaluation=EvaluationOptions(max_tokens=16384),
        checkpoint=CheckpointOptions(at_end=False),
    )
    ratio = width / TARGET.hidden_size
    if ratio == 1:
        return run
    return proxy_run(run, ratio) if parametrization == "mup" else run.changed(model=proxy_model(TARGET, ratio))


def loss_of(config: RunConfig, folder: Path) -> float:
    """Held-out loss of a trial, nats per token; infinite when it diverged. Trains it if the folder has no outcome."""
    outcome = read_outcome(folder) if folder.is_dir() else None
    if outcome is None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "run.yaml").write_text(dump_run(config), encoding="utf-8")
        train([str(folder / "run.yaml"), "--quiet"])
        outcome = read_outcome(folder)
    assert outcome is not None, folder
    assert outcome.kind in ("ok", "diverged", "nan"), outcome
    return outcome.held_out_loss if outcome.kind == "ok" and outcome.held_out_loss is not None else math.inf


def folder_of(root: Path, parametrization: str, width: int, rate: float, seed: int) -> Path:
    """Where a trial lies; both parametrizations share those of the target."""
    kind = "target" if width == WIDTHS[-1] else parametrization
    return root / f"{kind}-w{width}-lr{rate:g}-seed{seed}"


def transfer(losses: Losses, parametrization: str, width: int, seeds: range) -> dict[str, Any]:
    """What tuning at one width comes to at the target.

    Args:
        losses: Held-out loss by parametrization, width, learning rate and seed.
        parametrization: Which.
        width: Of the proxy.
        seeds: All seeds.
    """
    target = WIDTHS[-1]
    tuned, best = (best_rate(losses, parametrization, w, seeds) for w in (width, target))
    pairs = [(losses[parametrization, target, tuned, s], losses[parametrization, target, best, s]) for s in seeds]
    penalties = [there - here for there, here in pairs]
    return {
        "parametrization": parametrization,
        "proxy_width": width,
        "best_learning_rate": tuned,
        "best_learning_rate_of_target": best,
        "loss_of_proxy": mean(losses[parametrization, width, tuned, s] for s in seeds),
        "loss_of_target": mean(there for there, _ in pairs),
        "penalty": mean(penalties),
        "penalty_by_seed": penalties,
    }


def best_rate(losses: Losses, parametrization: str, width: int, seeds: range) -> float:
    """The learning rate with the lowest mean loss."""
    rates = {rate for name, w, rate, _ in losses if (name, w) == (parametrization, width)}
    return min(sorted(rates), key=lambda rate: mean(losses[parametrization, width, rate, seed] for seed in seeds))


def main() -> None:
    """Train what is missing, print and write the result."""
    parser = argparse.ArgumentParser(description="Transfer of the learning rate over widths.")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rates", type=int, default=len(RATES), help="use the first so many learning rates")
    parser.add_argument("--folder", type=Path, default=Path("runs/benchmarks/mup_transfer"))
    options = parser.parse_args()
    rates = RATES[: options.rates]
    seeds, root = range(options.seeds), options.folder.absolute()
    losses: Losses = {}
    for seed in seeds:
        for width in WIDTHS:
            for name in PARAMETRIZATIONS:
                for rate in rates:
                    losses[name, width, rate, seed] = loss_of(
                        trial(name, width, rate, seed), folder_of(root, name, width, rate, seed)
                    )
                row = " ".join(f"{losses[name, width, rate, seed]:.3f}" for rate in rates)
                print(f"seed {seed} width {width:<4} {name:<9} {row}", flush=True)
    results = [transfer(losses, name, width, seeds) for name in PARAMETRIZATIONS for width in WIDTHS[:-1]]
    lines = [
        "| tuned at | parametrization | best learning rate there | the target's | target's loss with it | penalty |",
        "|---|---|---|---|---|---|",
    ]
    for r in results:
        by_seed = ", ".join(f"{penalty:.4f}" for penalty in r["penalty_by_seed"])
        lines.append(
            f"| width {r['proxy_width']} | {r['parametrization']} | {r['best_learning_rate']:g} |"
            f" {r['best_learning_rate_of_target']:g} | {r['loss_of_target']:.4f} | {r['penalty']:.4f} ({by_seed}) |"
        )
    print("\n".join(lines))
    means = {
        f"{name}-w{width}": [mean(losses[name, width, rate, seed] for seed in seeds) for rate in rates]
        for name in PARAMETRIZATIONS
        for width in WIDTHS
    }
    write_json(
        RESULT,
        {
            "title": "Learning rates tuned on narrow models, muP and standard",
            "setup": f"target width {WIDTHS[-1]}, {TARGET.num_layers} layers, {STEPS} steps of {LENGTH * BATCH} bytes"
            f" of Python source, {len(rates)} learning rates, {options.seeds} seeds; nats per byte on held-out text,"
            " penalty of the mean and by seed",
            "arguments": ["--seeds", str(options.seeds), "--rates", str(options.rates)],
            "lines": lines,
            "learning_rates": rates,
            "results": results,
            "mean_losses": {name: [x if math.isfinite(x) else None for x in row] for name, row in means.items()},
            "num_seeds": options.seeds,
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        },
    )


if __name__ == "__main__":
    main()
