"""How recipes differ: where their optimum lies off the reference's, learnt from groups of runs, carried to new tasks.

A group is the runs of one task by one recipe. Its loss over hyperparameters has the form

    e = s * (shape(u - m0, v - m1) + sum_j k_j (z_j - base_j - m_j)^2)

with u, v, shape as in ``surface``, z the coordinates of weight decay, warm-up and betas, and the **offset** m of the
group: by how much its best values lie off the reference's, and log s, how much sharper its loss is. Offsets are
estimated from each group (least squares under a wide prior, then Laplace) and carried over by a Gaussian process over
groups: runs of one optimizer share a part, alike recipes another, near sizes a third; beyond the sizes of the tables
the offset is ever less certain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autotune.prior.coordinates import COORDINATES, forward, recipe_coordinates, task_coordinates, values_of
from autotune.prior.risk import CLIFF, CLIFF_SD, cliff_seen
from autotune.prior.robust import Floats
from autotune.prior.rows import MetaRow
from autotune.prior.surface import LAW_CAP, NOISE, RELATIVE_NOISE, Surface, optimum_law, raw_shape, soften
from autotune.prior.task import Task

OFFSETS = (*COORDINATES, "sharpness")
SETTINGS = COORDINATES[2:]
"""Coordinates whose effect is separable from the others'."""
DEFAULTS = {"weight_decay": 0.1, "warmup_ratio": 0.05, "beta1": 0.9, "beta2": 0.95}

OPTIMIZER_SD = np.array([1.0, 0.4, 0.8, 0.4, 0.4, 0.4, 0.3])
RECIPE_SD = np.array([0.5, 0.35, 0.5, 0.5, 0.3, 0.4, 0.3])
TASK_SD = np.array([0.3, 0.3, 0.3, 0.3, 0.2, 0.2, 0.3])
OUTSIDE_SD = np.array([0.12, 0.12, 0.12, 0.12, 0.08, 0.08, 0.25])
"""Standard deviations of the parts of an offset: of the optimizer, the recipe, the task, and for each unit that a task
lies outside (a factor e in size)."""
WIDE_SD = np.sqrt(OPTIMIZER_SD**2 + RECIPE_SD**2 + TASK_SD**2)
TASK_LENGTH = 1.5
"""Factor e in size over which offsets of tasks are alike."""
SWEEP_MARGIN = 0.6
"""Factors of e outside the grids' sizes that the one-factor sweeps reach."""
SLOPE_SD = 0.15
"""By how much exponents of recipes may differ."""
LEVEL_SD = 0.02
FAILED = ("diverged", "nan")


@dataclass(frozen=True)
class Group:
    """Runs of one task by one recipe."""

    optimizer: str
    recipe: Floats
    """``recipe_coordinates``, ``[4]``."""
    task: Floats
    """``task_coordinates``, ``[3]``."""
    points: Floats
    """Coordinates of the runs, ``[n, 6]``."""
    losses: Floats
    """Loss, infinite for a run that diverged, ``[n]``."""

    @property
    def excess(self) -> Floats:
        """Loss above the best run, capped."""
        return np.asarray(np.minimum(self.losses - self.losses.min(), LAW_CAP))


@dataclass(frozen=True)
class Anchor:
    """What is known of one recipe's offset."""

    optimizer: str
    recipe: Floats
    task: Floats | None
    """Where it was seen; None for a recipe seen at many sizes."""
    offset: Floats
    """``[7]``, in the order of ``OFFSETS``."""
    sd: Floats
    """``[7]``; infinite where nothing is known."""
    slope: Floats = field(default_factory=lambda: np.zeros(7))
    """By how much the offset changes with log tokens, ``[7]``."""
    cliff: Floats = field(default_factory=lambda: np.array([CLIFF, np.inf]))
    """``[2]``: where learning rates beyond the best diverge and its standard deviation, see ``risk``."""


