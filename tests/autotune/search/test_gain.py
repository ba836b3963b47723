"""What one more trial is expected to bring, and when that is too little."""

import math
from dataclasses import dataclass, replace

import pytest

from autotune.search.gain import MIN_WINDOW, expected_gain, is_enough
from autotune.search.sampler import Observation, SearchState
from autotune.search.uniform import UniformSampler
from autotune.space.objectives import Objective
from autotune.space.space import Scalar
from autotune.testing.samplers import plain_space, state_of

pytestmark = pytest.mark.unit


def losses(*values: float | None, bound: float | None = None) -> SearchState:
    """A state whose trials had these losses; None for a failed one."""
    observations = [
        Observation(
            number,
            "failed" if value is None else "ok",
            {"x": number / 100, "y": 1e-3},
            None if value is None else {"loss": value},
        )
        for number, value in enumerate(values)
    ]
    return state_of(plain_space((Objective(name="loss", bound=bound),)), observations)


def falling(count: int, rate: float) -> list[float]:
    return [2.0 + math.exp(-rate * number) for number in range(count)]


def test_a_search_that_still_improves_is_not_at_its_end() -> None:
    gain = expected_gain(UniformSampler(), losses(*falling(30, 0.1)))
    assert gain is not None
    assert gain.window == MIN_WINDOW
    assert gain.ratio > 0.003
    assert "mean of the last 10 trials" in gain.text
    assert not is_enough(UniformSampler(), losses(*falling(30, 0.1)), 0.003)


def test_a_plateau_is_the_end() -> None:
    state = losses(*falling(12, 0.5), *[2.5] * 20)
    gain = expected_gain(UniformSampler(), state)
    assert gain is not None
    assert gain.ratio == 0.0
    assert is_enough(UniformSampler(), state, 1e-6)


def test_failures_and_what_is_beyond_a_bound_bring_nothing() -> None:
    plateau = losses(*[2.5] * 12, *[None] * 12, bound=3.0)
    better_but_forbidden = losses(*[4.5] * 5, *[2.5] * 7, *[3.5] * 12, bound=3.0)
    for state in (plateau, better_but_forbidden):
        gain = expected_gain(UniformSampler(), state)
        assert gain is not None
        assert gain.ratio == 0.0


def test_nothing_is_known_of_the_first_trials_or_without_a_feasible_one() -> None:
    assert expected_gain(UniformSampler(), losses(*falling(2 * MIN_WINDOW - 1, 0.1))) is None
    assert expected_gain(UniformSampler(), losses(*[None] * 30)) is None
    assert not is_enough(UniformSampler(), losses(*[None] * 30), 0.1)


def test_a_diverged_loss_does_not_pass_for_a_plateau() -> None:
    """Beside a loss of a million all that is gained between two and three would be nothing."""
    gain = expected_gain(UniformSampler(), losses(1e6, *falling(30, 0.1)))
    assert gain is not None
    assert gain.ratio > 0.001


@dataclass(frozen=True)
class Knowing:
    """A sampler that expects less and less."""

    def propose(self, state: SearchState) -> dict[str, Scalar] | None:
        return None

    def expected_gain(self, state: SearchState) -> float | None:
        return 1 / (1 + len(state.observations)) if state.observations else None


def test_a_model_is_believed_when_it_says_little_several_times_in_a_row() -> None:
    gain = expected_gain(Knowing(), losses(2.0))
    assert gain is not None
    assert gain.ratio == 0.5
    assert "by the model" in gain.text
    assert not is_enough(Knowing(), losses(*[2.0] * 10), 0.1), "a tenth and more was expected before"
    assert is_enough(Knowing(), losses(*[2.0] * 12), 0.1)
    assert expected_gain(Knowing(), losses()) is None


def test_what_was_refused_or_still_runs_is_no_look_of_its_own() -> None:
    state = losses(*[2.0] * 10)
    last = state.observations[-1]
    kinds = ("refused", "running") * 3
    silent = [replace(last, number=10 + i, state=kind, values=None) for i, kind in enumerate(kinds)]
    assert not is_enough(Knowing(), replace(state, observations=(*state.observations, *silent)), 0.1)
