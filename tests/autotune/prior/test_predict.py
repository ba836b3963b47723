"""What the shipped prior says: sane everywhere, honest about where it stands, moved by a user's own runs."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from autotune.prior.predict import LEAST_STEPS, Prior
from autotune.prior.rows import MetaRow
from autotune.prior.task import HYPERPARAMETERS, Task

pytestmark = pytest.mark.unit

BILLION = 10**9
TINY: dict[str, Any] = {"num_parameters": 500_000, "total_tokens": 60_000, "sequence_length": 128}


@cache
def shipped() -> Prior:
    return Prior.load()


def task(**fields: Any) -> Task:
    return Task.model_validate({"num_parameters": BILLION, "total_tokens": 20 * BILLION, **fields})


def rate(prior: Prior, **fields: Any) -> float:
    return float(prior.at(task(**fields)).optimum()["learning_rate"])


def test_a_billion_parameters_start_near_what_published_laws_say() -> None:
    prior = shipped().at(task())
    best = prior.optimum()
    assert prior.support == "inside"
    assert 0.0007 < float(best["learning_rate"]) < 0.003
    assert 2e5 < float(best["global_batch_tokens"]) < 9e5
    level = prior.loss_level()
    assert level is not None
    assert 2.1 < level[0] < 2.4


def test_the_excess_is_small_at_the_proposal_and_rises_away_from_it() -> None:
    prior = shipped().at(task())
    best = prior.optimum()
    factors = np.array([0.1, 0.4, 1.0, 2.5, 10.0])
    # every other hyperparameter at its best, too
    mean, sd = prior.excess({**best, "learning_rate": float(best["learning_rate"]) * factors})
    assert 0 <= mean[2] < 0.001
    assert mean[0] > mean[1] > mean[2] < mean[3] < mean[4]
    assert sd[0] > sd[1] > sd[2] < sd[3] < sd[4]


@pytest.mark.parametrize("fields", [{}, TINY, {"num_parameters": 10**13, "total_tokens": 10**15}])
def test_the_excess_is_finite_everywhere(fields: dict[str, Any]) -> None:
    prior = shipped().at(task(**fields))
    points = {
        "learning_rate": np.array([1e-12, 1e-3, 10.0]),
        "global_batch_tokens": np.array([1.0, 1e5, 1e12]),
        "weight_decay": np.array([0.0, 0.1, 50.0]),
        "warmup_ratio": np.array([0.0, 0.5, 1.0]),
        "beta1": np.array([0.0, 0.9, 0.9999999]),
        "beta2": np.array([0.0, 0.95, 0.9999999]),
    }
    mean, sd = prior.excess(points)
    assert np.isfinite(mean).all()
    assert np.isfinite(sd).all()
    assert (mean >= 0).all()
    assert (sd > 0).all()


def test_a_hyperparameter_that_is_absent_at_a_point_is_at_the_recipes_value_there() -> None:
    prior = shipped().at(task())
    points: dict[str, Any] = {
        "learning_rate": np.array([1e-3, np.nan]),
        "weight_decay": np.array([np.nan, 0.3]),
        "schedule": np.array([None, "wsd"], dtype=object),
    }
    mean, sd = prior.excess(points)
    first, _ = prior.excess({"learning_rate": np.array([1e-3])})
    second, _ = prior.excess({"weight_decay": np.array([0.3]), "schedule": np.array(["wsd"])})
    assert mean == pytest.approx([first[0], second[0]])
    assert np.isfinite(sd).all()


def test_a_name_it_does_not_know_is_an_error_and_never_ignored() -> None:
    with pytest.raises(KeyError, match="learning_rat"):
        shipped().at(task()).excess({"learning_rat": np.array([1e-3])})


def test_a_tiny_task_gets_a_sane_guess_and_is_told_to_lie_outside() -> None:
    prior = shipped().at(task(**TINY))
    best = prior.optimum()
    assert prior.support == "outside"
    assert "fewer parameters, fewer tokens" in prior.reasons[0]
    assert prior.loss_level() is None
    assert 3e-4 < float(best["learning_rate"]) < 3e-2
    assert TINY["sequence_length"] <= float(best["global_batch_tokens"]) <= TINY["total_tokens"] / LEAST_STEPS
    near, far = shipped().at(task()).interval_90()["learning_rate"], prior.interval_90()["learning_rate"]
    assert far[1] / far[0] > 5 * near[1] / near[0]


def test_support_by_size_and_optimizer() -> None:
    assert shipped().at(task(num_parameters=4 * BILLION, total_tokens=80 * BILLION)).support == "extrapolated"
    assert shipped().at(task(optimizer="muon")).support == "extrapolated"
    unknown = shipped().at(task(optimizer="mine"))
    assert unknown.support == "outside"
    assert "mine" in unknown.reasons[0]


def test_recipes_shift_the_learning_rate() -> None:
    """Formulas do not cross recipes: decay to zero at 4096 tokens wants a higher rate, lion a lower one."""
    other = rate(shipped(), sequence_length=4096, min_lr_ratio=0.0, beta2=0.98)
    assert other > 1.6 * rate(shipped())
    assert rate(shipped(), optimizer="lion") < 0.5 * rate(shipped())


def test_a_constant_rate_is_worse_than_any_decay() -> None:
    prior = shipped().at(task())
    kinds = np.array(["cosine", "wsd", "constant"])
    mean, _ = prior.excess({"schedule": kinds})
    assert mean[2] > mean[0] + 0.02
    assert abs(mean[1] - mean[0]) < 0.01


def test_intervals_hold_the_optimum() -> None:
    prior = shipped().at(task())
    best = prior.optimum()
    for name, (low, high) in prior.interval_90().items():
        assert low <= float(best[name]) <= high
        assert name in HYPERPARAMETERS


def test_the_portfolio_begins_with_the_optimum_and_repeats_nothing() -> None:
    prior = shipped().at(task(**TINY))
    points = prior.portfolio(12)
    assert points[0] == prior.optimum()
    assert len({(p["learning_rate"], p["global_batch_tokens"]) for p in points}) == 12
    assert all(float(p["global_batch_tokens"]) >= TINY["sequence_length"] for p in points)


def test_beside_a_fixed_batch_the_rate_follows_it() -> None:
    prior = shipped().at(task())
    small, large = (prior.optimum({"global_batch_tokens": batch}) for batch in (1e5, 2e6))
    assert small["global_batch_tokens"] == 1e5
    assert float(small["learning_rate"]) < float(large["learning_rate"])


@pytest.mark.parametrize(
    "given",
    [{}, {"global_batch_tokens": 128.0}, {"global_batch_tokens": 3e7}, {"learning_rate": 1e-5}, {"learning_rate": 0.1},
     {"schedule": "constant"}],
)  # fmt: skip
@pytest.mark.parametrize("fields", [{}, TINY, {"num_parameters": 1, "total_tokens": 128, "optimizer": "lion"}])
def test_starts_lie_in_their_intervals_and_all_within_bounds(fields: dict[str, Any], given: dict[str, Any]) -> None:
    """Also beside values that are fixed far from all that was seen, and for tasks of no sense."""
    prior = shipped().at(task(**{"sequence_length": 128, **fields}))
    best, intervals, points = prior.optimum(given), prior.interval_90(given), prior.portfolio(9, given)
    assert given.items() <= best.items()
    assert not given.keys() & intervals.keys()
    assert points[0] == best
    most_batch = max(prior.task.total_tokens / LEAST_STEPS, prior.task.sequence_length)
    bounds = {"learning_rate": (1e-6, 0.1), "global_batch_tokens": (128, most_batch), "warmup_ratio": (0.0, 0.3)}
    for name, (low, high) in intervals.items():
        assert low * (1 - 1e-9) <= float(best[name]) <= high * (1 + 1e-9)
        least, most = bounds.get(name, (0.0, np.inf))
        assert least <= low <= high <= most
        assert all(least <= float(point[name]) <= most * (1 + 1e-9) for point in points)


def test_what_is_fixed_moves_intervals_loss_and_support() -> None:
    prior = shipped().at(task())
    free, near, far = {}, {"global_batch_tokens": 1e6}, {"global_batch_tokens": 4096.0}
    ends = [prior.interval_90(given)["learning_rate"] for given in (far, free, near)]
    assert ends[0][1] < ends[1][0], "a batch of a hundredth wants rates far below"
    assert ends[1][0] != ends[2][0]
    best, beside = prior.loss_level(free), prior.loss_level({"global_batch_tokens": 4e6})
    assert best is not None
    assert beside is not None
    assert beside[0] > best[0] + 0.005
    assert beside[1] > best[1]
    assert [prior.support_beside(given)[0] for given in (free, near, far)] == ["inside", "inside", "outside"]
    assert "global_batch_tokens given is a factor of about" in prior.support_beside(far)[1][-1]
    assert prior.loss_level(far) is None


def test_a_schedule_that_is_fixed_is_kept_and_costs_what_it_costs() -> None:
    answers = {}
    for schedule in ("cosine", "wsd", "linear", "constant"):
        prior = shipped().at(task(schedule=schedule))
        best = prior.optimum({"schedule": schedule})
        level = prior.loss_level({"schedule": schedule})
        assert level is not None
        assert best["schedule"] == schedule
        assert ("min_lr_ratio" in best) == (schedule != "constant")
        assert ("decay_ratio" in best) == (schedule == "wsd")
        answers[schedule] = level[0]
    assert answers["cosine"] < answers["wsd"] < answers["constant"] - 0.03


def test_names_of_optimizers_are_matched_in_any_case() -> None:
    assert task(optimizer="AdamW") == task(optimizer="adamw")
    reasons = shipped().at(task(optimizer="foo")).reasons
    assert any("'foo'" in reason and "adamw, cautious" in reason for reason in reasons)


def own_rows(size: dict[str, Any], best_rate: float, study: str = "mine") -> list[MetaRow]:
    """A user's sweep whose loss is lowest at ``best_rate``."""
    batch = float(shipped().at(task(**size)).optimum()["global_batch_tokens"])
    rates = best_rate * 2.0 ** np.arange(-3, 4)
    return [
        MetaRow(
            study=study,
            trial=number,
            task=task(**size),
            hyperparameters={"learning_rate": float(value), "global_batch_tokens": batch},
            loss=3.0 + 0.03 * float(np.log(value / best_rate)) ** 2,
        )
        for number, value in enumerate(rates)
    ]


