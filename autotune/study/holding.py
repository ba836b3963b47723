"""The numbers that an open study runs: their leases, taken, renewed in the background and given back."""

from __future__ import annotations

import threading
import uuid
from dataclasses import replace

from optuna.trial import FrozenTrial, TrialState

from autotune.study.lease import LEASE_PREFIX, Lease, LeaseKeeper, lease_key
from autotune.study.record import Record, lease_of, record_of
from autotune.study.trial_table import TrialTable


class Holding:
    """Leases of one open study.

    Args:
        table: The study's numbers.
    """

    def __init__(self, table: TrialTable) -> None:
        self.leases: dict[int, Lease] = {}
        """Number -> lease in force, of all that is held."""
        self._table = table
        self._lock = threading.Lock()
        """Of leases and their renewal. Not the study's: a proposal may take longer than a lease lasts."""
        self._holder = uuid.uuid4().hex
        self._keeper = LeaseKeeper(self._renew)

    def close(self) -> None:
        """Renew no more."""
        self._keeper.close()

    def new_lease(self, attempt: int) -> Lease:
        """A lease of ours."""
        return Lease.new(attempt, self._holder)

    def take(self, number: int, attempt: int) -> None:
        """Take the lease of an attempt and renew it from now on."""
        lease = self.new_lease(attempt)
        with self._lock:
            self._table.write_lease(number, lease)
            self.leases[number] = lease
            self._keeper.hold(number, lease)

    def drop(self, number: int) -> None:
        """Forget a number: it has its outcome, or is somebody else's."""
        with self._lock:
            self._forget(number)

    def release(self, number: int) -> None:
        """Give a number back unfinished, free for anybody at once."""
        with self._lock:
            self._table.write_lease(number, replace(self.leases[number], released=True))
            self._forget(number)

    def is_ours(self, number: int, attempt: int) -> bool:
        """Whether an attempt is still in force and held here."""
        trials = self._table.all()
        lease = lease_of(trials[number], trials)
        return lease is not None and lease.attempt == attempt and number in self.leases

    def is_lost(self, number: int) -> bool:
        """Whether another driver took it over."""
        return self._keeper.is_lost(number)

    def is_free(self, lease: Lease) -> bool:
        """Whether what a lease is on may be taken over: its owner is gone, or it is what this open study left behind
        when the storage failed in the middle of a call."""
        return lease.has_lapsed() or lease.holder == self._holder

    def num_abandoned(self, trial: FrozenTrial) -> int:
        """Attempts on a trial that were not given back: their owners ended without a word."""
        leases = [Lease.decode(text) for key, text in trial.user_attrs.items() if key.startswith(LEASE_PREFIX)]
        return sum(not lease.released for lease in leases)

    def claim(self, number: int, attempt: int) -> bool:
        """Claim an attempt; of all who do, the one whose claim has the lowest number wins."""
        claim = Record("claim", of=number)
        own = self._table.create(self.new_lease(attempt), record=claim, state=TrialState.FAIL)
        key = lease_key(attempt)
        trials = self._table.all()
        if trials[number].state.is_finished() or key in trials[number].user_attrs:
            return False
        return not any(record_of(other) == claim and key in other.user_attrs for other in trials[number:own])

    def _renew(self, number: int, lease: Lease) -> bool:
        with self._lock:
            held = self.leases.get(number)
            if held is None or held.attempt != lease.attempt:  # told, released or begun again meanwhile
                return True
            trials = self._table.all()
            current = lease_of(trials[number], trials)
            if current is None or current.attempt != lease.attempt:
                return False
            if not trials[number].state.is_finished():
                self._table.write_lease(number, lease)
            return True

    def _forget(self, number: int) -> None:
        self._keeper.drop(number)
        self.leases.pop(number, None)
