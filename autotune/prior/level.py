"""The loss at the optimum by size: E + A / N^a + B / D^b, with a factor for the active share of parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autotune.prior.robust import Floats

START = np.array([1.7, -0.9, -0.33, -0.1, -1.4, -0.33])
SD = np.array([0.3, 0.7, 0.1, 0.2, 0.7, 0.1])
"""What is believed before any table, of the order of published fits: irreducible loss; logarithm of the part of the
parameters at the reference task, its exponents of parameters and of the active share; the same of the tokens."""


@dataclass(frozen=True)
class LossLevel:
    """The fitted law of the loss at the optimum."""

    theta: Floats
    """``[6]``, in the order of ``START``."""
    error: float
    """Root mean square error on tasks left out of the fit, nats."""

    def at(self, task: Floats) -> float:
        """Loss at task coordinates ``[3]``, nats per token of the tables' text and tokenizer."""
        return float(_loss(self.theta, task[None])[0])

    @staticmethod
    def fit(tasks: Floats, losses: Floats) -> LossLevel:
        """Fit to the best losses ``[m]`` of tasks ``[m, 3]``; the error by leaving each out in turn."""
        every = np.arange(len(losses))
        errors = [
            float(_loss(_solve(tasks[every != i], losses[every != i]), tasks[i : i + 1])[0] - losses[i]) for i in every
        ]
        return LossLevel(_solve(tasks, losses), float(np.sqrt(np.mean(np.square(errors)))))


def _loss(theta: Floats, tasks: Floats) -> Floats:
    size = np.exp(theta[1] + theta[2] * tasks[:, 0] + theta[3] * tasks[:, 2])
    return np.asarray(theta[0] + size + np.exp(theta[4] + theta[5] * tasks[:, 1]))


def _solve(tasks: Floats, losses: Floats) -> Floats:
    from scipy.optimize import least_squares

    def residuals(theta: Floats) -> Floats:
        return np.concatenate([(_loss(theta, tasks) - losses) / 0.01, (theta - START) / SD])

    return np.asarray(least_squares(residuals, START, max_nfev=200).x)
