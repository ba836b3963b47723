"""The learned agent: legal proposals, the same in every process, better for having learned."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autotune.prior.predict import Prior
from autotune.prior.task import Task
from autotune.search.agent import Ground, Policy, changed, look, merits_of, view_size
from autotune.search.reinforce import ReinforceSampler
from autotune.search.sampler import Interruptible, Observation, Sampler, SearchState, SearchStopped
from autotune.search.simulation import World
from autotune.search.uniform import is_enumerated, plan_values
from autotune.space.grammar import load_space
from autotune.space.objectives import Objective
from autotune.space.space import Dimension, Space
from autotune.testing.samplers import CHECKS

pytestmark = pytest.mark.unit

SPACE = Space(
    "plain",
    (Objective(name="a"), Objective(name="b")),
    (
        Dimension("x", "float", low=0.0, high=1.0),
        Dimension("y", "log_float", low=1e-4, high=1.0),
        Dimension("word", "categorical", ("p", "q", "r")),
    ),
    {},
)
STEPS = 64


def state_of(space: Space, observations: tuple[Observation, ...] = (), seed: int = 0, **facts: object) -> SearchState:
    return SearchState(space, observations, len(observations), seed, 0, 20, **facts)  # type: ignore[arg-type]


def ok(number: int, **parameters: object) -> Observation:
    x = float(parameters["x"])  # type: ignore[arg-type]
    return Observation(number, "ok", parameters, {"a": x, "b": 1 - x})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def agent(tmp_path_factory: pytest.TempPathFactory) -> ReinforceSampler:
    """One that learned next to nothing."""
    return ReinforceSampler(cache=tmp_path_factory.mktemp("agents"), num_steps=STEPS)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_contract(agent: ReinforceSampler, check: Callable[[Sampler], None]) -> None:
    check(agent)


def test_a_trained_agent_is_read_back_from_the_cache(tmp_path: Path) -> None:
    state = state_of(SPACE, (ok(0, x=0.5, y=0.01, word="q"),))
    first = ReinforceSampler(cache=tmp_path, num_steps=STEPS).propose(state)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    again = ReinforceSampler(cache=tmp_path, num_steps=STEPS).propose(state)
    assert again == first
    assert file.stat().st_mtime_ns == written


def test_an_agent_of_another_space_is_trained_anew(tmp_path: Path) -> None:
    wider = Space("plain", SPACE.objectives, (*SPACE.dimensions[:2], Dimension("word", "categorical", ("p", "q"))), {})
    sampler = ReinforceSampler(cache=tmp_path, num_steps=STEPS)
    sampler.propose(state_of(SPACE))
    sampler.propose(state_of(wider))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_cache_is_trained_anew(tmp_path: Path) -> None:
    state = state_of(SPACE, (ok(0, x=0.5, y=0.01, word="q"),))
    first = ReinforceSampler(cache=tmp_path, num_steps=STEPS).propose(state)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:100])
    assert ReinforceSampler(cache=tmp_path, num_steps=STEPS).propose(state) == first


def test_several_proposals_before_any_result_differ(tmp_path: Path) -> None:
    sampler = ReinforceSampler(cache=tmp_path, num_steps=STEPS)
    observations: tuple[Observation, ...] = ()
    for number in range(4):
        chosen = sampler.propose(state_of(SPACE, observations, seed=number))
        assert chosen is not None
        observations = (*observations, Observation(number, "running", chosen))
    assert len({tuple(o.parameters.items()) for o in observations}) == 4


def test_proposals_stand_on_legal_plans(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(
        "use: [tiny_llama]\ncluster: cpu:2\nobjectives: [speed, memory, quality]\nspace:\n"
        "  plan: {dp_shard: [1, 2], tp: [1, 2], micro_batch_size: [1, 2, 4]}\n"
        "  hyperparameters: {global_batch_size: [8, 16], learning_rate: {log_float: [1e-4, 1e-2]}}\n"
    )
    space, enumeration = load_space(path)
    ground = Ground.of(space.dimensions, enumeration)
    told = [d for d in space.dimensions if is_enumerated(d)]
    legal = {tuple(plan_values(enumeration, row, told).items()) for row in range(enumeration.num_legal)}
    rng = np.random.default_rng(0)
    for _ in range(50):
        place, row = ground.nearest(rng.uniform(size=len(space.dimensions)))
        values = ground.encoding.values(place)
        assert tuple((d.name, values[d.name]) for d in told) in legal
        assert row is not None
    world = World.of(state_of(space, enumeration=enumeration))
    view = world.imagine(rng).begin()
    assert view.features.shape == (view_size(len(space.dimensions), 3),)


def test_merit_is_the_weighted_distance_from_the_best_of_each_cost() -> None:
    costs = np.array([[0.0, 2.0], [1.0, 1.0], [2.0, 0.0], [9.0, 9.0]])
    failed = np.array([False, False, False, True])
    assert merits_of(costs, failed, np.array([1.0, 0.0])).argmin() == 0
    assert merits_of(costs, failed, np.array([0.0, 1.0])).argmin() == 2
    assert merits_of(costs, failed, np.array([0.5, 0.5])).argmin() == 1
    assert merits_of(costs, failed, np.array([0.5, 0.5])).argmax() == 3


def test_what_is_seen_is_finite_and_bounded_whatever_the_costs() -> None:
    coordinates = np.random.default_rng(0).uniform(size=(5, 3))
    for costs in (np.zeros((5, 2)), np.full((5, 2), 1e30), np.arange(10.0).reshape(5, 2)):
        for failed in (np.zeros(5, bool), np.ones(5, bool)):
            features = look(coordinates, costs, failed, np.array([0.5, 0.5]), 0.5).features
            assert np.isfinite(features).all()
            assert np.abs(features).max() <= 3.0


def test_steps_become_finer_towards_the_end() -> None:
    start, action = np.full(2, 0.5), np.array([0.8, -0.5])
    sizes = [np.abs(changed(start, action, progress) - start).max() for progress in (0.0, 0.5, 1.0)]
    assert sizes[0] > 2 * sizes[1] > 4 * sizes[2] > 0


def test_a_policy_is_written_and_read_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    policy = Policy((rng.normal(size=(4, 3)), rng.normal(size=(2, 4))), (rng.normal(size=4), np.zeros(2)), np.zeros(2))
    policy.save(tmp_path / "agent.json")
    loaded = Policy.load(tmp_path / "agent.json")
    features = rng.normal(size=3)
    action = policy.act(features, np.random.default_rng(1))
    assert np.array_equal(loaded.act(features, np.random.default_rng(1)), action)


def test_a_prediction_that_held_is_enough(agent: ReinforceSampler) -> None:
    """Quality alone, and the predicted start as good as predicted: nothing more is expected. Else the agent goes on."""
    task = Task(num_parameters=500_000_000, total_tokens=10_000_000_000, min_lr_ratio=0.0)
    prior = Prior.load().at(task)
    predicted = prior.loss_level()
    assert predicted is not None
    space = Space(
        "q", (Objective(name="quality"),), (Dimension("learning_rate", "log_float", low=1e-4, high=1e-2),), {}
    )
    guess = Observation(0, "ok", {"learning_rate": 1e-4}, {"quality": predicted[0]})
    after_guess = state_of(space, (guess,), task_prior=prior)
    assert agent.remarks(after_guess) == [], "a guess is not what was predicted"
    assert agent.expected_gain(after_guess) is None
    start = agent.propose(after_guess)
    assert start is not None
    assert start == agent.propose(state_of(space, task_prior=prior)), "what is predicted comes after the guesses"
    for excess, gain, words in ((0.0, 0.0, "as good as predicted"), (1.0, None, "goes on")):
        tried = Observation(1, "ok", start, {"quality": predicted[0] + excess})
        state = state_of(space, (guess, tried), task_prior=prior)
        assert agent.expected_gain(state) == gain
        assert words in agent.remarks(state)[0]


def test_a_world_begins_within_its_ranges_whatever_the_prior_predicts() -> None:
    """That the rate ends at 0 has no logarithm."""
    prior = Prior.load().at(Task(num_parameters=500_000_000, total_tokens=10_000_000_000, min_lr_ratio=0.0))
    floor = Dimension("min_lr_ratio", "log_float", low=1e-3, high=1e-1)
    world = World.of(state_of(Space("q", (Objective(name="quality"),), (floor,), {}), task_prior=prior))
    assert world.start.tolist() == [0.0]


def test_a_part_of_a_training_is_not_held_against_the_prediction(agent: ReinforceSampler) -> None:
    prior = Prior.load().at(Task(num_parameters=500_000_000, total_tokens=10_000_000_000, min_lr_ratio=0.0))
    space = Space(
        "q", (Objective(name="quality"),), (Dimension("learning_rate", "log_float", low=1e-4, high=1e-2),), {}
    )
    start = agent.propose(state_of(space, task_prior=prior))
    assert start is not None
    part = Observation(0, "ok", start, {"quality": 9.0}, noise={"quality": 0.1})
    assert agent.remarks(state_of(space, (part,), task_prior=prior)) == []
    assert agent.remarks(state_of(space, (replace(part, noise={}),), task_prior=prior)) != []


def test_learning_ends_when_the_search_is_to_end(tmp_path: Path) -> None:
    """At the next step, not after a minute; and what was learned by then is not kept."""
    asked: list[int] = []
    agent = ReinforceSampler(cache=tmp_path, should_stop=lambda: bool(asked.append(0)) or len(asked) >= 5)
    assert isinstance(agent, Interruptible)
    with pytest.raises(SearchStopped):
        agent.propose(state_of(SPACE))
    assert len(asked) == 5
    assert list(tmp_path.iterdir()) == []


def test_learning_helps_on_imagined_studies(tmp_path: Path) -> None:
    """After some thousand imagined trials it gets further in the same studies than before."""
    from autotune.search.reinforce_training import train

    world = World.of(state_of(Space("one", (Objective(name="a"),), SPACE.dimensions[:2], {})))

    def progress(policy: Policy) -> float:
        rewards, rng = [], np.random.default_rng(7)
        for number in range(150):
            study = world.imagine(np.random.default_rng(number))
            view, has_ended = study.begin(), False
            while not has_ended:
                view, reward, has_ended = study.step(policy.act(view.features, rng))
                rewards.append(reward)
        return float(np.mean(rewards))

    assert progress(train(world, num_steps=12_288, seed=0)) > progress(train(world, num_steps=1, seed=0)) + 0.005
