"""Timing for the probe: warm-up, blocks of calls, a low quantile of them, all ranks at the same time.

What other processes do makes a call slower, never faster: on a quiet machine the low quantile and the median are nearly
the same, on a busy one the low quantile is what the machine can do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.context import ParallelContext

BLOCK_SECONDS = 0.002
"""A timed block is at least so long, so that the clock's own cost does not count."""
MAX_BLOCKS = 400
QUANTILE = 0.2
"""Of the blocks' times, which is told."""

COLLECTIVE_WAIT = 2.0
"""Time of a collective on a CPU over its CPU time, at most: each message wakes a thread, which takes as long as to send
a small one. What takes longer has waited for a core."""

Action = Callable[[], object]
Clock = Callable[[], float]


@dataclass
class Timer:
    """Times actions on every rank at once.

    All ranks must ask for the same measurements in the same order. A result is the largest of the ranks' low
    quantiles: a training step waits for the slowest.

    Args:
        context: The ranks.
        seconds: Time that one measurement may take, beside its warm-up.
        threads: CPU threads of a rank.
        min_blocks: Blocks of calls of each measurement, at least.
    """

    context: ParallelContext
    seconds: float
    threads: int = 1
    min_blocks: int = 5
    spreads: list[float] = field(default_factory=list)
    """How far the median lies above the low quantile, relative, of each measurement."""

    def each(self, action: Action) -> float:
        """Seconds of a call that needs no other rank, while all ranks make it.

        By one CPU thread: its CPU time, so that waiting for a core does not count.
        """
        self.context.barrier()
        num_blocks, calls = self._sizes(self._warm_up(action))
        return self._slowest(self._blocks(action, num_blocks, calls, self.clock()))

    def clock(self) -> Clock:
        """What tells the time of work that needs no other rank."""
        alone = self.context.device.type == "cpu" and self.threads == 1
        return time.thread_time if alone else time.perf_counter

    def waiting(self, action: Action) -> float:
        """Seconds of a call that waits for other threads of its process."""
        self.context.barrier()
        num_blocks, calls = self._sizes(self._warm_up(action))
        return self._slowest(self._blocks(action, num_blocks, calls, time.perf_counter))

    def together(self, action: Action) -> float:
        """Seconds of a call that all ranks make together; they agree on how often."""
        self.context.barrier()
        num_blocks, calls = self.context.broadcast(self._sizes(self._warm_up(action, num_calls=3)))
        self.context.barrier()
        start = time.process_time()
        times = self._blocks(action, num_blocks, calls, time.perf_counter)
        cpu_seconds = (time.process_time() - start) / (num_blocks * calls)
        return min(self._slowest(times), self.longest(cpu_seconds, COLLECTIVE_WAIT))

    def longest(self, cpu_seconds: float, wait: float) -> float:
        """The longest that a call by all ranks together takes on a machine that does nothing else.

        Args:
            cpu_seconds: CPU time of a call in this rank's process, its threads for communication among them.
            wait: Time relative to CPU time at which ranks no longer wait for each other, but for a core.

        Returns:
            Infinite where CPU time says little: with several threads, or where the device is another.
        """
        if self.context.device.type != "cpu" or self.threads > 1:
            return math.inf
        return wait * max(self.context.gather(cpu_seconds))

    def pair(self, first: Callable[[], object], second: Callable[[object], object]) -> tuple[float, float]:
        """Seconds of two actions one after the other, of which the second takes what the first made (a forward and a
        backward pass); each call timed by itself."""
        self.context.barrier()
        num_calls, _ = self._sizes(self._warm_up(lambda: second(first())))
        clock = self.clock()
        times: list[tuple[float, float]] = []
        for _ in range(num_calls):
            start = self._now(clock)
            made = first()
            middle = self._now(clock)
            second(made)
            times.append((middle - start, self._now(clock) - middle))
        forward, backward = zip(*times, strict=True)
        return self._slowest(list(forward)), self._slowest(list(backward))

    @property
    def noise_ratio(self) -> float:
        """The median of the spreads."""
        return float(np.median(self.spreads)) if self.spreads else 0.0

    def _now(self, clock: Clock = time.perf_counter) -> float:
        self.context.synchronize()
        return clock()

    def _warm_up(self, action: Action, num_calls: int = 2) -> float:
        """Seconds of the last of some first calls."""
        for _ in range(num_calls - 1):
            action()
        start = self._now()
        action()
        return self._now() - start

    def _sizes(self, seconds: float) -> tuple[int, int]:
        """Blocks, and calls per block, that fill the time."""
        calls = max(1, round(BLOCK_SECONDS / max(seconds, 1e-7)))
        blocks = int(self.seconds / max(seconds * calls, 1e-7))
        return min(max(blocks, self.min_blocks), MAX_BLOCKS), calls

    def _blocks(self, action: Action, num_blocks: int, calls: int, clock: Clock) -> list[float]:
        times = []
        for _ in range(num_blocks):
            start = self._now(clock)
            for _ in range(calls):
                action()
            times.append((self._now(clock) - start) / calls)
        return times

    def _slowest(self, times: list[float]) -> float:
        own = low_quantile(times)
        everyone = self.context.gather((own, float(np.median(times)) / own - 1))
        self.spreads.append(max(spread for _, spread in everyone))
        return max(seconds for seconds, _ in everyone)


def low_quantile(times: Sequence[float]) -> float:
    """The time that a fifth of the calls undercut."""
    return float(np.quantile(times, QUANTILE))


def drop_gradients(*tensors: torch.Tensor) -> None:
    """Forget gradients, so that the next backward pass makes new ones as the first of a training step does."""
    for tensor in tensors:
        tensor.grad = None
