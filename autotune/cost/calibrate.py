"""The fit of the cost model's figures to measured step times.

Unknown are the coefficients of the formulas, two factors per device and a few per training stack, all as logarithms
(shares as log odds). Each has a prior: its default, or for a stack the value of the stack it grew from, within a stated
spread; a stack or a device with few runs stays near it. The loss is the robust sum of squared errors of the logarithm
of the step time, each run weighted down by how many its family has, since runs of one publisher share their faults.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from autotune.cost.coefficients import Coefficients
from autotune.cost.columns import PlanColumns, encode
from autotune.cost.communication import LinkColumns
from autotune.cost.compute import Basis, compute_work
from autotune.cost.device_columns import FP8_RECIPES, DeviceColumns, SoftwareColumns
from autotune.cost.estimate import work_and_wire
from autotune.cost.shapes import ModelShape
from autotune.cost.software import software_catalogue
from autotune.cost.step_time import Scope, compose
from autotune.specs.cluster import ClusterSpec
from autotune.specs.figures import DeviceFigures
from engine.plan import Plan, plan_table
from engine.spec import ModelSpec

COEFFICIENT_SPREAD = {
    "wave_share": 0.7,
    "half_tile_ratio": 0.1,
    "misalignment": 0.7,
    "scalar_access": 0.4,
    "gradient_product_ratio": 0.04,
    "grouped_ratio": 0.3,
    "attention_half_length": 0.7,
    "attention_backward_ratio": 0.2,
    "score_bytes_forward": 0.5,
    "score_bytes_backward": 0.5,
    "memory_bound_ratio": 0.4,
    "permute_ratio": 0.5,
    "loss_ratio": 0.5,
    "cast_bytes": 0.5,
    "rowwise_ratio": 0.15,
    "mxfp8_ratio": 0.15,
    "nvfp4_ratio": 0.25,
    "kernel_us": 0.5,
    "backward_launch_ratio": 0.3,
    "step_kernels": 1.0,
    "host_sharpness": 0.15,
    "framework_ratio": 0.1,
    "host_skew": 0.25,
    "optimizer_bytes": 0.3,
    "accumulate_bytes": 0.5,
    "dp_hidden_ratio": 1.0,
    "tp_hidden_ratio": 1.0,
    "ep_hidden_ratio": 1.0,
    "cp_hidden_ratio": 1.0,
    "straggler_ratio": 0.7,
}
"""Coefficient -> standard deviation of its prior, of its logarithm (of its log odds for shares)."""

SHARES = frozenset(("wave_share", "dp_hidden_ratio", "tp_hidden_ratio", "ep_hidden_ratio", "cp_hidden_ratio"))
"""Coefficients between 0 and 1."""

DEVICE_SPREAD = {"sustained_ratio": 0.15, "sustained_memory_ratio": 0.15}
"""Factor of a device -> standard deviation of its prior around 1."""

SOFTWARE_SPREAD = {
    "compute_ratio": 0.12,
    "attention_ratio": 0.1,
    "memory_bound_ratio": 0.15,
    "communication_ratio": 0.15,
    "tp_communication_ratio": 0.3,
    "dp_communication_ratio": 0.4,
    "pp_communication_ratio": 0.3,
    "recompute_ratio": 0.2,
    "expert_ratio": 0.15,
    "host_ratio": 0.5,
    "fp8_ratio": 0.1,
}
"""Factor of a stack -> standard deviation of its prior around 1."""

ROOT_SPREAD = 0.4
"""Spread of a factor of a stack without a parent, relative: what all stacks share belongs to the devices' figures."""

ERROR = 0.06
"""Error of a step time that the loss counts as one standard deviation, of its logarithm."""
FAMILY_WEIGHT_POWER = 0.2
"""A family with ``k`` runs weighs ``k ** (1 - power)`` of them."""

FIRST_DAMPING, LAST_DAMPING = 1e-3, 1e6
MAX_STEP = 0.7
"""Most that a parameter moves in one step."""
TOLERANCE = 1e-4
"""Relative decrease of the loss at which a fit ends."""


