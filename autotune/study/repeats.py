"""What repeats of one candidate with other seeds say: a mean and an interval for each objective."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev

from autotune.space.objectives import Objective
from autotune.study.snapshot import StudySnapshot

LEVEL = 0.95


@dataclass(frozen=True)
class RepeatedValue:
    """One objective over the repeats of a trial."""

    objective: Objective
    num_repeats: int
    mean: float
    half_width: float | None
    """Half of the 95 % t-interval of the mean; None with a single repeat."""

    @property
    def text(self) -> str:
        """For people."""
        interval = "" if self.half_width is None else f" ± {self.objective.text(self.half_width)}"
        return f"{self.objective.text(self.mean)}{interval}"


def repeated_values(snapshot: StudySnapshot, number: int) -> list[RepeatedValue]:
    """Mean and t-interval of each objective over the repeats of trial ``number`` that were measured.

    The trial itself is left out: it was chosen for its value, which is therefore better than what to expect.
    """
    repeats = [row for row in snapshot.trials if row.repeat_of == number and row.share == 1]
    rows = [row.values for row in repeats if row.values is not None]
    if not rows:
        return []
    return [_interval(objective, [values[objective.name] for values in rows]) for objective in snapshot.objectives]


def _interval(objective: Objective, values: list[float]) -> RepeatedValue:
    count = len(values)
    if count == 1:
        return RepeatedValue(objective, 1, values[0], None)
    from scipy.stats import t

    quantile = float(t.ppf(0.5 + LEVEL / 2, count - 1))
    return RepeatedValue(objective, count, fmean(values), quantile * stdev(values) / math.sqrt(count))