@pytest.mark.parametrize("size", [{}, TINY])
def test_own_runs_move_the_answer_at_a_neighbouring_size(size: dict[str, Any]) -> None:
    neighbour = {**size, "num_parameters": int(task(**size).num_parameters * 1.5)}
    before = rate(shipped(), **neighbour)
    wanted = 4 * before
    taught = shipped().conditioned(own_rows(size, 4 * rate(shipped(), **size)))
    after = rate(taught, **neighbour)
    assert abs(np.log(after / wanted)) < 0.5 * abs(np.log(before / wanted))
    wide = shipped().at(task(**neighbour)).interval_90()["learning_rate"]
    narrow = taught.at(task(**neighbour)).interval_90()["learning_rate"]
    assert narrow[1] / narrow[0] < wide[1] / wide[0]
    assert "own stud" in taught.at(task(**neighbour)).reasons[-1]


def test_own_runs_of_another_size_weigh_less() -> None:
    taught = shipped().conditioned(own_rows(TINY, 4 * rate(shipped(), **TINY)))
    moved_near = rate(taught, **TINY) / rate(shipped(), **TINY)
    moved_far = rate(taught) / rate(shipped())
    assert moved_near > moved_far


def test_runs_that_all_failed_teach_nothing() -> None:
    failed = [row.changed(loss=None, status="diverged") for row in own_rows(TINY, 1e-2)]
    assert rate(shipped().conditioned(failed), **TINY) == rate(shipped(), **TINY)


