"""Studies from Python: asked and told, resumed, shared by processes, with failures that end nothing else."""

import doctest
import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import autotune
import autotune.api
import autotune.tuned
from autotune.cli import main
from autotune.study.study import load_snapshot
from engine.errors import UserError

FUNCTIONS = Path(__file__).with_name("api_functions.py")
SPACE: dict[str, Any] = {"x": {"float": [0, 1]}, "kind": ["a", "b"]}
LOSS = {"loss": "minimize"}


@pytest.fixture
def functions(monkeypatch: pytest.MonkeyPatch, repo_root: Path) -> ModuleType:
    """The functions as a module that worker processes find."""
    path = os.pathsep.join([str(FUNCTIONS.parent), str(repo_root)])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(str(FUNCTIONS.parent))
    return importlib.import_module("api_functions")


def study(**options: Any) -> autotune.Study:
    return autotune.Study(SPACE, LOSS, **{"sampler": "random", **options})


def quadratic(x: float, kind: str) -> float:
    return (x - 0.3) ** 2 + (kind == "b")


def test_docstrings_are_true() -> None:
    for module in (autotune.api, autotune.tuned):
        found = doctest.testmod(module)
        assert found.attempted
        assert not found.failed


def test_public_names_are_there_and_importing_them_is_lazy() -> None:
    code = "import sys, autotune; assert 'optuna' not in sys.modules; autotune.Study; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(autotune.__all__) <= set(dir(autotune))
    for name in autotune.__all__:
        assert getattr(autotune, name)


def test_best_and_front_follow_what_was_told() -> None:
    found = autotune.Study(SPACE, {"loss": "minimize", "speed_up": {"direction": "maximize"}}, sampler="random")
    told = []
    for _ in range(12):
        trial = found.ask()
        assert trial is not None
        x = float(trial.params["x"])
        told.append(x)
        found.tell(trial, {"loss": x, "speed_up": x * x, "extra": 5})
    assert [round(float(result.params["x"]), 6) for result in found.front] == [round(x, 6) for x in told]
    assert found.best in found.front
    assert found.trials[0].metrics == {"extra": 5.0}


def test_hundreds_of_trials_a_second_are_asked_and_told() -> None:
    found = study().run(quadratic, trials=300)
    assert len(found.trials) == 300
    assert found.best is not None
    assert found.best.values is not None
    assert found.best.values["loss"] < 0.01


def test_an_exception_is_one_trials_failure() -> None:
    def sometimes(x: float, kind: str, trial: autotune.Trial) -> float:
        if trial.number % 3 == 0:
            raise ValueError("as asked")
        if trial.number % 3 == 1:
            raise autotune.TrialFailed("loss of 12", "diverged")
        return x

    results = study().run(sometimes, trials=9).trials
    assert [result.state for result in results] == ["user", "diverged", "ok"] * 3
    assert results[0].detail == "ValueError: as asked"


def test_a_first_nan_is_never_the_best() -> None:
    values = iter([math.nan, -math.inf, 2.0, 3.0])
    found = study().run(lambda x, kind: next(values), trials=4)
    assert found.best is not None
    assert found.best.values == {"loss": 2.0}
    assert [result.state for result in found.trials] == ["nan", "nan", "ok", "ok"]


def test_beyond_a_bound_nothing_is_feasible() -> None:
    found = autotune.Study(SPACE, {"loss": {"direction": "minimize", "bound": -1}}, sampler="random")
    found.run(quadratic, trials=3)
    assert found.best is None
    assert [result.feasible for result in found.trials] == [False] * 3


def test_ctrl_c_leaves_nothing_running_and_the_trial_is_run_again(tmp_path: Path) -> None:
    seen = []

    def interrupted(x: float, kind: str, trial: autotune.Trial) -> float:
        seen.append((trial.number, x))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return x

    with study(folder=tmp_path / "s") as found:
        with pytest.raises(KeyboardInterrupt):
            found.run(interrupted, trials=5)
        assert [result.state for result in found.trials] == ["ok", "ok", "waiting"]
        found.run(interrupted, trials=5)
        assert [result.state for result in found.trials] == ["ok"] * 5
    assert seen[2] == seen[3]


def test_what_was_asked_and_not_told_is_free_when_the_study_is_closed(tmp_path: Path) -> None:
    with study(folder=tmp_path / "s") as found:
        first = found.ask()
    with study(folder=tmp_path / "s") as found:
        again = found.ask()
        assert first is not None
        assert again is not None
        assert (again.number, again.params, again.seed) == (first.number, first.params, first.seed)
        found.tell(again, 1.0)
        with pytest.raises(UserError, match="told already"):
            found.tell(again, 1.0)


