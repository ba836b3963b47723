"""The control protocol: what a retuner may ask of a running job, as files in the run's ``control/`` folder.

The asker writes a ChangeRequest; at the next step boundary rank 0 broadcasts it, all ranks apply it or none, and the
acknowledgement goes into the telemetry. A request stays in the folder until it is acknowledged, so a trainer that is
killed in between finds it again. Any training loop can take part with ``ControlInbox``.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from engine.atomic import write_json
from engine.schema import Schema
from engine.spec import Count, CountOrZero, Positive

CONTROL_FOLDER = "control"
PLANNED_STOP_EXIT_CODE = 75
"""Exit code of a run that was asked to stop at a checkpoint: start it again (EX_TEMPFAIL)."""


class SetLearningRateScale(Schema):
    """Multiply the schedule by ``scale`` from the next step on (absolute, not cumulative)."""

    kind: Literal["set_learning_rate_scale"] = "set_learning_rate_scale"
    scale: Positive


class SetMicroBatch(Schema):
    """Change the micro-batch at the same global batch; accumulation follows."""

    kind: Literal["set_micro_batch"] = "set_micro_batch"
    micro_batch_size: Count


class TakeCheckpoint(Schema):
    """Write a checkpoint now; the acknowledgement's data has its ``path``."""

    kind: Literal["checkpoint"] = "checkpoint"
    keep: bool = True
    """Keep it beside the newest of all, until the next one that is to be kept."""


class RollBack(Schema):
    """Return to a checkpoint, with another learning-rate scale, leaving out the next ``skip_steps`` batches."""

    kind: Literal["roll_back"] = "roll_back"
    checkpoint: str
    scale: Positive
    skip_steps: CountOrZero = 0


class Stop(Schema):
    """End at a checkpoint with the planned-stop exit code."""

    kind: Literal["stop"] = "stop"


Change = Annotated[SetLearningRateScale | SetMicroBatch | TakeCheckpoint | RollBack | Stop, Field(discriminator="kind")]


class ChangeRequest(Schema):
    """One request to a running job."""

    schema_version: Literal[1] = 1
    change_id: str = Field(default_factory=lambda: uuid.uuid4().hex[:12])
    """Names the request in the acknowledgement and in the ledger."""
    reason: str = ""
    """Why, in one line for people."""
    change: Change
    """What to do."""


_ADAPTER = TypeAdapter(ChangeRequest)


def send_request(run_folder: str | Path, request: ChangeRequest) -> Path:
    """Put a request into the run's inbox; requests are taken in the order they were sent."""
    import time

    path = Path(run_folder) / CONTROL_FOLDER / f"{time.time_ns():020d}-{request.change_id}.json"
    write_json(path, request.to_data())
    return path


class ControlInbox:
    """The trainer's side: reads requests in order and removes them once acknowledged. Used on rank 0 alone."""

    def __init__(self, run_folder: str | Path) -> None:
        self._folder = Path(run_folder) / CONTROL_FOLDER
        self._folder.mkdir(parents=True, exist_ok=True)
        self._paths: dict[str, Path] = {}

    def next_request(self) -> ChangeRequest | None:
        """The oldest request that waits; None when there is none. A malformed file is set aside as ``*.bad``."""
        try:
            names = sorted(entry.name for entry in os.scandir(self._folder) if entry.name.endswith(".json"))
        except OSError:  # whoever tidies up the folder of a live run does not end it
            return None
        for name in names:
            if name.startswith("."):
                continue
            path = self._folder / name
            try:
                request = _ADAPTER.validate_json(path.read_text(encoding="utf-8"))
            except OSError:  # withdrawn just now, not a file, or not ours to read: the run goes on without it
                continue
            except (ValidationError, UnicodeDecodeError):
                path.rename(path.with_suffix(".bad"))
                continue
            self._paths[request.change_id] = path
            return request
        return None

    def done(self, change_id: str) -> None:
        """Remove a request after its acknowledgement was written."""
        path = self._paths.pop(change_id, None)
        if path is not None:
            path.unlink(missing_ok=True)
