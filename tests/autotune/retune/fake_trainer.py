"""A training loop without a model that speaks the control protocol: losses follow a formula of the learning rates used.

As a job: ``fake_trainer.py RUN.yaml --folder FOLDER``; as branches: ``fake_trainer.py --at-once N FOLDER...``.
Loss = floor + progress term + noise floor of the current rate + whatever built up while the rate was too high.
The run file's ``origin`` sets what is emulated: ``best_rate``; ``live_penalty_above``, a scale beyond which the live
run alone gets worse; ``oom_above``, a micro-batch that is too large; ``wait_for``, kinds of ledger entries that the
live run waits for at steps 5 and 160, so that no test depends on how fast the retuner starts. For the same reason the
live run is slow while there are forks.
"""

import json
import math
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from autotune.retune.ledger import Ledger
from engine.checkpoint_folders import MANIFEST_FILE
from engine.config import RunConfig, load_run
from engine.control import (
    PLANNED_STOP_EXIT_CODE,
    ControlInbox,
    RollBack,
    SetLearningRateScale,
    SetMicroBatch,
    Stop,
    TakeCheckpoint,
)
from engine.outcome import OUTCOME_FILE, Outcome, write_outcome
from engine.schedule import learning_rate_at
from engine.telemetry import AckRecord, EventRecord, StepRecord, TelemetryWriter