def test_the_file_gives_back_what_was_saved(tmp_path: Any) -> None:
    shipped().save(tmp_path / "again.npz")
    with np.load(tmp_path / "again.npz") as arrays:
        again = Prior.from_arrays(dict(arrays))
    assert again.at(task()).optimum() == shipped().at(task()).optimum()


def test_own_runs_far_below_the_tables_promise_no_impossible_loss() -> None:
    """The law is far too high there: what own runs reached is carried by its ratio, and doubted."""

    def task(tokens: int) -> Task:
        return Task(num_parameters=300_000, num_active_parameters=300_000, total_tokens=tokens, sequence_length=64)

    tried = ((1.4e-3, 512.0, 2.7), (3.7e-3, 1024.0, 2.9), (3e-3, 512.0, 2.8))
    rows = [
        MetaRow(
            study="mine", trial=i, task=task(32_768), loss=loss, status="ok",
            hyperparameters={"learning_rate": rate, "global_batch_tokens": batch},
        )
        for i, (rate, batch, loss) in enumerate(tried)
    ]  # fmt: skip
    prior = Prior.load(rows)
    here, twice, four_times = (prior.at(task(32_768 * factor)).loss_level() for factor in (1, 2, 4))
    assert None not in (here, twice, four_times)
    assert here[0] == pytest.approx(2.7)
    assert 2.7 > twice[0] > four_times[0] > 1.5
    assert here[1] < 0.05 < 0.3 < twice[1] < four_times[1]
