"""Idle time of every pipeline schedule, measured against theory: stages that sleep instead of computing.

    python benchmarks/pipeline_bubble.py

Real processes run the engine's pipeline over gloo. A stage sleeps for given times in its forward pass and in the two
halves of its backward pass (gradients of inputs, gradients of weights), so nothing else costs time but sends of a few
bytes and torch's own work between them. Theory is the makespan of the schedule's action list with these times
(``autotune.cost.replay``). The first stage has no inputs that need gradients: torch makes its whole backward pass in
the second half, and theory has it there too. Takes about four minutes, for which the machine should be quiet.

Writes ``benchmarks/results/pipeline_bubble.json``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autotune.cost.replay import StageSeconds, replay
from engine.atomic import write_json
from engine.config import RuntimeOptions
from engine.context import ParallelContext, open_context
from engine.parallel.pipeline import PipelineRunner
from engine.parallel.pipeline_stage import SPLIT_BACKWARD
from engine.plan import Plan, Schedule
from engine.precision.policy import precision_policy
from engine.rules_universal import VIRTUAL_STAGES
from engine.spec import ModelSpec
from engine.stage_split import rank_stages

RESULT = Path(__file__).resolve().parent / "results" / "pipeline_bubble.json"
SPEC = ModelSpec(
    num_layers=8, hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=8, ffn_size=8, vocab_size=8
)  # the hidden size alone matters
RANKS = (2, 4)
REPEATS = 3
PASS_SECONDS = 0.04
"""A pass of a rank through all its stages: forward, gradients of inputs, gradients of weights alike."""


@dataclass(frozen=True)
class Case:
    """One pipeline and its times."""

    schedule: Schedule
    pp: int
    num_micro_batches: int
    last_stage: float = 1.0
    """How much longer the last stage takes than the others."""

    @property
    def plan(self) -> Plan:
        """As the engine runs it."""
        return Plan(pp=self.pp, schedule=self.schedule, virtual_stages=VIRTUAL_STAGES[self.schedule][0])

    def seconds(self, stage: int) -> float:
        """Of one pass through a stage."""
        plan = self.plan
        return PASS_SECONDS / plan.virtual_stages * (self.last_stage if stage == plan.num_stages - 1 else 1.0)

    @property
    def theory(self) -> float:
        """Seconds of a step."""
        plan = self.plan
        passes = [self.seconds(stage) for stage in range(plan.num_stages)]
        inputs, weights = list(passes), list(passes)
        if self.schedule in SPLIT_BACKWARD:
            inputs[0], weights[0] = 0.0, 2 * passes[0]
        run = replay(self.schedule, self.pp, plan.virtual_stages, self.num_micro_batches, StageSeconds(
            passes, inputs, weights
        ))  # fmt: skip
        return run.makespan

    @property
    def busy(self) -> float:
        """Seconds of a step in which the busiest rank works."""
        held = (sum(map(self.seconds, rank_stages(self.plan, rank))) for rank in range(self.pp))
        return 3 * self.num_micro_batches * max(held)


def cases(pp: int) -> Iterator[Case]:
    """What is measured on so many ranks."""
    for schedule in get_args(Schedule):
        for num_micro_batches in (pp, 2 * pp, 4 * pp):
            if schedule != "dualpipev" or num_micro_batches >= 2 * pp:
                yield Case(schedule, pp, num_micro_batches)
        yield Case(schedule, pp, 2 * pp, last_stage=1.5)


class _Inputs(torch.autograd.Function):
    """The forward pass, and the half of the backward pass that gives gradients of inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class _Weights(torch.autograd.Function):
    """The other half of the backward pass."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class SleepingStage(nn.Module):
    """A stage in the form that the engine's pipeline runs: sleeps, and adds its weight."""

    def __init__(self, stage: int, num_stages: int, seconds: float) -> None:
        super().__init__()
        self.stage = stage
        self.takes_tokens = stage == 0
        self.layers = nn.ModuleDict()
        self.head = nn.Identity() if stage == num_stages - 1 else None
        self.weight = nn.Parameter(torch.zeros(SPEC.hidden_size))
        self._seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        """[B, L] or [B, L, H] to [B, L, H]."""
        if self.takes_tokens:  # layers above an embedding give gradients of their inputs
            x = torch.zeros(*x.shape, SPEC.hidden_size, requires_grad=True)
        made: Tensor = _Inputs.apply(x, self._seconds)  # type: ignore[no-untyped-call]
        output: Tensor = made + _Weights.apply(self.weight, self._seconds)  # type: ignore[no-untyped-call]
        return output


