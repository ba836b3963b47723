"""The model of one live run: its history, the loss law fitted to it, intervals of forecasts, and its health."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from autotune.prior.loss_law import LossLaw, RatePath, fit_loss_law
from autotune.prior.robust import Floats
from autotune.twin.health import Finding, assess
from autotune.twin.history import History
from autotune.twin.interval import AdaptiveInterval
from autotune.twin.throughput import StepTime, step_time
from engine.config import RunConfig
from engine.schedule import learning_rate_at
from engine.schema import Schema
from engine.telemetry import AckRecord, EventRecord, StepRecord

NUM_BINS = 48
"""Segments that the history is averaged into before fitting."""
NUM_FUTURE_BINS = 24
MIN_STEPS_PER_BIN = 4
REFIT_GROWTH = 1.25
"""The law is fitted again when it is asked for and the history has grown by this factor."""
_MAX_PAST_LAWS = 8


class Forecast(Schema):
    """Training loss expected at the end of the run (nats per token) if the learning rate is scaled by ``scale`` now."""

    scale: float
    """Factor on the schedule."""
    loss: float
    """Expected loss."""
    low: float
    """Lower end of the 90 % interval."""
    high: float
    """Upper end."""
    law: str
    """Which law: ``multi-power`` or ``power``."""
    num_steps: int
    """Steps of history that the law was fitted to."""


@dataclass(frozen=True)
class _PastLaw:
    law: LossLaw
    num_steps: int


class Twin:
    """Follows one run.

    Args:
        config: The run's configuration: its schedule and length.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.history = History()
        self.interval = AdaptiveInterval()
        self._law: LossLaw | None = None
        self._num_fitted = 0
        self._past: list[_PastLaw] = []
        self._num_assessed = 0
        self._disturbed: list[tuple[float, float]] = []

    @property
    def step(self) -> int:
        """Steps done."""
        return int(self.history.step[-1]) if len(self.history) else 0

    @property
    def scale(self) -> float:
        """Factor on the schedule in force."""
        return float(self.history.scale[-1]) if len(self.history) else self.config.runtime.learning_rate_scale

    @property
    def num_warmup_steps(self) -> int:
        """Steps of the schedule's warm-up."""
        return round(self.config.hyperparameters.warmup_ratio * self.config.num_steps)

    @property
    def num_steps_left(self) -> int:
        """Steps to the end of the run."""
        return max(self.config.num_steps - self.step, 0)

    @property
    def memory_bytes(self) -> int | None:
        """Memory in use, as the last step said; None when it did not."""
        known = self.history.memory_bytes[-1:]
        return int(known[0]) if len(known) and np.isfinite(known[0]) else None

    def update(self, records: Iterable[StepRecord | EventRecord | AckRecord]) -> None:
        """Take in new telemetry."""
        for record in records:
            if isinstance(record, StepRecord):
                self.history.append(record)
            elif isinstance(record, AckRecord) and "to_step" in record.data:
                self.history.cut_after(record.data["to_step"])

    @property
    def law(self) -> LossLaw | None:
        """The loss law of the history so far, fitted when it is asked for; None with too little history."""
        num_steps = int((self.history.step > self.num_warmup_steps).sum())
        if num_steps < self._num_fitted:  # rolled back
            self._num_fitted, self._past, self._law = 0, [], None
        if num_steps >= max(REFIT_GROWTH * self._num_fitted, 2 * MIN_STEPS_PER_BIN):
            self._refit(num_steps)
        return self._law

    def disturbed(self, start: float, end: float) -> None:
        """Say that step times between two Unix times do not count: something ran beside the job."""
        self._disturbed.append((start, end))

    def step_time(self) -> StepTime | None:
        """Median step time of late."""
        return step_time(self.history, self.config.tokens_per_step)

    def findings(self, *, num_new: int | None = None, live: bool = True) -> list[Finding]:
        """What is wrong now.

        Args:
            num_new: Last steps that are looked at for spikes and non-finite steps; None for those since the last call.
            live: Whether the run goes on, so that silence is a stall.
        """
        if num_new is None:
            num_new = max(len(self.history) - self._num_assessed, 1)
        self._num_assessed = len(self.history)
        now = time.time() if live else None
        return assess(self.history, num_new=num_new, now=now, undisturbed=self._undisturbed())

    def forecast(self, factor: float = 1.0) -> Forecast | None:
        """Loss at the end of the run if the scale is multiplied by ``factor`` now; None before the first fit."""
        law = self.law
        if law is None or not self.num_steps_left:
            return None
        past, _ = self._binned()
        loss = float(law.predict(past.then(self._future(factor * self.scale)))[-1])
        done = max(self.step - self.num_warmup_steps, 1)
        width = self.interval.half_width(self.num_steps_left / done)
        return Forecast(
            scale=factor * self.scale,
            loss=loss,
            low=float(loss * np.exp(-width)),
            high=float(loss * np.exp(width)),
            law=law.form,
            num_steps=self._num_fitted,
        )

    def progress_lost(self, factor: float, num_steps: int) -> float:
        """How much more the loss would fall, by the law, from ``num_steps`` from now to the end of the run at the
        present scale than at ``factor`` times it (nats): what a trial over so few steps can't show of a slower rate."""
        fitted = self.law
        if fitted is None or num_steps >= self.num_steps_left:
            return 0.0
        # Progress alone: what annealing gives back at the end is the same wherever the trial is annealed as well.
        law = replace(fitted, drops=None)
        past, _ = self._binned()
        falls = []
        for scale in (self.scale, factor * self.scale):
            near = past.then(self._future(scale, 0, num_steps))
            whole = near.then(self._future(scale, num_steps))
            falls.append(float(law.predict(near)[-1] - law.predict(whole)[-1]))
        return falls[0] - falls[1]

    def _undisturbed(self) -> npt.NDArray[np.bool_]:
        keep = np.ones(len(self.history), dtype=bool)
        for start, end in self._disturbed:
            # A step that ended shortly after the disturbance began before its end.
            keep &= (self.history.time < start) | (self.history.time - self.history.step_seconds > end)
        return keep

    def _refit(self, num_steps: int) -> None:
        path, loss = self._binned()
        if len(loss) == 0:
            return
        for past in self._past:
            error = float(np.log(past.law.predict(path)[-1] / loss[-1]))
            self.interval.record(error, (num_steps - past.num_steps) / past.num_steps)
        law = fit_loss_law(path, loss)
        self._num_fitted = num_steps
        if law is not None:
            self._law = law
            self._past = [*self._past, _PastLaw(law, num_steps)][-_MAX_PAST_LAWS:]

    def _binned(self) -> tuple[RatePath, Floats]:
        """The history after warm-up as at most ``NUM_BINS`` segments, with the median loss of each."""
        kept = self.history.step > self.num_warmup_steps
        rate, loss = self.history.learning_rate[kept], self.history.loss[kept]
        num_bins = min(NUM_BINS, len(rate) // MIN_STEPS_PER_BIN)
        edges = np.linspace(0, len(rate), num_bins + 1).astype(int)
        spans = [slice(start, end) for start, end in pairwise(edges)]
        spans = [span for span in spans if np.isfinite(loss[span]).any()]
        path = RatePath(
            np.array([rate[span].mean() for span in spans]), np.array([float(span.stop - span.start) for span in spans])
        )
        return path, np.array([np.nanmedian(loss[span]) for span in spans])

    def _future(self, scale: float, first: int = 0, last: int | None = None) -> RatePath:
        """The schedule from ``first`` to ``last`` steps from now (default: the end of the run), times ``scale``."""
        last = self.num_steps_left if last is None else min(last, self.num_steps_left)
        edges = np.unique(np.linspace(first, last, NUM_FUTURE_BINS + 1).astype(int))
        tokens = self.config.tokens_per_step
        total = self.config.num_steps * tokens
        middles = (edges[:-1] + edges[1:] + 1) / 2 + self.step
        rates = [scale * learning_rate_at(self.config.hyperparameters, step * tokens, total) for step in middles]
        return RatePath(np.array(rates), np.diff(edges).astype(float))
