"""Tiny runs for tests of the trainer: a corpus of a few documents, a model of a few thousand weights, fp64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.config import RunConfig, dump_run
from engine.control import Change, ChangeRequest, send_request
from engine.outcome import Outcome, read_outcome
from engine.schema import parse
from engine.telemetry import AckRecord, EventRecord, StepRecord, read_telemetry
from engine.train import main

LENGTH = 16
GLOBAL_BATCH = 4
NUM_STEPS = 6
MODEL = {
    "num_layers": 2, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "ffn_size": 32,
    "vocab_size": 258, "max_positions": LENGTH,
}  # fmt: skip


def write_corpus(folder: Path) -> Path:
    """Documents that differ, enough for some to be held out."""
    folder.mkdir()
    for number in range(24):
        words = [f"line {number * line % 17} of document {number} says {line * line}" for line in range(12)]
        (folder / f"{number:02d}.txt").write_text("\n".join(words))
    return folder


def tiny_run(corpus: Path, **sections: dict[str, Any]) -> RunConfig:
    """A run of six steps; ``sections`` change single values of the run file."""
    data: dict[str, Any] = {
        "model": MODEL,
        "workload": {
            "data": {"paths": [str(corpus)], "holdout_ratio": 0.2},
            "sequence_length": LENGTH,
            "total_tokens": LENGTH * GLOBAL_BATCH * NUM_STEPS,
        },
        "hyperparameters": {"global_batch_size": GLOBAL_BATCH, "learning_rate": 0.01, "dropout": 0.1},
        "plan": {"precision": "fp64", "micro_batch_size": 2},
        "runtime": {"measure_memory": False},
        "evaluation": {"max_tokens": 512},
    }
    for section, values in sections.items():
        data[section] = {**data.get(section, {}), **values}
    return parse(RunConfig, data)


def train(config: RunConfig, folder: Path, *flags: str) -> int:
    """Run the training program in this process; its exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(dump_run(config))
    return main([str(folder / "run.yaml"), *flags])


def ask(folder: Path, change: Change) -> str:
    """Put a request into the inbox; its id."""
    request = ChangeRequest(change=change)
    send_request(folder, request)
    return request.change_id


def outcome_of(folder: Path) -> Outcome:
    """The outcome in the folder, which must be there."""
    outcome = read_outcome(folder)
    assert outcome is not None
    return outcome


def steps(folder: Path) -> dict[int, StepRecord]:
    """The newest record of each step."""
    return {record.step: record for record in read_telemetry(folder) if isinstance(record, StepRecord)}


def events(folder: Path, kind: str) -> list[EventRecord]:
    """All events of one kind."""
    return [record for record in read_telemetry(folder) if isinstance(record, EventRecord) and record.kind == kind]


def acks(folder: Path) -> dict[str, AckRecord]:
    """Acknowledgements by change id."""
    return {record.change_id: record for record in read_telemetry(folder) if isinstance(record, AckRecord)}


def trajectory(folder: Path) -> list[tuple[int, float | None, float, float | None]]:
    """Step, loss, learning rate and gradient norm of each step: equal only if batches and random draws were, too."""
    return [(r.step, r.loss, r.learning_rate, r.grad_norm) for _, r in sorted(steps(folder).items())]
