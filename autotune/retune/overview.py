"""A run as people look at it: where it stands, how it will end, what is wrong, and what the retuner did. Plain data."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import psutil

from autotune.prior.robust import Floats
from autotune.retune.job import RUN_FILE
from autotune.retune.ledger import STORY_KINDS, Entry, Ledger
from autotune.twin.health import Finding
from autotune.twin.twin import Forecast, Twin
from engine.config import RunConfig, load_run
from engine.errors import UserError
from engine.outcome import Outcome, read_outcome
from engine.schema import Schema
from engine.telemetry import EventRecord, TelemetryReader

NUM_POINTS = 60
"""Points of the loss curve."""
NUM_DECISIONS = 8
"""Newest entries of the ledger."""
FINDING_STEPS = 128
"""Findings of so many last steps are shown."""
ALIVE_SECONDS = 10.0
"""A run on another machine that wrote a step so lately counts as alive."""


class Overview(Schema):
    """One look at a run."""

    name: str
    """Name of the run."""
    folder: str
    """Its folder."""
    step: int
    """Steps done."""
    num_steps: int
    """Steps of the whole run."""
    tokens: int
    """Tokens trained on."""
    is_alive: bool
    """Whether it trains now: its process runs on this machine, or it wrote a step a moment ago."""
    last_seen_seconds: float | None
    """Since the last step; null before the first."""
    loss: float | None
    """Median training loss of the last steps, nats per token."""
    loss_curve: tuple[float, ...]
    """Median training loss of equal stretches of the run so far."""
    held_out_loss: float | None
    """Latest held-out loss, nats per token."""
    learning_rate: float | None
    """Learning rate of the last step."""
    learning_rate_scale: float
    """Factor on the schedule."""
    tokens_per_second: float | None
    """Speed of late."""
    step_seconds: float | None
    """Median step time of late."""
    seconds_left: float | None
    """To the end of the run at that speed."""
    memory_bytes: int | None
    """On rank 0: device memory in use (CUDA), or the process's resident memory (CPU)."""
    forecast: Forecast | None
    """Training loss expected at the end."""
    findings: tuple[Finding, ...]
    """What is wrong."""
    decisions: tuple[Entry, ...]
    """What the retuner did last."""
    outcome: Outcome | None
    """How the run ended; null while it runs."""


class Watcher:
    """Follows a run from outside, reading only.

    Args:
        folder: The run's folder.

    Raises:
        UserError: There is no run in it.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / RUN_FILE).is_file():
            raise UserError(f"no run in {folder}", hint=f"name a job, or a folder that holds a {RUN_FILE}")
        self._folder = folder
        self._config: RunConfig = load_run(folder / RUN_FILE)[0]
        self._twin = Twin(self._config)
        self._reader = TelemetryReader(folder)
        self._held_out_loss: float | None = None
        self._pid: int | None = None

    def look(self) -> Overview:
        """The run as it is now."""
        records = self._reader.poll()
        for record in records:
            if isinstance(record, EventRecord) and record.kind == "evaluation":
                self._held_out_loss = record.data.get("held_out_loss")
            if isinstance(record, EventRecord) and record.kind == "start":
                self._pid = record.data.get("pid")
        twin, history = self._twin, self._twin.history
        twin.update(records)
        outcome = read_outcome(self._folder)
        speed = twin.step_time()
        last_seen = time.time() - float(history.time[-1]) if len(history) else None
        wrote_lately = last_seen is not None and last_seen < ALIVE_SECONDS
        is_alive = outcome is None and (wrote_lately or (self._pid is not None and psutil.pid_exists(self._pid)))
        is_running = is_alive and len(history) > 0
        return Overview(
            name=self._config.name,
            folder=str(self._folder),
            step=twin.step,
            num_steps=self._config.num_steps,
            tokens=int(history.tokens[-1]) if len(history) else 0,
            is_alive=is_alive,
            last_seen_seconds=last_seen,
            loss=_median(history.loss[-16:]),
            loss_curve=_curve(history.loss),
            held_out_loss=outcome.held_out_loss if outcome and outcome.held_out_loss else self._held_out_loss,
            learning_rate=float(history.learning_rate[-1]) if len(history) else None,
            learning_rate_scale=twin.scale,
            tokens_per_second=speed.tokens_per_second if speed else None,
            step_seconds=speed.seconds if speed else None,
            seconds_left=twin.num_steps_left * speed.seconds if speed and is_running else None,
            memory_bytes=twin.memory_bytes,
            forecast=twin.forecast() if is_running else None,
            findings=tuple(twin.findings(num_new=FINDING_STEPS, live=is_running)),
            decisions=tuple(e for e in Ledger(self._folder).entries() if e.kind in STORY_KINDS)[-NUM_DECISIONS:],
            outcome=outcome,
        )


def _curve(losses: Floats) -> tuple[float, ...]:
    parts = np.array_split(losses, min(NUM_POINTS, len(losses))) if len(losses) else []
    medians = (_median(part) for part in parts)
    return tuple(median for median in medians if median is not None)


def _median(losses: Floats) -> float | None:
    finite = losses[np.isfinite(losses)]
    return float(np.median(finite)) if len(finite) else None
