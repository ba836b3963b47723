"""The steps of one live run as columns. A rollback or a resume takes back the steps that it supersedes."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from autotune.prior.robust import Floats
from engine.telemetry import StepRecord

_COLUMNS = (
    "step", "tokens", "time", "loss", "learning_rate", "scale", "grad_norm", "step_seconds", "micro_batch_size",
    "skipped", "timed", "memory_bytes",
)  # fmt: skip


class History:
    """Columns of equal length, one entry per step, in step order. Non-finite losses and norms are NaN."""

    def __init__(self, records: Iterable[StepRecord] = ()) -> None:
        self._data: Floats = np.empty((len(_COLUMNS), 256))
        self._length = 0
        self.num_superseded = 0
        """Steps that were done and taken back."""
        for record in records:
            self.append(record)

    def __len__(self) -> int:
        return self._length

    def append(self, record: StepRecord) -> None:
        """Add a step; later steps that are already known were taken back by a rollback or a resume, and are dropped."""
        if self._length and record.step <= self._data[0, self._length - 1]:
            self.cut_after(record.step - 1)
        if self._length == self._data.shape[1]:
            self._data = np.concatenate([self._data, np.empty_like(self._data)], axis=1)
        nan = float("nan")
        self._data[:, self._length] = (
            record.step,
            record.tokens,
            record.time,
            nan if record.loss is None else record.loss,
            record.learning_rate,
            record.learning_rate_scale,
            nan if record.grad_norm is None else record.grad_norm,
            record.step_seconds,
            record.micro_batch_size,
            record.skipped,
            record.timed,
            nan if record.memory_bytes is None else record.memory_bytes,
        )
        self._length += 1

    def cut_after(self, step: int) -> None:
        """Take back all steps later than ``step``."""
        kept = int(np.searchsorted(self.step, step, side="right"))
        self.num_superseded += self._length - kept
        self._length = kept

    def _column(self, name: str) -> Floats:
        return self._data[_COLUMNS.index(name), : self._length]

    @property
    def step(self) -> Floats:
        """Steps done, this one included."""
        return self._column("step")

    @property
    def tokens(self) -> Floats:
        """Tokens trained on in total."""
        return self._column("tokens")

    @property
    def time(self) -> Floats:
        """Unix time at the end of the step."""
        return self._column("time")

    @property
    def loss(self) -> Floats:
        """Training loss, nats per token; NaN where it was not finite."""
        return self._column("loss")

    @property
    def learning_rate(self) -> Floats:
        """Learning rate used."""
        return self._column("learning_rate")

    @property
    def scale(self) -> Floats:
        """Factor on the schedule in force."""
        return self._column("scale")

    @property
    def grad_norm(self) -> Floats:
        """Global gradient norm; NaN where it was not finite."""
        return self._column("grad_norm")

    @property
    def step_seconds(self) -> Floats:
        """Wall seconds of the whole step."""
        return self._column("step_seconds")

    @property
    def micro_batch_size(self) -> Floats:
        """Micro-batch in force."""
        return self._column("micro_batch_size")

    @property
    def skipped(self) -> npt.NDArray[np.bool_]:
        """Whether the update was left out because something was not finite."""
        return self._column("skipped") > 0

    @property
    def timed(self) -> npt.NDArray[np.bool_]:
        """Whether the step counts for speed."""
        return self._column("timed") > 0

    @property
    def memory_bytes(self) -> Floats:
        """Memory in use; NaN where it was not told."""
        return self._column("memory_bytes")
