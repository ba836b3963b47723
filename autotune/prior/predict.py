"""What the prior says of one task: the loss above its optimum at any hyperparameters, the optimum, points round it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from autotune.prior.coordinates import COORDINATES, backward, forward, task_coordinates
from autotune.prior.final_rate import final_rate_excess
from autotune.prior.level import LossLevel
from autotune.prior.recipes import SETTINGS, Anchor, Recipes, coordinates_of, group_rows
from autotune.prior.risk import careful
from autotune.prior.robust import Floats
from autotune.prior.rows import MetaRow
from autotune.prior.surface import NOISE, SOFTNESS, Surface, harden, optimum_law
from autotune.prior.task import HYPERPARAMETERS, Task

Support = Literal["inside", "extrapolated", "outside"]
Fixed = Mapping[str, float | str]
"""Values that are fixed beside what is asked for: of learning rate, batch or schedule, by name."""

SHIPPED = Path(__file__).with_name("fitted.npz")
LEARNING_RATES = (1e-6, 0.1)
"""Learning rates the prior ever proposes."""
LEAST_STEPS = 50
"""A run has at least so many steps at the batches it proposes."""
MOST_WARMUP = 0.3
"""Longest warm-up it proposes: short runs of the tables warm up for a fixed number of steps."""
SEEN = 1.3
"""How far from the law's optimum the grids reach in learning rate and batch, in logarithms (``INDUCING_U``)."""
REACH = 2.5
"""How far from the law's optimum the surface's is looked for, in logarithms."""
NEAR = 1.0
FAR = 3.0
"""A task at most ``NEAR`` outside the tables (a factor e in size) is extrapolated to, one beyond ``FAR`` is outside."""
SHAPE_ERROR = 0.25
"""Error of the form, as a share of the excess."""
NORMAL_90 = 1.645


