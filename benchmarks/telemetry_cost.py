"""CPU time that telemetry and the retuner (without canaries) take of a run with steps of 100 ms.

    python benchmarks/telemetry_cost.py [--steps 2400]

Telemetry: blocks of steps of real arithmetic with and without a record each, in turns A B B A, by process CPU time; and
the cost of a record measured alone. The retuner: its own process beside an emulated run in real time, which it follows,
assesses, fits and makes proposals for; the forks of its trials fail at once, so that its own cost is left.

Writes ``benchmarks/results/telemetry_cost.json``.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from autotune.retune.canary import turns
from autotune.retune.ledger import Ledger, costs
from engine.atomic import make_folder, write_json, write_text
from engine.config import RunConfig, dump_run
from engine.control import ControlInbox, SetMicroBatch, TakeCheckpoint
from engine.plan import Plan
from engine.spec import Hyperparameters, ModelSpec, Workload
from engine.telemetry import AckRecord, EventRecord, StepRecord, TelemetryWriter

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "telemetry_cost.json"
STEP_SECONDS = 0.1
GROUPS = ("embedding", "attention", "ffn", "norm", "head")
NUM_BLOCKS, BLOCK_STEPS = 160, 2
NO_FORKS = f"{sys.executable} -c 'raise SystemExit(1)'"


def step_record(step: int, micro_batch_size: int = 16) -> StepRecord:
    """A record as the engine writes it, with a falling, noisy loss."""
    noise = np.random.default_rng(step).normal(0, 0.02)
    norms = {group: 0.1234567 + 0.01 * index for index, group in enumerate(GROUPS)}
    return StepRecord(
        time=time.time(),
        step=step,
        tokens=step * 2048,
        loss=float((1.5 + 4.0 / np.sqrt(1 + step / 30)) * np.exp(noise)),
        learning_rate=1e-3,
        learning_rate_scale=1.0,
        grad_norm=0.987654321,
        grad_norms=norms,
        step_seconds=STEP_SECONDS,
        data_seconds=0.0001234,
        compute_seconds=0.0876543,
        optimizer_seconds=0.0123456,
        memory_bytes=400_000_000,
        micro_batch_size=micro_batch_size,
    )


def record_seconds(folder: Path, num_records: int = 3000) -> float:
    """CPU seconds of making and writing one record, flushed as in a run of 100 ms steps: every fifth."""
    writer = TelemetryWriter(folder)
    start = time.process_time()
    for step in range(1, num_records + 1):
        writer.write(step_record(step), flush=step % 5 == 0)
    return (time.process_time() - start) / num_records


def turns_ratio(folder: Path) -> tuple[float, list[float]]:
    """Median extra CPU time of steps with telemetry over neighbouring ones without, and the quartiles of the pairs."""
    matrix = np.random.default_rng(0).normal(size=(400, 400))
    num_products = max(1, round(STEP_SECONDS / _cpu_seconds(lambda: matrix @ matrix)))
    writer = TelemetryWriter(folder)

    def block(with_telemetry: bool) -> float:
        start = time.process_time()
        for step in range(BLOCK_STEPS):
            for _ in range(num_products):
                matrix @ matrix
            if with_telemetry:
                writer.write(step_record(step + 1), flush=step % 5 == 0)
        return time.process_time() - start

    seconds = [(with_telemetry, block(with_telemetry)) for with_telemetry in turns(NUM_BLOCKS)]
    ratios = []
    for first, second in zip(seconds[::2], seconds[1::2], strict=True):
        plain, told = sorted((first, second))
        ratios.append(told[1] / plain[1] - 1)
    return median(ratios), [float(value) for value in np.quantile(ratios, [0.25, 0.75])]


def _cpu_seconds(action: object, num_times: int = 20) -> float:
    assert callable(action)
    action()
    start = time.process_time()
    for _ in range(num_times):
        action()
    return (time.process_time() - start) / num_times


class EmulatedRun:
    """A run in real time that computes nothing: it writes records and answers requests.

    Args:
        folder: The run folder.
        num_steps: Steps to do.
    """

    def __init__(self, folder: Path, num_steps: int) -> None:
        self._folder, self._num_steps = folder, num_steps
        self._writer, self._inbox = TelemetryWriter(folder), ControlInbox(folder)
        self._micro_batch_size = 16

    def run(self) -> None:
        """Do all steps."""
        self._event("start", 0, {"pid": os.getpid()})
        begin = time.monotonic()
        for step in range(1, self._num_steps + 1):
            time.sleep(max(0.0, begin + step * STEP_SECONDS - time.monotonic()))
            self._writer.write(step_record(step, self._micro_batch_size))
            while request := self._inbox.next_request():
                self._answer(request.change_id, request.change, step)
        self._event("end", self._num_steps, {"outcome": "ok", "exit_code": 0})

    def _answer(self, change_id: str, change: object, step: int) -> None:
        data: dict[str, str] = {}
        if isinstance(change, TakeCheckpoint):
            path = make_folder(self._folder / "checkpoints" / f"step-{step:08d}")
            data["path"] = str(path)
        elif isinstance(change, SetMicroBatch):
            self._micro_batch_size = change.micro_batch_size
        now, tokens = time.time(), step * 2048
        self._writer.write(
            AckRecord(time=now, step=step, tokens=tokens, change_id=change_id, accepted=True, data=dict(data))
        )
        self._inbox.done(change_id)

    def _event(self, kind: str, step: int, data: dict[str, object]) -> None:
        event = {"kind": kind, "time": time.time(), "step": step, "tokens": 0, "data": data}
        self._writer.write(EventRecord.model_validate(event))


def retuner_seconds(folder: Path, num_steps: int, every: str) -> tuple[float, float, int]:
    """CPU seconds of the retuner beside such a run: in all, of its start alone; and the proposals it made."""
    config = RunConfig(
        model=ModelSpec(
            num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=4, head_dim=16, ffn_size=176, vocab_size=257
        ),
        workload=Workload(sequence_length=128, total_tokens=num_steps * 2048),
        hyperparameters=Hyperparameters(global_batch_size=16, schedule="constant"),
        plan=Plan(micro_batch_size=16),
    )
    write_text(folder / "run.yaml", dump_run(config))
    program = [sys.executable, "-P", "-m", "autotune.retune.controller"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [*program, str(folder), "--every", every, "--branches", NO_FORKS]
    retuner = subprocess.Popen(command, env=environment)
    EmulatedRun(folder, num_steps).run()
    retuner.wait()
    probe = "import time, autotune.retune.controller; print(time.process_time())"
    start = subprocess.run(
        [sys.executable, "-c", probe], env=environment, capture_output=True, text=True, check=True
    ).stdout
    entries = Ledger(folder).entries()
    proposals = sum(entry.kind == "proposal" for entry in entries)
    return costs(entries).retuner_cpu_seconds, float(start), proposals


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="What telemetry and the retuner cost.")
    parser.add_argument("--steps", type=int, default=2400, help="steps of 100 ms of the emulated run")
    parser.add_argument("--every", default="10s", help="how often the retuner looks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folders = [make_folder(Path(name) / part) for part in ("alone", "turns", "run")]
        alone = record_seconds(folders[0])
        ratio, quartiles = turns_ratio(folders[1])
        total, start, num_proposals = retuner_seconds(folders[2], options.steps, options.every)
    run_seconds = options.steps * STEP_SECONDS
    result = {
        "title": "What telemetry and the retuner cost",
        "setup": f"{os.cpu_count()} cores ({platform.machine()}) shared with other work; CPU seconds, steps of 100 ms",
        "lines": [
            f"Telemetry: {1e6 * alone:.0f} µs a step, {100 * alone / STEP_SECONDS:.2f} % of a step. In turns with steps"
            f" without it: {100 * ratio:+.2f} % (quartiles {100 * quartiles[0]:+.2f} and {100 * quartiles[1]:+.2f} %:"
            " less than the turns can tell).",
            "",
            f"Retuner without canaries, every {options.every}, {options.steps} steps, {num_proposals} proposals:"
            f" {total:.2f} CPU seconds, {100 * total / run_seconds:.2f} % of the run; {start:.2f} of them to start.",
        ],
        "step_seconds": STEP_SECONDS,
        "telemetry": {
            "cpu_seconds_per_record": alone,
            "ratio_of_step": alone / STEP_SECONDS,
            "ratio_in_turns": ratio,
            "quartiles_in_turns": quartiles,
        },
        "retuner": {
            "every": options.every,
            "num_steps": options.steps,
            "num_proposals": num_proposals,
            "cpu_seconds": total,
            "cpu_seconds_of_start": start,
            "ratio_of_run": total / run_seconds,
        },
    }
    print("\n".join(result["lines"]))
    write_json(RESULT, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
