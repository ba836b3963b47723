"""What a study tries next: the user's first guesses, then what its sampler proposes from what the study knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optuna.trial import TrialState

from autotune.prior.predict import TaskPrior
from autotune.search.fidelity import as_candidates
from autotune.search.forecast import Forecast
from autotune.search.gain import Gain, expected_gain, is_enough
from autotune.search.sampler import Sampler, SearchState, remarks_of
from autotune.search.seeds import derive_seed
from autotune.search.uniform import UniformSampler
from autotune.space.enumerate import Enumeration
from autotune.space.space import Scalar, Space
from autotune.study.record import observations_of, place_of, record_of
from autotune.study.trial_table import TrialTable

MAX_REJECTED = 10
"""Proposals in a row that were refused or known already before the next one is drawn uniformly."""


@dataclass(frozen=True)
class Proposer:
    """Chooses candidates. A pure function of the numbers in the table, for each number with a seed of its own: a study
    that is continued proposes what it would have proposed anyway, and two drivers never draw the same."""

    space: Space
    table: TrialTable
    sampler: Sampler
    study_seed: int
    num_trials: int | None
    guesses: Mapping[str, Mapping[str, Scalar]]
    """Key -> chosen values of the user's first guesses, in their order."""
    enumeration: Enumeration | None = None
    """The legal plans of a training space; of those with a forecast, the ones that are worth a trial."""
    forecast: Forecast | None = None
    task_prior: TaskPrior | None = None
    enough: float | None = None
    """Expected gain below which one more trial is not worth it; None for never."""

    def next_guess(self) -> dict[str, Scalar] | None:
        """The first guess that is no trial yet, nor about to be one: whoever asks, each is run once."""
        if not self.guesses:
            return None
        trials = self.table.all()
        records = [record_of(trial) for trial in trials]
        known = {record.key for record in records if record is not None and record.role == "trial"}
        chosen = [trial.params for trial in trials if trial.state == TrialState.RUNNING and record_of(trial) is None]
        for key, guess in self.guesses.items():
            if key not in known and dict(guess) not in chosen:  # by a driver that may be gone: then it is free again
                return dict(guess)
        return None

    def propose(self, number: int, num_rejected: int) -> dict[str, Scalar] | None:
        """Chosen values for a number; None when the space is used up.

        Args:
            number: In the table already.
            num_rejected: Proposals in a row of this driver that came to nothing.
        """
        sampler = self.sampler if num_rejected < MAX_REJECTED else UniformSampler()
        return sampler.propose(self._state(number))

    def measured(self, number: int) -> SearchState:
        """All that was measured before a number, as it was measured."""
        trials = self.table.all()[:number]
        place = place_of(number, trials)
        return SearchState(
            space=self.space,
            observations=observations_of(trials, self.space.objectives),
            number=place,
            seed=derive_seed(self.study_seed, "sampler", place),
            study_seed=self.study_seed,
            num_trials=self.num_trials,
            enumeration=self.enumeration,
            forecast=self.forecast,
            task_prior=self.task_prior,
        )

    def is_enough(self) -> bool:
        """Whether one more trial is not expected to be worth it."""
        if self.enough is None or self.next_guess() is not None:
            return False
        return is_enough(self.sampler, self._now(), self.enough)

    def expected_gain(self) -> Gain | None:
        """What one more trial is expected to bring; None while that is not known."""
        return expected_gain(self.sampler, self._now())

    def remarks(self) -> list[str]:
        """What the search has to say of itself now."""
        return remarks_of(self.sampler, self._now())

    def _now(self) -> SearchState:
        return self._state(len(self.table.all()))

    def _state(self, number: int) -> SearchState:
        """What a proposal may depend on."""
        state = self.measured(number)
        return as_candidates(state, self.space.fidelity) if self.space.fidelity else state
