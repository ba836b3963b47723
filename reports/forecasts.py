"""What was estimated before the trials against what they measured, as plain data."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autotune.study.snapshot import StudySnapshot
from reports.info import Axis, get_axes


class ForecastInfo(NamedTuple):
    """One objective: estimates and measurements of the ``n`` trials that have both, in the units of its axis."""

    axis: Axis
    numbers: np.ndarray
    """Trial numbers."""
    measured: np.ndarray
    estimated: np.ndarray
    low: np.ndarray
    high: np.ndarray
    """The estimate's interval."""

    @property
    def median_error_ratio(self) -> float:
        """Median of |estimate / measurement - 1|."""
        return float(np.median(np.abs(self.estimated / self.measured - 1)))

    @property
    def within_ratio(self) -> float:
        """Share of the measurements that lie in their interval."""
        return float(np.mean((self.low <= self.measured) & (self.measured <= self.high)))

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's, None where all are equal or there are fewer than three."""
        if len(self.numbers) < 3 or np.ptp(self.measured) == 0 or np.ptp(self.estimated) == 0:
            return None
        from scipy.stats import spearmanr

        return float(spearmanr(self.estimated, self.measured).statistic)

    @property
    def summary(self) -> str:
        """One line for people."""
        text = f"{self.axis.label.lower()}: off by {100 * self.median_error_ratio:.0f} % in the median"
        text += f", {100 * self.within_ratio:.0f} % of {len(self.numbers)} within their interval"
        rank = self.rank_correlation
        return text + (f", rank correlation {rank:.2f}" if rank is not None else "")


def get_forecasts(snapshot: StudySnapshot) -> tuple[ForecastInfo, ...]:
    """Every objective that was estimated and measured in at least one full training; repeats are left out."""
    infos = []
    for axis in get_axes(snapshot):
        rows = [
            (trial.number, trial.values[axis.name], *trial.forecast[axis.name])
            for trial in snapshot.trials
            if trial.values is not None and trial.share == 1 and trial.repeat_of is None and axis.name in trial.forecast
        ]
        if rows:
            numbers, *columns = np.array(rows, dtype=np.float64).T
            infos.append(ForecastInfo(axis, numbers.astype(np.int32), *(column / axis.scale for column in columns)))
    return tuple(infos)
