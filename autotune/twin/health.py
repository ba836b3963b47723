"""What is wrong with a live run, in numbers: spikes, divergence, plateau, slow steps, non-finite steps, stalls."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from autotune.prior.robust import Floats, median_and_sigma
from autotune.twin.history import History
from autotune.twin.throughput import find_drop
from engine.schema import Schema

WINDOW = 128
"""Steps that a new step is compared with."""
MIN_WINDOW = 24
SPIKE_SIGMAS = 6.0
MIN_SIGMA = 0.01
"""Least spread of the log that is reckoned with: losses of near-equal batches may have hardly any of their own."""
LOSS_SPIKE = "z of log loss"
"""Quantity of a spike of the loss; the other kind is of the gradient norm."""
PERSISTENT_STEPS = 32
"""A spike that holds for so many steps persists."""
SMOOTHING_STEPS = 16
"""Steps of the medians that divergence is judged by."""
NON_FINITE_LIMIT = 3
"""Non-finite steps among the last ``NON_FINITE_WINDOW`` that count as divergence."""
NON_FINITE_WINDOW = 20
STALL_SECONDS = 30.0
STALL_STEPS = 20.0

FindingKind = Literal["spike", "persistent_spike", "plateau", "divergence", "throughput_drop", "non_finite", "stall"]


class Finding(Schema):
    """One thing that is wrong, with the numbers it rests on."""

    kind: FindingKind
    """What it is."""
    step: int
    """Step it was found at."""
    quantity: str
    """What was measured, with its unit."""
    value: float
    """The measured value."""
    threshold: float
    """The value beyond which it counts."""
    since_step: int
    """First step concerned."""

    def describe(self) -> str:
        """One line for people."""
        words = self.kind.replace("_", " ")
        return f"{words} at step {self.step}: {self.quantity} {self.value:.4g} (limit {self.threshold:.4g})"


def assess(
    history: History,
    *,
    num_new: int | None = None,
    now: float | None = None,
    undisturbed: npt.NDArray[np.bool_] | None = None,
) -> list[Finding]:
    """All findings at the end of the history.

    Args:
        num_new: Steps since the last assessment, which are looked at for spikes; None for the last ``WINDOW``.
        now: Unix time, to tell a stall by; None for a run that has ended.
        undisturbed: Which steps ran without a canary beside them, [num_steps]; None for all.
    """
    if not len(history):
        return []
    if undisturbed is None:
        undisturbed = np.ones(len(history), dtype=bool)
    return [
        *find_spikes(history, num_new if num_new is not None else WINDOW),
        *find_divergence(history),
        *find_persistent_spike(history),
        *find_plateau(history),
        *_find_throughput_drop(history, undisturbed),
        *find_non_finite(history, num_new if num_new is not None else WINDOW),
        *(_find_stall(history, now) if now is not None else ()),
    ]


def find_spikes(history: History, num_new: int) -> list[Finding]:
    """Upward outliers of the last ``num_new`` steps: robust z of the log against the ``WINDOW`` steps before each."""
    findings = []
    for name, values in ((LOSS_SPIKE, history.loss), ("z of log gradient norm", history.grad_norm)):
        first = max(len(values) - num_new, MIN_WINDOW)
        if first >= len(values):
            continue
        logs = _log(values[max(0, first - WINDOW) :])
        logs = np.append(np.full(max(WINDOW - first, 0), np.nan), logs)
        windows = np.lib.stride_tricks.sliding_window_view(logs[:-1], WINDOW)
        known = np.isfinite(windows).sum(axis=1) >= MIN_WINDOW
        centre, sigma = median_and_sigma(np.where(known[:, None], windows, 0.0))
        z = (logs[WINDOW:] - centre) / np.maximum(sigma, MIN_SIGMA)
        for index in np.flatnonzero(known & (z > SPIKE_SIGMAS)):
            findings.append(_finding("spike", int(history.step[first + index]), name, z[index], SPIKE_SIGMAS))
    return findings


def find_persistent_spike(history: History) -> list[Finding]:
    """A spike that did not go away: nearly all of the last ``PERSISTENT_STEPS`` losses stand above what was usual."""
    if len(history) < PERSISTENT_STEPS + MIN_WINDOW:
        return []
    logs = _log(history.loss[-(PERSISTENT_STEPS + WINDOW) :])
    before, recent = logs[:-PERSISTENT_STEPS], logs[-PERSISTENT_STEPS:]
    centre, sigma = median_and_sigma(before)
    z = (recent - centre) / max(float(sigma), MIN_SIGMA)
    low = float(np.nanquantile(z, 0.1)) if np.isfinite(z).any() else 0.0
    if low <= SPIKE_SIGMAS / 2:
        return []
    first = int(history.step[-PERSISTENT_STEPS])
    step = int(history.step[-1])
    return [_finding("persistent_spike", step, "low decile of z of log loss", low, SPIKE_SIGMAS / 2, since=first)]


def find_divergence(history: History) -> list[Finding]:
    """The smoothed loss has climbed far above its best, or updates keep being left out as non-finite."""
    step = int(history.step[-1])
    recent_bad = int(_non_finite(history)[-NON_FINITE_WINDOW:].sum())
    if recent_bad >= NON_FINITE_LIMIT:
        return [_finding("divergence", step, f"non-finite of {NON_FINITE_WINDOW} steps", recent_bad, NON_FINITE_LIMIT)]
    medians, sigmas = _smoothed(history)
    if len(medians) < 2:
        return []
    best = float(medians.min())
    fallen = max(float(medians[0]) - best, 0.0)
    threshold = best + max(8.0 * float(np.median(sigmas)), 0.1 * best, 0.25 * fallen)
    if medians[-1] <= threshold:
        return []
    since = best_step(history)
    return [_finding("divergence", step, "smoothed loss (nats)", float(medians[-1]), threshold, since=since)]


def best_step(history: History) -> int:
    """The step at which the smoothed loss was lowest: what came after it led nowhere better."""
    medians, _ = _smoothed(history)
    if not len(medians):
        return 0
    return int(history.step[-1]) - SMOOTHING_STEPS * int(len(medians) - 1 - np.argmin(medians))


def find_plateau(history: History) -> list[Finding]:
    """No progress over the last ``WINDOW`` steps: the fall between their halves is within noise and under 0.2 %.

    Once the schedule has brought the rate down, little progress is to be expected and no finding.
    """
    if len(history) < 2 * WINDOW or history.learning_rate[-1] < 0.5 * history.learning_rate[-2 * WINDOW :].max():
        return []
    losses = history.loss[-WINDOW:]
    earlier, later = losses[: WINDOW // 2], losses[WINDOW // 2 :]
    (before, sigma_before), (after, sigma_after) = median_and_sigma(earlier), median_and_sigma(later)
    if not np.isfinite(before + after):
        return []
    # Standard error of a median is 1.2533 that of a mean.
    noise = 2.0 * 1.2533 * float(np.hypot(sigma_before, sigma_after)) / np.sqrt(WINDOW / 2)
    fall = float(before - after)
    threshold = max(0.002 * float(before), min(noise, 0.01 * float(before)))
    if not -5 * threshold < fall < threshold:
        return []
    since = int(history.step[-WINDOW])
    return [_finding("plateau", int(history.step[-1]), "fall of the loss (nats)", fall, threshold, since=since)]


def find_non_finite(history: History, num_new: int) -> list[Finding]:
    """Steps among the last ``num_new`` whose loss or gradient was not finite."""
    bad = np.flatnonzero(_non_finite(history)[-num_new:])
    if not len(bad):
        return []
    steps = history.step[-num_new:]
    return [_finding("non_finite", int(steps[bad[-1]]), "non-finite steps", len(bad), 0, since=int(steps[bad[0]]))]


def _find_throughput_drop(history: History, undisturbed: npt.NDArray[np.bool_]) -> list[Finding]:
    drop = find_drop(history, undisturbed)
    if drop is None:
        return []
    step = int(history.step[-1])
    return [_finding("throughput_drop", step, "step time (s)", drop.recent_seconds, drop.threshold_seconds)]


def _find_stall(history: History, now: float) -> list[Finding]:
    limit = max(STALL_SECONDS, STALL_STEPS * float(np.median(history.step_seconds[-WINDOW:])))
    quiet = now - float(history.time[-1])
    step = int(history.step[-1])
    return [_finding("stall", step, "seconds without a step", quiet, limit)] if quiet > limit else []


def _finding(
    kind: FindingKind, step: int, quantity: str, value: float, threshold: float, *, since: int | None = None
) -> Finding:
    return Finding(
        kind=kind,
        step=step,
        quantity=quantity,
        value=float(value),
        threshold=float(threshold),
        since_step=step if since is None else since,
    )


def _non_finite(history: History) -> npt.NDArray[np.bool_]:
    return history.skipped | ~np.isfinite(history.loss)


def _smoothed(history: History) -> tuple[Floats, Floats]:
    """Medians and spreads of whole groups of ``SMOOTHING_STEPS`` finite losses, counted from the end."""
    losses = history.loss[np.isfinite(history.loss)]
    groups = losses[len(losses) % SMOOTHING_STEPS :].reshape(-1, SMOOTHING_STEPS)
    return median_and_sigma(groups) if len(groups) else (losses[:0], losses[:0])


def _log(values: Floats) -> Floats:
    return np.log(np.where(values > 0, values, np.nan))
