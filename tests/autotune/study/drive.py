"""A driver as a process of its own: ``drive.py SPACE.yaml STUDY_FOLDER NUM_TRIALS FAKE_TRAINER_ARGUMENTS...``."""

import signal
import sys
from pathlib import Path

from autotune.space.grammar import load_space
from autotune.study.assignment import Assignment
from autotune.study.devices import DevicePool
from autotune.study.driver import Driver
from autotune.study.executor import LocalExecutor
from autotune.study.study import Study
from engine.outcome import Outcome

FAKE_TRAINER = str(Path(__file__).with_name("fake_trainer.py"))


class Silent:
    """Listens and says nothing."""

    def waiting(self) -> None: ...

    def started(self, assignment: Assignment) -> None: ...

    def finished(self, assignment: Assignment, outcome: Outcome) -> None: ...

    def released(self, assignment: Assignment) -> None: ...

    def retried(self, assignment: Assignment, outcome: Outcome) -> None: ...


def main() -> None:
    space_file, folder, num_trials, *arguments = sys.argv[1:]
    space, enumeration = load_space(space_file)
    study = Study.create_or_open(Path(folder), space, enumeration, num_trials=int(num_trials))
    pool = DevicePool(space.cluster, Path(folder).parent / "devices")
    executor = LocalExecutor(pool, lambda _: [sys.executable, FAKE_TRAINER, *arguments])
    driver = Driver(study, executor, Silent(), 2)
    signal.signal(signal.SIGTERM, lambda *_: driver.stop_soon())
    driver.run()
    study.close()


if __name__ == "__main__":
    main()
