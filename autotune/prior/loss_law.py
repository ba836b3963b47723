"""Loss as a function of the learning rates used so far, fitted to one run and used to forecast its end.

The multi-power law (Luo et al., "A Multi-Power Law for Loss Curve Prediction Across Learning Rate Schedules",
arXiv:2503.12811): with S(t) the sum of the learning rates after warm-up and eta_k the learning rate of segment k,

    L(t) = L0 + A (S(t) + Sw)^-alpha - B sum_k (eta_{k-1} - eta_k) G(eta_k^-gamma S_k(t)),   G(x) = 1 - (1 + C x)^-beta

where S_k(t) is the sum since the start of segment k. The first two terms are progress; the last is what a falling
learning rate gives back as noise dies down. The last term can only be told from the first two once the learning rate
has moved, so with few points or a constant rate it is left out, or taken from another run of the same recipe.

Learning rates are divided by a reference before fitting, which keeps all parameters near one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from autotune.prior.robust import MAD_TO_SIGMA, Floats

MIN_POINTS = 6
"""Fewest points that the power law is fitted to."""
MIN_POINTS_WITH_DROPS = 24
"""Fewest points that all parameters are fitted to."""
MIN_RATE_DROP_RATIO = 0.15
"""Least fall of the learning rate from its highest value that tells the drop term from the others."""
_LOG_RANGE = (np.log(1e-6), np.log(1e6))


@dataclass(frozen=True)
class RatePath:
    """Learning rates as segments of constant rate: ``rate`` and ``num_steps``, each [n]."""

    rate: Floats
    num_steps: Floats

    def then(self, later: RatePath) -> RatePath:
        """This path followed by another."""
        return RatePath(np.append(self.rate, later.rate), np.append(self.num_steps, later.num_steps))


def progress_term(sums: Floats, offset: Floats | float, exponent: Floats | float) -> Floats:
    """(S + Sw)^-alpha: how much of the loss that training can take away is left.

    Args:
        sums: Cumulative rate S.
        offset: Sw.
        exponent: alpha.
    """
    left: Floats = (sums + offset) ** -np.asarray(exponent)
    return left


@dataclass(frozen=True)
class DropTerm:
    """What a change of the learning rate does to the loss: B, C, beta and gamma of the multi-power law."""

    gain: float
    speed: float
    power: float
    rate_power: float

    def loss_change(self, rate: Floats, sum_at: Floats, sum_before: Floats) -> Floats:
        """Change of the loss at each segment, [n], from all segments up to it.

        Args:
            rate: Learning rate of each segment over the reference, [n].
            sum_at: Cumulative rate where the loss is asked for, inside each segment, [n].
            sum_before: Cumulative rate at the start of each segment, [n].
        """
        step_up = np.diff(rate, prepend=rate[:1])
        moved = np.flatnonzero(step_up)
        if not len(moved):
            return np.zeros_like(rate)
        since = np.maximum(sum_at[:, None] - sum_before[moved], 0.0)
        with np.errstate(divide="ignore", over="ignore"):
            reach = 1.0 - (1.0 + self.speed * since * np.maximum(rate[moved], 1e-12) ** -self.rate_power) ** -self.power
        return self.gain * reach @ step_up[moved]


@dataclass(frozen=True)
class LossLaw:
    """A fitted law. ``drops`` None makes it the plain power law in the cumulative learning rate."""

    floor: float
    """L0: the loss that is never undercut at the peak rate."""
    amplitude: float
    """A."""
    offset: float
    """Sw: cumulative rate before the first point, over the reference."""
    exponent: float
    """alpha."""
    reference_rate: float
    """Learning rate that all rates are divided by."""
    drops: DropTerm | None = None
    residual: float = 0.0
    """Median absolute residual of the fit, log loss."""

    @property
    def form(self) -> Literal["multi-power", "power"]:
        """Which law it is."""
        return "power" if self.drops is None else "multi-power"

    def predict(self, path: RatePath) -> Floats:
        """Mean loss over each segment of the path, [n], taken at the segment's middle."""
        rate = path.rate / self.reference_rate
        sums = rate * path.num_steps
        after = np.cumsum(sums)
        middle = after - sums / 2
        loss: Floats = self.floor + self.amplitude * progress_term(middle, self.offset, self.exponent)
        if self.drops is not None:
            loss = loss + self.drops.loss_change(rate, middle, after - sums)
        return np.maximum(loss, 1e-6)


