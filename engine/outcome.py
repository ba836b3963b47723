"""What a run measured, or the kind of its failure. Written by the run if it lives, else by whoever watched it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from engine.atomic import write_json
from engine.schema import Schema

OutcomeKind = Literal["ok", "oom", "hang", "nan", "diverged", "infra", "user", "interrupted"]

FAILURE_KINDS: tuple[OutcomeKind, ...] = ("oom", "hang", "nan", "diverged", "infra", "user", "interrupted")

OUTCOME_FILE = "outcome.json"
FAILURES_FOLDER = "failures"


class Outcome(Schema):
    """The end of one run. ``kind`` is ``ok``, or why it failed: out of memory, a hang, non-finite numbers, divergence,
    a fault of the machine (a killed worker ...), a mistake of the user's, or an interruption."""

    schema_version: Literal[1] = 1
    """Version of this file format."""
    kind: OutcomeKind
    """``ok`` or the kind of failure."""
    detail: str = ""
    """One line for people: what happened."""
    tokens_per_second: float | None = None
    """Training speed of the whole job: tokens over wall time of the measured steps."""
    step_seconds: float | None = None
    """Median wall time of the measured steps."""
    peak_memory_bytes: int | None = None
    """Largest peak of any rank: live tensor storages on CPU, allocated device memory on CUDA."""
    max_resident_bytes: int | None = None
    """Largest high-water mark of a rank's process."""
    held_out_loss: float | None = None
    """Nats per token on the held-out documents at the end."""
    held_out_bits_per_byte: float | None = None
    """The same in bits per byte of text."""
    train_loss: float | None = None
    """Mean training loss of the last tenth of the steps, nats per token."""
    num_steps: int = 0
    """Optimizer steps done in total."""
    num_tokens: int = 0
    """Tokens trained on in total."""
    num_skipped_steps: int = 0
    """Steps whose update was left out because something was not finite."""
    wall_seconds: float | None = None
    """From the start of the process to its end."""
    cpu_seconds: float | None = None
    """CPU time of all ranks."""
    corpus_hash: str | None = None
    """Hash of the text that was used."""
    num_parameters: int | None = None
    """Parameters of the whole model."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Further figures by name: what a user's own program reported, or what follows from the others."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Versions and machine: python, torch, device, host."""


def write_outcome(folder: str | Path, outcome: Outcome) -> None:
    """Write ``outcome.json`` atomically."""
    write_json(Path(folder) / OUTCOME_FILE, outcome.to_data())


def read_outcome(folder: str | Path) -> Outcome | None:
    """The outcome in ``folder``, or None when there is none (or it isn't a whole one)."""
    try:
        return Outcome.model_validate_json((Path(folder) / OUTCOME_FILE).read_text(encoding="utf-8"))
    except (OSError, ValidationError, json.JSONDecodeError, UnicodeDecodeError):
        return None


class RankFailure(Schema):
    """What one rank of a job says of its own end (``failures/rank<r>.json``): evidence for the job's outcome when
    rank 0 can't tell or no longer lives."""

    kind: OutcomeKind
    """The kind of failure."""
    detail: str = ""
    """One line for people."""
    rank: int
    """The rank that failed."""
    time: float
    """Unix time."""


_TELLING: tuple[OutcomeKind, ...] = ("user", "oom", "nan", "diverged", "hang", "infra", "interrupted")
"""From the kind that is surely a cause to those that are often effects: a rank that lost a peer reports ``hang`` or
``infra``, a rank that was told to end because another failed reports ``interrupted``."""


def write_failure(folder: str | Path, failure: RankFailure) -> None:
    """Write a rank's failure atomically."""
    write_json(Path(folder) / FAILURES_FOLDER / f"rank{failure.rank}.json", failure.to_data())


def clear_failures(folder: str | Path, rank: int, world_size: int) -> None:
    """Remove what an earlier process of this rank wrote; rank 0 also what ranks beyond the world did."""
    for path in (Path(folder) / FAILURES_FOLDER).glob("rank*.json"):
        number = path.stem.removeprefix("rank")
        if number == str(rank) or (rank == 0 and number.isdigit() and int(number) >= world_size):
            path.unlink(missing_ok=True)


def read_failures(folder: str | Path) -> list[RankFailure]:
    """The failures of all ranks, the most telling first: the head of the list is the job's kind of failure."""
    failures = []
    for path in (Path(folder) / FAILURES_FOLDER).glob("rank*.json"):
        try:
            failures.append(RankFailure.model_validate_json(path.read_text(encoding="utf-8")))
        except (OSError, ValidationError, UnicodeDecodeError):
            continue
    return sorted(failures, key=lambda failure: (_TELLING.index(failure.kind), failure.time))
