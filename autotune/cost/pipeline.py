"""Pipeline schedules in closed form: idle time of the slowest rank, sends that nothing hides, micro-batches in flight.

Durations are of one micro-batch on one rank, over all its virtual stages. ``slow_*`` are the slowest rank's, ``mean_*``
the mean over the ranks: the slowest rank sets the pace, filling and draining pass through all of them.
"""

from __future__ import annotations

import numpy as np

from autotune.cost.columns import IntColumn, code

GPIPE, ONE_F_ONE_B, INTERLEAVED, INTERLEAVED_ZB, ZBV, DUALPIPEV = (
    code("schedule", word)
    for word in ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
)


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
) -> np.ndarray:
    """Idle time of the slowest rank in a step, without sends. ``[n]`` seconds.

    A step lasts ``num_micro_batches * (slow_forward + slow_backward)`` and this; sends come on top
    (``send_seconds``).

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
    """
    p, m, v = pp, num_micro_batches, virtual_stages
    forward = p * mean_forward - slow_forward
    backward = p * mean_backward - slow_backward
    weight = weight_ratio * backward
    both = forward + backward
    short = np.maximum(p - m, 0) * (slow_forward + slow_backward)
    bubble = np.where(schedule == INTERLEAVED, both / v + short * (v - 1) / v, both)
    bubble = np.where(schedule == INTERLEAVED_ZB, np.maximum(both - 2 * weight, 0) / v + short * (v - 1) / v, bubble)
    bubble = np.where(schedule == ZBV, np.maximum(np.abs(both - 3 * weight), 0) / 2, bubble)
    bubble = np.where(schedule == DUALPIPEV, np.maximum(both + backward - 3 * weight, 0) / 2, bubble)
    return np.where(p > 1, bubble, 0.0)


def send_seconds(
    schedule: IntColumn,
    pp: IntColumn,
    virtual_stages: IntColumn,
    num_micro_batches: IntColumn,
    send: np.ndarray,
    overlap: np.ndarray | bool = True,
) -> np.ndarray:
    """Sends that nothing hides, in a step. ``[n]`` seconds.

    Args:
        schedule: Codes.
        pp: Pipeline ranks.
        virtual_stages: Stages per rank.
        num_micro_batches: Per step.
        send: Seconds of one send between neighbours.
        overlap: Whether sends run beside compute (they then cost latency only).
    """
    p, m, v = pp, num_micro_batches, virtual_stages
    fill = 2 * (p - 1) * send
    single = (schedule == ONE_F_ONE_B) * (m - 1)
    hidden = fill + single * send
    exposed = fill + 2 * m * v * send
    return np.where(p > 1, np.where(overlap, hidden, exposed), 0.0)


def in_flight(
    schedule: IntColumn,
    pp: IntColumn,
    virtual_stages: IntColumn,
    num_micro_batches: IntColumn,
    rank: IntColumn,
) -> np.ndarray:
    """Micro-batches whose activations a pipeline rank holds at its peak. ``[n]``, in full sets of its layers.

    With virtual stages a set is ``virtual_stages`` chunks, so that the number may be a fraction.

    Args:
        schedule: Codes.
        pp: Pipeline ranks.
        virtual_stages: Stages per rank.
        num_micro_batches: Per step.
        rank: Pipeline rank, 0 holds the embedding.
    """
    p, m, v = pp, num_micro_batches, virtual_stages
    rounds = np.maximum(m // p, 1)
    per_round = m // rounds
    chunks = np.where(schedule == GPIPE, m, np.minimum(m, p - rank))
    chunks = np.where(schedule == INTERLEAVED, (v - 1) * per_round + 2 * (p - 1 - rank) + 1, chunks)
    chunks = np.where(schedule == INTERLEAVED_ZB, (v - 1) * per_round + p, chunks)
    chunks = np.where(schedule == ZBV, 2 * p, chunks)
    chunks = np.where(schedule == DUALPIPEV, 2 * p + 1, chunks)
    chunks = np.minimum(chunks, m * v)
    return np.where(p > 1, chunks / v, 1.0)