@dataclass(frozen=True)
class Recipes:
    """The reference's best values of the separable hyperparameters, their weight, and known recipes."""

    base: Floats
    """``[4, 3]``: best coordinate at the reference task, its change with log parameters and with log tokens."""
    curvature: Floats
    """``[4]``: nats per squared unit of each coordinate."""
    anchors: tuple[Anchor, ...]

    def settings_optimum(self, tasks: Floats, surface: Surface) -> Floats:
        """Best coordinates ``[..., 4]`` of the reference recipe at tasks ``[..., 3]``.

        Their straight lines end a little outside the tables: the sweeps they come from tell of no more.
        """
        return np.asarray(self.base[:, 0] + _near(tasks, surface)[..., :2] @ self.base[:, 1:].T)

    def settings_excess(self, coordinates: Floats, best: Floats) -> Floats:
        """``[n]`` nats above the best of the separable hyperparameters, at coordinates ``[n, 4]``."""
        return np.asarray((coordinates - best) ** 2 @ self.curvature)

    def offset(self, task: Task, surface: Surface) -> tuple[Floats, Floats]:
        """Offset of a task's recipe and its standard deviation, both ``[7]``.

        Args:
            task: The task.
            surface: Fitted to the tasks beyond which offsets are ever less certain.
        """
        place = task_coordinates(task)
        target = Anchor(task.optimizer, recipe_coordinates(task), place, np.zeros(7), np.zeros(7))
        everyone = (*self.anchors, target)
        alike = _likeness(everyone, surface)
        log_tokens = _near(place, surface)[1]
        offsets = np.array([anchor.offset + anchor.slope * log_tokens for anchor in everyone])
        variances = np.array([anchor.sd for anchor in everyone]) ** 2
        means, sds = np.zeros(7), np.zeros(7)
        for axis in range(len(OFFSETS)):
            scales = np.array([OPTIMIZER_SD[axis], RECIPE_SD[axis], TASK_SD[axis], OUTSIDE_SD[axis]]) ** 2
            kernel = np.tensordot(scales, alike, axes=1)
            known = np.flatnonzero(np.isfinite(variances[:-1, axis]))
            across = np.linalg.solve(
                kernel[np.ix_(known, known)] + np.diag(variances[known, axis] + 1e-6), kernel[known, -1]
            )
            means[axis] = across @ offsets[known, axis]
            sds[axis] = np.sqrt(max(kernel[-1, -1] - across @ kernel[known, -1], 1e-6))
        return means, sds

    def cliff(self, task: Task) -> Floats:
        """``[2]``: where learning rates diverge beyond the best one of a task's recipe, and its standard deviation; by
        recipes of its optimizer, as far as they are alike."""
        known = [a for a in self.anchors if a.optimizer == task.optimizer and np.isfinite(a.cliff[1])]
        recipes = np.array([*(anchor.recipe for anchor in known), recipe_coordinates(task)])
        kernel = CLIFF_SD**2 * _alike(recipes)
        noise = np.diag([anchor.cliff[1] ** 2 for anchor in known])
        across = np.linalg.solve(kernel[:-1, :-1] + noise, kernel[:-1, -1])
        seen = np.array([anchor.cliff[0] for anchor in known])
        return np.array([CLIFF + across @ (seen - CLIFF), np.sqrt(kernel[-1, -1] - across @ kernel[:-1, -1])])

    def observe(self, group: Group, surface: Surface) -> Anchor:
        """A group's own offset, as a measurement: the estimate with the wide prior taken out again."""
        from scipy.optimize import least_squares

        capped = soften(group.excess)
        scale = 1 / np.sqrt(NOISE**2 + (RELATIVE_NOISE * capped) ** 2)
        tasks = np.broadcast_to(group.task, (len(group.losses), 3))

        def residuals(theta: Floats) -> Floats:
            excess = self.form_excess(group.points, tasks, theta[:7], surface)
            predicted = soften(np.minimum(excess, LAW_CAP)) + theta[7]
            return np.concatenate([(predicted - capped) * scale, theta[:7] / WIDE_SD, theta[7:] / LEVEL_SD])

        fit = least_squares(residuals, np.zeros(8), loss="soft_l1", max_nfev=200)
        variance = np.diag(np.linalg.inv(fit.jac.T @ fit.jac))[:7]
        information = np.maximum(1 / variance - WIDE_SD**-2, 0.0)
        told = information > 0.05 * WIDE_SD**-2
        offset = np.where(told, fit.x[:7] / np.where(told, variance * information, 1.0), 0.0)
        sd = np.where(told, np.sqrt(1 / np.where(told, information, 1.0)), np.inf)
        offset = np.clip(offset, -4 * WIDE_SD, 4 * WIDE_SD)
        distance = group.points[:, 0] - optimum_law(surface.law, tasks)[0] - fit.x[0]
        cliff = cliff_seen(distance, np.isinf(group.losses))
        return Anchor(group.optimizer, group.recipe, group.task, offset, sd, cliff=cliff)

    def form_excess(self, points: Floats, tasks: Floats, offset: Floats, surface: Surface) -> Floats:
        """Excess loss by the form alone, ``[n]``.

        Args:
            points: Coordinates of the runs, ``[n, 6]``.
            tasks: Their tasks, ``[n, 3]``.
            offset: ``[n, 7]`` or ``[7]``.
            surface: Gives the optimum's law and the shape round it.
        """
        rate, batch = optimum_law(surface.law, tasks)
        core = raw_shape(surface.shape, points[:, 0] - rate - offset[..., 0], points[:, 1] - batch - offset[..., 1])
        best = self.settings_optimum(tasks, surface) + offset[..., 2:6]
        return np.asarray(np.exp(offset[..., 6]) * (core + self.settings_excess(points[:, 2:], best)))


