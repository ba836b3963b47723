"""Synthetic telemetry."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest

from engine.telemetry import StepRecord

MakeSteps = Callable[..., list[StepRecord]]


@pytest.fixture
def make_steps() -> MakeSteps:
    """Records of steps with given losses; everything else as a healthy run would have it."""

    def make(
        losses: Iterable[float | None],
        *,
        first: int = 1,
        learning_rate: float = 1e-3,
        grad_norms: Iterable[float | None] | None = None,
        step_seconds: Iterable[float] | None = None,
    ) -> list[StepRecord]:
        losses = list(losses)
        norms = list(grad_norms) if grad_norms is not None else [1.0] * len(losses)
        seconds = list(step_seconds) if step_seconds is not None else [0.1] * len(losses)
        ends = 1000.0 + np.cumsum(seconds)
        return [
            StepRecord(
                time=float(ends[i]),
                step=first + i,
                tokens=(first + i) * 1024,
                loss=loss if loss is None else float(loss),
                learning_rate=learning_rate,
                learning_rate_scale=1.0,
                grad_norm=norms[i],
                step_seconds=float(seconds[i]),
                data_seconds=0.0,
                compute_seconds=0.0,
                optimizer_seconds=0.0,
                skipped=loss is None,
            )
            for i, loss in enumerate(losses)
        ]

    return make
