"""Sums along routes between real processes; probes, placement and re-routing over emulated links in virtual time."""

from __future__ import annotations

import socket
import threading
from datetime import timedelta
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.comm.placed import checked_topology, take_place
from engine.comm.transport import TokenBucket
from engine.errors import UserError
from engine.plan import Plan
from engine.probe_pairs import pair_rounds
from engine.routes import replay
from engine.topology import Links, PairSample, Topology
from tests.engine.comm import worker
from tests.engine.parallel import cases
from tests.engine.parallel.compare import EVERYTHING, largest_difference
from tests.engine.parallel.launch import run_cases

dist = pytest.mark.dist
unit = pytest.mark.unit


def write_topology(path: Path, links: Links) -> None:
    """A file that tells these links."""
    size = links.num_devices
    samples = [
        PairSample(source=source, target=target, bytes=num_bytes, seconds=float(times[source, target]))
        for num_bytes in (2**10, 2**22)
        for times in [links.seconds(num_bytes)]
        for source, target in permutations(range(size), 2)
    ]
    found = Topology(num_devices=size, hosts=("",) * size, backend="gloo", started="", samples=tuple(samples))
    path.write_text(found.model_dump_json())


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks found, in the order of ranks."""
    folder = tmp_path_factory.mktemp("comm")
    write_topology(folder / "topology.json", worker.emulated_links())
    run_cases([], worker.SIZE, folder, worker="tests.engine.comm.worker")
    logs = "\n".join(path.read_text() for path in folder.glob("*.log"))
    assert all((folder / f"{rank}.pt").is_file() for rank in range(worker.SIZE)), logs
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(worker.SIZE)]


# ---------------------------------------------------------------------------------------------------------------- sums


@dist
def test_every_route_sums_right_whatever_the_length_and_dtype(ranks: list[dict[str, Any]]) -> None:
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2e-2}
    for name in worker.ROUTES:
        for dtype in worker.DTYPES:
            for length in worker.LENGTHS:
                true = worker.inputs(dtype, length).double().sum(dim=0)
                found = ranks[0]["sums"][f"{name} {dtype} {length}"]
                assert found.dtype == dtype
                assert (found.double() - true).abs().max() <= tolerance[dtype] * true.abs().max().clip(1)


@dist
def test_all_ranks_end_with_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    for name, values in ranks[0]["sums"].items():
        assert all(torch.equal(values, other["sums"][name]) for other in ranks[1:]), name
    assert all(torch.equal(ranks[0]["routed"], other["routed"]) for other in ranks[1:])
    assert ranks[0]["routed"].tolist() == [4.0] * 5 + [4.0 * value for value in range(300)]


@dist
def test_processes_take_as_long_as_the_replay_of_their_messages(ranks: list[dict[str, Any]]) -> None:
    for name, route in worker.ROUTES.items():
        told = replay(route, worker.emulated_links(), 48 * 256 * 4)[0]
        assert max(found["timed"][name] for found in ranks) == pytest.approx(told), name


@dist
def test_an_emulated_link_holds_messages_back(ranks: list[dict[str, Any]]) -> None:
    assert all(found["slept"] >= 0.03 for found in ranks)


@dist
def test_training_along_routes_equals_training_by_the_backend(ranks: list[dict[str, Any]]) -> None:
    native, routed = (ranks[0]["trained"][name] for name in ("native", "topology"))
    alone = cases.train(cases.run_config("llama", {}, worker.SGD))
    for expected in (native, alone):
        difference = largest_difference(routed, expected, EVERYTHING)
        assert difference.ratio <= 1e-10, difference


# -------------------------------------------------------------------------------------------------------------- probes


@unit
@pytest.mark.parametrize("size", [2, 5, 8])
def test_rounds_hold_every_pair_once_and_no_rank_twice(size: int) -> None:
    rounds = pair_rounds(size)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(size), 2))
    assert all(len({rank for pair in pairs for rank in pair}) == 2 * len(pairs) for pairs in rounds)
    assert len(rounds) == size - 1 + size % 2
    assert [pair for pairs in pair_rounds(size, [(1, 0)]) for pair in pairs] == [(0, 1)]


@dist
def test_a_probe_finds_each_links_bandwidth_and_half_the_round_trip(ranks: list[dict[str, Any]]) -> None:
    true = worker.emulated_links()
    for found in ranks:
        assert len(found["links"]) == worker.SIZE * (worker.SIZE - 1)
        for name, (latency, bandwidth) in found["links"].items():
            edge = tuple(map(int, name.split("-")))
            assert bandwidth == pytest.approx(true.bandwidth[edge], rel=1e-3)
            assert latency == pytest.approx((true.latency[edge] + true.latency[edge[::-1]]) / 2, rel=1e-2)


@unit
def test_a_token_bucket_lets_messages_pass_one_after_another() -> None:
    bucket = TokenBucket(latency=0.5, bandwidth=100.0)
    assert bucket.pass_at(200, now=10.0) == 12.5
    assert bucket.pass_at(100, now=10.0) == 13.5
    assert bucket.pass_at(100, now=20.0) == 21.5


# ----------------------------------------------------------------------------------------------------------- placement


@dist
def test_processes_take_ranks_by_the_topology(ranks: list[dict[str, Any]]) -> None:
    numbers = [found["number"] for found in ranks]
    assert [found["rank"] for found in ranks] == [0, 1, 2, 3]
    assert {frozenset(numbers[:2]), frozenset(numbers[2:])} == {frozenset({0, 2}), frozenset({1, 3})}
    assert sum(found["tp_bandwidth"] == pytest.approx(50e9, rel=1e-3) for found in ranks) == 3  # one is slow one way


@unit
def test_a_topology_of_other_devices_is_refused_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "topology.json"
    write_topology(path, worker.emulated_links())
    with pytest.raises(UserError, match="of 4 devices, the plan dp2 has 2 ranks"):
        checked_topology(Plan(dp_shard=2), str(path))
    refusals = _two_processes(str(path), monkeypatch)
    assert [type(refusal) for refusal in refusals] == [UserError, UserError]
    assert all("of 4 devices" in str(refusal) and "hint" in str(refusal) for refusal in refusals)


@unit
def test_only_the_first_process_reads_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "topology.json"
    write_topology(path, Links(np.full((2, 2), 1e-5), np.full((2, 2), 1e9)))
    assert _two_processes(str(path), monkeypatch) == [0, 1]


def _two_processes(path: str, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What two processes, here threads, get: a rank or an error. The second has no file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    found: list[Any] = [None, None]

    def start(number: int) -> None:
        try:
            place = take_place(Plan(dp_shard=2), path if number == 0 else "nowhere", number, timedelta(seconds=60))
            found[number] = place.rank
            places.append(place)  # keeps the store alive for the other
        except UserError as error:
            found[number] = error

    places: list[Any] = []
    threads = [threading.Thread(target=start, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


# ---------------------------------------------------------------------------------------------------------- re-routing


@dist
def test_a_degraded_link_is_left_after_two_slow_steps(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["rerouting"]
    slow = [step for step, uses in enumerate(found["uses"]) if step >= worker.FAULT_AT and uses]
    assert slow == [worker.FAULT_AT, worker.FAULT_AT + 1]
    note = found["notes"][worker.FAULT_AT + 1]
    assert "sums are slow" in note
    assert "new routes" in note
    assert all(other is None for step, other in enumerate(found["notes"]) if step != worker.FAULT_AT + 1)
    before, during, after = (found["seconds"][step] for step in (worker.FAULT_AT - 1, worker.FAULT_AT, -1))
    assert before <= after < 0.5 * during


@dist
def test_sums_are_right_and_plans_equal_at_every_step_of_a_change(ranks: list[dict[str, Any]]) -> None:
    assert all(all(found["rerouting"]["exact"]) for found in ranks)
    for found in ranks[1:]:
        assert found["rerouting"]["ids"] == ranks[0]["rerouting"]["ids"]
        assert found["rerouting"]["notes"] == ranks[0]["rerouting"]["notes"]
    assert len(set(ranks[0]["rerouting"]["ids"])) == 2


@dist
def test_ranks_that_find_different_plans_keep_one(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert len(set(found["disagreeing"]["ids"])) == 1
        assert found["disagreeing"]["ids"] == ranks[0]["disagreeing"]["ids"]
        assert all("the routes stay, for ranks chose different ones" in note for note in found["disagreeing"]["notes"])


@dist
def test_refreshing_notices_a_link_that_no_sum_goes_over(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        notes = [note for note in found["refreshing"]["notes"] if note]
        assert len(notes) == 1
        assert notes[0].startswith("links changed: messages from rank 1 to 3")
        assert found["refreshing"]["bandwidth"] == pytest.approx(50e9, rel=1e-3)
