"""The engine's step against a training loop written by hand in plain torch: tokens per second and peak memory.

    python benchmarks/engine_overhead.py

The loop has the same decoder in plain modules (``nn.RMSNorm``, ``nn.Linear``, ``F.scaled_dot_product_attention``), the
same fused AdamW and clipping, and torch's own data parallelism where the engine has its: DDP beside replicated
parameters, ``fully_shard`` of each block beside ZeRO stage 3. Both begin with the same weights and see the same tokens;
their losses are compared. Steps take turns A B B A in the same processes. Memory is the peak of the resident set above
what a process has before it builds its model, one process for each side. Takes about three minutes.

Writes ``benchmarks/results/engine_overhead.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from autotune.retune.canary import turns  # noqa: E402
from engine.atomic import write_json  # noqa: E402
from engine.config import RunConfig, RuntimeOptions  # noqa: E402
from engine.context import open_context  # noqa: E402
from engine.models.decoder import initial_value  # noqa: E402
from engine.optim.groups import decays  # noqa: E402
from engine.plan import Plan  # noqa: E402
from engine.spec import Hyperparameters, ModelSpec, Workload  # noqa: E402
from engine.step import Stepper  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "engine_overhead.json"
MODEL = ModelSpec(
    num_layers=4, hidden_size=256, num_heads=8, num_kv_heads=4, head_dim=32, ffn_size=704, vocab_size=4096
)  # fmt: skip
LENGTH, GLOBAL_BATCH, NUM_MICRO_BATCHES = 256, 8, 2
LEARNING_RATE = 1e-3
NUM_BLOCKS = 32
"""Blocks of one step: each side has half of them, after ``WARMUP`` steps that do not count."""
WARMUP = 2
GOAL = 0.03
PLANS: dict[str, dict[str, Any]] = {
    "one process": {},
    "dp2, replicated / DDP": {"dp_replicate": 2},
    "dp2, ZeRO 3 / fully_shard": {"dp_shard": 2, "zero_stage": 3},
}
Step = Callable[[Tensor, Tensor], float]
"""One optimizer step on this rank's tokens and labels; its loss."""


