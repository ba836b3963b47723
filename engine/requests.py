"""The trainer's side of the control protocol: requests are taken at step boundaries, applied by all ranks or by none,
and acknowledged in the telemetry."""

from __future__ import annotations

from functools import singledispatchmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.checkpoint.store import check_identity, open_checkpoint
from engine.control import (
    ChangeRequest,
    ControlInbox,
    RollBack,
    SetLearningRateScale,
    SetMicroBatch,
    Stop,
    TakeCheckpoint,
)
from engine.errors import UserError
from engine.failures import describe
from engine.schema import parse

if TYPE_CHECKING:
    from engine.trainer import Trainer

_NUM_HANDLED_KEPT = 64
"""Ids of answered requests that a checkpoint remembers, so that none is applied twice after a kill."""


class RequestDesk:
    """Takes requests for a trainer.

    What was accepted is in force after a kill too: the newest checkpoint's manifest is brought up to date (one is
    written when there is none yet) before the acknowledgement, and the request's file goes last.

    Args:
        trainer: Whose settings are changed.
        folder: The run folder, with the inbox.
    """

    def __init__(self, trainer: Trainer, folder: Path) -> None:
        self._trainer = trainer
        self._context = trainer.context
        self._inbox = ControlInbox(folder) if self._context.is_main else None

    def is_waiting(self) -> bool:
        """Whether this rank knows of a request; only rank 0 ever does."""
        return self._inbox is not None and self._inbox.next_request() is not None

    def handle_all(self) -> None:
        """Answer every request that waits; called on all ranks at a step boundary."""
        while not self._trainer.is_ending:
            request = self._receive()
            if request is None:
                return
            self._handle(request)

    def _receive(self) -> ChangeRequest | None:
        request = self._inbox.next_request() if self._inbox else None
        data = self._context.broadcast(request.to_data() if request else None)
        return parse(ChangeRequest, data) if data else None

    def _handle(self, request: ChangeRequest) -> None:
        state = self._trainer.state
        before = state.handled
        accepted, reason, data = True, "", dict[str, Any]()
        if request.change_id in before:
            reason, data = "already applied before the process was started again", {"repeated": True}
        else:
            state.handled = (*before, request.change_id)[-_NUM_HANDLED_KEPT:]
            try:
                data = self._apply(request.change)
                self._trainer.secure_settings()
            except UserError as refusal:
                accepted, reason = False, describe(refusal)
                state.handled = before
        self._trainer.record_ack(request.change_id, accepted=accepted, reason=reason, data=data)
        if self._inbox:
            self._inbox.done(request.change_id)

    @singledispatchmethod
    def _apply(self, change: object) -> dict[str, Any]:
        """Apply one kind of change on all ranks and return the acknowledgement's data.

        Raises:
            UserError: It is refused, on all ranks, before anything was changed.
        """
        raise AssertionError(f"unknown change {change!r}")

    @_apply.register
    def _set_learning_rate_scale(self, change: SetLearningRateScale) -> dict[str, Any]:
        self._trainer.state.learning_rate_scale = change.scale
        return {"learning_rate_scale": change.scale}

    @_apply.register
    def _set_micro_batch(self, change: SetMicroBatch) -> dict[str, Any]:
        self._trainer.set_micro_batch(change.micro_batch_size)
        return {"micro_batch_size": change.micro_batch_size}

    @_apply.register
    def _take_checkpoint(self, change: TakeCheckpoint) -> dict[str, Any]:
        return {"path": str(self._trainer.save_checkpoint(requested=change.keep))}

    @_apply.register
    def _roll_back(self, change: RollBack) -> dict[str, Any]:
        identity = self._trainer.identity
        self._context.on_main(lambda: check_identity(open_checkpoint(change.checkpoint), identity))
        checkpoint = open_checkpoint(change.checkpoint)
        before = self._trainer.state.step
        self._trainer.roll_back(checkpoint, change.scale, change.skip_steps)
        return {"from_step": before, "to_step": self._trainer.state.step}

    @_apply.register
    def _stop(self, change: Stop) -> dict[str, Any]:
        path = self._trainer.save_checkpoint()
        self._trainer.end_planned()
        return {"path": str(path)}
