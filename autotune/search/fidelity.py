"""Which candidates of a study are trained on, and what samplers may believe of those that are not.

Trials grow in rungs (``space.fidelity``). A candidate's loss at a rung is not compared as it is: how far it will still
fall is forecast from its curve by the loss law, corrected by how candidates that went on did fall (level and slope by
Bayesian regression, the law's own uncertainty scaled to its errors). On forecasts, the best 1/eta of a rung go on, as
in asynchronous successive halving (Li et al., "A System for Massively Parallel Hyperparameter Tuning",
arXiv:1810.05934); with several objectives the best are those of the first non-dominated layers, and of a layer those
that stand alone. Speed and memory of a part of a training run of the engine are final.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autotune.search import pareto
from autotune.search.hygiene import MEASURED_EXACTLY, tells, violations_of
from autotune.search.sampler import Observation, SearchState
from autotune.space.fidelity import Fidelity
from autotune.space.objectives import QUALITY, Objective

PRIOR_WEIGHT = 4.0
"""The law's own uncertainty counts as much as so many candidates that went on."""
SLOPE_SD = 0.3
"""The fall that the law forecasts is right within so much of itself, before any candidate went on."""
LEVEL_SPREADS = 10.0
"""What all candidates of a rung still gain is not known within so many times their spread, before any went on."""
SPREAD_RATIO = 0.3
"""Without a curve a value still moves by so much of the spread of the rung's values."""
TOLERANCE = 1e-9
"""Of sums of shares."""


class Growth(NamedTuple):
    """A candidate to train on."""

    of: int
    """The number that trained it so far."""
    rung: int
    """The rung it goes to."""


@dataclass(frozen=True)
class Chain:
    """A candidate and the numbers that trained it, one a rung."""

    links: tuple[Observation, ...]
    """By rung."""

    @property
    def first(self) -> Observation:
        """The number that began it."""
        return self.links[0]

    @property
    def last(self) -> Observation:
        """The number that went farthest."""
        return self.links[-1]

    @property
    def known(self) -> Observation | None:
        """The farthest number with values; None without any, or where it failed by its own fault on the way."""
        if self.last.state == "failed" and tells(self.last):
            return None
        measured = [link for link in self.links if link.values is not None]
        return measured[-1] if measured else None


def chains_of(observations: Sequence[Observation]) -> list[Chain]:
    """The candidates of a study; refused proposals and repeats are none."""
    chains: dict[int, list[Observation]] = {}
    root: dict[int, int] = {}
    for observation in observations:
        if observation.state == "refused" or observation.repeat_of is not None:
            continue
        begun = observation.number if observation.continues is None else root.get(observation.continues)
        if begun is not None:
            root[observation.number] = begun
            chains.setdefault(begun, []).append(observation)
    return [Chain(tuple(links)) for links in chains.values()]


@dataclass(frozen=True)
class Forecasts:
    """Values of candidates after the full training, as costs (lower is better)."""

    mean: np.ndarray
    """``[n, k]``; NaN for a candidate of which nothing is known."""
    sd: np.ndarray
    """``[n, k]``: what is uncertain of the candidate alone. What all of a rung share (how much a training still gains)
    can't change their order and is left out; 0 for what was measured."""

    @classmethod
    def of(
        cls,
        chains: Sequence[Chain],
        links: Sequence[Observation | None],
        objectives: Sequence[Objective],
        fidelity: Fidelity,
    ) -> Forecasts:
        """Forecast candidates.

        Args:
            chains: What all of them went through.
            links: ``[n]``: the numbers to forecast from; None where nothing is known.
            objectives: The columns.
            fidelity: The rungs.
        """
        mean = np.full((len(links), len(objectives)), np.nan)
        sd = np.zeros_like(mean)
        for column, objective in enumerate(objectives):
            sign = -1.0 if objective.direction == "maximize" else 1.0
            for row, link in enumerate(links):
                if link is not None and link.values is not None:
                    mean[row, column] = sign * link.values[objective.name]
            for rung in range(fidelity.last):
                if objective.name in MEASURED_EXACTLY and fidelity.tells_speed(rung):
                    continue
                change = _Change.fit(chains, objective, fidelity, rung)
                for row, link in enumerate(links):
                    if link is not None and link.rung <= rung:
                        fall = change.of(link)
                        mean[row, column] -= fall.mean
                        sd[row, column] = np.hypot(sd[row, column], fall.sd)
        return cls(mean, sd)


class _Fall(NamedTuple):
    mean: float
    sd: float


