"""Trials that grow: the shares of the training after which candidates are compared, and how many go on.

fidelity: off                                    # every trial is a full training (the default)
fidelity: [0.25, 1]                              # a quarter of the tokens first, then all
fidelity: {min: 0.1, eta: 3}                     # 0.111, 0.333, 1
fidelity: {rungs: [0.2, 0.2, 1], widths: [0.5, 1, 1]}   # first with half as wide a model

Narrower models are trained by the rules of mup relative to the model's own width (``engine.proxy``), so what is best
for them is best for the model. Of a user's own program or function a value of its space says how long it trains:

fidelity: {of: epochs, min: 0.1}                 # 3, 9 and 27 epochs, where the space has 27
fidelity: {of: epochs, rungs: [0.25, 1], resumes: true}
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, model_validator

from engine.schema import Schema

Share = Annotated[float, Field(gt=0.0, le=1.0)]

DEFAULT_ETA = 3.0
DEFAULT_MIN = 0.1


class Rung(NamedTuple):
    """A stage of a candidate's training."""

    tokens_ratio: float
    """Share of the training's tokens that it goes to."""
    width_ratio: float
    """Width of the model over that of the model that is tuned."""


class Fidelity(Schema):
    """How trials grow."""

    rungs: Annotated[tuple[Share, ...], Field(strict=False, min_length=1)]
    """Shares of the training's tokens, rising to 1: a candidate is trained to each in turn, as long as it is among the
    best."""
    widths: Annotated[tuple[Share, ...], Field(strict=False)] = ()
    """Widths of the model at each rung over its own, rising to 1; empty for the model itself at all."""
    eta: float = Field(default=DEFAULT_ETA, gt=1.0)
    """One of so many candidates of a rung goes on to the next."""

    @model_validator(mode="before")
    @classmethod
    def _from_least(cls, data: Any) -> Any:
        """``min`` and ``eta`` stand for rungs that many times apart."""
        if not isinstance(data, dict) or "rungs" in data:
            if isinstance(data, dict) and "min" in data:
                raise ValueError("'rungs' says where the first rung is: leave 'min' out")
            rungs = data.get("rungs") if isinstance(data, dict) else None
            if isinstance(rungs, list) and any(isinstance(rung, int | float) and rung > 1 for rung in rungs):
                raise ValueError(f"'rungs' are shares of a full training, such as [0.25, 1]; got {rungs}")
            return data
        least, eta = data.get("min", DEFAULT_MIN), data.get("eta", DEFAULT_ETA)
        numbers = [isinstance(value, int | float) and not isinstance(value, bool) for value in (least, eta)]
        if not all(numbers) or not 0 < least < 1 or not eta > 1:
            raise ValueError(f"'min' must be between 0 and 1 and 'eta' above 1, got {least!r} and {eta!r}")
        if least * eta > 1 + 1e-9:
            most = math.floor(1000 / eta) / 1000
            raise ValueError(f"with eta {eta:g} no rung lies between 'min' {least:g} and 1: take 'min' up to {most}")
        rungs = [1.0]
        while rungs[0] / eta >= least * (1 - 1e-9):
            rungs.insert(0, rungs[0] / eta)
        return {**{key: value for key, value in data.items() if key != "min"}, "rungs": rungs}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.rungs) < 2 or self.rungs[-1] != 1.0 or not _rises(self.rungs):
            raise ValueError(f"'rungs' must rise from a share to 1, such as [0.25, 1]; got {list(self.rungs)}")
        if not self.widths and len(set(self.rungs)) < len(self.rungs):
            raise ValueError(f"'rungs' has a share twice, and no 'widths' to tell them apart: {list(self.rungs)}")
        if self.widths:
            if len(self.widths) != len(self.rungs):
                raise ValueError(f"'widths' needs one width for each of the {len(self.rungs)} rungs")
            if self.widths[-1] != 1.0 or not _rises(self.widths):
                raise ValueError(f"'widths' must rise to 1, such as [0.5, 1]; got {list(self.widths)}")
            if len(set(self.stages)) < len(self.stages):
                raise ValueError("two rungs are the same, in tokens and in width: leave one out")
        return self

    @property
    def stages(self) -> tuple[Rung, ...]:
        """The rungs with their widths."""
        return tuple(Rung(*stage) for stage in zip(self.rungs, self.widths or (1.0,) * len(self.rungs), strict=True))

    @property
    def last(self) -> int:
        """Index of the full training."""
        return len(self.rungs) - 1

    def continues(self, rung: int) -> bool:
        """Whether a rung goes on from the checkpoint of the one before: another width begins anew."""
        return rung > 0 and self.stages[rung].width_ratio == self.stages[rung - 1].width_ratio

    def tells_speed(self, rung: int) -> bool:
        """Whether speed and memory at a rung are those of the next one, too."""
        return self.continues(rung + 1)

    def share(self, rung: int) -> float:
        """Work of a training up to a rung over that of the full one, 0 to 1: its tokens, times the square of the width
        (nearly all of a model's work is in matrices that are as wide on both sides)."""
        stage = self.stages[rung]
        return stage.tokens_ratio * stage.width_ratio**2

    def cost(self, rung: int) -> float:
        """What a rung costs, in full trainings."""
        return self.share(rung) - (self.share(rung - 1) if self.continues(rung) else 0.0)

    def cost_from(self, rung: int) -> float:
        """What all rungs from one on cost together."""
        return sum(self.cost(index) for index in range(rung, len(self.rungs)))


class ProgramFidelity(Fidelity):
    """How trials of a user's own program or function grow."""

    of: str
    """The value that says how long it trains, fixed in the space at that of a full training."""
    resumes: bool = False
    """Whether it goes on from what it left in ``checkpoints`` in the trial's folder; else each rung trains from the
    beginning."""

    @model_validator(mode="after")
    def _check_widths(self) -> Self:
        if self.widths:
            raise ValueError("'widths' is for training runs of the engine: leave it out")
        return self

    def continues(self, rung: int) -> bool:
        """See ``Fidelity``."""
        return self.resumes and super().continues(rung)

    def tells_speed(self, rung: int) -> bool:
        """Never: what a program calls speed or cost may grow with its training."""
        return False

    def lengths(self, full: int | float) -> tuple[int | float, ...]:
        """The value at each rung.

        Args:
            full: At a full training; whole numbers stay whole.
        """
        if isinstance(full, int):
            return tuple(max(1, round(ratio * full)) for ratio in self.rungs)
        return tuple(ratio * full for ratio in self.rungs)


def _rises(values: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in pairwise(values))


def parse_words(value: Any) -> Any:
    """What people write, as the fields of ``Fidelity``; None for ``off``."""
    if value is None or value is False or value == "off":
        return None
    if value is True or value == "on":
        return {}
    return {"rungs": value} if isinstance(value, list) else value
