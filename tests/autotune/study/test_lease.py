"""Leases lapse when their owner is gone, and only then."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from autotune.study.lease import Lease, LeaseKeeper, current_lease, lease_key
from autotune.study.processes import ProcessIdentity, start_time

pytestmark = pytest.mark.unit


def lease(**changes: object) -> Lease:
    return replace(Lease.new(1), **changes)  # type: ignore[arg-type]


def test_round_trip() -> None:
    one = Lease.new(3)
    assert Lease.decode(one.encode()) == one


def test_a_living_owner_keeps_its_lease_even_when_it_is_late() -> None:
    assert not lease(expires=0.0).has_lapsed()


def test_a_dead_owner_loses_it_at_once() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    identity = ProcessIdentity(ProcessIdentity.current().machine, child.pid, start_time(child.pid) or 0.0)
    child.wait()
    assert lease(owner=identity).has_lapsed()


def test_a_recycled_process_number_is_another_process() -> None:
    me = ProcessIdentity.current()
    assert me.is_alive()
    assert replace(me, started=me.started - 1).is_alive() is False
    assert lease(owner=replace(me, started=me.started - 1)).has_lapsed()


def test_owners_on_other_machines_are_judged_by_time() -> None:
    elsewhere = replace(ProcessIdentity.current(), machine="another/boot/namespace")
    assert elsewhere.is_alive() is None
    assert not lease(owner=elsewhere).has_lapsed()
    assert lease(owner=elsewhere, expires=time.time() - 1).has_lapsed()


def test_start_time_of_nobody_is_none() -> None:
    assert start_time(2**22 + 1) is None
    assert start_time(os.getpid()) is not None


def test_the_highest_attempt_counts_and_of_its_claims_the_first() -> None:
    first, second, third = (lease(attempt=2, expires=float(i)) for i in range(3))
    attributes = {lease_key(1): lease().encode()}
    assert current_lease({}) is None
    assert current_lease(attributes, [second, third, first]) == second
    assert current_lease(attributes | {lease_key(2): first.encode()}, [second, third]) == first


def test_the_keeper_renews_what_is_held_and_notices_what_is_lost() -> None:
    renewed: list[int] = []
    seen = threading.Event()

    def write(number: int, one: Lease) -> bool:
        renewed.append(number)
        if renewed.count(1) >= 2:
            seen.set()
        if number == 3:
            raise OSError("the storage is away for a moment")
        return number != 2

    keeper = LeaseKeeper(write, every_seconds=0.01)
    for number in (1, 2, 3):
        keeper.hold(number, lease())
    assert seen.wait(30)
    keeper.close()
    assert keeper.is_lost(2)
    assert not keeper.is_lost(1)
    assert not keeper.is_lost(3)
    assert renewed.count(2) == 1


def test_an_attempt_begun_while_the_one_before_is_renewed_is_not_lost() -> None:
    seen = threading.Event()

    def write(number: int, one: Lease) -> bool:
        if one.attempt == 1:
            keeper.hold(number, lease(attempt=2))  # by another thread, as it were
            return False
        seen.set()
        return True

    keeper = LeaseKeeper(write, every_seconds=0.01)
    keeper.hold(1, lease())
    assert seen.wait(30)
    keeper.close()
    assert not keeper.is_lost(1)
