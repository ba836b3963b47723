"""From what ``engine.probe --measure`` says of a machine to a cluster that the cost model can plan with.

Figures of devices and links come from single operations (``autotune.specs.measured``). What they leave open is fitted
to the small training steps of the probe with the cost model's own formulas: how many bytes this engine's operators
move, what a step costs the host under each kind of plan, how much longer communication takes within a step than alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from autotune.cost.coefficients import coefficients_on
from autotune.cost.columns import PlanColumns, encode
from autotune.cost.communication import LinkColumns
from autotune.cost.device_columns import DeviceColumns, SoftwareColumns
from autotune.cost.estimate import step_time
from autotune.cost.shapes import ModelShape
from autotune.cost.software import OWN_ENGINE, software_on
from autotune.cost.step_time import Scope
from autotune.specs.cluster import ClusterSpec
from autotune.specs.figures import MeasuredFigures
from autotune.specs.measured import MAX_INTERVAL, MIN_INTERVAL, device_figures, fit_attention, link_figures
from engine.measurement import Measurement, StepSample
from engine.plan import Plan, plan_table

SYNCHRONOUS = {
    "host_sharpness": 1.0,
    "kernel_us": 0.0,
    "wave_share": 0.0,
    "half_tile_ratio": 1.0,
    "misalignment": 0.0,
    "scalar_access": 0.0,
    "framework_ratio": 1.0,
    "host_skew": 0.0,
    "gradient_product_ratio": 1.0,
    "grouped_ratio": 1.0,
    "straggler_ratio": 0.0,
}
"""Figures of the formulas on a device that is its own host: what the host does and what operators do add up, operators
run one after another, and there are no tiles to fill. The products of a backward pass are among those measured."""


@dataclass(frozen=True)
class Unknown:
    """A figure that steps decide."""

    name: str
    start: float
    """Where the fit starts, and stays where no sample says otherwise."""
    is_factor: bool = True
    """A factor of the engine (``SoftwareFigures``); else a figure of the formulas (``Coefficients``)."""
    pull: float = 0.02
    """Weight of the start relative to one sample: decides what no sample does. Times of communication alone are
    measured, so that within a step is taken to be alike unless steps are clear about it."""


@dataclass(frozen=True)
class Stage:
    """Figures that are fitted together, to the steps that depend on them; those of earlier stages are fixed."""

    chooses: Callable[[Plan], bool]
    unknowns: tuple[Unknown, ...]


STAGES = (
    Stage(
        lambda plan: plan.world_size == 1,
        (
            Unknown("memory_bound_ratio", 1.0),
            Unknown("half_precision_ratio", 1.0),
            Unknown("host_ratio", 1.0),
            Unknown("loss_ratio", 2.0, is_factor=False, pull=0.1),
            Unknown("optimizer_bytes", 30.0, is_factor=False, pull=0.1),
            Unknown("step_kernels", 100.0, is_factor=False),
            Unknown("accumulate_bytes", 12.0, is_factor=False),
        ),
    ),
    Stage(
        lambda plan: plan.tp > 1,
        (Unknown("tp_launches", 100.0), Unknown("tp_communication_ratio", 1.0, pull=0.2)),
    ),
    Stage(
        lambda plan: plan.dp_shard > 1,
        (
            Unknown("shard_launches", 10.0),
            Unknown("gather_launches", 20.0),
            Unknown("dp_communication_ratio", 1.0, pull=0.2),
        ),
    ),
    Stage(
        lambda plan: plan.pp > 1,
        (Unknown("pp_launches", 20.0), Unknown("pp_communication_ratio", 1.0, pull=0.2)),
    ),
)
DEVIATIONS_OF_INTERVAL = 2.5
"""Half-width of the interval over the median error: nine of ten errors of a normal distribution lie within."""
RANGE = 60.0
"""A fitted figure stays within this factor of where it starts."""


def measured_cluster(cluster: ClusterSpec, found: Measurement) -> ClusterSpec:
    """The cluster with the figures of its devices and links as they were measured.

    Args:
        cluster: The machines that were measured.
        found: The measurement.

    Raises:
        UserError: The measurement is not enough.
    """
    figures, errors = device_figures(found)
    links, link_errors = link_figures(found)
    machine = found.machine
    word = found.matmul[0].precision
    attention = fit_attention([sample for sample in found.attention if sample.precision == word])
    fixed = SYNCHRONOUS if machine.device == "cpu" else {}
    fixed = fixed | {
        "attention_half_length": attention.half_length,
        "attention_backward_ratio": attention.backward_ratio,
    }
    measured = MeasuredFigures(
        started=machine.started,
        host=machine.host,
        device_name=machine.device_name,
        versions=machine.versions,
        seconds=machine.seconds,
        is_quick=machine.is_quick,
        busy_cpus=machine.busy_cpus,
        noise_ratio=found.noise_ratio,
        errors=errors | link_errors,
        coefficients=fixed,
        input_tokens_per_second=found.input_tokens_per_second,
    )
    cluster = cluster.changed(figures=figures, links=links, measured=measured)
    if not found.steps:
        return cluster
    fit = fit_steps(cluster, found.steps, operator_figures(found, figures.memory_gb_per_second * 1e9))
    measured = measured.changed(
        coefficients=fixed | fit.coefficients, software=fit.software, errors=measured.errors | {"steps": fit.error}
    )
    spread = fit.error + found.noise_ratio
    interval = float(np.clip(DEVIATIONS_OF_INTERVAL * spread, MIN_INTERVAL, MAX_INTERVAL))
    return cluster.changed(figures=figures.changed(interval_ratio=interval), measured=measured)


@dataclass(frozen=True)
class StepFit:
    """What steps tell."""

    coefficients: dict[str, float]
    software: dict[str, float]
    error: float
    """Median relative error of the steps."""


def operator_figures(found: Measurement, bytes_per_second: float) -> dict[str, float]:
    """What the memory-bound operators say by themselves, as figures of the formulas: where the fit to steps starts.

    Args:
        found: The measurement.
        bytes_per_second: The device's bandwidth, which the figures are relative to.
    """
    rates = {
        operator: float(np.median([s.seconds / s.elements for s in found.stream if s.operator == operator]))
        for operator in {sample.operator for sample in found.stream}
    }
    # A loss reads and writes the logits four times forward and half as often again backward, by the formula.
    scale = {"optimizer": ("optimizer_bytes", 1.0), "loss": ("loss_ratio", 4 * 4 * 2.5)}
    return {
        name: bytes_per_second * rates[operator] / passes
        for operator, (name, passes) in scale.items()
        if operator in rates
    }


def fit_steps(
    cluster: ClusterSpec, samples: Sequence[StepSample], starts: Mapping[str, float] | None = None
) -> StepFit:
    """The figures with which the cost model gives the samples' times, stage by stage.

    Args:
        cluster: With figures of devices and links, and what is known of the formulas there.
        samples: Steps under one or several kinds of plans.
        starts: Where the fit starts, where something better is known than in ``STAGES``.
    """
    coefficients: dict[str, float] = {}
    software: dict[str, float] = {}
    errors: list[float] = []
    for stage in STAGES:
        chosen = [sample for sample in samples if stage.chooses(sample.plan)]
        if not chosen:
            continue
        assert cluster.measured is not None
        measured = cluster.measured
        known = cluster.changed(
            measured=measured.changed(
                coefficients=measured.coefficients | coefficients, software=measured.software | software
            )
        )
        unknowns = [replace(u, start=(starts or {}).get(u.name, u.start)) for u in stage.unknowns]
        values, deviations = _fit_stage(known, chosen, unknowns)
        errors += [abs(deviation) for deviation in np.expm1(deviations)]
        for unknown in stage.unknowns:
            (software if unknown.is_factor else coefficients)[unknown.name] = values[unknown.name]
    return StepFit(coefficients, software, float(np.median(errors)))


def _fit_stage(
    cluster: ClusterSpec, samples: Sequence[StepSample], unknowns: Sequence[Unknown]
) -> tuple[dict[str, float], np.ndarray]:
    """Values by name that minimise soft-L1 deviations of logarithms, and the deviations of the steps."""
    from scipy.optimize import least_squares

    model = StepModel(cluster, samples)
    start = np.log([unknown.start for unknown in unknowns])
    pulls = np.array([unknown.pull for unknown in unknowns])

    def values(logs: np.ndarray) -> dict[str, float]:
        return {unknown.name: float(value) for unknown, value in zip(unknowns, np.exp(logs), strict=True)}

    def residuals(logs: np.ndarray) -> np.ndarray:
        step, optimizer = model.deviations(values(logs))
        pulled: np.ndarray = np.concatenate([step, optimizer, pulls * (logs - start)])
        return pulled

    bounds = (start - np.log(RANGE), start + np.log(RANGE))
    fitted = least_squares(residuals, start, bounds=bounds, loss="soft_l1", f_scale=0.1)
    best = values(fitted.x)
    return best, model.deviations(best)[0]


class StepModel:
    """The cost model over samples as one table.

    Args:
        cluster: The machines.
        samples: ``n`` steps.
    """

    def __init__(self, cluster: ClusterSpec, samples: Sequence[StepSample]) -> None:
        assert cluster.figures is not None
        layers = np.array([sample.model.num_layers for sample in samples])
        rows = [(sample.plan, sample.global_batch_size, sample.sequence_length) for sample in samples]
        self._columns: PlanColumns = encode(plan_table(rows), layers)
        self._scope = Scope(
            shape=ModelShape.rows([ModelShape.of(sample.model) for sample in samples], np.arange(len(samples))),
            device=DeviceColumns.of(cluster.figures, np.asarray(self._columns.precision)),
            software=SoftwareColumns.of(software_on(cluster, OWN_ENGINE)),
            coefficients=coefficients_on(cluster),
            links=LinkColumns.of(cluster),
        )
        self._compute = np.log([sample.compute_seconds for sample in samples])
        self._optimizer = np.log([sample.optimizer_seconds for sample in samples])
        self._alone = np.array([sample.plan.world_size == 1 for sample in samples])

    def parts(self, values: Mapping[str, float]) -> Mapping[str, np.ndarray]:
        """Seconds by part with some figures changed; each ``[n]``."""
        known = {field.name: getattr(self._scope.software, field.name) for field in fields(SoftwareColumns)}
        software = SoftwareColumns(**known | {name: value for name, value in values.items() if name in known})
        of_formulas = {name: value for name, value in values.items() if name not in known}
        coefficients = self._scope.coefficients.model_copy(update=of_formulas)
        scope = replace(self._scope, software=software, coefficients=coefficients)
        return step_time(scope, self._columns).parts

    def deviations(self, values: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
        """Logarithms of estimate over measurement: of every step without its optimizer, and of the optimizer's part on
        single devices (on several it also waits for the slowest)."""
        parts = self.parts(values)
        compute = np.sum([seconds for part, seconds in parts.items() if part != "optimizer"], axis=0)
        optimizer = np.log(parts["optimizer"])[self._alone] - self._optimizer[self._alone]
        return np.log(compute) - self._compute, optimizer
