"""Metrics to TensorBoard and MLflow, beside the telemetry."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from engine.atomic import write_text
from engine.config import LoggingOptions, RunConfig, dump_run
from engine.errors import UserError

_log = logging.getLogger(__name__)

_RUN_ID_FILE = "mlflow_run_id"
_MAX_PENDING = 200  # metrics; MLflow takes up to 1000 in a request
_MAX_PENDING_SECONDS = 10.0
_MAX_PARAMETER_CHARS = 500  # the limit of MLflow's oldest servers
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}
"""MLflow's own settings would hold a training run up for minutes when its server is away; the user's go first."""


class _Sink(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""

    def close(self) -> None:
        """Write what is pending and end."""


class MetricSinks:
    """Everything that ``options`` ask for. With nothing asked for it does nothing.

    A sink that fails while training runs is told once and left out from then on: metrics elsewhere are not worth a run.

    Args:
        options: Which sinks.
        run_folder: The run's folder; a run that is resumed in it goes on in the same TensorBoard folder and MLflow run.
        config: The run, written to each sink once.

    Raises:
        UserError: A package is missing, or the MLflow address doesn't answer.
    """

    def __init__(self, options: LoggingOptions, run_folder: Path, config: RunConfig) -> None:
        self._sinks: list[_Sink] = []
        if options.tensorboard:
            self._sinks.append(_TensorBoard(run_folder, config))
        if options.mlflow_uri is not None:
            self._sinks.append(_MLflow(options.mlflow_uri, run_folder, config))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of one step."""
        for sink in list(self._sinks):
            self._attempt(sink, lambda sink=sink: sink.log(step, metrics))  # type: ignore[misc]

    def close(self) -> None:
        """Write what is pending and end."""
        for sink in list(self._sinks):
            self._attempt(sink, sink.close)
        self._sinks.clear()

    def _attempt(self, sink: _Sink, action: Any) -> None:
        try:
            action()
        except Exception as error:  # whatever a foreign library raises
            _log.warning("%s failed and gets no more metrics: %s", type(sink).__name__.lstrip("_"), error)
            self._sinks.remove(sink)


class _TensorBoard:
    """Event files in ``<run folder>/tensorboard``."""

    def __init__(self, run_folder: Path, config: RunConfig) -> None:
        try:
            from torch.utils import tensorboard
        except ImportError:
            raise _missing("tensorboard", "logging.tensorboard") from None
        self._module: ModuleType = tensorboard
        self._folder = run_folder / "tensorboard"
        self._text = dump_run(config)
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            # What an earlier process wrote of this step and later ones was lost with it, and is hidden.
            self._writer = self._module.SummaryWriter(str(self._folder), purge_step=step)
            self._writer.add_text("run", f"```yaml\n{self._text}```", step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class _MLflow:
    """One MLflow run in the experiment ``paretune``; metrics are sent in batches."""

    def __init__(self, uri: str, run_folder: Path, config: RunConfig) -> None:
        try:
            import mlflow
        except ImportError:
            raise _missing("mlflow", "logging.mlflow_uri") from None
        for name, value in _PATIENCE.items():
            os.environ.setdefault(name, value)
        self._metric: Any = mlflow.entities.Metric
        self._pending: list[Any] = []
        self._last_sent = time.monotonic()
        try:
            self._client: Any = mlflow.MlflowClient(tracking_uri=uri)
            self._run_id = self._resumed(run_folder) or self._started(run_folder, config)
        except Exception as error:  # of the library, of HTTP, of the system
            raise UserError(
                f"MLflow at {uri!r} can't be used: {error}",
                hint="correct logging.mlflow_uri (such as http://host:5000 or sqlite:///mlflow.db), or set it to null",
            ) from None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = int(time.time() * 1000)
        self._pending += [self._metric(name, float(value), now_ms, step) for name, value in metrics.items()]
        if len(self._pending) >= _MAX_PENDING or time.monotonic() - self._last_sent > _MAX_PENDING_SECONDS:
            self._send()

    def close(self) -> None:
        self._send()
        self._client.set_terminated(self._run_id)

    def _send(self) -> None:
        pending, self._pending = self._pending, []
        self._last_sent = time.monotonic()
        for start in range(0, len(pending), _MAX_PENDING):
            self._client.log_batch(self._run_id, metrics=pending[start : start + _MAX_PENDING])

    def _resumed(self, run_folder: Path) -> str | None:
        path = run_folder / _RUN_ID_FILE
        if not path.is_file():
            return None
        run_id = path.read_text(encoding="utf-8").strip()
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _started(self, run_folder: Path, config: RunConfig) -> str:
        experiment = self._client.get_experiment_by_name("paretune")
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment("paretune")
        run_id = str(self._client.create_run(experiment_id, run_name=config.name).info.run_id)
        for name, value in _flat(config.to_data()):
            self._client.log_param(run_id, name, str(value)[:_MAX_PARAMETER_CHARS])
        write_text(run_folder / _RUN_ID_FILE, f"{run_id}\n")
        return run_id


def _flat(data: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested settings as dotted names and values, those that are null left out."""
    result: list[tuple[str, Any]] = []
    for key, value in data.items():
        if isinstance(value, Mapping):
            result += _flat(value, f"{prefix}{key}.")
        elif value is not None:
            result.append((f"{prefix}{key}", value))
    return result


def _missing(package: str, setting: str) -> UserError:
    return UserError(
        f"{setting} needs the package {package}, which is not installed",
        hint="pip install -e '.[logging]' in the checkout, or switch it off in the run file",
    )
