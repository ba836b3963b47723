"""What a sweep optimises: any subset of the known objectives, or those of a user's own program; each with an optional
bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import Field, model_validator

from engine.outcome import Outcome
from engine.schema import Schema
from engine.units import format_bytes, format_count

ObjectiveName = str
QUALITY = "quality"
"""The objective that the prior and the forecasts of learning curves speak of."""
Direction = Literal["maximize", "minimize"]


@dataclass(frozen=True)
class KnownObjective:
    """An objective that every training run has."""

    direction: Direction
    unit: str
    label: str


KNOWN: Mapping[str, KnownObjective] = {
    "speed": KnownObjective("maximize", "tokens/s", "Training speed"),
    "memory": KnownObjective("minimize", "bytes", "Peak memory"),
    "quality": KnownObjective("minimize", "nats/token", "Held-out loss"),
    "cost": KnownObjective("minimize", "$ per 10^9 tokens", "Cost"),
    "energy": KnownObjective("minimize", "kWh per 10^9 tokens", "Energy"),
}
"""Objectives of training runs. ``cost`` and ``energy`` need the price and the power of the cluster's devices."""


class Objective(Schema):
    """One objective of a sweep."""

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")
    """``speed`` (tokens/s), ``memory`` (peak bytes per rank), ``quality`` (held-out loss, nats per token), ``cost``,
    ``energy``; of a user's own program any name that it reports."""
    direction: Direction = "minimize"
    """Which way is better; fixed for the known names."""
    bound: float | None = Field(default=None, allow_inf_nan=False)
    """A candidate beyond it is infeasible: least speed, most memory in bytes, highest loss; null for none."""

    @model_validator(mode="before")
    @classmethod
    def _known_direction(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("name"), str) and data["name"] in KNOWN:
            direction = KNOWN[data["name"]].direction
            data = {"direction": direction, **data}
            if data["direction"] != direction and data["direction"] in get_args(Direction):
                raise ValueError(f"{data['name']} is to {direction}; for another metric choose another name")
        return data

    def to_data(self) -> dict[str, Any]:
        """Plain data; the direction of a known objective is not said."""
        data = super().to_data()
        if self.name in KNOWN:
            del data["direction"]
        return data

    @property
    def unit(self) -> str:
        """Unit of the values; empty where it is not known."""
        return KNOWN[self.name].unit if self.name in KNOWN else ""

    @property
    def label(self) -> str:
        """Words for tables and axes."""
        return KNOWN[self.name].label if self.name in KNOWN else self.name

    def text(self, value: float) -> str:
        """A value with its unit, for people."""
        if self.name == "memory":
            return format_bytes(value)
        if self.name == "speed":
            return f"{format_count(float(f'{value:.3g}'))} {self.unit}"
        return f"{value:.4g} {self.unit}".rstrip()

    def value_of(self, outcome: Outcome) -> float | None:
        """The objective's value in an outcome, None where it was not measured."""
        measured = {
            "speed": outcome.tokens_per_second,
            "memory": outcome.peak_memory_bytes,
            "quality": outcome.held_out_loss,
        }
        value = measured.get(self.name)
        if value is None:
            value = outcome.metrics.get(self.name)
        return None if value is None else float(value)

    def violation(self, value: float) -> float:
        """How far ``value`` lies beyond the bound, as a share of it; at most 0 when it is within."""
        if self.bound is None:
            return 0.0
        excess = self.bound - value if self.direction == "maximize" else value - self.bound
        return excess / (abs(self.bound) or 1.0)