@dataclass(frozen=True)
class _Change:
    """How an objective's cost falls from a rung to the next: ``level + slope * (what the law says)``."""

    rung: int
    is_curve: bool
    spread: float
    """Standard deviation of the change of a candidate without a curve."""
    centre: float
    """What the law says of the candidates on average."""
    others_sd: float
    """How much the candidates differ in it."""
    weights: np.ndarray
    """Posterior mean of level and slope."""
    covariance: np.ndarray
    scale: float
    """The law's errors over its own uncertainty, squared."""

    @classmethod
    def fit(cls, chains: Sequence[Chain], objective: Objective, fidelity: Fidelity, rung: int) -> _Change:
        """Learn from the candidates that went from ``rung`` to the next."""
        sign = -1.0 if objective.direction == "maximize" else 1.0
        before = [link for c in chains for link in c.links if link.rung == rung and link.values is not None]
        values = np.array([sign * (link.values or {})[objective.name] for link in before])
        spread = SPREAD_RATIO * _spread(values)
        blank = cls(rung, objective.name == QUALITY, spread, 0.0, np.inf, np.array([0.0, 1.0]), np.zeros((2, 2)), 1.0)
        alone = [blank._law(link) for link in before]
        centre = float(np.median([law.mean for law in alone])) if alone else 0.0
        typical = float(np.median([law.sd for law in alone])) if alone else spread
        others_sd = float(np.sqrt(np.mean([(law.mean - centre) ** 2 for law in alone]))) if alone else 0.0
        blank = replace(blank, centre=centre, others_sd=max(others_sd, 1e-12))
        laws = [blank._law(link) for link in before]
        # How much all of them still gain (or, of another width, on which level they are) is not known beforehand.
        level_sd = LEVEL_SPREADS * max(_spread(values), typical)
        prior = np.diag([1 / max(level_sd, 1e-12) ** 2, 1 / SLOPE_SD**2])
        after = {link.continues: link for c in chains for link in c.links if link.values is not None}
        pairs = [row for row, link in enumerate(before) if link.number in after]
        rows = np.array([[1.0, laws[row].mean - centre] for row in pairs]).reshape(-1, 2)
        fell = np.array(
            [values[row] - sign * (after[before[row].number].values or {})[objective.name] for row in pairs]
        )
        noise = np.array([max(laws[row].sd, 1e-12) for row in pairs])
        start, scale = np.array([centre, 1.0]), 1.0
        weights, covariance = start, np.linalg.inv(prior)
        for _ in range(3 if pairs else 0):
            precision = prior + (rows.T / (scale * noise**2)) @ rows
            covariance = np.linalg.inv(precision)
            weights = covariance @ (prior @ start + (rows.T / (scale * noise**2)) @ fell)
            errors = (fell - rows @ weights) / noise
            scale = (PRIOR_WEIGHT + float(errors @ errors)) / (PRIOR_WEIGHT + len(pairs))
        return replace(blank, weights=weights, covariance=covariance, scale=scale)

    def of(self, link: Observation) -> _Fall:
        """Of a candidate; its standard deviation without what all candidates share."""
        law = self._law(link)
        away = law.mean - self.centre
        mean = float(self.weights @ np.array([1.0, away]))
        return _Fall(mean, float(np.sqrt(self.scale * law.sd**2 + self.covariance[1, 1] * away**2)))

    def _law(self, link: Observation) -> _Fall:
        fall = None
        if self.is_curve and link.curve is not None and link.curve.loss:
            fall = link.curve.fall(link.curve.rungs[self.rung], link.curve.rungs[self.rung + 1])
        if fall is None:
            return _Fall(self.centre, self.spread)
        # A curve that says little by itself will fall as the others do.
        trust = 1.0 / (1.0 + (fall.sd / self.others_sd) ** 2)
        return _Fall(self.centre + trust * (fall.mean - self.centre), fall.sd * trust**0.5)


