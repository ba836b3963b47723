"""What a sweep optimises: training speed, peak memory and quality, any subset, each with an optional bound."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from engine.outcome import Outcome
from engine.schema import Schema
from engine.units import format_bytes, format_count

ObjectiveName = Literal["speed", "memory", "quality"]
Direction = Literal["maximize", "minimize"]


class Objective(Schema):
    """One objective of a sweep."""

    name: ObjectiveName
    """``speed`` (tokens/s), ``memory`` (peak bytes per rank) or ``quality`` (held-out loss, nats per token)."""
    bound: float | None = Field(default=None, allow_inf_nan=False)
    """A candidate beyond it is infeasible: least speed, most memory in bytes, highest loss; null for none."""

    @property
    def direction(self) -> Direction:
        """Which way is better."""
        return "maximize" if self.name == "speed" else "minimize"

    @property
    def unit(self) -> str:
        """Unit of the values."""
        return {"speed": "tokens/s", "memory": "bytes", "quality": "nats/token"}[self.name]

    @property
    def label(self) -> str:
        """Words for tables and axes."""
        return {"speed": "Training speed", "memory": "Peak memory", "quality": "Held-out loss"}[self.name]

    def text(self, value: float) -> str:
        """A value with its unit, for people."""
        if self.name == "memory":
            return format_bytes(value)
        if self.name == "speed":
            return f"{format_count(float(f'{value:.3g}'))} {self.unit}"
        return f"{value:.4g} {self.unit}"

    def value_of(self, outcome: Outcome) -> float | None:
        """The objective's value in an outcome, None where it was not measured."""
        value = {
            "speed": outcome.tokens_per_second,
            "memory": outcome.peak_memory_bytes,
            "quality": outcome.held_out_loss,
        }[self.name]
        return None if value is None else float(value)

    def violation(self, value: float) -> float:
        """How far ``value`` lies beyond the bound, as a share of it; at most 0 when it is within."""
        if self.bound is None:
            return 0.0
        excess = self.bound - value if self.direction == "maximize" else value - self.bound
        return excess / (abs(self.bound) or 1.0)