class Run(Protocol):
    """A run with what its step time is a function of; ``PublishedRun`` is one."""

    @property
    def model(self) -> ModelSpec:
        """Architecture."""

    @property
    def cluster(self) -> ClusterSpec:
        """Machines."""

    @property
    def plan(self) -> Plan:
        """How the work was split."""

    @property
    def global_batch_size(self) -> int:
        """Sequences per step."""

    @property
    def sequence_length(self) -> int:
        """Tokens per sequence."""

    @property
    def software(self) -> str:
        """Training stack."""

    @property
    def recipe(self) -> str:
        """Of ``FP8_RECIPES``, or empty."""


@dataclass(frozen=True)
class Calibration:
    """Fitted figures."""

    coefficients: Coefficients
    devices: Mapping[str, Mapping[str, float]]
    """Device kind -> factor (``DEVICE_SPREAD``) -> value."""
    software: Mapping[str, Mapping[str, float]]
    """Stack -> factor (``SOFTWARE_SPREAD``) -> value."""


@dataclass(frozen=True)
class Table:
    """Runs in the form that the formulas take, with all factors of devices and stacks at 1."""

    scope: Scope
    columns: PlanColumns
    device_kinds: tuple[str, ...]
    device_index: np.ndarray
    software_names: tuple[str, ...]
    software_index: np.ndarray

    def __len__(self) -> int:
        return len(self.device_index)


def tabulate(runs: Sequence[Run]) -> Table:
    """Columns of runs of many models, clusters and stacks.

    Raises:
        UserError: A cluster without figures, or an unknown stack.
    """
    models, model_index = _distinct([run.model for run in runs])
    clusters, cluster_index = _distinct([run.cluster for run in runs])
    names = tuple(software_catalogue())
    software_index = np.array([names.index(run.software) for run in runs])
    kinds = tuple(sorted({cluster.device_kind for cluster in clusters}))
    device_index = np.array([kinds.index(run.cluster.device_kind) for run in runs])
    plans = plan_table((run.plan, run.global_batch_size, run.sequence_length) for run in runs)
    shape = ModelShape.rows([ModelShape.of(model) for model in models], model_index)
    columns = encode(plans, np.asarray(shape.num_layers, dtype=np.int64))
    neutral = [_neutral(cluster) for cluster in clusters]
    stacks = [software_catalogue()[name].model_copy(update=dict.fromkeys(SOFTWARE_SPREAD, 1.0)) for name in names]
    recipes = np.array([FP8_RECIPES.index(run.recipe) if run.recipe else 0 for run in runs])
    scope = Scope(
        shape=shape,
        device=DeviceColumns.rows(neutral, cluster_index, columns.precision, recipes),
        software=SoftwareColumns.rows(stacks, software_index),
        coefficients=Coefficients(),
        links=LinkColumns.rows(clusters, cluster_index),
    )
    return Table(scope, columns, kinds, device_index, names, software_index)


def _distinct(values: Sequence[object]) -> tuple[list, np.ndarray]:  # type: ignore[type-arg]
    place: dict[str, int] = {}
    distinct: list[object] = []
    index = []
    for value in values:
        key = repr(value)
        if key not in place:
            place[key] = len(distinct)
            distinct.append(value)
        index.append(place[key])
    return distinct, np.array(index)


def _neutral(cluster: ClusterSpec) -> DeviceFigures:
    if cluster.figures is None:
        raise ValueError(f"cluster {cluster.name} has no figures")
    return cluster.figures.model_copy(update=dict.fromkeys(DEVICE_SPREAD, 1.0))


@dataclass(frozen=True)
class _Block:
    """Parameters of one name: one for all rows, or one per group of rows."""

    name: str
    kind: str
    size: int
    index: np.ndarray | None
    centre: float
    spread: float
    parents: np.ndarray | None = None
    """``[size]``: the group whose value is each one's prior; its own where the prior is the centre."""