def _spread(values: np.ndarray) -> float:
    """Half the range of the better half: bad candidates may be anywhere."""
    if len(values) < 2:
        return float(np.abs(values).max(initial=0.0)) * 0.1
    best = np.sort(values)[: len(values) // 2 + 1]
    return float(np.ptp(best)) / 2


def ranked(costs: np.ndarray, violations: np.ndarray) -> np.ndarray:
    """Rows from the best to the worst: the feasible before the others, by non-dominated layers, of a layer the
    outermost and the most solitary first (crowding distance, Deb et al. 2002).

    Args:
        costs: ``[n, k]``, lower is better, finite.
        violations: ``[n]``, above 0 beyond a bound.
    """
    if costs.shape[1] == 1:
        return np.lexsort((costs[:, 0], np.maximum(violations, 0.0)))
    layer = pareto.layers(costs)
    crowding = np.zeros(len(costs))
    for depth in np.unique(layer):
        rows = np.flatnonzero(layer == depth)
        crowding[rows] = _crowding(costs[rows])
    return np.lexsort((np.arange(len(costs)), -crowding, layer, np.maximum(violations, 0.0)))


def _crowding(costs: np.ndarray) -> np.ndarray:
    """``[n]``: the sum over objectives of the gap between a point's neighbours, as a share of the range."""
    total = np.zeros(len(costs))
    for column in costs.T:
        order = np.argsort(column, kind="stable")
        scale = np.ptp(column) or 1.0
        gaps = np.full(len(column), np.inf)
        gaps[1:-1] = (column[order][2:] - column[order][:-2]) / scale
        total[order] += gaps
    return total


def next_growth(state: SearchState, fidelity: Fidelity, left: float, *, may_begin: bool = True) -> Growth | None:
    """The candidate to train on now, before a new one begins; None to begin one.

    Args:
        state: Of the search, with all numbers of the study.
        fidelity: The rungs.
        left: What is left of the budget, in full trainings.
        may_begin: Whether a new candidate could begin and be trained in full. If not, the best go on, as far as the
            budget goes.
    """
    chains = chains_of(state.observations)
    if not may_begin:
        waiting = [chain.last for chain in chains if _is_waiting(chain, fidelity)]
        for link in _ranked(chains, waiting, state.space.objectives, fidelity):
            if fidelity.cost_from(link.rung + 1) <= left + TOLERANCE:
                return Growth(link.number, link.rung + 1)
        return None
    waits = {chain.last.number for chain in chains if _is_waiting(chain, fidelity)}
    for rung in range(fidelity.last - 1, -1, -1):
        # Each as it stood at this rung: what has become of those that went on is no fair rival.
        members = [link for chain in chains for link in chain.links if link.rung == rung and link.values is not None]
        order = _ranked(chains, members, state.space.objectives, fidelity)
        for link in order[: int(len(order) / fidelity.eta)]:
            if link.number in waits:
                return Growth(link.number, rung + 1)
    return None


def _ranked(
    chains: Sequence[Chain], links: Sequence[Observation], objectives: Sequence[Objective], fidelity: Fidelity
) -> list[Observation]:
    """Numbers with values, from the best forecast on."""
    if not links:
        return []
    forecasts = Forecasts.of(chains, links, objectives, fidelity)
    expected = [_expected(link, forecasts, row, objectives) for row, link in enumerate(links)]
    violations = violations_of(expected, objectives).max(axis=1)
    return [links[row] for row in ranked(forecasts.mean, violations).tolist()]


def _is_waiting(chain: Chain, fidelity: Fidelity) -> bool:
    return chain.last.values is not None and chain.last.rung < fidelity.last


def _expected(link: Observation, forecasts: Forecasts, row: int, objectives: Sequence[Objective]) -> Observation:
    """A candidate of which something is known, as samplers see it: as if it had been trained in full."""
    values, noise = {}, {}
    for column, objective in enumerate(objectives):
        sign = -1.0 if objective.direction == "maximize" else 1.0
        values[objective.name] = sign * float(forecasts.mean[row, column])
        if forecasts.sd[row, column] > 0:
            noise[objective.name] = float(forecasts.sd[row, column])
    return replace(link, state="ok", values=values, failure="", noise=noise, fidelity=1.0)


def as_candidates(state: SearchState, fidelity: Fidelity) -> SearchState:
    """The state as samplers see it: one observation a candidate, under the number that began it. Where it has not grown
    to the end its values are forecasts, with their ``noise``."""
    chains = chains_of(state.observations)
    forecasts = Forecasts.of(chains, [chain.known for chain in chains], state.space.objectives, fidelity)
    seen: Mapping[int, Observation] = {
        chain.first.number: _seen(chain, forecasts, row, state.space.objectives) for row, chain in enumerate(chains)
    }
    kept = [seen.get(o.number, o) for o in state.observations if o.continues is None]
    return replace(state, observations=kept)


def _seen(chain: Chain, forecasts: Forecasts, row: int, objectives: Sequence[Objective]) -> Observation:
    if chain.known is not None:
        return _expected(chain.first, forecasts, row, objectives)
    last = chain.last
    return replace(chain.first, state=last.state, values=last.values, failure=last.failure, fidelity=last.fidelity)
