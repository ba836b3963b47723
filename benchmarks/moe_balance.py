"""How even the load of experts and of ranks gets, and what that costs in loss: nothing, auxiliary loss, selection bias,
placement and replicas.

    python benchmarks/moe_balance.py [--seeds 3] [--steps 1200] [--folder runs/benchmarks/moe_balance]

A small mixture of experts learns bytes of three unlike kinds of text from the Python installation (source code,
reference manual, tables of character sets), whose shares of the batch are uneven and drift.

* Experts: the load of each expert in each step and layer, without balancing, with the auxiliary loss and with the
  loss-free selection bias at three strengths each; held-out loss of each over several seeds.
* Ranks: the same loads, step by step, under placements of the experts on 2, 4 and 8 ranks, each planned from the loads
  up to then and used for the next steps: so staleness is counted.
* A real run on two expert-parallel ranks without and with placement: CPU time of the experts' forward passes by rank,
  and the loss beside that of one process.

The model, the drift of the texts and the strengths of balancing were chosen after looking at runs of seed 0; the other
seeds are fresh.

Writes ``benchmarks/results/moe_balance.json``. Finished runs are kept in the folder: started again, it goes on where it
was. They are of the sources of that time: after a change of the engine or of this file, give another folder.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.atomic import make_folder, write_json
from engine.config import RunConfig, RuntimeOptions
from engine.context import open_context
from engine.moe.experts import Experts
from engine.moe.placement import LoadForecast, Placement, all_at_home, place
from engine.parallel.experts import mixtures_of
from engine.plan import Plan
from engine.spec import Hyperparameters, ModelSpec, MoESpec, Workload
from engine.step import Stepper

RESULT = Path(__file__).resolve().parent / "results" / "moe_balance.json"
LENGTH, BATCH, VOCAB = 128, 8, 256
EXPERTS, CHOSEN = 8, 2
WARMUP_STEPS = 20
"""Of the learning rate; as many first steps are left out of the figures of balance."""
LEARNING_RATE = 3e-3
"""At the end of the warm-up; from there it falls to nothing."""
MODEL = ModelSpec(
    num_layers=2, hidden_size=48, num_heads=4, num_kv_heads=4, head_dim=12, ffn_size=128, vocab_size=VOCAB,
    moe=MoESpec(
        num_experts=EXPERTS, experts_per_token=CHOSEN, ffn_size=48, scoring="sigmoid", selection_bias=True
    ),
)  # fmt: skip
PERIODS = (200, 130)
"""Steps after which the share of source code, and that of tables in the rest, come back."""
HELD_OUT_RATIO = 0.1
NUM_HELD_OUT = 96
TWO_RANK_STEPS = 150
PLAN_STEPS = 10
"""Steps from one placement to the next."""

SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    **{f"auxiliary loss, {c:g}": {"router_aux_loss_coefficient": c} for c in (0.001, 0.003, 0.01)},
    "auxiliary loss of micro-batches, 0.003": {
        "router_aux_loss_coefficient": 0.003, "router_aux_loss_scope": "micro_batch", "micro_batch_size": BATCH // 2,
    },
    **{f"selection bias, {r:g}": {"expert_bias_rate": r} for r in (0.001, 0.003, 0.01)},
}  # fmt: skip
"""Name -> hyperparameters, and the micro-batch where it matters."""


@dataclass(frozen=True)
class Domain:
    """One kind of text."""

    train: np.ndarray
    """Bytes."""
    held_out: np.ndarray

    @classmethod
    def read(cls, files: Sequence[Path], max_bytes: int = 2_000_000) -> Domain:
        """From files, in order; the end is held out."""
        data = np.frombuffer(b"\n".join(file.read_bytes() for file in files)[:max_bytes], np.uint8)
        end = int(len(data) * (1 - HELD_OUT_RATIO))
        return cls(data[:end], data[end:])


def domains() -> list[Domain]:
    """Source code, the language's manual, tables of character sets."""
    library = Path(sysconfig.get_paths()["stdlib"])
    manual = [library / "pydoc_data" / "topics.py"]
    tables = sorted((library / "encodings").glob("[ckm]*.py"))
    return [Domain.read(files) for files in (sorted(library.glob("*.py")), manual, tables)]


def shares(step: int) -> np.ndarray:
    """Share of each kind of text in the batch of a step, [3]: most is source code, and all drift."""
    source = 0.5 + 0.3 * np.cos(2 * np.pi * step / PERIODS[0])
    tables = (1 - source) * (0.4 + 0.3 * np.sin(2 * np.pi * step / PERIODS[1]))
    return np.array([source, 1 - source - tables, tables])


