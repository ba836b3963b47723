"""Pipeline schedules in closed form: idle time of the slowest rank, sends that nothing hides, micro-batches in flight.

Durations are of one micro-batch on one rank, over all its virtual stages. ``slow_*`` are the slowest rank's, ``mean_*``
the mean over the ranks: the slowest rank sets the pace, filling and draining pass through all of them. With ``p``
ranks, ``v`` stages per rank, ``m`` micro-batches, and ``f``, ``b = i + w`` the passes through one stage (``i`` and
``w``: gradients of inputs and of weights), equal stages idle

* gpipe, 1f1b: ``(p - 1)(f + b)`` (Huang et al. 2019, arXiv 1811.06965; Narayanan et al. 2021, arXiv 2104.04473, 2.2);
* interleaved_1f1b: ``(p - 1)(f + b)`` of the ``v`` times smaller stages (the same, 2.2.2);
* interleaved_zero_bubble: ``(p - 1) max(f, i, f + i - w)``, ZB-H1's bubble (Qi et al. 2024, arXiv 2401.10241, table 2)
  where it is not shorter than the passes that wait for each other;
* zbv: zero where f = i = w but for the last fill ``(p - 1) f``; else the longest of the chains in ``_zbv``;
* dualpipev: ``(p - 1) max(0, i - w) + max(2 (p - 1) f, (p - 2) f + (p - 1) i)`` where the passes of a pair take the sum
  of their times (``(p - 1)(F&B + B - 3W)`` of arXiv 2412.19437 is the same path for w <= i and 2 i <= f + w).

Chains of the last three were found by replaying torch's action lists (``autotune.cost.replay``) with random durations;
a test compares every closed form with the replay.
"""

from __future__ import annotations

from functools import reduce

import numpy as np

from autotune.cost.columns import IntColumn, code

GPIPE, ONE_F_ONE_B, INTERLEAVED, INTERLEAVED_ZB, ZBV, DUALPIPEV = (
    code("schedule", word)
    for word in ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
)


Column = np.ndarray
"""``[n]`` numbers."""


def bubble_seconds(
    schedule: IntColumn,
    pp: IntColumn,
    virtual_stages: IntColumn,
    num_micro_batches: IntColumn,
    slow_forward: np.ndarray,
    slow_backward: np.ndarray,
    mean_forward: np.ndarray,
    mean_backward: np.ndarray,
    weight_ratio: float | np.ndarray = 0.5,
    *,
    num_after: IntColumn | int = 0,
    last_seconds: float | np.ndarray = 0.0,
) -> np.ndarray:
    """Idle time of the slowest rank in a step, without sends. ``[n]`` seconds.

    A step lasts ``num_micro_batches * (slow_forward + slow_backward)`` and this; sends come on top
    (``send_seconds``).

    Exact for equal stages, but for fewer micro-batches than fill the pipeline (``m < p`` of interleaved_zero_bubble,
    ``p < m < 2p - 1`` of zbv), where it is the longest of the chains that matter. For unequal stages it
    is exact for gpipe, and for 1f1b with the slowest ranks first (``num_after``); else an estimate, above 1f1b's by up
    to ``p - 1`` times the difference between the slowest and the mean rank.

    Args:
        schedule: Codes.
        pp: Pipeline ranks; 1 has no bubble.
        virtual_stages: Stages per rank.
        num_micro_batches: Per step.
        slow_forward: Seconds of a micro-batch's forward pass on the slowest rank.
        slow_backward: Of its backward pass, recompute included.
        mean_forward: Mean over the ranks.
        mean_backward: Mean over the ranks.
        weight_ratio: Share of the backward pass that computes gradients of weights, for schedules that split it.
        num_after: 1f1b: faster ranks after the last of the slowest ones, which are the first ranks.
        last_seconds: 1f1b: seconds of a micro-batch on the last rank, both passes, where ``num_after`` is not 0.
    """
    numbers = (pp, virtual_stages, num_micro_batches, slow_forward, slow_backward, mean_forward, mean_backward)
    schedule, ratio, *columns = np.broadcast_arrays(schedule, weight_ratio, *numbers)
    p, v, m, f, b, mean_f, mean_b = (column.astype(np.float64) for column in columns)
    # A stage's passes on all ranks but the slowest: what filling or draining costs.
    forward, backward = (p * mean_f - f) / v, (p * mean_b - b) / v
    # Where there are too few micro-batches, ranks wait for the passes through the stages of the other virtual rounds.
    short = np.where(schedule == INTERLEAVED, np.maximum(p - m, 0) * (v - 1) * (f + b) / v, 0.0)
    bubble: np.ndarray = np.asarray(forward + backward + short)
    after = np.broadcast_to(num_after, p.shape)
    lighter_end = (schedule == ONE_F_ONE_B) & (after > 0)
    if lighter_end.any():
        some = [np.broadcast_to(x, p.shape)[lighter_end] for x in (p, m, f, b, mean_f + mean_b, after, last_seconds)]
        bubble[lighter_end] = _slow_beginning(*some)
    for word, chains in ((INTERLEAVED_ZB, _zero_bubble), (ZBV, _zbv), (DUALPIPEV, _dualpipev)):
        rows = (schedule == word) & (p > 1)
        if rows.any():
            some = [column[rows] for column in (p, v, m, f / v, b / v, forward, backward, ratio)]
            bubble[rows] = chains(*some)
    return np.where(p > 1, np.maximum(bubble, 0.0), 0.0)


