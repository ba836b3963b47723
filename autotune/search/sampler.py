"""The contract of everything that proposes candidates.

A sampler is a pure function of the state of the search: the same observations and seed give the same proposal. So a
study that is continued goes on as it would have, several drivers need nothing but the storage, and a sweep by one
worker can be repeated exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

from autotune.prior.predict import TaskPrior
from autotune.search.curves import Curve
from autotune.search.forecast import Forecast
from autotune.space.enumerate import Enumeration
from autotune.space.space import Scalar, Space

SUPPORT_TEXTS = {
    "extrapolated": "the prior extrapolates, so its interval is wide",
    "outside": "the prior knows nothing near this run, so it decides little",
}
"""Support of a prior -> what that means."""

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
    rung: int = 0
    """Of a study whose trials grow (``Space.fidelity``): how far this number trains its candidate."""
    continues: int | None = None
    """The number that trained the candidate up to the rung before."""
    curve: Curve | None = None
    """Its training loss from the first step on, where trials grow."""
    key: str = ""
    """Hash of the candidate, where it is known already."""
    noise: Mapping[str, float] = field(default_factory=dict)
    """Objective name -> standard deviation of a value that is a forecast of the full training; samplers see candidates
    that have not grown to the end by such values."""


@dataclass(frozen=True)
class SearchState:
    """All that a proposal may depend on."""

    space: Space
    observations: Sequence[Observation]
    """By number, the running ones too."""
    number: int
    """Of the proposal in the study, without gaps for trials that were interrupted and taken over."""
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

    @property
    def predicted_best(self) -> dict[str, float]:
        """Objective name -> the best value that the prior predicts, where it does."""
        level = self.task_prior.loss_level() if self.task_prior else None
        return {} if level is None else {self.space.quality_name: level[0]}


class Sampler(Protocol):
    """Proposes candidates."""

    def propose(self, state: SearchState) -> dict[str, Scalar] | None:
        """A value for every active dimension.

        It should be legal and new: whoever asked finds out otherwise and asks again with one observation more.

        Returns:
            Dimension name -> value, in the space's order; None when there is nothing new in the space.
        """


@runtime_checkable
class Remarking(Protocol):
    """A sampler that has something to say of its search."""

    def remarks(self, state: SearchState) -> list[str]:
        """Sentences for people on what the observations say so far, the most important first. As pure as ``propose``,
        and asked only now and then."""


class SearchStopped(Exception):
    """A proposal was given up because the search is to end."""


@runtime_checkable
class Interruptible(Protocol):
    """A sampler whose proposals may take minutes."""

    should_stop: Callable[[], bool]
    """Whether the search is to end; asked again and again by ``propose``, which then raises ``SearchStopped``."""


@runtime_checkable
class Foreseeing(Protocol):
    """A sampler that knows what one more trial may bring."""

    def expected_gain(self, state: SearchState) -> float | None:
        """The growth of the hypervolume that one more trial is expected to bring, as a share of the front's box
        (``pareto.hypervolume``); None where it can't tell."""


def remarks_of(sampler: Sampler, state: SearchState) -> list[str]:
    """What a search has to say: of the prior, and of its sampler where that speaks."""
    remarks = []
    if state.task_prior is not None and state.task_prior.support != "inside":
        because = "; ".join(state.task_prior.reasons)
        remarks.append(SUPPORT_TEXTS[state.task_prior.support] + (f": {because}" if because else ""))
    return remarks + (sampler.remarks(state) if isinstance(sampler, Remarking) else [])
