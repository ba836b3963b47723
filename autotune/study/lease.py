"""Who runs a trial: a lease in the trial's own attributes, so that it works with every storage.

Each attempt to run a trial has one lease: the owner's process and a time of expiry. The owner renews it in the
background. A lease lapses when its process is gone (told at once on the same machine) or, on another machine, when it
was not renewed in time. A lapsed trial is taken over by *claiming* the next attempt: a claim is a record whose number
the storage gives out in one order to everybody, and the lowest number for an attempt wins. Attributes alone could not
decide this, because the last writer of an attribute overwrites the others.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from autotune.study.processes import ProcessIdentity

LEASE_SECONDS = 120.0
"""Without renewal a lease held on another machine lapses after this."""
RENEW_SECONDS = 30.0

LEASE_PREFIX = "lease:"
"""Attribute ``lease:<attempt>`` of a trial: one key per attempt, so that no attempt overwrites another's."""


@dataclass(frozen=True)
class Lease:
    """One attempt's owner."""

    attempt: int
    """From 1."""
    owner: ProcessIdentity
    expires: float
    """Unix time."""
    released: bool = False
    """Given back unfinished (the sweep was stopped): free for anybody at once."""
    holder: str = ""
    """Which of the owner's open studies has it: so that one knows what it left behind when the storage failed."""

    @classmethod
    def new(cls, attempt: int, holder: str = "") -> Self:
        """A lease of this process."""
        return cls(attempt, ProcessIdentity.current(), time.time() + LEASE_SECONDS, holder=holder)

    def renewed(self) -> Lease:
        """The same with a later expiry."""
        return replace(self, expires=time.time() + LEASE_SECONDS)

    def has_lapsed(self) -> bool:
        """Whether the attempt may be taken over. A living process of this machine keeps its lease even when it is late
        (stopped, or starved): it will go on."""
        if self.released:
            return True
        alive = self.owner.is_alive()
        return time.time() > self.expires if alive is None else not alive

    def encode(self) -> str:
        """As text, because storages differ in what structure they keep."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Self:
        """The inverse of ``encode``."""
        data = json.loads(text)
        return cls(**{**data, "owner": ProcessIdentity(**data["owner"])})


def lease_key(attempt: int) -> str:
    """Name of the attribute of an attempt's lease."""
    return f"{LEASE_PREFIX}{attempt}"


def current_lease(attributes: dict[str, Any], claims: Iterable[Lease] = ()) -> Lease | None:
    """The lease in force: that of the highest attempt, told from the trial's attributes and the claims on it (a claimer
    may have died before it wrote the attribute). Of several claims on an attempt the first counts."""
    leases: dict[int, Lease] = {}
    for claim in claims:
        leases.setdefault(claim.attempt, claim)
    for key, text in attributes.items():
        if key.startswith(LEASE_PREFIX):
            lease = Lease.decode(text)
            leases[lease.attempt] = lease
    return leases[max(leases)] if leases else None


class LeaseKeeper:
    """Renews the leases this process holds, in one background thread.

    Args:
        write: Stores a lease of a trial number; returns False when the trial belongs to somebody else by now.
        every_seconds: Time between renewals.
    """

    def __init__(self, write: Callable[[int, Lease], bool], every_seconds: float = RENEW_SECONDS) -> None:
        self._write = write
        self._every_seconds = every_seconds
        self._held: dict[int, Lease] = {}
        self._lost: set[int] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)
        self._thread.start()

    def hold(self, number: int, lease: Lease) -> None:
        """Begin to renew."""
        with self._lock:
            self._held[number] = lease
            self._lost.discard(number)

    def drop(self, number: int) -> None:
        """Stop to renew."""
        with self._lock:
            self._held.pop(number, None)

    def is_lost(self, number: int) -> bool:
        """Whether somebody else took the trial over."""
        with self._lock:
            return number in self._lost

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._every_seconds):
            with self._lock:
                held = dict(self._held)
            for number, lease in held.items():
                if not self._renew(number, lease.renewed()):
                    with self._lock:
                        if self._held.get(number) is lease:  # else a newer attempt of our own is in force
                            self._lost.add(number)
                            self._held.pop(number, None)

    def _renew(self, number: int, lease: Lease) -> bool:
        try:
            return self._write(number, lease)
        except Exception:  # the storage is away for a moment: the next renewal tries again, the lease is long enough
            return True
