"""A trial to run, as it is handed from a study to whatever runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from autotune.space.program import Program
from autotune.space.space import Scalar
from engine.config import RunConfig


@dataclass(frozen=True)
class Assignment:
    """A trial to run now, by whoever got it."""

    number: int
    attempt: int
    folder: Path
    parameters: Mapping[str, Scalar]
    """What was chosen, by dimension."""
    label: str
    """The candidate in a few words."""
    seed: int
    """For all that is random in it; a function of the study's seed and the trial's place in it."""
    config: RunConfig | None = None
    """The run of the engine; None for a user's own program or function."""
    program: Program | None = None
    """The user's own program; None for a run of the engine or a function."""
    grown: Mapping[str, Scalar] = field(default_factory=dict)
    """What its rung sets in place of the space's fixed values: how long a program or function trains."""
    repeat_of: int | None = None
    """The trial it repeats with another seed."""
    share: float = 1.0
    """Share of the full training that is done at its end."""
    cost: float = 1.0
    """What it uses of the budget, in full trainings."""
    leaves_checkpoint: bool = False
    """A part of a training of a user's program or function that says that it goes on: it has to leave something to go
    on from in ``checkpoints`` of its folder."""
    continues: int | None = None
    """The trial that trained its candidate before; its checkpoint is in the folder, unless it was lost."""

    @property
    def num_devices(self) -> int:
        """Devices it needs for itself."""
        if self.config is not None:
            return self.config.plan.world_size
        return self.program.num_devices if self.program is not None else 1