class FakeRun:
    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self.settings = config.origin
        self.state = {"step": 0, "progress": 0.0, "damage": 0.0, "scale": config.runtime.learning_rate_scale}
        self.state["micro_batch"] = config.plan.micro_batch_size
        if config.branch:
            self.load(Path(config.branch.checkpoint))
            self.state["scale"] = config.branch.learning_rate_scale
        elif paths := sorted(folder.glob("checkpoints/step-*")):
            self.load(paths[-1])
        self.patient_until = time.time() + 30
        self.first = self.state["step"]
        self.end = self.first + config.branch.num_steps if config.branch else config.num_steps
        (folder / OUTCOME_FILE).unlink(missing_ok=True)
        self.telemetry = TelemetryWriter(folder, flush_seconds=0.02)
        self.inbox = None if config.branch else ControlInbox(folder)

    def load(self, checkpoint: Path) -> None:
        self.state = json.loads((checkpoint / "state.json").read_text())

    def save(self) -> Path:
        path = self.folder / "checkpoints" / f"step-{self.state['step']:08d}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "state.json").write_text(json.dumps(self.state))
        (path / MANIFEST_FILE).write_text("{}")
        return path

    def record(self, kind: str, data: dict[str, object]) -> None:
        event = EventRecord(kind=kind, time=time.time(), step=self.state["step"], tokens=0, data=data)  # type: ignore[arg-type]
        self.telemetry.write(event)

    def rate(self, step: int) -> float:
        config = self.config
        total = config.num_steps * config.tokens_per_step
        rate = learning_rate_at(config.hyperparameters, step * config.tokens_per_step, total) * self.state["scale"]
        if config.branch and config.branch.anneal_steps:
            rate *= min(1.0, (self.end - step) / config.branch.anneal_steps + 0.05)
        return rate

    def smooth_loss(self) -> float:
        return 1.5 + 3.5 / math.sqrt(1 + self.state["progress"] / 20) + self.state["damage"]

    def advance(self) -> tuple[float, float]:
        state = self.state
        state["step"] += 1
        rate = self.rate(state["step"])
        relative = rate / float(self.settings.get("best_rate", "1e-3"))
        # Rates up to twice the best pay; beyond that they do harm that heals slowly.
        state["progress"] += min(relative, 2.0)
        state["damage"] = max(0.9 * state["damage"], 0.0) + max(0.03 * (relative - 2.5), 0.0)
        limit = float(self.settings.get("live_penalty_above", "inf"))
        if self.config.branch is None and state["scale"] > limit:
            state["damage"] += 0.3
        noise = random.Random(state["step"]).gauss(0, 0.02)
        return rate, self.smooth_loss() * math.exp(noise) + 0.05 * min(relative, 5.0)

    def apply(self, change: object) -> dict[str, object]:
        if isinstance(change, SetLearningRateScale):
            self.state["scale"] = change.scale
        elif isinstance(change, SetMicroBatch):
            self.state["micro_batch"] = change.micro_batch_size
        elif isinstance(change, TakeCheckpoint):
            return {"path": str(self.save())}
        elif isinstance(change, RollBack):
            before = self.state["step"]
            self.load(Path(change.checkpoint))
            self.state["scale"] = change.scale
            for path in self.folder.glob("checkpoints/step-*"):
                shutil.rmtree(path)
            self.save()
            return {"from_step": before, "to_step": self.state["step"]}
        elif isinstance(change, Stop):
            self.save()
        return {}

    def run(self) -> int:
        self.record("start", {"pid": os.getpid()})
        stopped: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
        seconds = 0.0015 if self.config.branch is None else 0.0
        awaited = dict(zip((5, 160), self.settings.get("wait_for", "").split(), strict=False))
        high = 0
        while self.state["step"] < self.end:
            if self.config.branch is None and self.is_waiting(awaited.get(self.state["step"])):
                time.sleep(0.01)
                self.telemetry.flush()
                if not self.inbox or not self.inbox.next_request():
                    continue
            while self.inbox and (request := self.inbox.next_request()):
                data = self.apply(request.change)
                step, now = self.state["step"], time.time()
                ack = AckRecord(time=now, step=step, tokens=0, change_id=request.change_id, accepted=True, data=data)
                self.telemetry.write(ack)
                self.inbox.done(request.change_id)
                if isinstance(request.change, Stop):
                    return self.close("interrupted", PLANNED_STOP_EXIT_CODE)
            if stopped:
                self.save()
                return self.close("interrupted", 128 + stopped[0])
            if self.state["micro_batch"] > float(self.settings.get("oom_above", "inf")):
                return self.close("oom", 1)
            rate, loss = self.advance()
            time.sleep(0.02 if (self.folder / "forks").exists() else seconds * (1 + 4 / self.state["micro_batch"]))
            self.telemetry.write(self.step_record(rate, loss, seconds * (1 + 4 / self.state["micro_batch"])))
            high = high + 1 if loss > 7.0 else 0
            if high >= 5:
                return self.close("diverged", 1)
        if self.config.checkpoint.at_end:
            self.save()
        return self.close("ok", 0)

    def is_waiting(self, kind: str | None) -> bool:
        if kind is None or time.time() > self.patient_until:
            return False
        return all(entry.kind != kind for entry in Ledger(self.folder).entries())

    def step_record(self, rate: float, loss: float, seconds: float) -> StepRecord:
        return StepRecord(
            time=time.time(),
            step=self.state["step"],
            tokens=self.state["step"] * self.config.tokens_per_step,
            loss=loss,
            learning_rate=rate,
            learning_rate_scale=self.state["scale"],
            grad_norm=1.0,
            step_seconds=seconds,
            data_seconds=0.0,
            compute_seconds=0.0,
            optimizer_seconds=0.0,
            memory_bytes=1000,
            micro_batch_size=self.state["micro_batch"],
        )

    def close(self, kind: str, exit_code: int) -> int:
        held_out = self.smooth_loss() if kind == "ok" else None
        outcome = Outcome(kind=kind, held_out_loss=held_out, num_steps=self.state["step"])  # type: ignore[arg-type]
        write_outcome(self.folder, outcome)
        self.record("end", {"outcome": kind, "exit_code": exit_code})
        self.telemetry.flush()
        return exit_code


def main(arguments: list[str]) -> int:
    if arguments[0] == "--at-once":
        return max(FakeRun(load_run(Path(name) / "run.yaml")[0], Path(name)).run() for name in arguments[2:])
    run, _, folder = arguments
    return FakeRun(load_run(run)[0], Path(folder)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
