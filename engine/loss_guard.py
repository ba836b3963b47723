"""Tells from the losses alone when a run can't be saved: too many non-finite steps in a row, or divergence."""

from __future__ import annotations

from engine.failures import RunFailure
from engine.schema import Schema

_DECAY = 0.9
"""Decay of the smoothed loss per step."""
_PATIENCE = 5
"""Steps in a row that the smoothed loss must be too high, and not falling over them."""


class LossHistory(Schema):
    """What the guard knows of the past; part of every checkpoint."""

    initial: float | None = None
    """First finite loss of the run, nats per token."""
    smoothed: float | None = None
    """Exponential moving average of the finite losses."""
    num_skipped_in_a_row: int = 0
    """Non-finite steps since the last finite one."""
    high_since: float | None = None
    """The smoothed loss when it last rose above the limit; null while below."""
    num_high: int = 0
    """Steps in a row above the limit."""


class LossGuard:
    """Follows the training loss.

    Args:
        diverged_above: Limit of the smoothed loss; None for the first loss plus one nat.
        max_skipped_steps: Non-finite steps in a row that end the run.
    """

    def __init__(self, diverged_above: float | None, max_skipped_steps: int) -> None:
        self._diverged_above = diverged_above
        self._max_skipped_steps = max_skipped_steps
        self.history = LossHistory()

    def check(self, loss: float | None, skipped: bool) -> None:
        """Take in one step; ``loss`` is None when it was not finite.

        Raises:
            RunFailure: ``nan`` or ``diverged``.
        """
        past = self.history
        num_skipped = past.num_skipped_in_a_row + 1 if skipped else 0
        if num_skipped >= self._max_skipped_steps:
            raise RunFailure("nan", f"{num_skipped} steps in a row had a loss or a gradient that is not finite")
        if loss is None:
            self.history = past.changed(num_skipped_in_a_row=num_skipped)
            return
        initial = loss if past.initial is None else past.initial
        smoothed = loss if past.smoothed is None else _DECAY * past.smoothed + (1 - _DECAY) * loss
        limit = initial + 1.0 if self._diverged_above is None else self._diverged_above
        num_high = past.num_high + 1 if smoothed > limit else 0
        high_since = None if num_high == 0 else smoothed if past.high_since is None else past.high_since
        self.history = LossHistory(
            initial=initial,
            smoothed=smoothed,
            num_skipped_in_a_row=num_skipped,
            high_since=high_since,
            num_high=num_high,
        )
        if num_high >= _PATIENCE and high_since is not None and smoothed >= high_since:
            raise RunFailure(
                "diverged",
                f"the smoothed training loss is {smoothed:.4g}, above {limit:.4g} for {num_high} steps and not falling"
                f" (it began at {initial:.4g})",
            )
