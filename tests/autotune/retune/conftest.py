"""A job whose training loop is emulated: everything but the model is real."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.retune.supervisor import Supervisor
from engine.atomic import write_text
from engine.config import RunConfig, dump_run
from engine.plan import Plan
from engine.spec import Hyperparameters, ModelSpec, Workload

FAKE_TRAINER = (sys.executable, "-P", str(Path(__file__).with_name("fake_trainer.py")))

MakeConfig = Callable[..., RunConfig]
RunJob = Callable[..., int]


@pytest.fixture
def make_config() -> MakeConfig:
    """The run file of an emulated job of ``num_steps`` steps."""

    def make(
        num_steps: int = 1000, *, scale: float = 1.0, wait_for: str = "checkpoint proposal", **origin: Any
    ) -> RunConfig:
        config = RunConfig(
            model=ModelSpec(
                num_layers=1, hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=8, ffn_size=16, vocab_size=257
            ),
            workload=Workload(sequence_length=8, total_tokens=num_steps * 8 * 8),
            hyperparameters=Hyperparameters(
                global_batch_size=8, learning_rate=1e-3, schedule="cosine", warmup_ratio=0.02
            ),
            plan=Plan(micro_batch_size=4),
            origin={"wait_for": wait_for} | {key: str(value) for key, value in origin.items()},
        )
        return config.changed(runtime=config.runtime.changed(learning_rate_scale=scale))

    return make


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The folder of a job."""
    return tmp_path / "job"


@pytest.fixture
def run_job(job: Path) -> RunJob:
    """Run a job under the supervisor to its end; the exit code."""

    def run(config: RunConfig, every: str | None = "40steps", **options: Any) -> int:
        job.mkdir(exist_ok=True)
        write_text(job / "run.yaml", dump_run(config))
        return Supervisor(job, every=every, engine=FAKE_TRAINER, branches=FAKE_TRAINER, **options).run()

    return run
