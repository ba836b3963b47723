"""Every sampler keeps the contract; the genetic ones evolve; what a search has to say, and names that do not exist."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import optuna
import pytest

from autotune.prior.predict import Prior
from autotune.prior.task import Task
from autotune.search.optuna_samplers import GeneticSampler, nsga2, nsga3, population_size, trials_of
from autotune.search.sampler import Sampler, SearchState, remarks_of
from autotune.search.samplers import EXTRAS, SAMPLERS, make_sampler
from autotune.search.uniform import UniformSampler
from autotune.space.objectives import Objective
from autotune.testing.samplers import CHECKS, arbitrary, bowl, check_learns, drawn, plain_space, search, state_of
from engine.errors import UserError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", [name for name in SAMPLERS if name not in EXTRAS])
def test_contract(name: str, check: Callable[[Sampler], None]) -> None:
    check(make_sampler(name))


@pytest.mark.parametrize(("name", "num_trials", "num_seeds"), [("joint", 40, 1), ("tpe", 40, 3), ("gp", 10, 1)])
def test_better_than_random_search_on_a_convex_loss(name: str, num_trials: int, num_seeds: int) -> None:
    check_learns(make_sampler(name), num_trials=num_trials, num_seeds=num_seeds)


def test_generations_are_the_trials_in_order() -> None:
    """Refused proposals and trials that still run are of none, failures of one."""
    space = plain_space()
    observations = drawn(space, 1, state="refused", after=drawn(space, 3))
    observations = drawn(space, 1, state="running", after=drawn(space, 2, state="failed", after=observations))
    trials = trials_of(state_of(space, observations), generation_key="g", size=2)
    assert [trial.system_attrs.get("g") for trial in trials] == [0, 0, 1, None, 1, 2, None]


@pytest.mark.parametrize("make", [nsga2, nsga3])
def test_genetic_samplers_evolve(make: Callable[..., optuna.samplers.NSGAIISampler]) -> None:
    """Parents are the best of all generations before, children are near them: late generations are better."""
    space, size = plain_space(), population_size(60)
    observations = search(GeneticSampler(make), space, bowl, 60)
    sampler = make(0, size)
    trials = trials_of(state_of(space, observations), generation_key=sampler._get_generation_key(), size=size)
    study = optuna.create_study(sampler=sampler)
    study.add_trials(trials)
    parents = sampler.get_parent_population(study, 60 // size)
    best = sorted(study.trials, key=lambda trial: trial.value)[:size]
    assert {trial.number for trial in parents} == {trial.number for trial in best}
    losses = [o.values["loss"] for o in observations if o.values is not None]
    assert sum(losses[-2 * size :]) < 0.3 * sum(losses[: 2 * size])


def test_a_sampler_is_not_shown_values_as_measured() -> None:
    """Of a diverged trial and of failures it sees finite costs and a constraint, of a running one nothing."""
    space = plain_space((Objective(name="loss", bound=3.0),))
    observations = drawn(space, 6, measure=lambda chosen: {"loss": 2.0 + bowl(chosen)["loss"]})
    observations = drawn(space, 1, measure=lambda _: {"loss": 1e6}, after=observations)
    observations = drawn(space, 1, state="failed", failure="nan", after=observations)
    observations = drawn(space, 1, state="running", after=observations)
    *usual, diverged, failed, running = trials_of(state_of(space, observations))
    assert max(trial.value for trial in (*usual, diverged, failed)) < 10
    assert all(max(trial.constraints.values()) <= 0 for trial in usual)
    assert max(diverged.constraints.values()) > 0
    assert max(failed.constraints.values()) > 0
    assert running.value is None


def test_sobol_points_go_on_where_they_were_and_spread_better_than_chance() -> None:
    space = plain_space()
    points = [o.parameters for o in search(make_sampler("qmc"), space, bowl, 16)]
    assert len({int(float(p["x"] or 0) * 16) for p in points}) == 16, "one in each sixteenth"
    later = make_sampler("qmc").propose(state_of(space, drawn(space, 15)))
    assert later == points[15], "by number alone"


class Talking(UniformSampler):
    def remarks(self, state: SearchState) -> list[str]:
        return [f"{len(state.observations)} seen"]


def test_a_package_that_would_only_be_faster_is_not_asked_for() -> None:
    """In a process of its own: the library complains once, when it is first used."""
    code = (
        "import sys; sys.modules['greenlet'] = None\n"
        "from autotune.search.samplers import make_sampler\n"
        "from autotune.testing.samplers import bowl, plain_space, search\n"
        "search(make_sampler('gp'), plain_space(), bowl, 6)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_what_a_search_says_of_itself() -> None:
    space = plain_space()
    state = state_of(space, drawn(space, 2))
    assert remarks_of(UniformSampler(), state) == []
    assert remarks_of(Talking(), state) == ["2 seen"]
    tiny = Prior.load().at(Task(num_parameters=1000, total_tokens=10_000))
    of_prior, of_sampler = remarks_of(Talking(), replace(state, task_prior=tiny))
    assert "prior knows nothing near this run" in of_prior
    assert of_sampler == "2 seen"


def test_unknown_names_and_missing_extras_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no sampler 'nsga4'") as raised:
        make_sampler("nsga4")
    assert "nsga" in (raised.value.hint or "")
    with pytest.raises(UserError, match="no sampler 'xyz'") as raised:
        make_sampler("xyz")
    assert "joint" in (raised.value.hint or "")

    def needs_gymnasium() -> Sampler:
        raise ModuleNotFoundError("No module named 'gymnasium'", name="gymnasium")

    monkeypatch.setitem(SAMPLERS, "rl", needs_gymnasium)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="needs gymnasium") as raised:
        make_sampler("rl")
    assert "paretune[rl]" in (raised.value.hint or "")


def test_a_sampler_of_the_users_own_is_named_by_its_place() -> None:
    assert isinstance(make_sampler("autotune.search.uniform:UniformSampler"), UniformSampler)
    with pytest.raises(UserError, match="No module named 'nowhere'"):
        make_sampler("nowhere:Sampler")
    with pytest.raises(UserError, match="no attribute 'Missing'"):
        make_sampler("autotune.search.uniform:Missing")
    with pytest.raises(UserError, match="is no sampler"):
        make_sampler("collections:OrderedDict")


def test_arbitrary_values_depend_on_the_candidate_alone() -> None:
    measure = arbitrary(plain_space())
    assert measure({"x": 0.5, "y": 1e-3}) == measure({"x": 0.5, "y": 1e-3}) != measure({"x": 0.6, "y": 1e-3})