def measure(case: Case, context: ParallelContext) -> float:
    """Seconds of a step, from the first rank's start to the last one's end: the shortest of some, as other work on the
    machine only adds."""
    plan = case.plan
    parts = [SleepingStage(stage, plan.num_stages, case.seconds(stage)) for stage in rank_stages(plan, context.pp_rank)]
    runner = PipelineRunner(
        parts,  # type: ignore[arg-type]
        lambda logits, _: logits.sum(),
        SPEC,
        context,
        precision_policy("fp32"),
        num_micro_batches=case.num_micro_batches,
        sequence_length=1,
    )
    tokens = torch.zeros(case.num_micro_batches, 1, dtype=torch.int64)
    spans: list[float] = []
    for _ in range(1 + REPEATS):  # the first makes connections
        context.barrier()
        start = time.perf_counter()
        runner.train(tokens, tokens, 1.0)
        times = context.gather((start, time.perf_counter()))
        spans.append(max(end for _, end in times) - min(start for start, _ in times))
    return min(spans[1:])


def work(rank: int, pp: int, port: int, results: Any) -> None:
    """One rank: every case of a number of ranks."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=pp)
    for case in cases(pp):
        measured = measure(case, open_context(case.plan, RuntimeOptions()))
        if rank == 0:
            results.put((case, measured))
    dist.barrier()
    dist.destroy_process_group()


def run(pp: int) -> Iterator[tuple[Case, float]]:
    """Start the ranks, and what they measure."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start = multiprocessing.get_context("spawn")
    results: Any = start.Queue()
    processes = [start.Process(target=work, args=(rank, pp, port, results), daemon=True) for rank in range(pp)]
    for process in processes:
        process.start()
    for _ in cases(pp):
        yield results.get(timeout=120)
    for process in processes:
        process.join()


def main() -> int:
    """Measure, print the table, write the result file."""
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    lines = [
        "Idle is what the busiest rank does not work, of the whole step. The stages take equal times, or the last one"
        " half as much again. In theory as in torch, stage 0 makes its whole backward pass with the gradients of"
        " weights where a schedule splits it: its inputs need none.",
        "",
        "| schedule | ranks | micro-batches | last stage | measured s | theory s | ratio | idle % | in theory % |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    rows = []
    for pp in RANKS:
        for case, measured in run(pp):
            theory, busy = case.theory, case.busy
            rows.append(asdict(case) | {"measured": measured, "theory": theory, "busy": busy})
            lines.append(
                f"| {case.schedule} | {pp} | {case.num_micro_batches} | {case.last_stage:g} | {measured:.3f}"
                f" | {theory:.3f} | {measured / theory:.3f} | {(measured - busy) / measured * 100:.1f}"
                f" | {max(theory - busy, 0.0) / theory * 100:.1f} |"
            )
            print(lines[-1], flush=True)
    ratios = [row["measured"] / row["theory"] for row in rows]
    lines += ["", f"Measured against theory: median {statistics.median(ratios):.3f}, from {min(ratios):.3f} to"
              f" {max(ratios):.3f}."]  # fmt: skip
    print(lines[-1])
    write_json(RESULT, {
        "title": "Idle time of pipeline schedules",
        "setup": f"stages that sleep {PASS_SECONDS * 1000:.0f} ms a pass and rank, the shortest of {REPEATS} steps;"
        f" processes over gloo on {os.cpu_count()} cores",
        "lines": lines, "rows": rows,
    })  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