def _near(tasks: Floats, surface: Surface) -> Floats:
    """Task coordinates ``[..., 3]`` held where the one-factor sweeps reach."""
    beyond = surface.beyond(tasks)
    return np.asarray(tasks - np.sign(beyond) * np.maximum(np.abs(beyond) - SWEEP_MARGIN, 0.0))


def _likeness(anchors: Sequence[Anchor], surface: Surface) -> Floats:
    """``[4, n, n]``: how alike optimizer, recipe, task and place outside the tables are, as covariances."""
    names = np.array([anchor.optimizer for anchor in anchors])
    same = names[:, None] == names[None]
    recipes = np.array([anchor.recipe for anchor in anchors])
    recipe = _alike(recipes)
    local = np.array([anchor.task is not None for anchor in anchors])
    tasks = np.array([np.zeros(3) if anchor.task is None else anchor.task for anchor in anchors])
    near = np.exp(-((tasks[:, None] - tasks[None]) ** 2).sum(axis=2) / (2 * TASK_LENGTH**2))
    beyond = np.where(local[:, None], surface.beyond(tasks), 0.0)
    return np.stack([
        same & (names != "adamw"),
        recipe,
        same * recipe * near * (local[:, None] & local[None]),
        same * (beyond @ beyond.T),
    ])  # fmt: skip


def _alike(recipes: Floats) -> Floats:
    """``[n, n]``: likeness of recipes ``[n, 4]``, 1 for equal ones."""
    return np.asarray(np.exp(-((recipes[:, None] - recipes[None]) ** 2).sum(axis=2) / 2))


def group_rows(rows: Sequence[MetaRow]) -> list[Group]:
    """Rows by study, task and optimizer, those that tell nothing of quality left out; of a trial's repeats each
    counts. Groups without two comparable runs are dropped."""
    by_key: dict[tuple[object, ...], list[MetaRow]] = {}
    for row in rows:
        if row.loss is None and row.status not in FAILED:
            continue
        task = row.task
        key = (
            row.study,
            row.folder,
            task.num_parameters,
            task.num_active_parameters,
            task.total_tokens,
            task.optimizer,
        )
        by_key.setdefault(key, []).append(row)
    groups = [_group(members) for members in by_key.values() if sum(row.status == "ok" for row in members) >= 2]
    return groups


def _group(rows: Sequence[MetaRow]) -> Group:
    best = min((row for row in rows if row.status == "ok"), key=lambda row: row.loss or 0.0)
    points = np.array([coordinates_of(row.task, row.hyperparameters, 1)[0] for row in rows])
    losses = np.array([
        row.loss if row.status == "ok" and row.loss is not None else np.inf for row in rows
    ])  # fmt: skip
    return Group(best.task.optimizer, recipe_coordinates(best.task), task_coordinates(best.task), points, losses)


def coordinates_of(task: Task, points: Mapping[str, object], num_points: int) -> Floats:
    """``[num_points, 6]`` coordinates of hyperparameters, the recipe's where they are not named."""
    columns: list[NDArray[np.float64]] = [
        forward(name, values_of(task, points, name, num_points)) for name in COORDINATES
    ]
    return np.column_stack(columns)