def test_a_study_goes_on_as_it_would_have(tmp_path: Path) -> None:
    with study(folder=tmp_path / "whole") as found:
        whole = [result.params for result in found.run(quadratic, trials=8).trials]
    for trials in (3, 8):
        with study(folder=tmp_path / "parts") as found:
            parts = [result.params for result in found.run(quadratic, trials=trials).trials]
    assert parts == whole
    assert len({str(params) for params in parts}) == 8


def test_a_trial_has_a_folder_once_it_asks_for_it(tmp_path: Path) -> None:
    def function(x: float, kind: str, trial: autotune.Trial) -> float:
        if trial.number == 1:
            assert trial.folder is not None
            (trial.folder / "note.txt").write_text("mine")
        return x

    with study(folder=tmp_path / "s") as found:
        found.run(function, trials=3)
        assert [path.name for path in (tmp_path / "s" / "trials").iterdir()] == ["1"]
    trial = study().ask()
    assert trial is not None
    assert trial.folder is None


def test_own_runs_of_the_user_are_what_the_prior_begins_with(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(autotune.api, "read_rows", lambda path: ["a row"])
    monkeypatch.setattr(autotune.api, "task_prior_of", lambda space, rows: seen.append(rows))
    task = {"num_parameters": 10**8, "total_tokens": 10**9, "roles": {"quality": "loss"}}
    study(task=task)
    study(task=task, prior=False)
    study()
    assert seen == [["a row"]]


def test_the_sampler_knows_the_budget_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = []
    found = study()

    def propose(self: Any, state: Any) -> Any:
        budgets.append(state.num_trials)
        return {"x": len(budgets) / 10, "kind": "a"}

    monkeypatch.setattr(type(found._study._proposer.sampler), "propose", propose)
    found.run(quadratic, trials=2)
    assert budgets == [2, 2]
    found.ask()
    assert budgets[-1] is None


def test_another_space_is_refused(tmp_path: Path) -> None:
    study(folder=tmp_path / "s").close()
    with pytest.raises(UserError, match="another space"):
        autotune.Study({"x": {"float": [0, 2]}}, LOSS, folder=tmp_path / "s")


def test_guesses_come_first_and_are_checked() -> None:
    trial = study(guesses=[{"x": 0.25, "kind": "b"}]).ask()
    assert trial is not None
    assert trial.params == {"x": 0.25, "kind": "b"}
    for wrong in ({"x": 5.0, "kind": "a"}, {"y": 0.5}, {"x": 0.5, "kind": "c"}):
        with pytest.raises(UserError):
            study(guesses=[wrong])


def test_conditional_values_are_left_out_or_have_their_default() -> None:
    space = {"kind": ["a", "b"], "y": {"float": [0, 1], "when": "kind == 'a'"}}
    seen = []

    def function(kind: str, y: float | None = None) -> float:
        seen.append((kind, y is None))
        return 1.0

    autotune.Study(space, LOSS, sampler="random").run(function, trials=8)
    assert set(seen) == {("a", False), ("b", True)}


def test_a_used_up_space_ends_the_sweep() -> None:
    found = autotune.Study({"n": [1, 2, 3]}, LOSS, sampler="random").run(lambda n: n, trials=10)
    assert sorted(result.params["n"] for result in found.trials) == [1, 2, 3]
    assert found.ask() is None


def misnamed(x: float, kind: str) -> dict[str, float]:
    return {"los": x}


@pytest.mark.parametrize("workers", [1, 2])
def test_a_function_that_can_only_fail_ends_the_sweep(workers: int) -> None:
    with study() as found:
        with pytest.raises(UserError, match="first 3 trials all failed alike: it gave no 'loss', only los"):
            found.run(misnamed, trials=50, workers=workers)
        assert 3 <= len(found.trials) <= 2 + 2 * workers
        assert found.best is None
        assert found.run(quadratic, trials=8).best is not None  # goes on


def test_failures_after_a_trial_that_did_well_end_nothing() -> None:
    with study(guesses=[{"x": 0.5, "kind": "a"}]) as found:
        found.run(quadratic, trials=1).run(misnamed, trials=6)
        assert [result.state for result in found.trials] == ["ok", *["user"] * 5]


def test_failures_in_different_words_end_nothing() -> None:
    def fails(x: float, kind: str) -> float:
        raise ValueError(f"x = {x}")

    assert len(study().run(fails, trials=5).trials) == 5


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda y, kind: y, "missing a required argument: 'y'"),
        (lambda x: x, "unexpected keyword argument 'kind'"),
        (lambda x, kind, trial, batch: x, "missing a required argument: 'batch'"),
    ],
)
def test_a_function_with_other_arguments_is_refused_before_the_first_trial(
    function: Callable[..., Any], words: str
) -> None:
    with study() as found:
        with pytest.raises(UserError, match=words) as error:
            found.run(function, trials=5)
        assert "it gets by name: kind, x" in str(error.value)
        assert not found.trials


