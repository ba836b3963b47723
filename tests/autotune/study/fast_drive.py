"""A driver of trials that take no time, as a process of its own: ``fast_drive.py SPACE.yaml STUDY_FOLDER NUM_TRIALS
NUM_WORKERS STORAGE RAN_FILE [DELAY_SECONDS]`` (``-`` as storage for the journal). Every start of a trial is a line
``NUMBER ATTEMPT UNIX_TIME`` in the last file."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from autotune.space.grammar import load_space
from autotune.space.space import TrialLimits
from autotune.study.assignment import Assignment
from autotune.study.child import Stop
from autotune.study.driver import Driver
from autotune.study.study import Study
from engine.outcome import Outcome


class Immediate:
    """Gives each trial its outcome at once (or after a delay), without a process."""

    def __init__(self, ran: Path, delay_seconds: float) -> None:
        self.ran = ran
        self.delay_seconds = delay_seconds

    def run(
        self,
        assignment: Assignment,
        limits: TrialLimits,
        *,
        stop: Callable[[], Stop],
        on_start: Callable[[], None],
        on_waiting: Callable[[], None],
    ) -> Outcome:
        on_start()
        with open(self.ran, "a") as file:
            file.write(f"{assignment.number} {assignment.attempt} {time.time()}\n")
        time.sleep(self.delay_seconds)
        return Outcome(kind="ok", tokens_per_second=100.0, held_out_loss=3.0, corpus_hash="text")

    def close(self) -> None: ...


class Silent:
    """Listens and says nothing."""

    def waiting(self) -> None: ...

    def started(self, assignment: Assignment) -> None: ...

    def finished(self, assignment: Assignment, outcome: Outcome) -> None: ...

    def released(self, assignment: Assignment) -> None: ...

    def retried(self, assignment: Assignment, outcome: Outcome) -> None: ...


def main() -> None:
    space_file, folder, num_trials, num_workers, storage, ran, *delay = sys.argv[1:]
    space, enumeration = load_space(space_file)
    url = None if storage == "-" else storage
    study = Study.create_or_open(
        Path(folder), space, enumeration, num_trials=int(num_trials), storage_url=url, sampler="random"
    )
    Driver(study, Immediate(Path(ran), float(delay[0]) if delay else 0.0), Silent(), int(num_workers)).run()
    study.close()


if __name__ == "__main__":
    main()