def sequences(texts: Sequence[np.ndarray], kinds: np.ndarray, draws: np.random.Generator) -> Tensor:
    """A piece of each of the given kinds, int64 [sequences, LENGTH + 1]."""
    starts = [draws.integers(len(texts[kind]) - LENGTH) for kind in kinds]
    rows = [texts[kind][start : start + LENGTH + 1] for kind, start in zip(kinds, starts, strict=True)]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


@dataclass
class Run:
    """What one training run showed."""

    loads: np.ndarray
    """Assignments of each expert, [steps, layers, E]."""
    losses: np.ndarray
    """Of each step, nats per byte."""
    held_out_loss: float
    """Nats per byte."""
    expert_seconds: np.ndarray
    """CPU seconds of the experts' forward passes on this rank in each step, [steps]."""


def train(setting: dict[str, Any], seed: int, num_steps: int, plan: Plan | None = None) -> Run:
    """Train a model with a seed of its own for values and data; on every rank of ``plan``, or in one process."""
    micro_batch_size = setting.get("micro_batch_size", BATCH)
    hyper = {name: value for name, value in setting.items() if name != "micro_batch_size"}
    config = RunConfig(
        model=MODEL,
        workload=Workload(sequence_length=LENGTH, total_tokens=num_steps * BATCH * LENGTH),
        hyperparameters=Hyperparameters(global_batch_size=BATCH, **hyper),
        plan=plan or Plan(micro_batch_size=micro_batch_size),
        runtime=RuntimeOptions(seed=seed),
    )
    context = open_context(config.plan, config.runtime)
    stepper = Stepper.build(config, context, VOCAB)
    layers = [layer for part in stepper.parts for layer in mixtures_of(part).values()]
    clock = ExpertClock([layer.experts for layer in layers])
    kinds_of_text = domains()
    draws = np.random.default_rng(seed)
    own = slice(context.dp_rank * BATCH // context.dp_size, (context.dp_rank + 1) * BATCH // context.dp_size)
    run = Run(np.zeros((num_steps, len(layers), EXPERTS), np.int64), np.zeros(num_steps), np.nan, np.zeros(num_steps))
    for step in range(num_steps):
        kinds = draws.choice(3, BATCH, p=shares(step))
        batch = sequences([kind.train for kind in kinds_of_text], kinds, draws)[own]
        before = clock.seconds
        rate = LEARNING_RATE * min((step + 1) / WARMUP_STEPS, 1 - step / num_steps)
        result = stepper.train_step(batch[:, :-1], batch[:, 1:], rate)
        run.expert_seconds[step] = clock.seconds - before
        assert result.loss is not None, "a run of this benchmark diverged"
        run.losses[step] = result.loss
        run.loads[step] = [layer.previous_load.tolist() for layer in layers]
    average = np.mean([shares(step) for step in range(num_steps)], axis=0)
    fixed = np.random.default_rng(0)
    kinds = np.repeat(np.arange(3), np.round(average * NUM_HELD_OUT).astype(int))
    held_out = sequences([kind.held_out for kind in kinds_of_text], kinds, fixed)
    held_out = held_out[: len(held_out) // context.dp_size * context.dp_size].chunk(context.dp_size)[context.dp_rank]
    loss, count = stepper.evaluate(held_out[:, :-1], held_out[:, 1:])
    run.held_out_loss = loss / count
    return run


def train_once(path: Path, setting: dict[str, Any], seed: int, num_steps: int) -> Run:
    """``train`` in one process, or what it gave before."""
    if not path.exists():
        make_folder(path.parent)
        run = train(setting, seed, num_steps)
        with path.with_suffix(".part").open("wb") as file:
            np.savez(file, **vars(run))
        path.with_suffix(".part").replace(path)
    with np.load(path) as kept:
        return Run(kept["loads"], kept["losses"], float(kept["held_out_loss"]), kept["expert_seconds"])


class ExpertClock:
    """CPU seconds of this thread in the experts' forward computation, without dispatch and exchange."""

    def __init__(self, experts: Sequence[Experts]) -> None:
        self.seconds = 0.0
        for module in experts:
            module._compute = self._timed(module._compute)  # type: ignore[method-assign]

    def _timed(self, compute: Any) -> Any:
        def timed(rows: Tensor, loads: Sequence[int]) -> Tensor:
            start = time.thread_time()
            outputs: Tensor = compute(rows, loads)
            self.seconds += time.thread_time() - start
            return outputs

        return timed


# ---------------------------------------------------------------------------------------------------------- experts


def evenness(loads: np.ndarray) -> np.ndarray:
    """Mean over largest load, along the last axis: 1 is even."""
    return np.asarray(loads.mean(axis=-1) / loads.max(axis=-1))


def uniform_evenness(num_draws: int = 2000) -> float:
    """What a router that chose at random would show: counts of so few tokens are uneven by themselves."""
    counts = np.random.default_rng(0).multinomial(LENGTH * BATCH * CHOSEN, np.full(EXPERTS, 1 / EXPERTS), num_draws)
    return float(evenness(counts).mean())


def with_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and its standard error."""
    return mean(values), stdev(values) / len(values) ** 0.5


def expert_table(runs: dict[str, list[Run]]) -> tuple[list[str], dict[str, Any]]:
    """Balance and loss of each setting, against no balancing with the same seed."""
    lines = [
        "| balancing | mean/max load | 5th percentile | held-out loss | against nothing |",
        "|---|---|---|---|---|",
    ]
    data = {}
    for name, some in runs.items():
        even = np.concatenate([evenness(run.loads[WARMUP_STEPS:]).ravel() for run in some])
        loss, _ = with_error([run.held_out_loss for run in some])
        gaps = [run.held_out_loss - base.held_out_loss for run, base in zip(some, runs["nothing"], strict=True)]
        gap, error = with_error(gaps)
        told = "" if name == "nothing" else f"{gap:+.4f} ± {error:.4f}"
        lines.append(f"| {name} | {even.mean():.3f} | {np.quantile(even, 0.05):.3f} | {loss:.4f} | {told} |")
        data[name] = {
            "settings": SETTINGS[name],
            "mean_over_max": float(even.mean()),
            "mean_over_max_p5": float(np.quantile(even, 0.05)),
            "held_out_losses": [run.held_out_loss for run in some],
            "loss_gap": gap,
            "loss_gap_standard_error": error,
        }
    return lines, data


# ------------------------------------------------------------------------------------------------------------ ranks


def replay(loads: np.ndarray, num_ranks: int, num_replicas: int, source: str) -> tuple[np.ndarray, float]:
    """Rank loads of recorded steps under placements planned on the way.

    Args:
        loads: Of one layer, [steps, E].
        num_ranks: Along ``ep``.
        num_replicas: Further copies.
        source: What a plan is made from: ``home`` for none, ``last`` step, ``forecast``, or ``oracle``, each step's
            own load.

    Returns:
        Mean over largest rank load of each step, [steps]; copies that the busiest rank takes in or gives away, mean
        over steps.
    """
    forecast = LoadForecast.empty(EXPERTS)
    placement: Placement = all_at_home(EXPERTS, num_ranks, num_replicas)
    even, moved = [], []
    for step, load in enumerate(loads.astype(float)):
        if source == "oracle":
            placement = place(load, num_ranks, num_replicas)
        even.append(evenness(placement.rank_loads(load)))
        moved.append(placement.num_moved)
        forecast = forecast.after(load)
        if source in ("last", "forecast") and (step + 1) % PLAN_STEPS == 0:
            expected = load if source == "last" else forecast.mean(PLAN_STEPS)
            placement = place(expected, num_ranks, num_replicas)
    return np.array(even), mean(moved)


def rank_table(runs: dict[str, list[Run]]) -> tuple[list[str], list[dict[str, Any]]]:
    """Balance of ranks under each kind of placement, for the loads of each setting of ``runs``."""
    lines = [
        "| loads | ranks | placement | mean/max load | 5th percentile | copies moved |",
        "|---|---|---|---|---|---|",
    ]
    data = []
    for name, some in runs.items():
        for ranks in (2, 4, 8):
            kinds = [
                ("at home", 0, "home"),
                ("placed", 0, "forecast"),
                (f"placed, {ranks} replicas", ranks, "forecast"),
            ]
            kinds.append((f"placed, {2 * ranks} replicas", 2 * ranks, "forecast"))
            kinds.append(("the same from the last step's load", 2 * ranks, "last"))
            kinds.append(("the same from each step's own load", 2 * ranks, "oracle"))
            for told, replicas, source in kinds:
                found = [
                    replay(run.loads[:, layer], ranks, replicas, source)
                    for run in some
                    for layer in range(run.loads.shape[1])
                ]
                even = np.concatenate([series[WARMUP_STEPS:] for series, _ in found])
                moved = mean(number for _, number in found)
                p5 = float(np.quantile(even, 0.05))
                lines.append(f"| {name} | {ranks} | {told} | {even.mean():.3f} | {p5:.3f} | {moved:.1f} |")
                data.append({
                    "loads": name, "num_ranks": ranks, "num_replicas": replicas, "planned_from": source,
                    "mean_over_max": float(even.mean()), "mean_over_max_p5": p5, "mean_copies_moved": moved,
                })  # fmt: skip
    return lines, data


# -------------------------------------------------------------------------------------------------- two real ranks


def train_on_rank(rank: int, port: int, num_steps: int, placed: bool) -> Run:
    """One of two expert-parallel ranks."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank),
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    placement = {"expert_replicas": 4, "expert_placement_steps": PLAN_STEPS} if placed else {}
    plan = Plan(dp_replicate=2, ep=2, micro_batch_size=BATCH // 2, precision="fp64", **placement)  # type: ignore[arg-type]
    return train({}, 0, num_steps, plan)


def two_ranks(num_steps: int, *, placed: bool) -> list[Run]:
    """A run on two ranks, as each saw it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        return list(pool.map(train_on_rank, range(2), [port] * 2, [num_steps] * 2, [placed] * 2))


def two_rank_lines(num_steps: int) -> tuple[list[str], dict[str, Any]]:
    """What two ranks show: CPU time of the experts by rank, and the loss against one process."""
    alone = train({}, 0, num_steps, Plan(micro_batch_size=BATCH, precision="fp64"))
    lines, data = [], {}
    for placed in (False, True):
        ranks = two_ranks(num_steps, placed=placed)
        times = np.stack([run.expert_seconds for run in ranks], axis=-1)
        even = evenness(times[WARMUP_STEPS:])
        gap = float(np.abs(ranks[0].losses / alone.losses - 1).max())
        name = "placed every 10 steps, 4 replicas" if placed else "at home"
        lines.append(
            f"* {name}: mean/max of the ranks' CPU time in experts {even.mean():.3f} (5th percentile"
            f" {np.quantile(even, 0.05):.3f}); largest relative difference of a step's loss from one process' {gap:.1e}"
        )
        data[name] = {
            "mean_over_max": float(even.mean()),
            "mean_over_max_p5": float(np.quantile(even, 0.05)),
            "largest_relative_loss_difference": gap,
        }
    return lines, data


def main() -> int:
    """Train, replay, print, write."""
    parser = argparse.ArgumentParser(description="Balance of experts and ranks, and its cost in loss.")
    parser.add_argument("--seeds", type=int, choices=range(2, 11), default=3)
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/benchmarks/moe_balance"), help="finished runs, of the same sources"
    )
    options = parser.parse_args()
    if options.steps <= WARMUP_STEPS:
        parser.error(f"--steps: more than the {WARMUP_STEPS} of the warm-up")
    os.environ["OMP_NUM_THREADS"] = "1"
    jobs = [(name, seed) for seed in range(options.seeds) for name in SETTINGS]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        found = pool.map(
            train_once,
            [
                options.folder / f"{name.replace(',', '').replace(' ', '-')}-seed{seed}-steps{options.steps}.npz"
                for name, seed in jobs
            ],
            [SETTINGS[name] for name, _ in jobs],
            [seed for _, seed in jobs],
            [options.steps] * len(jobs),
        )
        runs: dict[str, list[Run]] = {name: [] for name in SETTINGS}
        for (name, _), run in zip(jobs, found, strict=True):
            runs[name].append(run)
    expert_lines, experts = expert_table(runs)
    balanced = max(experts, key=lambda name: experts[name]["mean_over_max"])
    rank_lines, ranks = rank_table({name: runs[name] for name in ("nothing", balanced)})
    real_lines, real = two_rank_lines(TWO_RANK_STEPS)
    floor = uniform_evenness()
    lines = [
        f"Expert loads of single steps ({LENGTH * BATCH * CHOSEN} assignments to {EXPERTS} experts, 2 layers), steps"
        f" {WARMUP_STEPS} to {options.steps}, {options.seeds} seeds. A router that chose at random would show mean/max"
        f" {floor:.3f}. Differences of loss are between runs of the same seed, with their standard error."
        " Model, drift and strengths were chosen after looking at seed 0.",
        "",
        *expert_lines,
        "",
        f"Rank loads of the same steps: experts placed anew every {PLAN_STEPS} steps by forecast of their load, with"
        f" further copies of the busiest; the cost of moving weights is left out of these plans. *{balanced}* is shown"
        " for having the evenest experts above.",
        "",
        *rank_lines,
        "",
        f"Two real ranks over gloo in fp64, {TWO_RANK_STEPS} steps, nothing balanced but by placement:",
        "",
        *real_lines,
    ]
    write_json(RESULT, {
        "title": "Balance of experts and ranks",
        "setup": f"{os.cpu_count()} cores, one thread a process",
        "lines": lines,
        "settings": {
            "model": MODEL.to_data(), "sequence_length": LENGTH, "global_batch_size": BATCH, "num_steps": options.steps,
            "num_seeds": options.seeds, "learning_rate": LEARNING_RATE, "warmup_steps": WARMUP_STEPS,
            "drift_periods_in_steps": PERIODS, "placement_steps": PLAN_STEPS, "num_held_out_sequences": NUM_HELD_OUT,
        },
        "uniform_mean_over_max": floor,
        "experts": experts,
        "ranks": ranks,
        "two_ranks": real,
    })  # fmt: skip
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
