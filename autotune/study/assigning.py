"""What a number of a study is as something to run: its seed, its run or program, its place, what it goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.search.seeds import derive_seed
from autotune.space.space import Candidate, Scalar, Space
from autotune.space.training import TrainingSpace
from autotune.study.assignment import Assignment
from autotune.study.growth import carry_checkpoint, goes_on, links_of, run_at
from autotune.study.record import Record, place_of, record_of, trial_folder
from autotune.study.trial_table import TrialTable


@dataclass(frozen=True)
class Assigner:
    """Makes assignments of the numbers of one study."""

    folder: Path
    """The study's."""
    study: str
    """Its name."""
    study_seed: int
    space: Space
    table: TrialTable

    def assignment(self, number: int, candidate: Candidate, chosen: Mapping[str, Scalar], record: Record) -> Assignment:
        """The first attempt on a number.

        Args:
            number: In the table.
            candidate: What was chosen, legal.
            chosen: Its values.
            record: What the number is.
        """
        trials = self.table.all()
        begun = links_of(number, record, trials)[0]
        seed = derive_seed(self.study_seed, "trial", place_of(begun, trials))
        config = candidate.run
        if config is not None and self.space.fidelity is not None and record.role != "repeat":
            config = run_at(config, self.space.fidelity, record.rung, self._num_devices)
        if config is not None:
            config = config.changed(
                name=f"{self.study[:100]}-{number}",
                runtime=config.runtime.changed(seed=seed),
                origin={"study": self.study, "trial": str(number)},
            )
        return Assignment(
            number=number,
            attempt=1,
            folder=trial_folder(self.folder, number),
            parameters=dict(chosen),
            label=candidate.label,
            seed=seed,
            config=config,
            program=self.space.program(chosen, seed),
            repeat_of=record.of if record.role == "repeat" else None,
            share=record.share,
            cost=record.cost,
            continues=record.of if record.role == "growth" else None,
        )

    def prepared(self, assignment: Assignment) -> Assignment:
        """The same with the checkpoint that it goes on from in its folder. Only its owner may ask for it."""
        if assignment.continues is not None and assignment.config is not None:
            fidelity, trials = self.space.fidelity, self.table.all()
            before = record_of(trials[assignment.continues])
            assert fidelity is not None
            assert before is not None
            run = self.space.candidate(assignment.parameters).run
            assert run is not None
            if goes_on(run_at(run, fidelity, before.rung, self._num_devices), assignment.config):
                carry_checkpoint(trial_folder(self.folder, assignment.continues), assignment.folder)
        return assignment

    @property
    def _num_devices(self) -> int:
        return self.space.cluster.num_devices if isinstance(self.space, TrainingSpace) else 1