@dataclass(frozen=True)
class TaskPrior:
    """The prior at one task."""

    task: Task
    support: Support
    """Whether the task lies among those the prior was fitted to, near them, or far away."""
    reasons: tuple[str, ...]
    """What the support rests on, for people; empty where nothing needs to be said."""
    surface: Surface
    recipes: Recipes
    level: LossLevel
    offset: Floats
    """``[7]`` by which this recipe's best values lie off the reference's, see ``recipes``."""
    offset_sd: Floats
    """Its standard deviation, ``[7]``."""
    cliff: Floats
    """``[2]``: logarithm of the learning rate over the best one from which runs diverge, and its standard deviation."""
    level_shift: tuple[float, float] | None
    """Mean and standard deviation of the loss of own runs above the tables' law; None without own runs."""
    outside: float
    """Distance from the tables' tasks, in factors of e."""

    def excess(self, points: Mapping[str, Any]) -> tuple[Floats, Floats]:
        """Loss above that at the likeliest optimum, in nats per token.

        Args:
            points: Hyperparameter name -> values ``[n]``; what is missing, NaN or None is at the recipe's value,
                learning rate and batch at their optimum.

        Returns:
            Mean and standard deviation, both ``[n]``; finite everywhere.

        Raises:
            KeyError: A name is none of ``HYPERPARAMETERS``.
        """
        unknown = set(points) - set(HYPERPARAMETERS)
        if unknown:
            raise KeyError(f"the prior knows no hyperparameter {sorted(unknown)[0]!r}")
        num_points = max((np.size(values) for values in points.values()), default=1)
        best = {name: backward(name, z) for name, z in zip(COORDINATES[:2], self._centre[:2], strict=True)}
        defaults = {**self.task.to_data(), **best}
        points = {name: _present(values, defaults[name]) for name, values in points.items()}
        coordinates = coordinates_of(self.task, {**best, **points}, num_points)
        places = self._places(coordinates[:, 0], coordinates[:, 1])
        surface, fit_sd = self.surface.mean_and_sd(places, self._places(self._centre[:1], self._centre[1:2])[0])
        core = np.maximum(harden(surface) - self._lowest, 0.0)
        settings = self.recipes.settings_excess(coordinates[:, 2:], self._centre[2:])
        final, final_sd = final_rate_excess(self.task, points, num_points)
        mean = np.exp(self.offset[6]) * (core + settings) + final
        varied = np.array([name in points for name in COORDINATES])
        return mean, self._sd(coordinates, fit_sd, mean, final_sd, varied)

    def loss_level(self, given: Fixed | None = None) -> tuple[float, float] | None:
        """Loss at the optimum and its standard deviation, nats per token; None where the prior can't tell.

        It is that of the tables' text and tokenizer, moved by what own runs near this size reached.

        Args:
            given: Values that are fixed: the loss is that of the best beside them.
        """
        if self.support_beside(given or {})[0] == "outside":
            return None
        shift, shift_sd = self.level_shift or (0.0, 0.0)
        level = self.level.at(task_coordinates(self.task)) + shift
        sd = math.hypot(self.level.error * (1 + self.outside), shift_sd)
        if not given:
            return level, sd
        mean, mean_sd = self.excess({name: np.array([value]) for name, value in self.optimum(given).items()})
        return level + float(mean[0]), math.hypot(sd, float(mean_sd[0]))

    def support_beside(self, given: Fixed) -> tuple[Support, tuple[str, ...]]:
        """Support of the answer beside fixed values, which may lie far from all that was seen, and its reasons.

        Args:
            given: Values that are fixed.
        """
        support, reasons = self.support, list(self.reasons)
        best = self._best(given)
        places = self._places(best[:1], best[1:2])[0]
        for name, place in zip(COORDINATES[:2], places, strict=False):
            away = abs(float(place))
            if name not in given or away <= SEEN:
                continue
            support = "outside" if away > REACH or support == "outside" else "extrapolated"
            reasons.append(
                f"the {name} given is a factor of about {float(f'{math.exp(away):.2g}'):,g} from the best known,"
                f" runs were seen within a factor of {math.exp(SEEN):.1f}"
            )
        return support, tuple(reasons)

    def optimum(self, given: Fixed | None = None) -> dict[str, float | str]:
        """The hyperparameters to begin with by their names: those of least expected loss, given how uncertain the prior
        is of where the best ones lie (``risk``).

        Args:
            given: Values of learning rate, batch or schedule that are fixed: the others are the best beside them.
                A constant rate is only proposed where it is fixed, and has no final share.
        """
        given = given or {}
        centre = self._careful(given) if given else self._proposal
        best: dict[str, float | str] = {
            name: self._within(name, backward(name, z)) for name, z in zip(COORDINATES, centre, strict=True)
        }
        schedule = "cosine" if self.task.schedule == "constant" else self.task.schedule
        best = {**best, "schedule": schedule, **given}
        if best["schedule"] == "wsd":
            best["decay_ratio"] = self.task.decay_ratio
        return best if best["schedule"] == "constant" else {**best, "min_lr_ratio": 0.0}

    def interval_90(self, given: Fixed | None = None) -> dict[str, tuple[float, float]]:
        """Hyperparameter name -> where the best value lies with a probability of 0.9, round the likeliest one.

        Args:
            given: Values that are fixed, which have no interval: those of the others are of the best beside them.
        """
        given = given or {}
        centre = self._best(given) if given else self._centre
        sd = np.concatenate([self._place_sd(centre, given), self.offset_sd[2:6]])
        intervals = {}
        for name, z, width in zip(COORDINATES, centre, sd * NORMAL_90, strict=True):
            if name not in given:
                least, most = self._bounds(name)
                ends = sorted((backward(name, z - width), backward(name, z + width)))
                intervals[name] = (min(max(ends[0], least), most), max(min(ends[1], most), least))
        return intervals

    def portfolio(self, k: int = 5, given: Fixed | None = None) -> list[dict[str, float | str]]:
        """``k`` points to try first: the optimum, learning rate and batch off it in turn, then both, then further.

        Args:
            k: How many; fewer where bounds and what is fixed leave no more.
            given: Values of learning rate, batch or schedule that are fixed.
        """
        best, fixed = self.optimum(given), given or {}
        points = []
        for rate, batch in _spiral():
            point = {
                **best,
                "learning_rate": self._within("learning_rate", float(best["learning_rate"]) * 1.6**rate),
                "global_batch_tokens": self._within(
                    "global_batch_tokens", float(best["global_batch_tokens"]) * 1.5**batch
                ),
                **fixed,
            }
            if point not in points:
                points.append(point)
        return points[:k]

    @cached_property
    def _centre(self) -> Floats:
        """Coordinates of the likeliest optimum, ``[6]``."""
        return self._best({})

    @cached_property
    def _proposal(self) -> Floats:
        """Coordinates of what to begin with, ``[6]``."""
        return self._careful({})

    def _place_sd(self, centre: Floats, given: Fixed) -> Floats:
        """Standard deviation of where the best learning rate and batch lie, ``[2]``: of the recipe and the surface.

        Beside a fixed one, that of the other holds also what it moves by when the fixed one's own best is elsewhere.
        """
        sd = np.hypot(self.offset_sd[:2], self._core_sd(centre))
        step = 0.3
        for axis, name in enumerate(COORDINATES[:2]):
            if name in given:
                ends = [self._best({**given, name: float(given[name]) * math.exp(s)}) for s in (-step, step)]
                slope = (ends[1] - ends[0])[1 - axis] / (2 * step)
                sd[1 - axis] = math.hypot(sd[1 - axis], slope * self.offset_sd[axis])
        return sd

    @cached_property
    def _lowest(self) -> float:
        places = self._places(self._centre[:1], self._centre[1:2])
        return float(harden(self.surface.mean(places))[0])

    def _core_sd(self, centre: Floats) -> Floats:
        """Standard deviation of the surface's own optimum, ``[2]``: of its slope there, over its curvature."""
        step = 0.3
        moved = np.array([[0.0, 0.0], [step, 0], [-step, 0], [0, step], [0, -step]]) + centre[:2]
        places = self._places(moved[:, 0], moved[:, 1])
        values, sd = self.surface.mean(places), np.zeros(2)
        for axis in (0, 1):
            up, down = 1 + 2 * axis, 2 + 2 * axis
            curvature = max((values[up] + values[down] - 2 * values[0]) / step**2, 0.005)
            slope_sd = float(self.surface.difference_sd(places[up : up + 1], places[down])[0]) / (2 * step)
            sd[axis] = min(slope_sd / curvature, 1.0)
        return sd

    def _places(self, log_rate: Floats, log_batch: Floats) -> Floats:
        tasks = np.broadcast_to(task_coordinates(self.task), (len(log_rate), 3))
        return self.surface.places(log_rate, log_batch, tasks, self.offset[:2])

    def _bounds(self, name: str) -> tuple[float, float]:
        """Least and greatest value of a hyperparameter that is ever proposed."""
        length = float(self.task.sequence_length)
        return {
            "learning_rate": LEARNING_RATES,
            "global_batch_tokens": (length, max(self.task.total_tokens / LEAST_STEPS, length)),
            "warmup_ratio": (0.0, MOST_WARMUP),
        }.get(name, (0.0, math.inf))

    def _within(self, name: str, value: float) -> float:
        least, most = self._bounds(name)
        return min(max(value, least), most)

    def _careful(self, given: Fixed) -> Floats:
        best = self._best(given) if given else self._centre
        sharpness = float(np.exp(self.offset[6]))
        lowest = float(harden(self.surface.mean(self._places(best[:1], best[1:2])))[0])

        def excess(log_rate: Floats, log_batch: Floats) -> Floats:
            return sharpness * (harden(self.surface.mean(self._places(log_rate, log_batch))) - lowest)

        width = NORMAL_90 * self._place_sd(best, given)
        ranges = [  # never beyond the interval: far from all that was seen, the excess is flat and caution has no end
            (max(low, z - w), min(high, z + w))
            for (low, high), z, w in zip(self._ranges(given), best, width, strict=False)
        ]
        return np.concatenate([careful(excess, best[:2], self.offset_sd[:2], self.cliff, ranges), best[2:]])

    def _ranges(self, given: Fixed) -> list[tuple[float, float]]:
        """Coordinates of the least and greatest learning rate and batch that are proposed beside given ones."""
        ends = [(given[name],) * 2 if name in given else self._bounds(name) for name in COORDINATES[:2]]
        return [(math.log(float(low)), math.log(float(high))) for low, high in ends]

    def _best(self, given: Fixed) -> Floats:
        law = optimum_law(self.surface.law, task_coordinates(self.task)[None])
        axes = []
        for axis, (low, high) in enumerate(self._ranges(given)):
            middle = float(np.clip(law[axis][0] + self.offset[axis], low, high))
            axes.append((max(low, middle - REACH), min(high, middle + REACH)))
        (low_x, high_x), (low_y, high_y) = axes
        for _ in range(4):  # a grid, then finer ones round its best node
            x, y = np.meshgrid(np.linspace(low_x, high_x, 21), np.linspace(low_y, high_y, 21), indexing="ij")
            values = self.surface.mean(self._places(x.ravel(), y.ravel()))
            found = np.unravel_index(int(values.argmin()), x.shape)
            best_x, best_y = float(x[found]), float(y[found])
            step_x, step_y = (high_x - low_x) / 10, (high_y - low_y) / 10
            low_x, high_x = max(low_x, best_x - step_x), min(high_x, best_x + step_x)
            low_y, high_y = max(low_y, best_y - step_y), min(high_y, best_y + step_y)
        place = task_coordinates(self.task)
        settings = self.recipes.settings_optimum(place, self.surface) + self.offset[2:6]
        warmup = SETTINGS.index("warmup_ratio")
        settings[warmup] = min(settings[warmup], float(forward("warmup_ratio", MOST_WARMUP)))
        return np.concatenate([[best_x, best_y], settings])

    def _sd(self, coordinates: Floats, fit_sd: Floats, mean: Floats, final_sd: Floats, varied: Any) -> Floats:
        """Uncertainty of the excess: of the fit, of where the optimum of what varies lies, of the form, and noise."""
        fit_sd = fit_sd * (1 + mean / SOFTNESS)  # softened back to nats
        curvature = np.concatenate([np.exp(2 * self.surface.shape[[0, 2]]), self.recipes.curvature])
        distance = np.abs(coordinates - self._centre)
        moved = curvature * (2 * distance * self.offset_sd[:6] + self.offset_sd[:6] ** 2) * varied
        place_variance = (moved**2).sum(axis=1) * np.exp(2 * self.offset[6])
        form = mean * (SHAPE_ERROR + self.offset_sd[6])
        return np.asarray(np.sqrt(fit_sd**2 + place_variance + form**2 + final_sd**2 + NOISE**2))