def _longest(*chains: Column) -> Column:
    """The chain of passes that ends last, as idle time of the slowest rank."""
    longest: Column = reduce(np.maximum, chains)
    return longest


def _slow_beginning(p: Column, m: Column, f: Column, b: Column, mean: Column, after: Column, last: Column) -> Column:
    """1F1B whose slowest ranks are the first ``p - after``: the last of them waits for the first micro-batch to come
    back from the ranks behind it, and at the end again, but is as many passes ahead as there are ranks behind it. Or
    the last rank, with a head, sets the pace. ``mean`` and ``last``: seconds of both passes."""
    behind = np.maximum(p * mean - (p - after) * (f + b), 0.0)
    before = (p - after - 1) * (f + b)
    slowest = before + np.maximum(behind - after * f, 0.0) + np.maximum(behind - after * b, 0.0)
    longest: Column = np.maximum(slowest, m * (last - f - b) + p * mean - last)
    return longest


def _zero_bubble(
    p: Column, v: Column, m: Column, f: Column, b: Column, forward: Column, backward: Column, ratio: Column
) -> Column:
    """ZB-H1: see ``bubble_seconds``. ``f`` and ``b`` of one stage; ``forward`` and ``backward`` of the other ranks'."""
    weight, inputs = ratio * backward, (1 - ratio) * backward
    full = _longest(forward, inputs, forward + inputs - weight)
    # With m < p: the stages of all rounds in turn, and the weights at the end.
    i, w = (1 - ratio) * b, ratio * b
    turns = v * p + m - 1 - m * v
    short = _longest(
        turns * (f + i) - (m * v - 1) * w,
        v * (p - m) * f + turns * i - m * (v - 1) * w,
        v * (p - m) * f + (p - 1) * i,
        turns * f + (p - m) * i,
    )
    return np.where(m < p, short, full)


