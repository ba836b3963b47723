"""SIGTERM and SIGINT: in training, the first asks for a checkpoint at the next step boundary and a later one ends the
process at once; before and after, already the first does."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

from engine.failures import Interrupted

_SAME_REQUEST_SECONDS = 2.0
"""Signals this close together are one: Ctrl-C reaches a rank from the terminal and again from torchrun."""


class SignalWatch:
    """While entered, remembers the first SIGTERM or SIGINT in ``received`` (0: none).

    Attributes:
        received: The first signal.
        deferred: Whether the main thread looks at ``received`` by itself, so that the first one need not interrupt it.

    Raises:
        Interrupted: Out of whatever the main thread does.
    """

    def __init__(self) -> None:
        self.received = 0
        self.deferred = False
        self._time = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalWatch:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        now = time.monotonic()
        if not self.received:
            self.received, self._time = number, now
            if not self.deferred:
                raise Interrupted(number)
        elif now - self._time > _SAME_REQUEST_SECONDS:
            raise Interrupted(number)
