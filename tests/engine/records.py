"""Telemetry records with every field set, for tests that care for a few."""

from typing import Any

from engine.telemetry import StepRecord


def step_record(step: int, loss: float | None = 2.0, **fields: Any) -> StepRecord:
    """A step of 10 tokens and 0.1 seconds that ended at second ``step``; ``fields`` in place of what is set here."""
    plain: dict[str, Any] = {
        "time": float(step),
        "tokens": step * 10,
        "learning_rate": 1e-3,
        "learning_rate_scale": 1.0,
        "grad_norm": 1.0,
        "step_seconds": 0.1,
        "data_seconds": 0.0,
        "compute_seconds": 0.08,
        "optimizer_seconds": 0.02,
    }
    return StepRecord(step=step, loss=loss, **plain | fields)