def _zbv(
    p: Column, v: Column, m: Column, f: Column, b: Column, forward: Column, backward: Column, ratio: Column
) -> Column:
    """ZB-V: see ``bubble_seconds``."""
    i, w = (1 - ratio) * b, ratio * b
    # Mean over the other ranks: where p - 1 of them fill or drain, each with its own passes.
    k = p - 1
    f_k, i_k, w_k = forward / k, (1 - ratio) * backward / k, ratio * backward / k
    # Micro-batches beyond p, until the pipeline is full.
    j = np.clip(m - p, 1, p - 1)
    filling = _longest(
        2 * k * i_k - 2 * j * w_k,
        2 * (k - j) * i_k,
        np.where(m >= 2 * p - 1, k * i_k, 0.0),
        2 * k * f_k - 2 * k * w_k - w,
        2 * k * f_k - k * i_k - np.minimum(k, 1 + 2 * np.maximum(2 * p - 1 - m, 0)) * w_k,
        (p - j - 1) * f_k + f + (j - 1) * w_k,
        (p - j - 1) * i_k + i + (j - 1) * w_k,
        (p + j - 2) * f_k - (j - 1) * i_k,
        np.where(m >= 2 * p - 1, (2 * k - 1) * f_k + i - 2 * k * w_k, 0.0),
    )
    few = _longest(
        2 * (p - m) * f_k + 2 * k * i_k,
        (2 * p - m - 1) * (f_k + i_k),
        2 * k * f_k + (2 * k - 3 * (m - 1)) * i_k - (m - 1) * w_k,
        2 * k * f_k + 2 * (k - (m - 1)) * i_k - 2 * (m - 1) * w_k,
    )
    return np.where(m <= p, few, filling)


def _dualpipev(
    p: Column, v: Column, m: Column, f: Column, b: Column, forward: Column, backward: Column, ratio: Column
) -> Column:
    """DualPipeV: see ``bubble_seconds``."""
    weight, inputs = ratio * backward, (1 - ratio) * backward
    longest: Column = _longest(2 * forward, (p - 2) / (p - 1) * forward + inputs) + np.maximum(inputs - weight, 0.0)
    return longest


