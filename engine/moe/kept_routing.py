"""What a layer decided in its forward pass, for the recomputation of it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class RoutingMemory:
    """Takes over, in a recomputation, what the forward pass decided: which experts tokens go to, and how many rows are
    exchanged. Rounding could decide otherwise the second time; and what is decided once is also counted once and
    exchanged once.

    Without ``kept`` values nothing is remembered.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] | None = None

    def __call__(self, name: str, decide: Callable[[], T]) -> T:
        """The value under ``name``, decided now unless it was before."""
        if self._values is None:
            return decide()
        if name not in self._values:
            self._values[name] = decide()
        value: T = self._values[name]
        return value

    def contexts(self) -> tuple[Kept, Kept]:
        """For ``context_fn`` of torch's checkpointing: the context of a forward pass and that of its recomputation."""
        kept = Kept(self)
        return kept, kept


class Kept:
    """Context in which a memory has the values of one forward pass; may be entered again for each recomputation."""

    def __init__(self, memory: RoutingMemory) -> None:
        self._memory = memory
        self._values: dict[str, Any] = {}
        self._outside: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        self._outside, self._memory._values = self._memory._values, self._values
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._memory._values = self._outside
