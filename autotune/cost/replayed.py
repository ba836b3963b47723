"""Estimates of finalists by replaying their pipeline schedules with the seconds of each single stage.

The closed form knows three kinds of pipeline ranks and takes filling and draining at the mean rank's pace. Here every
stage has its own layers, embedding and head, and the schedule's actions wait for each other as they would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from autotune.cost.columns import PlanColumns, encode, words_of
from autotune.cost.estimate import EstimateTable, Estimator, work_and_wire
from autotune.cost.replay import Replay, StageSeconds, replay
from autotune.cost.step_time import WEIGHT_RATIO, Blocks, Scope, micro_batch_times
from autotune.specs.cluster import ClusterSpec
from engine.plan import PlanTable
from engine.spec import ModelSpec

PASS_PARTS = ("matmul", "attention", "memory_bound", "recompute", "host", "tp", "cp", "ep")
"""Parts of the step that micro-batches take on a rank; the other parts come once a step or are the pipeline's."""


def replay_rows(
    model: ModelSpec,
    cluster: ClusterSpec,
    table: PlanTable,
    rows: Sequence[int] | np.ndarray | None = None,
    *,
    software: str = "default",
    optimizer: Literal["adamw", "sgd"] = "adamw",
) -> EstimateTable:
    """Estimates whose pipelines are replayed. Plans without a pipeline keep the closed form's figures.

    Args:
        model: The architecture.
        cluster: The machines.
        table: Plans with their batches.
        rows: Which of them, by default all. A replay takes up to half a second (64 ranks, 512 micro-batches).
        software: Training stack.
        optimizer: Optimizer.

    Raises:
        UserError: The cluster has no figures, or a schedule can't run its plan's numbers.
    """
    if rows is not None:
        table = {name: column[np.asarray(rows)] for name, column in table.items()}
    c = encode(table, model.num_layers)
    estimator = Estimator.of(model, cluster, software=software, optimizer=optimizer)
    closed = estimator.estimate(c)
    time = {name: part.copy() for name, part in closed.time.items()}
    step = closed.step_seconds.copy()
    for row, stages in enumerate(stage_seconds(model, estimator.scope(c), c, table)):
        if stages is None:
            continue
        run, without_sends = replay_row(c, row, stages), replay_row(c, row, replace(stages, send=0.0))
        busiest = float(run.busy.max())
        scale = busiest / sum(closed.time[name][row] for name in PASS_PARTS)
        for name in PASS_PARTS:
            time[name][row] *= scale
        time["bubble"][row] = without_sends.makespan - busiest
        time["pp"][row] = run.makespan - without_sends.makespan
        rest = sum(part[row] for name, part in time.items() if name != "straggler")
        before = closed.step_seconds[row] - closed.time["straggler"][row]
        time["straggler"][row] *= rest / before
        step[row] = rest + time["straggler"][row]
    change = step / closed.step_seconds
    return replace(
        closed,
        step_seconds=step,
        step_seconds_low=closed.step_seconds_low * change,
        step_seconds_high=closed.step_seconds_high * change,
        time=time,
        method="replay",
    )


def replay_row(c: PlanColumns, row: int, stages: StageSeconds) -> Replay:
    """The replay of one plan: its timeline, what each rank does when, and who is idle.

    Raises:
        UserError: The schedule can't run the plan's numbers.
    """
    one = c.take(np.array([row]))
    return replay(
        words_of("schedule")[int(one.schedule[0])],
        int(one.pp[0]),
        int(one.virtual_stages[0]),
        int(one.num_micro_batches[0]),
        stages,
    )


def stage_seconds(model: ModelSpec, x: Scope, c: PlanColumns, table: PlanTable) -> list[StageSeconds | None]:
    """What a micro-batch costs each stage of each plan; None for a plan without a pipeline.

    Args:
        model: The architecture.
        x: Device, stack and network.
        c: ``n`` plans.
        table: The same plans with their layers per stage.
    """
    work, wire = work_and_wire(x, c)
    counts = _stage_blocks(model, c, table)
    passes = micro_batch_times(x, c, work, wire)
    forward, backward = passes.seconds(counts)
    _, device = passes.device_seconds(counts)
    again = passes.again.on(counts) / np.maximum(device, 1e-30) * backward
    weight = WEIGHT_RATIO * (backward - again)
    ratio = x.software.communication_ratio * x.software.pp_communication_ratio
    send = np.broadcast_to(np.asarray(wire.pp_send) * ratio, len(c))
    overlap = np.broadcast_to(c.overlap_pp, len(c)) > 0
    found: list[StageSeconds | None] = []
    for row, (pp, v) in enumerate(
        zip(np.broadcast_to(c.pp, len(c)), np.broadcast_to(c.virtual_stages, len(c)), strict=True)
    ):
        n = int(pp * v)
        found.append(
            StageSeconds(
                forward=forward[:n, row].tolist(),
                backward_input=(backward - weight)[:n, row].tolist(),
                backward_weight=weight[:n, row].tolist(),
                send=float(send[row]),
                overlap=bool(overlap[row]),
            )
            if pp > 1
            else None
        )
    return found


def _stage_blocks(model: ModelSpec, c: PlanColumns, table: PlanTable) -> Blocks:
    """Blocks of each stage, in stage order: ``[most stages, n]`` each, zero beyond a plan's stages."""
    is_moe = np.array([model.is_moe_layer(layer) for layer in range(model.num_layers)])
    num_stages = np.broadcast_to(c.pp * c.virtual_stages, len(c))
    counts = np.zeros((4, int(num_stages.max()), len(c)))
    for row, n in enumerate(num_stages.tolist()):
        sizes = table["layers_per_stage"][row]
        if sizes is None:
            sizes = model.num_layers // n + (np.arange(n) < model.num_layers % n)
        moe = np.array([part.sum() for part in np.split(is_moe, np.cumsum(sizes)[:-1])])
        counts[0, :n, row], counts[1, :n, row] = np.asarray(sizes) - moe, moe
        counts[2, 0, row] = counts[3, n - 1, row] = 1
    return Blocks(*counts)
