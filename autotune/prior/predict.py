"""What the prior says of one task: the loss above its optimum at any hyperparameters, the optimum, points round it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from autotune.prior.task import Task

Floats = NDArray[np.float64]
Support = Literal["inside", "extrapolated", "outside"]


@dataclass(frozen=True)
class TaskPrior:
    """The prior at one task."""

    task: Task
    support: Support
    """Whether the task lies among those the prior was fitted to, near them, or far away."""
    reasons: tuple[str, ...]
    """Why the support is not ``inside``, for people."""
    centre: Floats
    """Natural logarithms of learning rate and batch at the optimum, ``[2]``."""

    def excess(self, points: Mapping[str, Any]) -> tuple[Floats, Floats]:
        """Loss above that at the optimum, in nats per token.

        Args:
            points: Hyperparameter name -> values ``[n]``; what is missing is at the recipe's value.

        Returns:
            Mean and standard deviation, both ``[n]``.
        """
        num_points = max((np.size(values) for values in points.values()), default=1)
        filled = {"learning_rate": math.exp(self.centre[0]), "global_batch_tokens": math.exp(self.centre[1]), **points}
        columns = [
            np.log(np.broadcast_to(np.asarray(filled[name], dtype=float), num_points))
            for name in ("learning_rate", "global_batch_tokens")
        ]
        u, v = columns[0] - self.centre[0], columns[1] - self.centre[1]
        mean = 0.02 * u**2 - 0.015 * u * v + 0.02 * v**2
        widening = {"inside": 1.0, "extrapolated": 2.0, "outside": 4.0}[self.support]
        return mean, widening * (0.003 + 0.5 * mean)

    def loss_level(self) -> tuple[float, float] | None:
        """Loss at the optimum and its standard deviation; None where the prior can't tell."""
        return None

    def optimum(self) -> dict[str, float | str]:
        """The best hyperparameters by their names."""
        return {"learning_rate": math.exp(self.centre[0]), "global_batch_tokens": math.exp(self.centre[1])}

    @property
    def interval_90(self) -> dict[str, tuple[float, float]]:
        """Hyperparameter name -> where the best value lies with a probability of 0.9."""
        factor = {"inside": 1.6, "extrapolated": 2.5, "outside": 6.0}[self.support]
        return {name: (float(value) / factor, float(value) * factor) for name, value in self.optimum().items()}

    def portfolio(self, k: int = 5) -> list[dict[str, float | str]]:
        """``k`` points to try first: the optimum, then learning rate and batch off it in turn."""
        best = self.optimum()
        steps = [(1.0, 1.0), (1.6, 1.0), (1 / 1.6, 1.0), (1.0, 1.5), (1.0, 1 / 1.5), (1.6, 1.5), (1 / 1.6, 1 / 1.5)]
        return [
            {
                **best,
                "learning_rate": float(best["learning_rate"]) * rate,
                "global_batch_tokens": float(best["global_batch_tokens"]) * batch,
            }
            for rate, batch in steps[:k]
        ]


@dataclass(frozen=True)
class Prior:
    """The fitted prior."""

    @staticmethod
    def load(extra_rows: Sequence[Any] = ()) -> Prior:
        """The shipped prior, conditioned on further rows."""
        return Prior()

    def at(self, task: Task) -> TaskPrior:
        """The prior at one task."""
        n, d = math.log(task.num_parameters), math.log(task.total_tokens)
        batch = max(math.log(0.58) + 0.571 * d, math.log(task.sequence_length))
        centre = np.array([min(math.log(1.79) - 0.713 * n + 0.307 * d, math.log(0.03)), batch])
        inside = 1.5e8 <= task.num_parameters <= 1.5e9 and 2e9 <= task.total_tokens <= 2e11
        near = 5e7 <= task.num_parameters <= 2e10 and 5e8 <= task.total_tokens <= 2e12
        support: Support = "inside" if inside else "extrapolated" if near else "outside"
        reasons = () if inside else ("the task is larger or smaller than those the prior was fitted to",)
        return TaskPrior(task, support, reasons, centre)