def fit_recipes(groups: Sequence[Group], surface: Surface, reference: Sequence[Group]) -> Recipes:
    """Fit base, curvature and one anchor an optimizer to one-factor sweeps of several optimizers by one laboratory.

    The optimizers share the change of the offset with tokens, which is the laboratory's. (One with parameters, too,
    predicts sizes that were left out less well: sweeps of three sizes can't tell it.)

    Args:
        groups: Their runs.
        surface: The reference's surface.
        reference: Groups of the reference recipe, whose offset of learning rate and batch is zero by definition.
    """
    from scipy.optimize import least_squares

    optimizers = sorted({group.optimizer for group in groups})
    sizes = [len(group.losses) for group in groups]
    cell = np.repeat(np.arange(len(groups)), sizes)
    which = np.array([optimizers.index(group.optimizer) for group in groups])[cell]
    points, tasks = np.concatenate([group.points for group in groups]), np.array([group.task for group in groups])[cell]
    num = 7 * len(optimizers)
    capped = soften(np.concatenate([group.excess for group in groups]))
    scale = 1 / np.sqrt(NOISE**2 + (RELATIVE_NOISE * capped) ** 2)
    wide = np.tile(WIDE_SD, (len(optimizers), 1))
    if "adamw" in optimizers:
        wide[optimizers.index("adamw"), 2:6] = 0.01  # the reference of these four is AdamW of these sweeps
    middle = np.array([float(forward(name, DEFAULTS[name])) for name in SETTINGS])

    def unpack(theta: Floats) -> tuple[Recipes, Floats, Floats, Floats]:
        base = np.column_stack([theta[num : num + 4], theta[num + 4 : num + 8], theta[num + 8 : num + 12]])
        recipes = Recipes(base, np.exp(theta[num + 12 : num + 16]), ())
        slope = np.concatenate([theta[num + 16 : num + 18], np.zeros(5)])
        return recipes, theta[:num].reshape(-1, 7), slope, theta[num + 18 :]

    def residuals(theta: Floats) -> Floats:
        recipes, offsets, slope, levels = unpack(theta)
        excess = recipes.form_excess(points, tasks, offsets[which] + tasks[:, 1:2] * slope, surface)
        return np.concatenate([
            (soften(np.minimum(excess, LAW_CAP)) + levels[cell] - capped) * scale,
            (offsets / wide).ravel(),
            theta[num : num + 4] - middle,
            theta[num + 4 : num + 12] / SLOPE_SD,
            (theta[num + 12 : num + 16] - np.log(0.01)) / 1.5,
            theta[num + 16 : num + 18] / SLOPE_SD,
            levels / 0.01,
        ])  # fmt: skip

    start = np.concatenate([np.zeros(num), middle, np.zeros(8), np.full(4, np.log(0.01)), np.zeros(2 + len(groups))])
    fit = least_squares(residuals, start, loss="soft_l1", max_nfev=40)
    recipes, offsets, slope, _ = unpack(np.asarray(fit.x))
    sds = np.sqrt(np.diag(np.linalg.inv(fit.jac.T @ fit.jac)))[:num].reshape(-1, 7)
    recipe_of = {name: np.mean([g.recipe for g in groups if g.optimizer == name], axis=0) for name in optimizers}
    best_rate = optimum_law(surface.law, tasks)[0] + offsets[which, 0] + tasks[:, 1] * slope[0]
    has_diverged = np.isinf(np.concatenate([group.losses for group in groups]))
    anchors = []
    for o, name in enumerate(optimizers):
        own = which == o
        cliff = cliff_seen((points[:, 0] - best_rate)[own], has_diverged[own])
        anchors.append(Anchor(name, recipe_of[name], None, offsets[o], sds[o], slope, cliff))
    if reference:
        sd = np.array([0.05, 0.05, np.inf, np.inf, np.inf, np.inf, 0.05])
        distance = [group.points[:, 0] - optimum_law(surface.law, group.task[None])[0] for group in reference]
        cliff = cliff_seen(np.concatenate(distance), np.isinf(np.concatenate([g.losses for g in reference])))
        anchors.append(Anchor(reference[0].optimizer, reference[0].recipe, None, np.zeros(7), sd, cliff=cliff))
    return Recipes(recipes.base, recipes.curvature, tuple(anchors))
