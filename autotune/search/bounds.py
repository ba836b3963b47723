"""Lower bounds on the step time and the memory of every plan of a block, from few of its plans.

They rest on what holds for any sensible cost model, and on nothing else:

* more overlap never makes a step longer, apart from the parts of ``NOT_BOUNDED``, which are left out of the bound (they
  are at least 0);
* those parts alone depend on the ZeRO stage, on the overlap of data-parallel communication and on offload; stragglers
  are a share of the rest that all plans of a block have alike;
* recomputing nothing is the fastest, but for those parts;
* splitting the sequence over the tensor-parallel ranks, and offload, never take more memory.

A search checks every plan that it estimates against its block's bounds, and does without them if one is broken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np

from autotune.cost.columns import PlanColumns, words_of
from autotune.cost.estimate import Estimator
from autotune.search.blocks import Blocks, Columns
from autotune.search.plan_space import PlanSpace
from autotune.specs.cluster import ClusterSpec
from autotune.specs.figures import MatmulPrecision
from engine.flops import training_flops_per_token
from engine.spec import ModelSpec

NOT_BOUNDED = ("dp", "optimizer", "offload")
"""Parts of the step time that the bound takes as 0."""
SLACK = 1e-9
"""Relative room for rounding, more than costs are rounded by."""


@dataclass(frozen=True)
class MemoryBounds:
    """No plan of a block takes less; each ``[b]``."""

    memory_bytes: np.ndarray
    memory_bytes_high: np.ndarray
    """Of the high end of the interval, which decides whether a plan fits."""


def memory_bounds(estimator: Estimator, blocks: Blocks, chunk_rows: int) -> MemoryBounds:
    """Bounds on the memory of every block's plans.

    Args:
        estimator: The cost model.
        blocks: The blocks.
        chunk_rows: Plans computed at once.
    """
    held, high = np.zeros(len(blocks)), np.zeros(len(blocks))
    for some, rows in _pieces(blocks, np.arange(len(blocks)), smallest_rows, chunk_rows):
        same = blocks.same_memory(some, rows)
        table = estimator.memory(same.plans)
        held[some] = _least(table.memory_bytes[same.of_row], len(some))
        high[some] = _least(table.high_bytes[same.of_row], len(some))
    return MemoryBounds(held * (1 - SLACK), high * (1 - SLACK))


def time_bounds(estimator: Estimator, blocks: Blocks, which: np.ndarray, chunk_rows: int) -> np.ndarray:
    """Bounds on the step time of the plans of some blocks, seconds.

    Args:
        estimator: The cost model.
        blocks: The blocks.
        which: ``[w]`` indices of blocks.
        chunk_rows: Plans computed at once.

    Returns:
        ``[b]``, with 0 for the other blocks.
    """
    seconds = np.zeros(len(blocks))
    for some, rows in _pieces(blocks, which, fastest_rows, chunk_rows):
        chunk = blocks.plans(some, rows)
        parts = dict(estimator.step_time(chunk.plans, same_work=chunk.same_work).parts)
        straggler = parts.pop("straggler")
        total = np.sum(list(parts.values()), axis=0)
        bounded = total - np.sum([parts[name] for name in NOT_BOUNDED], axis=0)
        seconds[some] = _least(bounded * (1 + straggler / total), len(some))
    return seconds * (1 - SLACK)


def least_seconds(model: ModelSpec, cluster: ClusterSpec, columns: PlanColumns) -> np.ndarray:
    """Step time that no plan is faster than: the model's FLOPs at the devices' dense peak, or at the best measured rate
    where the peak is not known. ``[n]``, 0 where neither is."""
    rates = np.zeros(len(words_of("precision")))
    for code, word in enumerate(words_of("precision")):
        measured = cluster.figures.matmul.get(cast(MatmulPrecision, word)) if cluster.figures else None
        rates[code] = max(cluster.peak_flops.get(word, 0.0), measured.tflops * 1e12 if measured else 0.0)
    lengths, of_row = np.unique(columns.sequence_length, return_inverse=True)
    flops = np.array([training_flops_per_token(model, int(length)) for length in lengths])[of_row]
    tokens = columns.global_batch_size * columns.sequence_length
    rate = rates[columns.precision] * columns.world_size
    return np.where(rate > 0, flops * tokens / np.maximum(rate, 1.0), 0.0)


def without_recompute(space: PlanSpace, blocks: Blocks) -> np.ndarray:
    """``[b]``: for each block the one that differs only in that nothing is recomputed; -1 where there is none."""
    periods = blocks.sizes["recompute_period"]
    kinds = blocks.sizes["recompute"]
    place = kinds * periods
    if "none" not in space.values["recompute"]:
        return np.full(len(blocks), -1)
    none = space.values["recompute"].index("none") * periods
    group = blocks.index // place
    sibling = np.full(len(blocks), -1)
    bare = np.flatnonzero((blocks.index % place >= none) & (blocks.index % place < none + periods))
    at = np.searchsorted(group[bare], group)
    found = at < len(bare)
    found[found] = group[bare[at[found]]] == group[found]
    sibling[found] = bare[at[found]]
    return sibling


def fastest_rows(inner: Columns, rows: np.ndarray) -> np.ndarray:
    """Which of a block's inner ``rows`` bound its step time: those that no other overlaps more than."""
    waits = np.stack([1 - inner[name][rows] for name in ("overlap_tp", "overlap_pp")])
    return _minimal(waits, np.stack([inner[name][rows] for name in ("sequence_parallel", "vocab_parallel")]))


def smallest_rows(inner: Columns, rows: np.ndarray) -> np.ndarray:
    """Which of a block's inner ``rows`` bound its memory."""
    names = ("offload_parameters_ratio", "offload_optimizer_ratio", "offload_activations_ratio", "sequence_parallel")
    whole = np.stack([1 - inner[name][rows] for name in names])
    return _minimal(whole, np.stack([inner[name][rows] for name in ("vocab_parallel", "zero_stage")]))


def _minimal(measures: np.ndarray, same: np.ndarray) -> np.ndarray:
    """Indices of the columns of ``measures`` ``[a, r]`` that no other is at most equal to in all, among columns that
    agree in ``same`` ``[b, r]``; of equal ones the first."""
    below = (measures[:, :, None] <= measures[:, None, :]).all(axis=0)
    below &= (same[:, :, None] == same[:, None, :]).all(axis=0)
    order = np.arange(measures.shape[1])
    strictly = below & (~below.T | (order[:, None] < order[None, :]))
    return np.flatnonzero(~strictly.any(axis=0))


def _pieces(
    blocks: Blocks, which: np.ndarray, choose: Callable[[Columns, np.ndarray], np.ndarray], chunk_rows: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Blocks of one class, as many as make a chunk, and the inner rows that are chosen among those of the class."""
    for kind, rows in enumerate(blocks.classes):
        members = which[blocks.kind[which] == kind]
        chosen = rows[choose(blocks.inner, rows)]
        step = max(1, chunk_rows // max(1, len(chosen)))
        for start in range(0, len(members), step):
            yield members[start : start + step], chosen


def _least(values: np.ndarray, num_blocks: int) -> np.ndarray:
    least: np.ndarray = values.reshape(num_blocks, -1).min(axis=1)
    return least