class Rotary:
    """Tables of rotary positions, [L, D] each."""

    def __init__(self) -> None:
        size = MODEL.head_dim
        angles = torch.outer(torch.arange(LENGTH), MODEL.rope_theta ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.cos, self.sin = angles.cos(), angles.sin()

    def rotate(self, x: Tensor) -> Tensor:
        """[B, heads, L, D] to the same."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-second, first), dim=-1) * self.sin


class PlainAttention(nn.Module):
    """Causal attention with grouped queries."""

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        hidden, size = MODEL.hidden_size, MODEL.head_dim
        self.rotary = rotary
        self.query = nn.Linear(hidden, MODEL.num_heads * size, bias=False)
        self.key = nn.Linear(hidden, MODEL.num_kv_heads * size, bias=False)
        self.value = nn.Linear(hidden, MODEL.num_kv_heads * size, bias=False)
        self.out = nn.Linear(MODEL.num_heads * size, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, H] to the same."""
        shape = (*x.shape[:2], -1, MODEL.head_dim)
        query, key, value = (p(x).view(shape).transpose(1, 2) for p in (self.query, self.key, self.value))
        query, key = self.rotary.rotate(query), self.rotary.rotate(key)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class PlainFeedForward(nn.Module):
    """Gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(MODEL.hidden_size, MODEL.ffn_size, bias=False)
        self.up = nn.Linear(MODEL.hidden_size, MODEL.ffn_size, bias=False)
        self.down = nn.Linear(MODEL.ffn_size, MODEL.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, H] to the same."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class PlainBlock(nn.Module):
    """Attention and feed-forward on the residual stream."""

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(MODEL.hidden_size, MODEL.norm_eps)
        self.attention = PlainAttention(rotary)
        self.ffn_norm = nn.RMSNorm(MODEL.hidden_size, MODEL.norm_eps)
        self.ffn = PlainFeedForward()

    def forward(self, x: Tensor) -> Tensor:
        """[B, L, H] to the same."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class PlainDecoder(nn.Module):
    """The decoder, with the engine's names of parameters."""

    def __init__(self) -> None:
        super().__init__()
        rotary = Rotary()
        self.embedding = nn.Embedding(MODEL.vocab_size, MODEL.hidden_size)
        self.layers = nn.ModuleList(PlainBlock(rotary) for _ in range(MODEL.num_layers))
        self.norm = nn.RMSNorm(MODEL.hidden_size, MODEL.norm_eps)
        self.head = nn.Linear(MODEL.hidden_size, MODEL.vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [B, L] to logits [B, L, V]."""
        x = self.embedding(tokens)
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))


@dataclass(frozen=True)
class Place:
    """This process among those of a plan."""

    config: RunConfig
    rank: int
    world_size: int


def plain_step(place: Place) -> Step:
    """The loop by hand."""
    hyper, plan = place.config.hyperparameters, place.config.plan
    decoder = PlainDecoder()
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(initial_value(MODEL, place.config.runtime.seed, name, parameter.shape))
    model: nn.Module = decoder
    if plan.dp_shard > 1:
        mesh = init_device_mesh("cpu", (place.world_size,))
        for module in (*decoder.layers, decoder.embedding):
            fully_shard(module, mesh=mesh)
        fully_shard([decoder.norm, decoder.head], mesh=mesh, reshard_after_forward=False)
        fully_shard(decoder, mesh=mesh)
    elif place.world_size > 1:
        model = DistributedDataParallel(decoder)
    named = list(decoder.named_parameters())
    groups = [
        {"params": [p for name, p in named if decays(name, p) == decay], "weight_decay": hyper.weight_decay * decay}
        for decay in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(hyper.beta1, hyper.beta2), eps=hyper.eps, fused=True)
    assert hyper.clip_norm is not None
    clip_norm = hyper.clip_norm

    def step(tokens: Tensor, labels: Tensor) -> float:
        size = len(tokens) // NUM_MICRO_BATCHES
        loss_sum = 0.0
        for index, (inputs, targets) in enumerate(zip(tokens.split(size), labels.split(size), strict=True)):
            waits = isinstance(model, DistributedDataParallel) and index < NUM_MICRO_BATCHES - 1
            with model.no_sync() if waits else nullcontext():
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / NUM_MICRO_BATCHES
                loss.backward()
            loss_sum += float(loss.detach())
        total = torch.tensor(loss_sum)
        if place.world_size > 1:
            dist.all_reduce(total)
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm, foreach=True)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE
        optimizer.step()
        optimizer.zero_grad()
        return float(total) / place.world_size

    return step


def engine_step(place: Place) -> Step:
    """The engine."""
    context = open_context(place.config.plan, place.config.runtime, has_experts=False)
    stepper = Stepper.build(place.config, context, vocab_size=1)

    def step(tokens: Tensor, labels: Tensor) -> float:
        loss = stepper.train_step(tokens, labels, LEARNING_RATE).loss
        assert loss is not None
        return loss

    return step


SIDES: dict[str, Callable[[Place], Step]] = {"plain": plain_step, "engine": engine_step}


def batch(number: int, place: Place) -> tuple[Tensor, Tensor]:
    """This rank's tokens and labels of a step."""
    draws = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, MODEL.vocab_size, (GLOBAL_BATCH, LENGTH + 1), generator=draws)
    mine = tokens.chunk(place.world_size)[place.rank]
    return mine[:, :-1].contiguous(), mine[:, 1:].contiguous()


def speed(place: Place) -> dict[str, Any]:
    """Seconds of every step of both sides, the slowest rank's, and their losses."""
    steps = {name: make(place) for name, make in SIDES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    order = ["plain", "engine"] * WARMUP + ["engine" if engine else "plain" for engine in turns(NUM_BLOCKS)]
    for name in order:
        tokens, labels = batch(len(losses[name]), place)
        if place.world_size > 1:
            dist.barrier()
        start = time.perf_counter()
        losses[name].append(steps[name](tokens, labels))
        taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        if place.world_size > 1:
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        seconds[name].append(float(taken))
    return {"seconds": {name: times[WARMUP:] for name, times in seconds.items()}, "losses": losses}


def memory(place: Place, side: str) -> dict[str, Any]:
    """Peak of the resident set, bytes above the one before the model was built, of the fullest rank."""
    before = _resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    step = SIDES[side](place)
    for number in range(3):
        step(*batch(number, place))
    peak = torch.tensor(_resident_bytes("VmHWM") - before)
    if place.world_size > 1:
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return {"peak_bytes": int(peak)}


def _resident_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def threads_of(world_size: int) -> int:
    """Threads of each process, so that all of them have all cores."""
    return max((os.cpu_count() or 1) // world_size, 1)


def work(plan: str, what: str, output: Path) -> None:
    """One process of a run."""
    world_size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    num_threads = threads_of(world_size)
    torch.set_num_threads(num_threads)
    if world_size > 1:
        dist.init_process_group("gloo")
    settings = PLANS[plan] | {"micro_batch_size": GLOBAL_BATCH // (world_size * NUM_MICRO_BATCHES)}
    config = RunConfig(
        model=MODEL,
        workload=Workload(sequence_length=LENGTH, total_tokens=GLOBAL_BATCH * LENGTH * 100),
        hyperparameters=Hyperparameters(global_batch_size=GLOBAL_BATCH, clip_norm=1.0),
        plan=Plan(precision="fp32", **settings),
        runtime=RuntimeOptions(seed=1, threads_per_rank=num_threads),
    )
    place = Place(config, rank, world_size)
    found = speed(place) if what == "speed" else memory(place, what)
    if rank == 0:
        output.write_text(json.dumps(found))
    if world_size > 1:
        dist.destroy_process_group()


def run(plan: str, what: str) -> dict[str, Any]:
    """Start the processes of a plan and take what they found."""
    world_size = Plan(**PLANS[plan]).world_size
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"] if world_size > 1 else []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads_of(world_size))}
    if what != "speed":  # freed tensors leave the resident set at once
        environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        command = [sys.executable, *ranks, str(Path(__file__).resolve()), "--work", plan, what, str(output)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        found: dict[str, Any] = json.loads(output.read_text())
    return found


def compare(plan: str) -> dict[str, Any]:
    """Speed and memory of both sides under a plan."""
    timed = run(plan, "speed")
    engine, plain = (np.array(timed["seconds"][side]) for side in ("engine", "plain"))
    # Neighbouring steps of A B B A, so that a slower moment of the machine is in both.
    ratios = (plain.reshape(-1, 2).sum(axis=1) / engine.reshape(-1, 2).sum(axis=1)).tolist()
    losses = np.array([timed["losses"]["engine"], timed["losses"]["plain"]])
    peaks = {side: run(plan, side)["peak_bytes"] for side in SIDES}
    tokens = GLOBAL_BATCH * LENGTH
    return {
        "plan": plan,
        "engine_tokens_per_second": tokens / median(engine),
        "plain_tokens_per_second": tokens / median(plain),
        "engine_step_seconds": median(engine),
        "speed_ratio": median(ratios),
        "speed_ratio_quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
        "engine_peak_bytes": peaks["engine"],
        "plain_peak_bytes": peaks["plain"],
        "memory_ratio": peaks["engine"] / peaks["plain"],
        "largest_loss_difference": float(np.abs(losses[0] / losses[1] - 1).max()),
    }


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="The engine's step against a loop by hand.")
    parser.add_argument("--work", nargs=3, metavar=("PLAN", "WHAT", "OUTPUT"), help="what the processes are started as")
    options = parser.parse_args()
    if options.work:
        work(options.work[0], options.work[1], Path(options.work[2]))
        return 0
    found = [compare(plan) for plan in PLANS]
    within = all(row["speed_ratio"] >= 1 - GOAL and row["memory_ratio"] <= 1 + GOAL for row in found)
    lines = [
        "| run | engine tokens/s | by hand tokens/s | speed, engine / by hand (quartiles) | engine step s"
        " | engine peak MiB | by hand peak MiB | memory, engine / by hand |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {row['plan']} | {row['engine_tokens_per_second']:.0f} | {row['plain_tokens_per_second']:.0f}"
            f" | {row['speed_ratio']:.3f} ({row['speed_ratio_quartiles'][0]:.3f} to"
            f" {row['speed_ratio_quartiles'][1]:.3f}) | {row['engine_step_seconds']:.2f}"
            f" | {row['engine_peak_bytes'] / 2**20:.0f} | {row['plain_peak_bytes'] / 2**20:.0f}"
            f" | {row['memory_ratio']:.3f} |"
            for row in found
        ),
        "",
        f"The goal, at most {GOAL:.0%} slower and larger everywhere, is {'met' if within else 'not met'}. Losses of"
        f" the two differ by {max(row['largest_loss_difference'] for row in found):.0e} at most, relatively.",
    ]
    result = {
        "title": "The engine's step against a training loop by hand",
        "setup": f"{os.cpu_count()} cores ({platform.machine()}), torch {torch.__version__}, gloo, fp32; a decoder of"
        f" {MODEL.num_layers} layers, width {MODEL.hidden_size}, vocabulary {MODEL.vocab_size}; {GLOBAL_BATCH}"
        f" sequences of {LENGTH} tokens a step in {NUM_MICRO_BATCHES} micro-batches a rank, fused AdamW, clipping;"
        f" median of {NUM_BLOCKS // 2} steps a side in turns A B B A in the same processes",
        "lines": lines,
        "runs": found,
    }
    write_json(RESULT, result)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
