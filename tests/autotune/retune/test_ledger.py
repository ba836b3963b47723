"""The ledger survives kills, and what a restarted retuner takes from it is what happened."""

from pathlib import Path

import pytest

from autotune.retune.ledger import FIRST_SPAN, LEDGER_FILE, NEXT_SPAN, Ledger, costs, recall

pytestmark = pytest.mark.unit


def decide(ledger: Ledger, *, accepted: bool, rungs: int = 0, origin: str = "here") -> None:
    data = {"action": {"kind": "learning_rate", "origin": origin}}
    ledger.append("proposal", 10, "try", data, proposal_id="p")
    ledger.append(
        "decision", 20, "done", {"action": "learning_rate", "accepted": accepted, "rungs": rungs, "origin": origin}
    )


def test_a_torn_last_line_is_passed_over_and_nothing_glued_to_it(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.append("start", 0, "first")
    ledger.append("start", 5, "second")
    path = tmp_path / LEDGER_FILE
    path.write_bytes(path.read_bytes()[:-9])
    assert [entry.text for entry in ledger.entries()] == ["first"]
    ledger.append("start", 7, "third")
    assert [entry.text for entry in ledger.entries()] == ["first", "third"]


def test_a_changed_line_is_not_believed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.append("decision", 20, "x", {"action": "learning_rate", "accepted": False})
    path = tmp_path / LEDGER_FILE
    path.write_text(path.read_text().replace("false", "true "))
    assert ledger.entries() == []


def test_no_ledger_is_an_empty_one(tmp_path: Path) -> None:
    assert Ledger(tmp_path).entries() == []
    assert recall([]).span == FIRST_SPAN


def test_an_open_proposal_is_remembered_until_decided(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.append("proposal", 10, "try", {"action": {"kind": "learning_rate"}}, proposal_id="p")
    opened = recall(ledger.entries()).open_proposal
    assert opened is not None
    assert opened.proposal_id == "p"
    ledger.append("decision", 11, "no", {"action": "learning_rate", "accepted": False})
    assert recall(ledger.entries()).open_proposal is None


def test_an_accepted_rate_is_watched_until_the_watch_ends(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    decide(ledger, accepted=True, rungs=4)
    memory = recall(ledger.entries())
    assert memory.watched is not None
    assert (memory.span, memory.direction, memory.num_holds) == (NEXT_SPAN, "both", 0)
    ledger.append("watch", 30, "kept", {"kept": True})
    assert recall(ledger.entries()).watched is None


def test_a_short_step_leads_on_in_its_direction(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    decide(ledger, accepted=True, rungs=-2)
    assert recall(ledger.entries()).direction == "down"


def test_trials_that_change_nothing_look_closer_each_time(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    spans = []
    for _ in range(3):
        decide(ledger, accepted=False)
        spans.append(recall(ledger.entries()).span)
    assert spans == [NEXT_SPAN, 1, 1]
    assert recall(ledger.entries()).num_holds == 3


def test_a_slower_start_is_tried_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    decide(ledger, accepted=False, origin="start")
    memory = recall(ledger.entries())
    assert memory.num_starts == 1
    assert memory.slower_start is None
    assert memory.span == NEXT_SPAN


def test_a_slower_start_that_catches_up_is_remembered_until_it_is_gone_on_with(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    held = {"action": "learning_rate", "accepted": False, "origin": "start", "slower_start": "/s/step-00000155"}
    ledger.append("proposal", 10, "try", {"action": {"kind": "learning_rate", "origin": "start"}})
    ledger.append("decision", 20, "near", held)
    assert recall(ledger.entries()).slower_start == "/s/step-00000155"
    ledger.append("proposal", 30, "on", {"action": {"kind": "learning_rate", "origin": "start"}})
    memory = recall(ledger.entries())
    assert (memory.slower_start, memory.num_starts) == (None, 2)


def test_rollbacks_are_counted_by_cause_unless_they_undo_a_change(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.append("roll_back", 10, "diverged", {"cause": "divergence", "accepted": True})
    decide(ledger, accepted=True, rungs=4)
    ledger.append("roll_back", 30, "worse", {"cause": "watch", "accepted": True})
    memory = recall(ledger.entries())
    assert memory.recoveries == {"divergence": 1}
    assert memory.watched is None
    assert memory.num_holds == 1


def test_costs_are_summed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    ledger.append("cost", 1, "", {"cpu_seconds": 0.5, "wall_seconds": 10.0})
    ledger.append("cost", 2, "", {"cpu_seconds": 0.25, "wall_seconds": 5.0})
    ledger.append(
        "canary", 2, "", {"action": "learning_rate", "num_steps": 96, "cpu_seconds": 12.0, "wall_seconds": 8.0}
    )
    total = costs(ledger.entries())
    assert (total.retuner_cpu_seconds, total.canary_cpu_seconds, total.num_canaries) == (0.75, 12.0, 1)
