"""The space of a user's own program or Python function: named values, and the command they are put into."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.space.expression import Expression
from autotune.space.fidelity import ProgramFidelity
from autotune.space.program import OWN_PLACEHOLDERS, SEED, Program, Template
from autotune.space.space import Candidate, Scalar, Space
from autotune.specs.cluster import ClusterSpec

LENGTH = "sequence_length"
"""The key of ``task`` that goes with a batch in sequences."""


@dataclass(frozen=True, kw_only=True)
class CommandSpace(Space):
    """Values by name. With a command a trial is a run of a program, else a call of a Python function."""

    template: Template | None = None
    folder: Path = field(default=Path(), compare=False)
    """Where the program runs: the folder of the file that names it, or the one we were in. No part of the study: a
    project may be moved."""
    devices: Expression | None = None
    """Devices that a trial needs, by its values; None for one."""
    cluster: ClusterSpec | None = None
    """The machine that programs run on; None for functions."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """What is trained, in the words of ``prior.task.Task``; empty where it was not told."""

    def names(self, chosen: Mapping[str, Any]) -> dict[str, Any]:
        """See ``Space``; also the length of the task's sequences, by which the prior tells a batch in tokens."""
        known = {LENGTH: self.task[LENGTH]} if LENGTH in self.task else {}
        return {**known, **super().names(chosen)}

    def grown(self, rung: int) -> dict[str, Scalar]:
        """See ``Space``."""
        if self.fidelity is None:
            return {}
        assert isinstance(self.fidelity, ProgramFidelity)
        return {self.fidelity.of: self.fidelity.lengths(self.fixed[self.fidelity.of])[rung]}

    def program(
        self, chosen: Mapping[str, Scalar], seed: int, grown: Mapping[str, Scalar] | None = None
    ) -> Program | None:
        """See ``Space``."""
        if self.template is None:
            return None
        values = {**self.names(chosen), **(grown or {})}
        texts = {name: text_of(values[name]) for name in self.template.names - set(OWN_PLACEHOLDERS)}
        texts[SEED] = str(seed)
        return Program(self.template, texts, self.objectives, self.folder, self.num_devices(self.names(chosen)))

    @property
    def is_seeded(self) -> bool:
        """Whether trials with other seeds are other runs, as far as the command tells."""
        return self.template is None or SEED in self.template.names

    def num_devices(self, values: Mapping[str, Any]) -> int:
        """Devices that a trial needs.

        Args:
            values: Everything a condition can read.
        """
        return 1 if self.devices is None else int(self.devices(values))

    def _candidate(self, values: Mapping[str, Any], chosen: Mapping[str, Any]) -> Candidate:
        most = self.cluster.devices_per_node if self.cluster else 1
        needed = 1 if self.devices is None else self.devices(values)
        is_whole = isinstance(needed, numbers.Real) and float(needed).is_integer()
        if not is_whole or not 1 <= needed <= most:
            return Candidate(rule="devices", reason=f"it needs {needed} devices, the machine has {most}")
        return super()._candidate(values, chosen)


def text_of(value: Scalar) -> str:
    """A value as it stands in a command: numbers so that they read back equal, ``true`` and ``false``."""
    return str(value).lower() if isinstance(value, bool) else str(value)
