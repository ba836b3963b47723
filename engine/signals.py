"""SIGTERM and SIGINT: the first asks for a checkpoint at the next step boundary, a later one ends the process at once."""

from __future__ import annotations

import signal
import time
from types import FrameType

from engine.failures import Interrupted

_SAME_REQUEST_SECONDS = 2.0
"""Signals this close together are one: Ctrl-C reaches a rank from the terminal and again from torchrun, which forwards it."""


class SignalWatch:
    """While entered, remembers the first SIGTERM or SIGINT in ``received`` (0: none).

    Raises:
        Interrupted: Out of whatever the main thread does, on a second signal.
    """

    def __init__(self) -> None:
        self.received = 0
        self._time = 0.0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> SignalWatch:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if not self.received:
            self.received, self._time = number, now
        elif now - self._time > _SAME_REQUEST_SECONDS:
            raise Interrupted(number)
