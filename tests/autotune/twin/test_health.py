"""Injected faults are found with the right kind and step; healthy runs stay silent."""

from collections.abc import Callable

import numpy as np
import pytest

from autotune.twin.health import Finding, assess
from autotune.twin.history import Floats, History
from engine.telemetry import StepRecord

pytestmark = pytest.mark.unit

MakeSteps = Callable[..., list[StepRecord]]


def curve(num_steps: int, *, sigma: float = 0.02, seed: int = 0) -> Floats:
    steps = np.arange(1, num_steps + 1)
    noise = np.random.default_rng(seed).normal(0, sigma, num_steps)
    falling: Floats = (1.8 + 4.0 * (1 + steps / 20) ** -0.5) * np.exp(noise)
    return falling


def kinds(findings: list[Finding]) -> set[str]:
    return {finding.kind for finding in findings}


@pytest.mark.parametrize("seed", range(20))
def test_a_healthy_run_has_no_finding(make_steps: MakeSteps, seed: int) -> None:
    seconds = np.random.default_rng(seed).normal(0.1, 0.01, 500)
    for length in (10, 60, 200, 500):
        history = History(make_steps(curve(length, seed=seed), step_seconds=seconds[:length]))
        assert assess(history, num_new=length) == []


def test_a_spike_is_found_at_its_step(make_steps: MakeSteps) -> None:
    losses = curve(300)
    losses[250] *= 1.6
    spikes = assess(History(make_steps(losses)))
    assert [(f.kind, f.step, f.quantity) for f in spikes] == [("spike", 251, "z of log loss")]
    assert spikes[0].value > spikes[0].threshold


def test_a_spike_of_the_gradient_norm_is_found(make_steps: MakeSteps) -> None:
    norms = np.exp(np.random.default_rng(0).normal(0, 0.1, 200))
    norms[190] = 20.0
    found = assess(History(make_steps(curve(200), grad_norms=norms.tolist())))
    assert [(f.kind, f.step, f.quantity) for f in found] == [("spike", 191, "z of log gradient norm")]


def test_a_spike_that_stays_persists(make_steps: MakeSteps) -> None:
    losses = curve(300)
    losses[260:] *= 1.4
    assert "persistent_spike" in kinds(assess(History(make_steps(losses))))


def test_climbing_loss_is_divergence(make_steps: MakeSteps) -> None:
    losses = curve(200)
    losses[120:] += np.linspace(0, 4, 80)
    assert "divergence" in kinds(assess(History(make_steps(losses))))


def test_repeated_non_finite_steps_are_divergence(make_steps: MakeSteps) -> None:
    losses: list[float | None] = [float(x) for x in curve(60)]
    losses[50] = losses[53] = losses[56] = None
    found = assess(History(make_steps(losses)))
    assert kinds(found) == {"divergence", "non_finite"}
    assert next(f.value for f in found if f.kind == "non_finite") == 3


def test_flat_loss_is_a_plateau(make_steps: MakeSteps) -> None:
    flat = 3.0 * np.exp(np.random.default_rng(0).normal(0, 0.02, 300))
    assert kinds(assess(History(make_steps(flat)))) == {"plateau"}


def test_slow_steps_are_a_throughput_drop_unless_disturbed(make_steps: MakeSteps) -> None:
    seconds = np.full(200, 0.1)
    seconds[180:] = 0.2
    history = History(make_steps(curve(200), step_seconds=seconds))
    found = assess(history)
    assert kinds(found) == {"throughput_drop"}
    assert found[0].value == pytest.approx(0.2)
    undisturbed = np.arange(200) < 180
    assert assess(history, undisturbed=undisturbed) == []


def test_silence_is_a_stall(make_steps: MakeSteps) -> None:
    history = History(make_steps(curve(50)))
    end = float(history.time[-1])
    assert assess(history, now=end + 5) == []
    assert kinds(assess(history, now=end + 60)) == {"stall"}


def test_a_rollback_takes_back_later_steps(make_steps: MakeSteps) -> None:
    history = History(make_steps(curve(100)))
    for record in make_steps([9.0, 8.0], first=41):
        history.append(record)
    assert len(history) == 42
    assert history.num_superseded == 60
    assert history.loss[-2:].tolist() == [9.0, 8.0]


def test_no_findings_without_steps() -> None:
    assert assess(History()) == []
