"""Stands in for the engine: reads ``run.yaml`` in the working folder and ends in the way its first argument says.

Run as a script. ``ok [SECONDS]`` writes telemetry and an outcome whose values are functions of the run file;
``until PATH`` does so once there is such a file.
"""

import os
import signal
import sys
import time
from pathlib import Path

from engine.config import load_run
from engine.outcome import Outcome, RankFailure, write_failure, write_outcome
from engine.telemetry import StepRecord, TelemetryWriter

HERE = Path()


def step(writer: TelemetryWriter, number: int) -> None:
    """One step of telemetry."""
    record = StepRecord(
        time=time.time(), step=number, tokens=number * 100, loss=3.0, learning_rate=1e-3, learning_rate_scale=1.0,
        grad_norm=1.0, step_seconds=0.1, data_seconds=0.0, compute_seconds=0.1, optimizer_seconds=0.0,
    )  # fmt: skip
    writer.write(record, flush=True)


def main() -> int:
    mode, *rest = sys.argv[1:]
    config, _ = load_run(HERE / "run.yaml")
    writer = TelemetryWriter(HERE)
    step(writer, 1)
    if mode == "until":  # somebody makes a file
        while not Path(rest[0]).exists():
            time.sleep(0.05)
        mode, rest = "ok", []
    if mode == "ok":
        time.sleep(float(rest[0]) if rest else 0.0)
        learning_rate = config.hyperparameters.learning_rate
        outcome = Outcome(
            kind="ok", tokens_per_second=1000.0 * config.plan.micro_batch_size, peak_memory_bytes=10**6,
            held_out_loss=2.0 + abs(learning_rate - 1e-3), corpus_hash=rest[1] if len(rest) > 1 else "text",
        )  # fmt: skip
        write_outcome(HERE, outcome)
    elif mode == "nan":
        write_outcome(HERE, Outcome(kind="nan", detail="loss is not finite"))
        return 1
    elif mode == "diverged":
        write_outcome(HERE, Outcome(kind="diverged", detail="loss 9 above 4"))
        return 1
    elif mode == "user":
        print("error: the corpus is empty\nhint: name another", file=sys.stderr)
        return 2
    elif mode == "rank-oom":  # rank 1 ran out of memory, rank 0 only lost its peer
        write_failure(HERE, RankFailure(kind="oom", detail="out of memory", rank=1, time=time.time()))
        write_outcome(HERE, Outcome(kind="infra", detail="lost a peer", num_steps=1))
        return 1
    elif mode == "crash":
        raise RuntimeError("something broke")
    elif mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif mode == "abort":
        os.abort()
    elif mode == "rank-killed":  # as torchrun tells it
        print(f"  exitcode  : -{rest[0]} (pid: 7)\n  error_file: <N/A>", file=sys.stderr)
        return 1
    elif mode == "memory":
        block = bytearray(600 * 2**20)
        block[::4096] = b"x" * len(block[::4096])
        time.sleep(60)
    elif mode == "hang":
        time.sleep(60)
    elif mode == "slow":
        for number in range(2, 600):
            time.sleep(0.1)
            step(writer, number)
    elif mode == "family":  # a grandchild in a session of its own, as torchrun starts its ranks
        import subprocess

        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        time.sleep(60)
    elif mode == "polite":
        signal.signal(signal.SIGTERM, lambda *_: (HERE / "said-goodbye").touch() or sys.exit(143))
        time.sleep(60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
