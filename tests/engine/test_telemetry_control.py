"""Append-only files and the control folder under kills, torn lines, rotation and hostile content."""

import itertools
import os
from pathlib import Path

import pytest

from engine.atomic import append_line, read_lines, write_json, write_text
from engine.control import ChangeRequest, ControlInbox, SetLearningRateScale, SetMicroBatch, send_request
from engine.errors import UserError
from engine.outcome import Outcome, read_outcome, write_outcome
from engine.telemetry import TELEMETRY_FILE, EventRecord, TelemetryReader, TelemetryWriter, read_telemetry
from tests.engine.records import step_record

pytestmark = pytest.mark.unit


def test_a_torn_line_costs_itself_alone_and_nothing_is_glued_to_it(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    append_line(path, {"n": 1})
    whole = path.read_bytes()
    for cut in range(1, len(whole)):
        path.write_bytes(whole + whole[:cut])
        append_line(path, {"n": 2})
        assert [record["n"] for record in read_lines(path)] == ([1, 1, 2] if whole[:cut] == whole[:-1] else [1, 2])


def test_a_flipped_bit_is_noticed(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    append_line(path, {"loss": 2.5})
    path.write_bytes(path.read_bytes().replace(b"2.5", b"2.4"))
    assert list(read_lines(path)) == []


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path) -> None:
    path = tmp_path / "file.json"
    write_text(path, "old")
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"x": float("nan")})
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.json"]
    with pytest.raises(UserError, match="cannot create the folder"):
        write_text(path / "below" / "file", "x")


def test_a_reader_follows_a_live_file_over_rotations_without_loss(tmp_path) -> None:
    writer = TelemetryWriter(tmp_path, max_bytes=1500, flush_seconds=0)
    reader = TelemetryReader(tmp_path)
    seen: list[int] = []
    for step in range(1, 41):
        writer.write(step_record(step))
        if step % 3 == 0:
            seen += [record.step for record in reader.poll()]
    writer.flush()
    seen += [record.step for record in reader.poll()]
    assert seen == list(range(1, 41))
    assert [record.step for record in read_telemetry(tmp_path)] == seen
    assert len(list(tmp_path.glob("telemetry.*.jsonl"))) > 5


def test_a_rotation_while_the_reader_reads_loses_nothing(tmp_path, monkeypatch) -> None:
    writer = TelemetryWriter(tmp_path, max_bytes=1500, flush_seconds=0)
    reader = TelemetryReader(tmp_path)
    writer.write(step_record(1))
    assert len(reader.poll()) == 1
    plain, steps = TelemetryReader._new_bytes, iter(range(2, 21))

    def new_bytes(self: TelemetryReader, path: Path) -> bytes:
        if path.name == TELEMETRY_FILE:  # the writer goes on between the look at the folder and the file
            for step in itertools.islice(steps, 7):
                writer.write(step_record(step))
        return plain(self, path)

    monkeypatch.setattr(TelemetryReader, "_new_bytes", new_bytes)
    assert [record.step for record in reader.poll()] == list(range(2, 21))


def test_a_reader_waits_for_the_end_of_a_line(tmp_path) -> None:
    writer = TelemetryWriter(tmp_path)
    writer.write(EventRecord(kind="note", time=0.0, step=0, tokens=0))
    path = tmp_path / TELEMETRY_FILE
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    reader = TelemetryReader(tmp_path)
    assert reader.poll() == []
    path.write_bytes(whole)
    assert len(reader.poll()) == 1


def test_requests_are_taken_in_order_until_acknowledged(tmp_path) -> None:
    inbox = ControlInbox(tmp_path)
    first = ChangeRequest(change=SetLearningRateScale(scale=0.7), reason="loss spikes")
    second = ChangeRequest(change=SetMicroBatch(micro_batch_size=4))
    send_request(tmp_path, first)
    send_request(tmp_path, second)
    assert inbox.next_request() == first
    assert ControlInbox(tmp_path).next_request() == first, "a restarted trainer finds it again"
    inbox.done(first.change_id)
    assert inbox.next_request() == second
    inbox.done(second.change_id)
    assert inbox.next_request() is None


@pytest.mark.parametrize("content", ["", "{", '{"change": {"kind": "format_disk"}}', "\x00\xff", '{"change_id": 3}'])
def test_a_malformed_request_is_set_aside(tmp_path, content: str) -> None:
    inbox = ControlInbox(tmp_path)
    (tmp_path / "control" / "0-x.json").write_text(content)
    good = ChangeRequest(change=SetLearningRateScale(scale=0.7))
    send_request(tmp_path, good)
    assert inbox.next_request() == good
    assert (tmp_path / "control" / "0-x.bad").exists()


def test_a_run_whose_control_folder_is_removed_goes_on(tmp_path) -> None:
    inbox = ControlInbox(tmp_path)
    (tmp_path / "control").rmdir()
    assert inbox.next_request() is None
    request = ChangeRequest(change=SetLearningRateScale(scale=0.7))
    send_request(tmp_path, request)
    assert inbox.next_request() == request


def test_what_is_written_may_be_read_by_those_the_umask_allows(tmp_path) -> None:
    before = os.umask(0o022)
    try:
        write_text(tmp_path / "file", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644


def test_outcomes_round_trip_and_half_written_ones_are_none(tmp_path) -> None:
    outcome = Outcome(kind="ok", tokens_per_second=10.0, held_out_loss=2.0)
    write_outcome(tmp_path, outcome)
    assert read_outcome(tmp_path) == outcome
    (tmp_path / "outcome.json").write_text((tmp_path / "outcome.json").read_text()[:20])
    assert read_outcome(tmp_path) is None
    assert read_outcome(tmp_path / "missing") is None