def fit_loss_law(path: RatePath, loss: Floats, *, drops: DropTerm | None = None) -> LossLaw | None:
    """Fit the law to one run: least squares with a soft-L1 loss on log residuals, from several starts.

    Args:
        path: The learning rates after warm-up, [n] segments.
        loss: Mean (or median) training loss of each segment, [n], above zero.
        drops: The drop term of a run of the same recipe (its rates over the same multiple of the peak), kept as it is;
            None to fit it too where the run's own rates allow.

    Returns:
        The law; None with fewer points than ``MIN_POINTS`` or without any learning rate above zero.
    """
    if len(loss) < MIN_POINTS or not np.any(path.rate > 0):
        return None
    reference = float(path.rate.max())
    fall = 1.0 - path.rate[np.argmax(path.rate) :].min() / reference
    with_drops = drops is None and len(loss) >= MIN_POINTS_WITH_DROPS and fall >= MIN_RATE_DROP_RATIO
    from scipy.optimize import least_squares

    lower, upper = _bounds(loss, with_drops)
    noise = max(1e-3, noise_of(np.log(loss)))

    def residuals(point: Floats) -> Floats:
        return np.log(_unpack(point, reference, drops, with_drops).predict(path) / loss)

    def descend(point: Floats, num_evaluations: int) -> tuple[float, Floats]:
        point = np.clip(point, lower + 1e-9, upper - 1e-9)
        fit = least_squares(
            residuals, point, bounds=(lower, upper), loss="soft_l1", f_scale=noise, ftol=1e-6, max_nfev=num_evaluations
        )
        return float(fit.cost), fit.x

    starts = _starts(path, loss, reference, with_drops)
    # All starts go a little way, the best of them the whole.
    _, nearest = min((descend(point, 8) for point in starts), key=lambda fit: fit[0])
    _, best = descend(nearest, 80)
    law = _unpack(best, reference, drops, with_drops)
    return replace(law, residual=float(np.median(np.abs(residuals(best)))))


def noise_of(values: Floats) -> float:
    """Standard deviation of the noise on a smooth curve of at least three values, [n]: second differences tell it from
    the trend; their spread is sqrt(6) times that of the noise."""
    return float(MAD_TO_SIGMA * np.median(np.abs(np.diff(values, 2))) / np.sqrt(6))


def _bounds(loss: Floats, with_drops: bool) -> tuple[Floats, Floats]:
    # The floor may lie anywhere below the lowest loss; an exponent beyond 3 is a curve that has already ended.
    lower = [np.log(loss.min() * 0.02), _LOG_RANGE[0], _LOG_RANGE[0], np.log(0.02)]
    upper = [np.log(loss.min() * 1.02), _LOG_RANGE[1], _LOG_RANGE[1], np.log(3.0)]
    if with_drops:
        lower += [np.log(1e-4), np.log(1e-5), np.log(0.05), 0.0]
        upper += [np.log(loss.max()), np.log(1e3), np.log(3.0), 1.5]
    return np.array(lower), np.array(upper)


def _starts(path: RatePath, loss: Floats, reference: float, with_drops: bool) -> list[Floats]:
    """Nine starts: three floors by three exponents, the rest set so that the law meets the first point."""
    total = float((path.rate / reference) @ path.num_steps)
    points = []
    for floor_ratio in (0.3, 0.7, 0.95):
        for exponent in (0.2, 0.5, 1.0):
            floor, offset = floor_ratio * loss.min(), 0.05 * total
            amplitude = max(loss[0] - floor, 1e-3) * offset**exponent
            point = [np.log(floor), np.log(amplitude), np.log(offset), np.log(exponent)]
            if with_drops:
                point += [np.log(0.1 * loss.min()), np.log(10.0 / total), np.log(0.5), 0.5]
            points.append(np.array(point))
    return points


def _unpack(point: Floats, reference: float, drops: DropTerm | None, with_drops: bool) -> LossLaw:
    floor, amplitude, offset, exponent = (float(value) for value in np.exp(point[:4]))
    if with_drops:
        gain, speed, power = (float(value) for value in np.exp(point[4:7]))
        drops = DropTerm(gain, speed, power, float(point[7]))
    return LossLaw(floor, amplitude, offset, exponent, reference, drops)
