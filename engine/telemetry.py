"""What a running job says of itself: one record per step and per event, in an append-only file that rotates."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from engine.atomic import decode_line, encode_line, read_lines
from engine.schema import Schema

TELEMETRY_FILE = "telemetry.jsonl"


class StepRecord(Schema):
    """One optimizer step, written by rank 0 after it. Times are wall seconds of rank 0."""

    kind: Literal["step"] = "step"
    """Which record this is."""
    time: float
    """Unix time at the end of the step."""
    step: int
    """Steps done, this one included."""
    tokens: int
    """Tokens trained on in total, this step included."""
    loss: float | None
    """Mean training loss of the global batch, nats per token; null when it was not finite."""
    learning_rate: float
    """Learning rate used."""
    learning_rate_scale: float
    """Factor on the schedule in force."""
    grad_norm: float | None
    """Global gradient norm before clipping; null when it was not finite."""
    grad_norms: dict[str, float] = Field(default_factory=dict)
    """Gradient norm per parameter group."""
    auxiliary_loss: float | None = None
    """Sum of the routers' losses with their coefficients, nats; null without experts, and when it was not finite."""
    expert_load_ratio: float | None = None
    """Mean load of the experts over the fullest one's, mean over the layers: 1 is even; null without experts."""
    step_seconds: float
    """Whole step."""
    data_seconds: float
    """Waiting for data."""
    compute_seconds: float
    """Forward and backward, with their communication."""
    optimizer_seconds: float
    """Norm, clipping and update."""
    memory_bytes: int | None = None
    """Device memory in use (CUDA), or the process's resident memory (CPU)."""
    skipped: bool = False
    """Whether the update was left out because the loss or a gradient was not finite."""
    micro_batch_size: int = 1
    """Micro-batch in force."""
    precision: str = "fp32"
    """Matrix-multiply precision in force."""
    timed: bool = True
    """Whether the step counts for speed (not a warm-up or memory-tracking step)."""


class EventRecord(Schema):
    """Something that is not a step."""

    kind: Literal["start", "evaluation", "checkpoint", "end", "note"]
    """``start`` of a process, ``evaluation`` done, ``checkpoint`` written, ``end`` of the process, or a ``note``."""
    time: float
    """Unix time."""
    step: int
    """Steps done."""
    tokens: int
    """Tokens trained on."""
    data: dict[str, Any] = Field(default_factory=dict)
    """``evaluation``: held_out_loss, held_out_bits_per_byte, seconds. ``checkpoint``: path, seconds. ``start``:
    world_size, pid, num_steps, tokens_per_step, resumed_from, corpus_hash, num_parameters.
    ``end``: outcome. ``note``: text."""


class AckRecord(Schema):
    """The trainer's answer to a ChangeRequest."""

    kind: Literal["ack"] = "ack"
    """Which record this is."""
    time: float
    """Unix time."""
    step: int
    """Steps done when it was decided."""
    tokens: int
    """Tokens trained on."""
    change_id: str
    """The request answered."""
    accepted: bool
    """Whether all ranks applied it."""
    reason: str = ""
    """Why not, or what was done."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Results, such as the path of a checkpoint that was asked for."""


TelemetryRecord = Annotated[StepRecord | EventRecord | AckRecord, Field(discriminator="kind")]
_ADAPTER: TypeAdapter[StepRecord | EventRecord | AckRecord] = TypeAdapter(TelemetryRecord)


class TelemetryWriter:
    """Appends records; buffered, flushed at most every ``flush_seconds``, rotated at ``max_bytes``
    (``telemetry.1.jsonl`` is the oldest). No fsync: a lost machine may cost the last lines, never a torn file.

    Args:
        folder: Run folder.
        max_bytes: Size at which a new file is begun.
        flush_seconds: Longest time a record stays in memory.
    """

    def __init__(self, folder: str | Path, *, max_bytes: int = 64 * 2**20, flush_seconds: float = 0.5) -> None:
        self._path = Path(folder) / TELEMETRY_FILE
        self._max_bytes = max_bytes
        self._flush_seconds = flush_seconds
        self._last_flush = 0.0
        self._lines: list[str] = []
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, record: StepRecord | EventRecord | AckRecord, *, flush: bool = False) -> None:
        """Append one record."""
        self._lines.append(encode_line(record.model_dump(mode="json")))
        if flush or record.kind != "step" or record.time - self._last_flush >= self._flush_seconds:
            self.flush()
            self._last_flush = record.time

    def flush(self) -> None:
        """Hand everything to the operating system."""
        if not self._lines:
            return
        with open(self._path, "a+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a killed writer's torn last line: close it, or this record is glued to it
                    file.write(b"\n")
            file.write("".join(self._lines).encode())
            size = file.tell()
        self._lines.clear()
        if size >= self._max_bytes:
            os.replace(self._path, self._path.with_name(f"telemetry.{len(_rotated(self._path.parent)) + 1}.jsonl"))


def _rotated(folder: Path) -> list[Path]:
    files = [path for path in folder.glob("telemetry.*.jsonl") if path.name.split(".")[1].isdigit()]
    return sorted(files, key=lambda path: int(path.name.split(".")[1]))


def _decode(data: dict[str, Any]) -> StepRecord | EventRecord | AckRecord | None:
    try:
        return _ADAPTER.validate_python(data)
    except ValidationError:  # a record of a newer version: readers pass it over
        return None


def read_telemetry(folder: str | Path) -> Iterator[StepRecord | EventRecord | AckRecord]:
    """All records of a run in order, over rotated files; torn or foreign lines are passed over."""
    folder = Path(folder)
    for path in [*_rotated(folder), folder / TELEMETRY_FILE]:
        for data in read_lines(path):
            record = _decode(data)
            if record is not None:
                yield record


class TelemetryReader:
    """Follows a live file: each ``poll`` returns the records that are new, across rotations, never a torn line."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._num_rotated_read = 0
        self._offset = 0

    def poll(self) -> list[StepRecord | EventRecord | AckRecord]:
        """New whole records since the last call."""
        records: list[StepRecord | EventRecord | AckRecord] = []
        while True:
            for path in _rotated(self._folder)[self._num_rotated_read :]:
                records += self._take(self._new_bytes(path))
                self._num_rotated_read += 1
                self._offset = 0
            block = self._new_bytes(self._folder / TELEMETRY_FILE)
            if len(_rotated(self._folder)) <= self._num_rotated_read:  # else it may be of the file begun meanwhile
                return records + self._take(block)

    def _new_bytes(self, path: Path) -> bytes:
        try:
            with open(path, "rb") as file:
                file.seek(self._offset)
                return file.read()
        except FileNotFoundError:
            return b""

    def _take(self, block: bytes) -> list[StepRecord | EventRecord | AckRecord]:
        whole = block.rfind(b"\n") + 1
        self._offset += whole
        records = []
        for line in block[:whole].decode("utf-8", errors="replace").splitlines():
            data = decode_line(line)
            record = None if data is None else _decode(data)
            if record is not None:
                records.append(record)
        return records