def _present(values: Any, default: Any) -> Any:
    """Values ``[n]`` with a default where they are NaN or None."""
    array = np.asarray(values)
    if array.dtype.kind not in "fO":
        return array
    absent = (
        np.frompyfunc(lambda v: v is None, 1, 1)(array).astype(bool) if array.dtype.kind == "O" else np.isnan(array)
    )
    return np.where(absent, default, array) if absent.any() else array


def _spiral() -> list[tuple[int, int]]:
    """Whole steps of (learning rate, batch) by their distance, learning rate first."""
    reach = range(-3, 4)
    steps = [(rate, batch) for rate in reach for batch in reach]
    return sorted(steps, key=lambda step: (step[0] ** 2 + step[1] ** 2, step[0] == 0, -step[0], -step[1]))


@dataclass(frozen=True)
class Prior:
    """The fitted prior."""

    surface: Surface
    recipes: Recipes
    level: LossLevel
    own: tuple[tuple[Anchor, float], ...] = ()
    """Groups of the user's own runs: their offset, and their best loss."""

    @staticmethod
    def load(extra_rows: Sequence[MetaRow] = ()) -> Prior:
        """The shipped prior, conditioned on further rows (a user's own finished trials)."""
        with np.load(SHIPPED) as arrays:
            prior = Prior.from_arrays(dict(arrays))
        return prior.conditioned(extra_rows) if extra_rows else prior

    def conditioned(self, rows: Sequence[MetaRow]) -> Prior:
        """This prior with further rows: each study and size becomes a measurement of its recipe's offset."""
        own = []
        for group in group_rows(rows):
            anchor = self.recipes.observe(group, self.surface)
            own.append((anchor, float(group.losses.min())))
        recipes = dataclasses.replace(self.recipes, anchors=(*self.recipes.anchors, *(anchor for anchor, _ in own)))
        return dataclasses.replace(self, recipes=recipes, own=(*self.own, *own))

    @property
    def optimizers(self) -> list[str]:
        """Names of the optimizers of which runs were seen, the user's own among them."""
        return sorted({anchor.optimizer for anchor in self.recipes.anchors})

    def at(self, task: Task) -> TaskPrior:
        """The prior at one task."""
        place = task_coordinates(task)
        beyond = self.surface.beyond(place)
        offset, offset_sd = self.recipes.offset(task, self.surface)
        support, reasons, distance = self._support(task, place, beyond)
        shift = self._level_shift(task, place)
        return TaskPrior(
            task, support, reasons, self.surface, self.recipes, self.level, offset, offset_sd,
            self.recipes.cliff(task), shift, distance,
        )  # fmt: skip

    def _support(self, task: Task, place: Floats, beyond: Floats) -> tuple[Support, tuple[str, ...], float]:
        reasons: list[str] = []
        gap = float(np.sqrt(((self.surface.tasks - place) ** 2).sum(axis=1)).min())
        distance = max(float(np.linalg.norm(beyond)), gap - NEAR, 0.0)
        support: Support = "inside" if distance <= 0.35 else "extrapolated" if distance <= FAR else "outside"
        if distance > 0.35:
            words = ("parameters", "tokens", "the share of active parameters")
            sides = [f"{'more' if b > 0 else 'fewer'} {w}" for b, w in zip(beyond[:2], words, strict=False) if b]
            sides += [f"{words[2]} is {'higher' if beyond[2] > 0 else 'lower'}"] if beyond[2] else []
            factor = float(f"{math.exp(distance):.2g}")
            reasons.append(
                f"the nearest sizes the prior was fitted to are a factor of about {factor:,.0f} away"
                + (f" ({', '.join(sides)})" if sides else "")
            )
        if task.optimizer not in self.optimizers:
            support = "outside"
            seen = ", ".join(self.optimizers)
            reasons.append(f"no run with the optimizer {task.optimizer!r} was seen; seen were {seen}")
        elif task.optimizer != "adamw" and support == "inside":
            support = "extrapolated"
            reasons.append(f"{task.optimizer} was seen in one-factor sweeps of 130M to 1.2B parameters only")
        own = [anchor for anchor, _ in self.own if anchor.optimizer == task.optimizer and anchor.task is not None]
        near = [a for a in own if a.task is not None and float(np.linalg.norm(a.task - place)) <= 1.5 * NEAR]
        telling = [anchor for anchor in near if np.isfinite(anchor.sd[:2]).any()]
        for count, told in (
            (len(telling), "near this size moved the answer"),
            (len(near) - len(telling), "near this size told nothing of rate and batch: too few trials, or too alike"),
        ):
            if count:
                reasons.append(f"{count} own {'study' if count == 1 else 'studies'} {told}")
        support = "extrapolated" if telling and support == "outside" else support
        return support, tuple(reasons), 0.0 if telling else distance

    def _level_shift(self, task: Task, place: Floats) -> tuple[float, float] | None:
        """What the nearest own runs add to the tables' law, and its standard deviation.

        Their best losses are carried here by the law's ratio. Beyond the tables nobody saw how it falls, so up to half
        of that change is doubted there.
        """
        near = [
            (float(np.linalg.norm(anchor.task - place)), best, best * self.level.at(place) / self.level.at(anchor.task))
            for anchor, best in self.own
            if anchor.task is not None and anchor.optimizer == task.optimizer
        ]
        near = [found for found in near if found[0] <= 3 * NEAR]
        if not near:
            return None
        distances, _, carried = np.transpose(near)
        mean = float(np.average(carried, weights=np.exp(-distances)))
        distance, best, _ = min(near)
        doubt = 0.5 * min(1.0, float(np.linalg.norm(self.surface.beyond(place)))) * abs(mean - best)
        return mean - self.level.at(place), 0.02 + 0.1 * distance + doubt

    def save(self, path: Path) -> None:
        """Write the fitted numbers."""
        names = ("recipe", "offset", "sd", "slope", "cliff")
        known = [
            {"optimizer": anchor.optimizer, **{name: getattr(anchor, name).tolist() for name in names}}
            for anchor in self.recipes.anchors
        ]
        np.savez_compressed(
            path,
            **{f"surface.{name}": values for name, values in self.surface.to_arrays().items()},  # type: ignore[arg-type]
            base=self.recipes.base,
            curvature=self.recipes.curvature,
            level=self.level.theta,
            level_error=np.array(self.level.error),
            anchors=np.array(json.dumps(known)),
        )

    @staticmethod
    def from_arrays(arrays: Mapping[str, Any]) -> Prior:
        """The inverse of ``save``, from the arrays of its file."""
        surface = {name.removeprefix("surface."): v for name, v in arrays.items() if name.startswith("surface.")}
        anchors = tuple(
            Anchor(a["optimizer"], task=None, **{name: np.array(a[name]) for name in a if name != "optimizer"})
            for a in json.loads(str(arrays["anchors"]))
        )
        recipes = Recipes(arrays["base"], arrays["curvature"], anchors)
        level = LossLevel(arrays["level"], float(arrays["level_error"]))
        return Prior(Surface.from_arrays(surface), recipes, level)