class Fit:
    """A table of runs and the parameters that its step times depend on."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.wire = work_and_wire(table.scope, table.columns)[1]
        """Communication alone, which no parameter changes."""
        defaults = Coefficients()
        blocks = [
            _Block(name, "coefficient", 1, None, _to_line(name, getattr(defaults, name)), spread)
            for name, spread in COEFFICIENT_SPREAD.items()
        ]
        devices, stacks = len(table.device_kinds), len(table.software_names)
        blocks += [_Block(n, "device", devices, table.device_index, 0.0, s) for n, s in DEVICE_SPREAD.items()]
        parents = _parents(table.software_names)
        blocks += [
            _Block(name, "software", stacks, table.software_index, 0.0, spread, parents)
            for name, spread in SOFTWARE_SPREAD.items()
        ]
        self.blocks = blocks
        self.offsets = np.concatenate(([0], np.cumsum([block.size for block in blocks])))
        self.start = np.concatenate([np.full(block.size, block.centre) for block in blocks])
        self.spread = np.concatenate([np.full(block.size, block.spread) for block in blocks])
        self.prior_matrix = np.diag(1 / self.spread)
        """``[parameters, parameters]``: ``prior_matrix @ (theta - start)`` are the prior's residuals."""
        for block, offset in zip(blocks, self.offsets[:-1], strict=True):
            for place, parent in enumerate(() if block.parents is None else block.parents):
                if parent != place:
                    self.prior_matrix[offset + place, offset + parent] = -1 / block.spread
                else:
                    self.prior_matrix[offset + place, offset + place] /= ROOT_SPREAD

    def log_seconds(self, theta: np.ndarray) -> np.ndarray:
        """Logarithm of the step time of every row. ``[n]``"""
        scope, c = self.scope(theta), self.table.columns
        work = compute_work(Basis(scope.shape, scope.device, scope.software, scope.coefficients, c))
        parts = compose(scope, c, work, self.wire).parts
        return np.asarray(np.log(np.sum(list(parts.values()), axis=0)))

    def scope(self, theta: np.ndarray) -> Scope:
        """The formulas' inputs with these parameters."""
        values = [theta[a:b] for a, b in zip(self.offsets[:-1], self.offsets[1:], strict=True)]
        base = self.table.scope
        changed: dict[str, dict[str, float | np.ndarray]] = {"coefficient": {}, "device": {}, "software": {}}
        for block, value in zip(self.blocks, values, strict=True):
            changed[block.kind][block.name] = (
                _from_line(block.name, float(value[0])) if block.index is None else np.exp(value)[block.index]
            )
        device = changed["device"]
        compute, memory = device["sustained_ratio"], device["sustained_memory_ratio"]
        return dataclasses.replace(
            base,
            coefficients=Coefficients.model_construct(**changed["coefficient"]),  # type: ignore[arg-type]
            device=dataclasses.replace(
                base.device,
                matmul_flops=base.device.matmul_flops * compute,
                wide_flops=base.device.wide_flops * compute,
                memory_bytes_per_second=base.device.memory_bytes_per_second * memory,
            ),
            software=dataclasses.replace(base.software, **changed["software"]),
        )

    def jacobian(self, theta: np.ndarray, rows: np.ndarray, step: float = 1e-4) -> np.ndarray:
        """Derivative of ``log_seconds`` of some rows. ``[m, parameters]``.

        Parameters of one name change disjoint rows, so that one evaluation serves all groups.
        """
        base = self.log_seconds(theta)[rows]
        matrix = np.zeros((len(base), len(theta)))
        picked = np.flatnonzero(rows) if rows.dtype == bool else rows
        for block, offset in zip(self.blocks, self.offsets[:-1], strict=True):
            moved = theta.copy()
            moved[offset : offset + block.size] += step
            change = (self.log_seconds(moved)[rows] - base) / step
            if block.index is None:
                matrix[:, offset] = change
            else:
                matrix[np.arange(len(base)), offset + block.index[picked]] = change
        return matrix

    def calibration(self, theta: np.ndarray) -> Calibration:
        """Parameters as figures."""
        found: dict[str, dict[str, dict[str, float]]] = {"device": {}, "software": {}}
        names = {"device": self.table.device_kinds, "software": self.table.software_names}
        values = {}
        for block, offset in zip(self.blocks, self.offsets[:-1], strict=True):
            if block.index is None:
                values[block.name] = _from_line(block.name, float(theta[offset]))
                continue
            for place, name in enumerate(names[block.kind]):
                found[block.kind].setdefault(name, {})[block.name] = float(np.exp(theta[offset + place]))
        return Calibration(Coefficients(**values), found["device"], found["software"])


