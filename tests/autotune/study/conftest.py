"""A small space, and drivers of it whose trials are a fake trainer."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.space.enumerate import Enumeration
from autotune.space.grammar import load_space
from autotune.space.training import TrainingSpace
from autotune.study.assignment import Assignment
from autotune.study.devices import DevicePool
from autotune.study.driver import Driver
from autotune.study.executor import LocalExecutor
from autotune.study.study import Study
from engine.outcome import Outcome

FAKE_TRAINER = str(Path(__file__).with_name("fake_trainer.py"))

SPACE = """
use: [tiny_llama]
cluster: cpu:2
objectives: [speed, quality]
space:
  plan:
    dp_shard: [1, 2]
    micro_batch_size: [1, 2, 4, 8]
  hyperparameters:
    global_batch_size: [8, 16]
    learning_rate: {log_float: [1e-4, 1e-2]}
"""


class Log:
    """Remembers what a driver says."""

    def __init__(self) -> None:
        self.finished_numbers: list[int] = []
        self.released_numbers: list[int] = []
        self.retried_numbers: list[int] = []

    def waiting(self) -> None: ...

    def started(self, assignment: Assignment) -> None: ...

    def finished(self, assignment: Assignment, outcome: Outcome) -> None:
        self.finished_numbers.append(assignment.number)

    def released(self, assignment: Assignment) -> None:
        self.released_numbers.append(assignment.number)

    def retried(self, assignment: Assignment, outcome: Outcome) -> None:
        self.retried_numbers.append(assignment.number)


def fake(*arguments: str) -> Callable[[Assignment], list[str]]:
    """A trial's command: the fake trainer."""
    return lambda assignment: [sys.executable, FAKE_TRAINER, *arguments]


@pytest.fixture
def make_space(tmp_path: Path) -> Callable[..., tuple[TrainingSpace, Enumeration]]:
    """Loads the small space, or another text, with overrides."""

    def make(*overrides: str, text: str = SPACE) -> tuple[TrainingSpace, Enumeration]:
        path = tmp_path / "small.yaml"
        path.write_text(text)
        return load_space(path, overrides)

    return make


@pytest.fixture
def open_study(tmp_path: Path, make_space: Callable[..., tuple[TrainingSpace, Enumeration]]):  # type: ignore[no-untyped-def]
    """Opens a study of the small space below ``tmp_path``, by a sampler that takes no time unless told otherwise;
    closed at the end."""
    opened: list[Study] = []

    def open_(name: str = "s", *overrides: str, text: str = SPACE, **options) -> Study:  # type: ignore[no-untyped-def]
        space, enumeration = make_space(*overrides, text=text)
        options.setdefault("sampler", "tpe")
        study = Study.create_or_open(tmp_path / "studies" / name, space, enumeration, **options)
        opened.append(study)
        return study

    yield open_
    for study in opened:
        study.close()


@pytest.fixture
def drive(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Runs a study's trials with the fake trainer."""

    def run(study: Study, *arguments: str, workers: int = 1, log: Log | None = None) -> Log:
        log = log or Log()
        pool = DevicePool(study.space.cluster, tmp_path / "devices")
        Driver(study, LocalExecutor(pool, fake(*(arguments or ("ok",)))), log, workers).run()
        return log

    return run