def test_functions_of_any_keywords_and_of_values_with_defaults_are_taken() -> None:
    assert study().run(lambda trial, **values: values["x"], trials=2).best is not None
    space = {"kind": ["a", "b"], "x": {"float": [0, 1], "when": "kind == 'a'"}}
    with autotune.Study(space, LOSS, sampler="random") as found:
        assert found.run(lambda kind, x=0.5: x, trials=4).best is not None
        with pytest.raises(UserError, match="missing a required argument: 'x'"):
            found.run(lambda kind, x: x, trials=8)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: autotune.Study({"x": {"flaot": [0, 1]}}, LOSS), "did you mean 'float'?"),
        (lambda: autotune.Study(SPACE, {"loss": "down"}), "minimize"),
        (lambda: study(storage="sqlite://"), "needs a name"),
        (lambda: study().run(quadratic), "no budget"),
        (lambda: study().run(quadratic, trials=2, trial_seconds=1.0), "processes=True"),
        (lambda: study(trials=0), "a whole number from 1 on"),
        (lambda: study(trials="3"), "a whole number from 1 on"),
        (lambda: study(seed="a"), "a whole number from 0 on"),
        (lambda: study(guesses={"x": 0.5}), "put it in [ ]"),
        (lambda: study(guesses=[0.5]), "mapping of names to values"),
        (lambda: study(constraints="x < 1"), "put it in [ ]"),
        (lambda: study(constraints=["x > 99"]).ask(), "no candidate of the space is legal"),
        (lambda: autotune.Study([1, 2], LOSS), "mapping of names to values"),  # type: ignore[arg-type]
        (lambda: autotune.Study({"x": {"int": [0, 10**30]}}, LOSS), "reaches beyond"),
        (lambda: autotune.Study(SPACE, {"cost": "min"}), "'maximize' or 'minimize'"),
        (lambda: autotune.Study(SPACE, {}), "a mapping of names to directions"),
        (lambda: study().tell(0, 1.0), "study.ask()"),  # type: ignore[arg-type]
        (lambda: autotune.Study({"trial": [1, 2]}, LOSS).run(quadratic, trials=1), "something else"),
        (lambda: study().run(quadratic, trials=2, workers=0), "at least 1 worker"),
        (lambda: study(storage="sqlite://", name="../elsewhere"), "is not allowed"),
        (lambda: autotune.TrialFailed("x", "unlucky"), "kinds are oom"),  # type: ignore[arg-type]
    ],
)
def test_mistakes_are_told(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        make()
    assert words in str(error.value)


def test_a_trial_of_another_study_is_refused_and_nothing_of_a_closed_one() -> None:
    one, other = study(), study()
    trial, _ = one.ask(), other.ask()
    assert trial is not None
    for tell in (lambda: other.tell(trial, 1.0), lambda: other.release(trial)):
        with pytest.raises(UserError, match="another study"):
            tell()
    one.tell(trial, 1.0)
    with pytest.raises(UserError, match="told already"):
        one.release(trial)
    one.close()
    with pytest.raises(UserError, match="closed"):
        one.ask()


def test_a_study_lives_in_a_database_too(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/studies.db"
    with study(storage=url, name="s") as found:
        found.run(quadratic, trials=3)
    with study(storage=url, name="s") as found:
        assert len(found.run(quadratic, trials=5).trials) == 5


def test_a_study_of_a_database_is_known_to_the_commands_once_it_has_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url, runs = f"sqlite:///{tmp_path}/studies.db", tmp_path / "runs"
    with study(storage=url, name="pydb") as found:
        found.run(quadratic, trials=3)
    assert main(["studies", "show", "pydb", "--runs-dir", str(runs)]) == 2
    assert "folder=" in capsys.readouterr().err
    with study(storage=url, folder=runs / "studies" / "pydb") as found:
        assert len(found.trials) == 3
    for arguments in (["studies", "show"], ["report"], ["apply", "-o", str(tmp_path / "best.yaml")]):
        assert main([*arguments, "pydb", "--runs-dir", str(runs)]) == 0


def test_threads_share_one_study() -> None:
    found = study().run(lambda x, kind: x, trials=20, workers=4)
    assert [result.state for result in found.trials] == ["ok"] * 20


@pytest.mark.dist
def test_worker_processes_keep_a_crash_to_its_trial(functions: ModuleType) -> None:
    found = study().run(functions.breaks, trials=5, workers=2, processes=True, trial_seconds=3.0)
    states = {result.number % 5: (result.state, result.detail) for result in found.trials}
    assert states[0][0] == states[4][0] == "ok"
    assert states[1] == ("user", "its process ended with exit status 7")
    assert states[2][0] == "hang"
    assert states[3] == ("user", "ValueError: as asked")


@pytest.mark.dist
def test_a_crash_of_the_function_is_its_own_failure(functions: ModuleType) -> None:
    (result,) = study().run(functions.aborts, trials=1, processes=True).trials
    assert (result.state, result.detail) == ("user", "it crashed with SIGABRT")


@pytest.mark.dist
def test_a_decorated_function_runs_in_worker_processes(functions: ModuleType) -> None:
    assert functions.tuned(0.5, "a")["loss"] == 0.5
    processes = {result.metrics["process"] for result in functions.tuned.run(processes=True).trials}
    assert len(processes) == 1
    assert os.getpid() not in processes


@pytest.mark.dist
def test_a_sweep_in_processes_outside_the_main_guard_is_told_in_one_message(tmp_path: Path, repo_root: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import autotune\n"
        "def f(x): return x\n"
        "study = autotune.Study({'x': {'float': [0, 1]}}, {'loss': 'minimize'}, sampler='random')\n"
        "study.run(f, trials=2, processes=True)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(repo_root)}
    ended = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.count("Traceback") == 1
    assert "hint: run the sweep below `if __name__ == '__main__':`" in ended.stderr
    program.write_text(
        program.read_text()
        .replace("study = ", "if __name__ == '__main__':\n  study = ")
        .replace("\nstudy.run", "\n  study.run")
    )
    subprocess.run([sys.executable, str(program)], env=environment, check=True)


def test_a_function_that_cannot_be_sent_is_told() -> None:
    with pytest.raises(UserError, match="can't be sent to worker processes"):
        study().run(lambda x, kind: x, trials=2, processes=True)


def start(folder: Path, trials: int, seconds: float, repo_root: Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(repo_root)}
    return subprocess.Popen([sys.executable, str(FUNCTIONS), str(folder), str(trials), str(seconds)], env=environment)


@pytest.mark.dist
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_leaves_no_zombie_and_its_trial_is_run_again(
    tmp_path: Path, repo_root: Path, number: signal.Signals
) -> None:
    process = start(tmp_path / "s", 5, 60.0, repo_root)
    while not (tmp_path / "started").exists():
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(number)
    process.wait()
    (waiting,) = load_snapshot(tmp_path / "s").trials
    assert waiting.state == "waiting"
    with study(folder=tmp_path / "s") as found:
        results = found.run(quadratic, trials=5).trials
    assert results[0].params == waiting.parameters
    assert [result.state for result in results] == ["ok"] * 5


@pytest.mark.dist
def test_processes_share_one_study(tmp_path: Path, repo_root: Path) -> None:
    processes = [start(tmp_path / "s", 20, 0.05, repo_root) for _ in range(2)]
    assert [process.wait(240) for process in processes] == [0, 0]
    rows = load_snapshot(tmp_path / "s").trials
    assert [row.state for row in rows] == ["finished"] * 20
    assert len({str(row.parameters) for row in rows}) == 20


def test_trials_become_a_table() -> None:
    frame = study().run(quadratic, trials=3).to_frame()
    assert list(frame.columns)[:4] == ["number", "state", "detail", "feasible"]
    assert {"value.loss", "param.x", "param.kind"} <= set(frame.columns)
    assert len(frame) == 3


def test_a_range_of_millions_is_never_listed() -> None:
    found = autotune.Study({"n": {"int": [1, 10**9]}}, LOSS, sampler="random").run(lambda n: n, trials=5)
    assert len({result.params["n"] for result in found.trials}) == 5
    assert found.space.candidate({"n": 10**9}).is_legal
    assert not found.space.candidate({"n": 1.0}).is_legal


@pytest.mark.parametrize("resumes", [True, False])
def test_trials_of_a_function_grow(tmp_path: Path, resumes: bool) -> None:
    calls: list[tuple[int, int]] = []

    def train(x: float, epochs: int, trial: autotune.Trial) -> float:
        assert trial.folder is not None
        checkpoint = trial.folder / "checkpoints" / "epoch"
        calls.append((epochs, int(checkpoint.read_text()) if checkpoint.exists() else 0))
        checkpoint.parent.mkdir(exist_ok=True)
        checkpoint.write_text(str(epochs))
        return (x - 0.3) ** 2 + 1 / epochs

    options: dict[str, Any] = {"folder": tmp_path / "s", "sampler": "random"}
    options["fidelity"] = {"of": "epochs", "rungs": [0.25, 1], "resumes": resumes}
    space = {"x": {"float": [0, 1]}, "epochs": 8}
    with autotune.Study(space, LOSS, **options) as grown:
        grown.run(train, trials=3)
        assert {(2, 0), (8, 2 if resumes else 0)} == set(calls)
        assert {result.share for result in grown.trials} == {0.25, 1.0}
        assert {(result.share, result.params["epochs"]) for result in grown.trials} == {(0.25, 2), (1.0, 8)}
        assert all(result.share == 1 for result in grown.front)
    with autotune.Study.open(tmp_path / "s") as again:
        again.run(train, trials=4)
        assert sum(row.cost for row in again.snapshot().trials) <= 4 + 1e-9
    with pytest.raises(UserError, match="fidelity"):
        autotune.Study(space, LOSS, folder=tmp_path / "s")


def test_a_function_that_could_not_go_on_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"fidelity": {"of": "epochs", "rungs": [0.25, 1], "resumes": True}}
    space = {"x": {"float": [0, 1]}, "epochs": 8}
    with pytest.raises(UserError, match="without a folder"):
        autotune.Study(space, LOSS, **options)
    with autotune.Study(space, LOSS, folder=tmp_path / "s", **options) as kept, pytest.raises(UserError) as error:
        kept.run(lambda x, epochs: x / epochs, trials=2)
    assert "trial.folder / 'checkpoints'" in str(error.value)
    assert not kept.trials


def test_the_budget_counts_what_whole_numbers_come_to() -> None:
    lengths: list[int] = []

    def train(x: float, epochs: int) -> float:
        lengths.append(epochs)
        return x + 1 / epochs

    grown = autotune.Study(
        {"x": {"float": [0, 1]}, "epochs": 3}, LOSS, sampler="random", fidelity={"of": "epochs", "rungs": [0.1, 1]}
    )
    grown.run(train, trials=6)
    assert set(lengths) == {1, 3}
    assert sum(lengths) / 3 == pytest.approx(sum(row.cost for row in grown.snapshot().trials))
    assert sum(lengths) / 3 <= 6 + 1e-9


def test_a_part_that_leaves_nothing_to_go_on_from_fails(tmp_path: Path) -> None:
    options: dict[str, Any] = {"fidelity": {"of": "epochs", "rungs": [0.25, 1], "resumes": True}, "sampler": "random"}
    space = {"x": {"float": [0, 1]}, "epochs": 8}
    with autotune.Study(space, LOSS, folder=tmp_path / "s", **options) as kept:
        with pytest.raises(UserError, match="left nothing in 'checkpoints'"):
            kept.run(lambda x, epochs, trial: x / epochs, trials=20)
        assert [result.state for result in kept.trials] == ["user"] * 3
        asked = kept.ask()
        assert asked is not None
        kept.tell(asked, 0.5)
        assert kept.trials[-1].state == "user"


def test_a_part_in_the_middle_that_leaves_only_what_it_was_given_fails(tmp_path: Path) -> None:
    options: dict[str, Any] = {"fidelity": {"of": "epochs", "min": 0.1, "resumes": True}, "sampler": "random"}

    def train(x: float, epochs: int, trial: autotune.Trial) -> float:
        assert trial.folder is not None
        if epochs == 1:
            (trial.folder / "checkpoints").mkdir(exist_ok=True)
            (trial.folder / "checkpoints" / "epoch").write_text("1")
        return x / epochs

    with autotune.Study({"x": {"float": [0, 1]}, "epochs": 9}, LOSS, folder=tmp_path / "s", **options) as kept:
        kept.run(train, trials=3)
        states = {(result.params["epochs"], result.state) for result in kept.trials}
        assert states == {(1, "ok"), (3, "user")}
        assert all(result.seconds is not None for result in kept.trials)


def test_what_more_trials_bring_is_told_by_full_trainings() -> None:
    grown = autotune.Study(
        {"x": {"float": [0, 1]}, "epochs": 9}, LOSS, sampler="random", fidelity={"of": "epochs", "min": 0.1}
    )
    grown.run(lambda x, epochs: x + 1 / epochs, trials=8)
    assert sum(result.share == 1 for result in grown.trials) < 20 < len(grown.trials)
    assert grown._study.expected_gain() is None
