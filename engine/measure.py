"""What a run costs: time of its steps, memory, CPU time. Collected per rank, put together at the end."""

from __future__ import annotations

import platform
import resource
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from statistics import median
from typing import Annotated, Any

import psutil
import torch
from pydantic import Field

from engine.config import RuntimeOptions
from engine.context import ParallelContext
from engine.memory.tracker import LiveStorageTracker
from engine.plan import Plan
from engine.schema import Schema
from engine.spec import CountOrZero
from engine.step import Stepper, StepResult

_MAX_STEPS_KEPT = 8192
"""Newest timed steps whose median is told; the speed counts all of them."""
MAX_CARRIED = 4096
"""Newest steps whose times and losses a checkpoint carries: all that is told of, but in very long runs."""


class Measured(Schema):
    """What a run has measured so far; part of every checkpoint, so that a process started anew tells of all of it."""

    plan: Plan | None = None
    """The plan that was measured."""
    device: str = ""
    """The kind of device, as in the outcome's environment."""
    timed_seconds: Annotated[float, Field(ge=0.0)] = 0.0
    """Time of the steps that count."""
    timed_tokens: CountOrZero = 0
    """Their tokens."""
    step_seconds: Annotated[tuple[float, ...], Field(strict=False)] = ()
    """Times of the newest of them."""
    peak_memory_bytes: CountOrZero | None = None
    """The largest of all ranks."""
    losses: Annotated[tuple[float, ...], Field(strict=False)] = ()
    """Newest training losses."""


class Meter:
    """Measures the steps of one process.

    Args:
        options: Which steps count, and whether memory is tracked.
        context: The ranks that measure together.
    """

    def __init__(self, options: RuntimeOptions, context: ParallelContext) -> None:
        self._options = options
        self._context = context
        self._process = psutil.Process()
        self._num_steps = 0
        self._is_tracking = False
        self._newest: tuple[float, int] | None = None
        self._timed_tokens = 0
        self._timed_seconds = 0.0
        self._timed_steps: deque[float] = deque(maxlen=_MAX_STEPS_KEPT)
        self._peak_memory_bytes: int | None = None
        self.start_time = self._process.create_time()
        """Unix time at which the process began."""

    def run_step(self, stepper: Stepper, step: Callable[[], StepResult], *, is_last: bool) -> tuple[StepResult, bool]:
        """Run one step, tracking its memory if it is the one for that.

        On CPU the second step is tracked, when the optimizer's state exists (or the first, if it is the last too).

        Args:
            stepper: Whose parameters, gradients and optimizer state are counted.
            step: Runs it.
            is_last: Whether the process ends after it.

        Returns:
            The step's result, and whether its time counts.
        """
        number, self._num_steps = self._num_steps, self._num_steps + 1
        wanted = self._options.measure_memory and self._context.device.type == "cpu"
        self._is_tracking = wanted and self._peak_memory_bytes is None and (number == 1 or is_last)
        if self._is_tracking:
            with LiveStorageTracker() as tracker:
                tracker.track(_state_tensors(stepper))
                result = step()
            self._peak_memory_bytes = tracker.peak_bytes
            return result, False
        return step(), number >= self._options.measure_warmup_steps

    def add(self, seconds: float, num_tokens: int, *, timed: bool) -> None:
        """Take in a step of the whole job: its wall time and its tokens."""
        if not self._is_tracking or self._newest is None:
            self._newest = seconds, num_tokens
        if timed:
            self._timed_steps.append(seconds)
            self._timed_seconds += seconds
            self._timed_tokens += num_tokens

    @property
    def num_steps(self) -> int:
        """Steps this process ran, timed or not."""
        return self._num_steps

    def so_far(self, plan: Plan, losses: Sequence[float]) -> Measured:
        """What a checkpoint carries on; called on all ranks. Times are this rank's.

        Args:
            plan: That all of it was measured with.
            losses: Newest training losses.
        """
        peaks = [peak for peak in self._context.gather(self._own_peak()) if peak is not None]
        return Measured(
            plan=plan,
            device=environment(self._context.device)["device"],
            timed_seconds=self._timed_seconds,
            timed_tokens=self._timed_tokens,
            step_seconds=tuple(self._timed_steps)[-MAX_CARRIED:],
            peak_memory_bytes=max(peaks, default=None),
            losses=tuple(losses)[-MAX_CARRIED:],
        )

    def go_on(self, plan: Plan, before: Measured) -> None:
        """Go on from what an earlier process measured, if it was the same plan on the same kind of device."""
        if (before.plan, before.device) != (plan, environment(self._context.device)["device"]):
            return
        self._timed_seconds += before.timed_seconds
        self._timed_tokens += before.timed_tokens
        self._timed_steps.extend(before.step_seconds)
        self._peak_memory_bytes = before.peak_memory_bytes

    def memory_bytes(self) -> int:
        """Memory in use now: allocated on the device (CUDA), else resident in this process."""
        if self._context.device.type == "cuda":
            return torch.cuda.memory_allocated(self._context.device)
        return int(self._process.memory_info().rss)

    def results(self, *, all_ranks: bool) -> dict[str, Any]:
        """The measured fields of an Outcome.

        Args:
            all_ranks: Take the largest memory and the summed CPU time of all ranks, which must all call this; else
                this rank alone speaks (a rank that failed can't ask the others).
        """
        own = self._own_resources()
        ranks = self._context.gather(own) if all_ranks else [own]
        seconds, num_tokens, steps = self._timed_seconds, self._timed_tokens, list(self._timed_steps)
        if not steps and self._newest:  # a run of a few steps has a speed too, if a poor one
            seconds, num_tokens = self._newest
            steps = [seconds]
        peaks = [rank["peak_memory_bytes"] for rank in ranks if rank["peak_memory_bytes"] is not None]
        return {
            "tokens_per_second": num_tokens / seconds if steps else None,
            "step_seconds": median(steps) if steps else None,
            "peak_memory_bytes": max(peaks, default=None),
            "max_resident_bytes": max(rank["max_resident_bytes"] for rank in ranks),
            "cpu_seconds": sum(rank["cpu_seconds"] for rank in ranks),
            "wall_seconds": time.time() - self.start_time,
        }

    def _own_peak(self) -> int | None:
        if self._context.device.type != "cuda":
            return self._peak_memory_bytes
        return max(torch.cuda.max_memory_allocated(self._context.device), self._peak_memory_bytes or 0)

    def _own_resources(self) -> dict[str, Any]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "peak_memory_bytes": self._own_peak(),
            # Linux counts kilobytes, macOS bytes.
            "max_resident_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
        }


def _state_tensors(stepper: Stepper) -> Iterator[torch.Tensor]:
    """Parameters, buffers, gradients and optimizer state."""
    for part in stepper.parts:
        for tensor in chain(part.parameters(), part.buffers()):
            yield tensor
            if tensor.grad is not None:
                yield tensor.grad
    for state in stepper.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def environment(device: torch.device) -> dict[str, str]:
    """Versions and machine, for an Outcome."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": f"{device.type}: {name}",
        "host": socket.gethostname(),
        "system": platform.platform(),
    }
