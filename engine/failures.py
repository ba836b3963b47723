"""From an exception to the kind of failure it means."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

from engine.errors import UserError
from engine.outcome import OutcomeKind


class RunFailure(Exception):
    """The run found out itself that it can't go on.

    Args:
        kind: The kind of failure.
        detail: One line for people.
    """

    def __init__(self, kind: OutcomeKind, detail: str) -> None:
        super().__init__(detail)
        self.kind: OutcomeKind = kind


class Interrupted(BaseException):
    """A second signal: end at once. Not an ``Exception``, so that nothing on the way handles it by mistake.

    Args:
        signal_number: The signal.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"ended at once by signal {signal_number}")
        self.signal_number = signal_number


# Parts of messages of plain RuntimeErrors, as PyTorch 2.13 (allocators, gloo, NCCL, the store) words them.
_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")
_TIMED_OUT = ("timed out", "timeout")
_LOST_PEER = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")
_SOURCE_LINE = re.compile(r"^\[\S+:\d+\] ")
"""Where in gloo's sources an error arose."""
_COMMUNICATION = ("gloo", "nccl", "collective", "recv", "send", "store", "wait", "barrier", "socket", "operation")


def classify(error: BaseException) -> OutcomeKind:
    """The kind of failure that ``error``, or what it was caused by, means; ``infra`` when nothing tells more."""
    for cause in _causes(error):
        kind = _kind_of(cause)
        if kind is not None:
            return kind
    return "infra"


def communication_failure(error: BaseException) -> tuple[OutcomeKind, str] | None:
    """The kind and description of a failure to communicate, if ``error`` or what it was caused by is one.

    A peer that does not answer in time is a ``hang``. One that is gone is ``infra``: it ended by a failure of its own,
    which its own rank reports if it can, and which this effect must not outweigh.
    """
    for cause in _causes(error):
        if _is_lost_peer(cause):
            return "infra", describe(cause)
        kind = _kind_of(cause)
        if kind is not None:
            return ("hang", describe(cause)) if kind == "hang" and not isinstance(cause, RunFailure) else None
    return None


def has_lost_peer(error: BaseException) -> bool:
    """Whether ``error``, or what it was caused by, means that another process is gone: nothing to look for here."""
    return any(_is_lost_peer(cause) for cause in _causes(error))


def describe(error: BaseException) -> str:
    """One line for people."""
    text = " ".join(str(error).replace("\nhint: ", "; ").split())
    if _is_lost_peer(error):
        sentence = _SOURCE_LINE.sub("", text).partition(". ")[0].rstrip(".")
        return (
            f"another process of the run ended or cannot be reached ({sentence}); start it again: it goes on from its"
            " newest checkpoint"
        )
    return text if isinstance(error, UserError | RunFailure | Interrupted) else f"{type(error).__name__}: {text}"


def _is_lost_peer(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(part in str(error).lower() for part in _LOST_PEER)


def _causes(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__ or (None if current.__suppress_context__ else current.__context__)


def _kind_of(error: BaseException) -> OutcomeKind | None:
    import torch

    if isinstance(error, RunFailure):
        return error.kind
    if isinstance(error, UserError):
        return "user"
    if isinstance(error, Interrupted | KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return "oom"
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "oom"
    if isinstance(error, TimeoutError):
        return "hang"
    if isinstance(error, RuntimeError):
        text = str(error).lower()
        if any(part in text for part in _OUT_OF_MEMORY):
            return "oom"
        if any(part in text for part in _TIMED_OUT) and any(part in text for part in _COMMUNICATION):
            return "hang"
    return None
