"""What TensorBoard and MLflow get, over restarts and failures. A stand-in plays MLflow and keeps what it is told."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from engine.config import LoggingOptions, RunConfig
from engine.errors import UserError
from engine.logging_sinks import MetricSinks
from engine.spec import ModelSpec, Workload

pytestmark = pytest.mark.unit


@pytest.fixture
def config() -> RunConfig:
    model = ModelSpec(num_layers=1, hidden_size=8, num_heads=1, num_kv_heads=1, head_dim=8, ffn_size=8, vocab_size=257)
    return RunConfig(name="sinks", model=model, workload=Workload(sequence_length=8, total_tokens=64))


class FakeClient:
    """The part of ``mlflow.MlflowClient`` that is used."""

    runs: ClassVar[dict[str, dict[str, Any]]] = {}
    down: ClassVar[bool] = False

    def __init__(self, tracking_uri: str) -> None:
        if "unreachable" in tracking_uri:
            raise ConnectionError("nobody answers")

    def get_experiment_by_name(self, name: str) -> None:
        assert name == "paretune"

    def create_experiment(self, name: str) -> str:
        return "7"

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        run_id = f"run{len(self.runs)}"
        self.runs[run_id] = {"name": run_name, "params": {}, "metrics": [], "status": "RUNNING"}
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id))

    def update_run(self, run_id: str, status: str) -> None:
        self.runs[run_id]["status"] = status

    def log_param(self, run_id: str, name: str, value: str) -> None:
        self.runs[run_id]["params"][name] = value

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        if self.down:
            raise ConnectionError("server gone")
        assert len(metrics) <= 1000
        self.runs[run_id]["metrics"] += metrics

    def set_terminated(self, run_id: str) -> None:
        self.runs[run_id]["status"] = "FINISHED"


@pytest.fixture
def mlflow_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, dict[str, Any]]]:
    module = ModuleType("mlflow")
    module.MlflowClient = FakeClient  # type: ignore[attr-defined]
    module.entities = SimpleNamespace(  # type: ignore[attr-defined]
        Metric=lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step)
    )
    monkeypatch.setitem(sys.modules, "mlflow", module)
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    FakeClient.runs.clear()
    yield FakeClient.runs
    FakeClient.down = False


def test_nothing_asked_for_writes_nothing(tmp_path: Path, config: RunConfig) -> None:
    sinks = MetricSinks(LoggingOptions(), tmp_path, config)
    sinks.log(1, {"loss": 1.0})
    sinks.close()
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_shows_a_resumed_run_once(tmp_path: Path, config: RunConfig) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, value in ((1, 1.0), (3, 2.0)):  # the second process resumes at step 3, the first had come to 5
        sinks = MetricSinks(LoggingOptions(tensorboard=True), tmp_path, config)
        for step in range(start, 6):
            sinks.log(step, {"loss": value, "grad_norm/attention": 0.5})
        sinks.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
    assert len(events.Scalars("grad_norm/attention")) == 5


def test_mlflow_gets_settings_and_all_metrics(
    tmp_path: Path, config: RunConfig, mlflow_runs: dict[str, dict[str, Any]]
) -> None:
    sinks = MetricSinks(LoggingOptions(mlflow_uri="http://server"), tmp_path, config)
    for step in range(1, 251):
        sinks.log(step, {"loss": 1 / step})
    sinks.close()
    (run,) = mlflow_runs.values()
    assert [metric.step for metric in run["metrics"]] == list(range(1, 251))
    assert run["name"] == "sinks"
    assert run["params"]["workload.total_tokens"] == "64"
    assert run["status"] == "FINISHED"


def test_a_resumed_run_goes_on_in_its_mlflow_run(
    tmp_path: Path, config: RunConfig, mlflow_runs: dict[str, dict[str, Any]]
) -> None:
    for step in (1, 2):
        sinks = MetricSinks(LoggingOptions(mlflow_uri="http://server"), tmp_path, config)
        sinks.log(step, {"loss": 1.0})
        sinks.close()
    (run,) = mlflow_runs.values()
    assert [metric.step for metric in run["metrics"]] == [1, 2]


def test_a_server_that_goes_away_does_not_end_the_run(
    tmp_path: Path, config: RunConfig, mlflow_runs: dict[str, dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    sinks = MetricSinks(LoggingOptions(mlflow_uri="http://server"), tmp_path, config)
    FakeClient.down = True
    with caplog.at_level(logging.WARNING):
        for step in range(1000):
            sinks.log(step, {"loss": 1.0})
        sinks.close()
    assert [record.getMessage() for record in caplog.records] == ["MLflow failed and gets no more metrics: server gone"]


def test_an_address_that_does_not_answer_is_told(
    tmp_path: Path, config: RunConfig, mlflow_runs: dict[str, dict[str, Any]]
) -> None:
    with pytest.raises(UserError, match=r"'http://unreachable' can't be used: nobody answers"):
        MetricSinks(LoggingOptions(mlflow_uri="http://unreachable"), tmp_path, config)


@pytest.mark.parametrize(
    ("module", "options"),
    [("torch.utils.tensorboard", LoggingOptions(tensorboard=True)), ("mlflow", LoggingOptions(mlflow_uri="x"))],
)
def test_a_missing_package_is_told_with_the_extra(
    tmp_path: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch, module: str, options: LoggingOptions
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delattr("torch.utils.tensorboard", raising=False)
    with pytest.raises(UserError, match="is not installed") as caught:
        MetricSinks(options, tmp_path, config)
    assert ".[logging]" in str(caught.value.hint)
