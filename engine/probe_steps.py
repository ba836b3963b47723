"""Measures small training steps of the engine itself, under one plan after another.

Single operations do not tell what a step costs the host: autograd, tensor-parallel wrappers, gathering of sharded
parameters, pipeline actions. Two sizes of model and two numbers of micro-batches tell those costs apart: per layer,
per micro-batch, per step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.config import RunConfig, RuntimeOptions
from engine.context import ParallelContext, open_context
from engine.measurement import StepSample
from engine.plan import Plan
from engine.probe_timing import Clock, Timer, low_quantile
from engine.spec import Hyperparameters, ModelSpec, Workload
from engine.step import Stepper

NUM_WARMUP = 2
MIN_STEPS, QUICK_MIN_STEPS, MAX_STEPS = 5, 3, 60
TINY_LENGTH = 8
TINY_WAIT, REAL_WAIT = 1.6, 1.25
"""Time of a step over its CPU time, at most, where ranks have equal work: see ``Timer.longest``."""


@dataclass(frozen=True)
class Case:
    """Steps to measure."""

    model: ModelSpec
    plan: Plan
    batches: tuple[int, ...]
    """Global batches, in sequences."""
    length: int


def measure_steps(timer: Timer, *, seconds: float, quick: bool) -> list[StepSample]:
    """Steps of every kind of plan that the ranks can take.

    Args:
        timer: All ranks.
        seconds: Time for each sample beside warm-up.
        quick: Fewer steps of each sample.
    """
    samples = []
    context = timer.context
    least = QUICK_MIN_STEPS if quick else MIN_STEPS
    runtime = RuntimeOptions.model_validate({"device": context.device.type, "threads_per_rank": timer.threads})
    for case in (*_tiny_cases(context.world_size), *_real_cases(context.world_size, context.device)):
        plan = case.plan
        own = ParallelContext(plan, context.device)
        if plan.world_size > 1:
            own = open_context(plan, runtime, has_experts=case.model.moe is not None)
        for batch in case.batches:
            config = RunConfig(
                model=case.model,
                workload=Workload(sequence_length=case.length, total_tokens=case.length),
                hyperparameters=Hyperparameters(global_batch_size=batch),
                plan=plan,
                runtime=runtime,
            )
            samples.append(_measure(config, own, timer, seconds, least))
    return samples


def _measure(config: RunConfig, own: ParallelContext, timer: Timer, seconds: float, least: int) -> StepSample:
    """Steps of one run; of a plan for one rank, every rank runs its own copy."""
    plan, batch, length = config.plan, config.hyperparameters.global_batch_size, config.workload.sequence_length
    stepper = Stepper.build(config, own, config.model.vocab_size)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.model.vocab_size, (batch // plan.dp, length), generator=generator)
    everyone, clock = timer.context, timer.clock() if plan.world_size == 1 else time.perf_counter
    seconds_of_one = [_timed(stepper, tokens, clock) for _ in range(NUM_WARMUP)][-1]
    num_steps = everyone.broadcast(min(max(int(seconds / sum(seconds_of_one)), least), MAX_STEPS))
    everyone.barrier()
    start = time.process_time()
    steps = [_timed(stepper, tokens, clock) for _ in range(num_steps)]
    cpu_seconds = (time.process_time() - start) / num_steps
    compute, optimizer = zip(*steps, strict=True)
    times = everyone.gather((low_quantile(compute), low_quantile(optimizer)))
    compute_seconds, optimizer_seconds = (max(of_ranks) for of_ranks in zip(*times, strict=True))
    micro_batches = plan.num_micro_batches(batch)
    wait = TINY_WAIT if length == TINY_LENGTH else REAL_WAIT
    longest = timer.longest(cpu_seconds, wait * (micro_batches + plan.pp - 1) / micro_batches)
    shorter = min(longest / (compute_seconds + optimizer_seconds), 1.0)
    return StepSample(
        model=config.model,
        plan=plan,
        global_batch_size=batch,
        sequence_length=length,
        compute_seconds=shorter * compute_seconds,
        optimizer_seconds=shorter * optimizer_seconds,
    )


def _timed(stepper: Stepper, tokens: torch.Tensor, clock: Clock) -> tuple[float, float]:
    """Seconds of one step by the clock: forward and backward, and the optimizer's part."""
    start, wall_start = clock(), time.perf_counter()
    result = stepper.train_step(tokens, tokens, 1e-4)
    share = (clock() - start) / (time.perf_counter() - wall_start)
    return result.compute_seconds * share, result.optimizer_seconds * share


def _tiny_cases(world_size: int) -> Iterator[Case]:
    """Models too small for their arithmetic to count, under each kind of plan."""
    few, many = _tiny_model(world_size, 2), _tiny_model(world_size, 6)
    plans = [Plan()]
    if world_size > 1:
        plans += [
            Plan(tp=world_size),
            Plan(tp=world_size, sequence_parallel=True),
            Plan(dp_shard=world_size),
            Plan(dp_shard=world_size, zero_stage=2),
        ]
    for plan in plans:
        yield Case(few, plan, (plan.dp, 4 * plan.dp), TINY_LENGTH)
        yield Case(many, plan, (plan.dp,), TINY_LENGTH)
    if world_size > 1:
        model = _tiny_model(world_size, 2 * world_size)
        yield Case(model, Plan(pp=world_size), (world_size, 4 * world_size), TINY_LENGTH)


def _real_cases(world_size: int, device: torch.device) -> Iterator[Case]:
    """Whole layers and a whole loss of a real size on one device, in each usual precision; then split in each way."""
    on_cpu = device.type == "cpu"
    length, micro_batch = (192, 4) if on_cpu else (4096, 1)
    precisions = ("fp32", "bf16") if on_cpu else ("bf16",)
    for precision in precisions:
        for num_layers in (1, 3):
            plan = Plan.model_validate({"micro_batch_size": micro_batch, "precision": precision})
            yield Case(_real_model(num_layers, world_size, on_cpu), plan, (micro_batch,), length)
    base = Plan.model_validate({"micro_batch_size": micro_batch, "precision": precisions[0]})
    yield Case(_real_model(3, world_size, on_cpu), base.changed(micro_batch_size=1), (4,), length)
    if world_size > 1:
        few, many = _real_model(2, world_size, on_cpu), _real_model(2 * world_size, world_size, on_cpu)
        yield Case(few, base.changed(tp=world_size), (micro_batch,), length)
        for zero_stage in (2, 3):
            plan = base.changed(dp_shard=world_size, zero_stage=zero_stage)
            yield Case(few, plan, (micro_batch * world_size,), length)
        yield Case(many, base.changed(pp=world_size), (micro_batch * world_size,), length)


def _real_model(num_layers: int, world_size: int, on_cpu: bool) -> ModelSpec:
    head_dim, least_heads = (40, 8) if on_cpu else (128, 32)
    heads = -(-least_heads // world_size) * world_size
    hidden = heads * head_dim
    return ModelSpec(
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        ffn_size=hidden * 11 // 4 // world_size * world_size,
        vocab_size=8 * hidden,
        max_positions=8192,
    )


def _tiny_model(world_size: int, num_layers: int) -> ModelSpec:
    head_dim, heads = 16, max(world_size, 2)
    return ModelSpec(
        num_layers=num_layers,
        hidden_size=heads * head_dim,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        ffn_size=2 * heads * head_dim,
        vocab_size=64 * heads,
        max_positions=TINY_LENGTH,
    )