def solve(
    fit: Fit,
    log_measured: np.ndarray,
    families: np.ndarray,
    rows: np.ndarray,
    max_steps: int = 60,
) -> np.ndarray:
    """Parameters that fit some rows best: Levenberg-Marquardt steps on reweighted squares, from the priors.

    The loss of a residual ``r`` is ``2 (sqrt(1 + r^2) - 1)``: squared where small, absolute where large.

    Args:
        fit: The table.
        log_measured: ``[n]`` logarithm of the measured seconds.
        families: ``[n]`` family of each row, as numbers.
        rows: ``[n]`` bools: rows that may be looked at.
        max_steps: Steps at most.
    """
    counts = np.bincount(families[rows], minlength=families.max() + 1)
    weight = np.sqrt(counts[families[rows]] ** -FAMILY_WEIGHT_POWER) / ERROR

    def residuals(theta: np.ndarray) -> np.ndarray:
        data = (fit.log_seconds(theta)[rows] - log_measured[rows]) * weight
        return np.concatenate([data, fit.prior_matrix @ (theta - fit.start)])

    theta = fit.start
    residual = residuals(theta)
    damping = FIRST_DAMPING
    for _ in range(max_steps):
        jacobian = np.vstack([fit.jacobian(theta, rows) * weight[:, None], fit.prior_matrix])
        weighted = jacobian / np.sqrt(1 + residual**2)[:, None]
        curvature, slope = weighted.T @ jacobian, weighted.T @ residual
        before, found = _loss(residual), None
        while damping < LAST_DAMPING:
            step = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -slope)
            moved = theta + np.clip(step, -MAX_STEP, MAX_STEP)
            found = residuals(moved)
            if _loss(found) < before:
                break
            damping, found = damping * 5, None
        if found is None:
            break
        theta, residual, damping = moved, found, damping / 5
        if before - _loss(residual) < TOLERANCE * before:
            break
    return np.asarray(theta)


def _loss(residual: np.ndarray) -> float:
    return float(2 * np.sum(np.sqrt(1 + residual**2) - 1))


def grouped_folds(keys: Sequence[str], num_folds: int) -> np.ndarray:
    """Which fold each row is held out in, ``[n]``: rows with the same key share one, and folds are of like size."""
    sizes = Counter(keys)
    totals = np.zeros(num_folds, dtype=np.int64)
    fold_of: dict[str, int] = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        fold_of[key] = int(np.argmin(totals))
        totals[fold_of[key]] += sizes[key]
    return np.array([fold_of[key] for key in keys])


def held_out(
    fit: Fit,
    log_measured: np.ndarray,
    families: np.ndarray,
    folds: np.ndarray,
    max_steps: int = 60,
) -> np.ndarray:
    """Logarithm of the step time of every row by a fit that never saw the row's fold. ``[n]``

    Each fit begins at the priors, so that nothing of the rows held out is in it.

    Args:
        fit: The table.
        log_measured: ``[n]``.
        families: ``[n]`` numbers.
        folds: ``[n]``: fold of each row.
        max_steps: Steps at most.
    """
    predicted = np.full(len(log_measured), np.nan)
    for fold in np.unique(folds):
        out = folds == fold
        theta = solve(fit, log_measured, families, ~out, max_steps=max_steps)
        predicted[out] = fit.log_seconds(theta)[out]
    return predicted


def _parents(names: Sequence[str]) -> np.ndarray:
    """The place of each stack's parent among the stacks; its own where it has none."""
    catalogue = software_catalogue()
    return np.array([names.index(catalogue[name].parent or name) for name in names])


def _to_line(name: str, value: float) -> float:
    value = min(max(value, 0.02), 0.98) if name in SHARES else max(value, 1e-6)
    return float(np.log(value / (1 - value)) if name in SHARES else np.log(value))


def _from_line(name: str, value: float) -> float:
    return float(1 / (1 + np.exp(-value)) if name in SHARES else np.exp(value))
