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
        config, fidelity = candidate.run, None if record.role == "repeat" else self.space.fidelity
        grown = {} if fidelity is None else self.space.grown(record.rung)
        if config is not None and fidelity is not None:
            config = run_at(config, fidelity, record.rung, self._num_devices)
        if config is not None:
            config = config.changed(
                name=f"{self.study[:100]}-{number}",
                runtime=config.runtime.changed(seed=seed),
                origin={"study": self.study, "trial": str(number)},
            )
        goes_further = fidelity is not None and record.rung < fidelity.last and fidelity.continues(record.rung + 1)
        return Assignment(
            number=number,
            attempt=1,
            folder=trial_folder(self.folder, number),
            parameters=dict(chosen),
            label=candidate.label,
            seed=seed,
            config=config,
            program=self.space.program(chosen, seed, grown),
            grown=grown,
            leaves_checkpoint=config is None and goes_further,
            repeat_of=record.of if record.role == "repeat" else None,
            share=record.share,
            cost=record.cost,
            continues=record.of if record.role == "growth" else None,
        )

    def prepared(self, assignment: Assignment) -> Assignment:
        """The same with the checkpoint that it goes on from in its folder. Only its owner may ask for it."""
        if assignment.continues is not None and self._goes_on(assignment, assignment.continues):
            carry_checkpoint(trial_folder(self.folder, assignment.continues), assignment.folder)
        return assignment

    def _goes_on(self, assignment: Assignment, before: int) -> bool:
        """Whether a growth goes on from the checkpoint of the number before."""
        fidelity, trials = self.space.fidelity, self.table.all()
        record = record_of(trials[before])
        assert fidelity is not None
        assert record is not None
        if assignment.config is None:
            return fidelity.continues(record.rung + 1)
        run = self.space.candidate(assignment.parameters).run
        assert run is not None
        return goes_on(run_at(run, fidelity, record.rung, self._num_devices), assignment.config)

    @property
    def _num_devices(self) -> int:
        return self.space.cluster.num_devices if isinstance(self.space, TrainingSpace) else 1
