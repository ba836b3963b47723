"""The contract of everything that proposes candidates.

A sampler is a pure function of the state of the search: the same observations and seed give the same proposal. So a
study that is continued goes on as it would have, several drivers need nothing but the storage, and a sweep by one
worker can be repeated exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from autotune.prior.predict import TaskPrior
from autotune.search.forecast import Forecast
from autotune.space.enumerate import Enumeration
from autotune.space.space import Scalar, Space

ObservationState = Literal["running", "ok", "failed", "refused"]


@dataclass(frozen=True)
class Observation:
    """A number of a study as samplers see it."""

    number: int
    state: ObservationState
    """``failed``: it ran and gave no values; ``refused``: it broke a rule and never ran."""
    parameters: Mapping[str, Scalar]
    """Dimension name -> value of the active dimensions."""
    values: Mapping[str, float] | None = None
    """Objective name -> value as measured; None unless ``ok``. Finite, but a loss may be that of a diverged run:
    models take costs from ``hygiene`` alone."""
    failure: str = ""
    """Kind of failure, or the rule that refused it."""
    fidelity: float = 1.0
    """Share of the full training that was done, 0 to 1."""
    repeat_of: int | None = None
    """The trial that it repeats with another seed."""


@dataclass(frozen=True)
class SearchState:
    """All that a proposal may depend on."""

    space: Space
    observations: Sequence[Observation]
    """By number, the running ones too."""
    number: int
    """Number of the proposal in the study."""
    seed: int
    """Of this proposal alone."""
    study_seed: int
    """Of the study, for sequences over its proposals."""
    num_trials: int | None = None
    """Trials of the whole study; None while only time limits it."""
    enumeration: Enumeration | None = None
    """Legal plans that are worth a trial, for a training space."""
    forecast: Forecast | None = None
    """What the cost model says of speed and memory, where there is one."""
    task_prior: TaskPrior | None = None
    """What the meta-learned prior says of quality, where there is one."""

    @property
    def tried(self) -> tuple[Observation, ...]:
        """What ran or runs."""
        return tuple(o for o in self.observations if o.state != "refused")


class Sampler(Protocol):
    """Proposes candidates."""

    def propose(self, state: SearchState) -> dict[str, Scalar] | None:
        """A value for every active dimension.

        It should be legal and new: whoever asked finds out otherwise and asks again with one observation more.

        Returns:
            Dimension name -> value, in the space's order; None when there is nothing new in the space.
        """