def send_seconds(
    schedule: IntColumn,
    pp: IntColumn,
    virtual_stages: IntColumn,
    num_micro_batches: IntColumn,
    send: np.ndarray,
    overlap: np.ndarray | bool = True,
    *,
    slack: float | np.ndarray = 0.0,
    stage_forward: float | np.ndarray = np.inf,
    stage_weight: float | np.ndarray = np.inf,
) -> np.ndarray:
    """Sends that nothing hides, in a step. ``[n]`` seconds.

    Beside compute, a send costs its latency where ranks wait for each other: in filling and draining, and under 1f1b
    all the time, because its ranks are exactly as far ahead as a round trip without sends takes: ``p`` micro-batches
    make ``2 (p - 1)`` sends. Interleaved and V-shaped schedules are further ahead and hide sends shorter than a stage's
    passes; DualPipeV hands both outputs of a pair on at its end and hides nothing.

    Args:
        schedule: Codes.
        pp: Pipeline ranks.
        virtual_stages: Stages per rank.
        num_micro_batches: Per step.
        send: Seconds of one send between neighbours.
        overlap: Whether sends run beside compute. If not, the sender waits.
        slack: Seconds by which the slowest rank needs longer for a micro-batch than the other ranks' mean; sends hide
            in it.
        stage_forward: Seconds of a micro-batch's forward pass through one stage: up to which sends are hidden.
        stage_weight: Seconds of the gradients of weights of one stage, for schedules that split the backward pass.
    """
    p, m, v = pp, num_micro_batches, virtual_stages
    fill = 2 * (p - 1)
    single, dual = schedule == ONE_F_ONE_B, schedule == DUALPIPEV
    interleaved = np.where(m % p == 0, 2 * (v * p - 1), fill)
    interleaved = np.where(m < p, 2 * (v * p - 1), interleaved)
    zero_bubble = np.where(m % p == 0, p * v + 3 * p - 4, np.where(m < p, 2 * (v * p - 1), 4 * (p - 1)))
    latency = np.where(schedule == INTERLEAVED, interleaved, fill)
    latency = np.where(schedule == INTERLEAVED_ZB, zero_bubble, latency)
    latency = np.where(schedule == ZBV, np.where(m >= 2 * p - 1, 5 * p - 7, 4 * (p - 1)), latency)
    latency = np.where(dual, 9 * p - 13, latency)
    # Round trips: one send each way between neighbours, but for every p-th micro-batch.
    trips = np.where(single, m - 2 - np.maximum(m - 2, 0) // p, 0)
    trips = np.where(dual, 2 * (m - 2 * p - np.maximum(m - p - 2, 0) // p), trips)
    trips = np.maximum(trips, 0)
    beside = latency * send + trips * np.maximum(2 * send - slack, 0.0)
    # Sends longer than the passes they hide behind.
    looped = (schedule == INTERLEAVED) | (schedule == INTERLEAVED_ZB)
    behind = np.where(schedule == INTERLEAVED_ZB, stage_weight / 2, stage_forward * np.where(schedule == ZBV, 2, 1))
    growth = np.where(schedule == INTERLEAVED_ZB, 1.5, 1.0)
    long = m * v * growth * np.maximum(send - behind, 0.0)
    beside = beside + np.where(looped | (schedule == ZBV), long, 0.0)
    beside = beside + np.where(schedule == GPIPE, 2 * (m - 1) * np.maximum(send - stage_forward, 0.0), 0.0)
    ends = np.where((p == 2) & (schedule != GPIPE), 1, 0)
    vee = (schedule == ZBV) | dual
    per_micro_batch = np.where(vee, np.where(p == 2, 2, 4), 2 * v - ends)
    waits = m * per_micro_batch + 2 * (p - 2) + ends - single * (p > 2) * (m > 1)
    waits = np.where(m < p, np.maximum(waits, 2 * (v * p - 1) - 2 * vee + m - 1), waits) * send
    return np.where(p > 1, np.where(overlap, beside, waits), 0.0)


def in_flight(
    schedule: IntColumn,
    pp: IntColumn,
    virtual_stages: IntColumn,
    num_micro_batches: IntColumn,
    rank: IntColumn,
) -> np.ndarray:
    """Micro-batches whose activations a pipeline rank holds at its peak. ``[n]``, in full sets of its layers.

    With virtual stages a set is ``virtual_stages`` stages' activations, so that the number may be a fraction. A stage's
    activations are held from its forward pass to its gradients of weights. Equal to the peaks of the action lists
    (``autotune.cost.replay.peak_in_flight``).

    Args:
        schedule: Codes.
        pp: Pipeline ranks.
        virtual_stages: Stages per rank.
        num_micro_batches: Per step.
        rank: Pipeline rank, 0 holds the embedding.
    """
    p, m, v = pp, num_micro_batches, virtual_stages
    per_round = m // np.maximum(m // p, 1)
    stages = np.where(schedule == GPIPE, m, np.minimum(m, p - rank))
    stages = np.where(schedule == INTERLEAVED, (v - 1) * per_round + 2 * (p - 1 - rank) + 1, stages)
    stages = np.where(schedule == INTERLEAVED_ZB, (v - 1) * per_round + p, stages)
    stages = np.where(schedule == ZBV, np.minimum(2 * p - 1 - rank, m) + np.minimum(rank + 1, m), stages)
    stages = np.where(schedule == DUALPIPEV, 2 * p + 1, stages)
    stages = np.minimum(stages, m * v)
    return np.where(p > 1, stages / v, 1.0)


def waiting_for_weights(
    schedule: IntColumn,
    pp: IntColumn,
    virtual_stages: IntColumn,
    num_micro_batches: IntColumn,
    rank: IntColumn,
) -> np.ndarray:
    """Of the micro-batches ``in_flight``, those whose gradients of inputs are made and those of weights are not, at the
    moment with the most of both. ``[n]``, in full sets of its layers.

    Args:
        schedule: Codes.
        pp: Pipeline ranks.
        virtual_stages: Stages per rank.
        num_micro_batches: Per step.
        rank: Pipeline rank, 0 holds the embedding.
    """
    stages = np.where(schedule == INTERLEAVED_ZB, rank + 1, np.where(schedule == ZBV, 1, 0))
    stages = np.minimum(stages, num_micro_batches * virtual_stages)
    return np.where(pp > 1, stages / virtual_stages, 0.0)
