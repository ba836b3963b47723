"""Which trial of a study: the front of the candidates that may be chosen, its knee, its extremes, or one by number."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autotune.search import pareto
from autotune.space.objectives import Direction, Objective, ObjectiveName
from autotune.study.snapshot import StudySnapshot, TrialRow
from engine.errors import UserError

EXTREMES: dict[str, ObjectiveName] = {
    "fastest": "speed",
    "smallest": "memory",
    "best": "quality",
    "cheapest": "cost",
    "thriftiest": "energy",
}
"""Way to pick -> the objective whose best value it takes."""
PICKS = ("knee", *EXTREMES)
KNEE_MEANING = (
    "the point of the front nearest to the ideal point (the best value of each objective, which no candidate has at"
    " once), with each objective scaled to the front's range"
)


class Concession(NamedTuple):
    """What a trial gives up in one objective against the best of the front."""

    objective: Objective
    extreme: TrialRow
    """The trial with the best value."""
    ratio: float
    """How much worse the value is, as a share of the best; above 0."""
    text: str
    """The same in words."""


class Nearest(NamedTuple):
    """The trial that is least beyond the bounds, where all are beyond them."""

    trial: TrialRow
    text: str
    """Which bounds it breaks, and by how much."""


def comparable_trials(snapshot: StudySnapshot, bounds: Sequence[Objective] = ()) -> list[TrialRow]:
    """Feasible trials within ``bounds``. Repeats of a trial with other seeds are left out: they are no candidates of
    their own, and the luckiest of several seeds would pass for a better one."""
    return [
        trial
        for trial in snapshot.trials
        if trial.feasible and trial.values is not None and trial.repeat_of is None and _excess(trial, bounds) <= 0
    ]


def front_trials(snapshot: StudySnapshot, bounds: Sequence[Objective] = ()) -> list[TrialRow]:
    """The Pareto front among the comparable trials, by trial number."""
    trials = comparable_trials(snapshot, bounds)
    mask = pareto.front(value_matrix(snapshot, trials), _directions(snapshot))
    return [trial for trial, best in zip(trials, mask, strict=True) if best]


def knee_trial(snapshot: StudySnapshot, trials: Sequence[TrialRow]) -> TrialRow | None:
    """The knee (``KNEE_MEANING``) of some trials with values; None without any."""
    row = pareto.knee(value_matrix(snapshot, trials), _directions(snapshot))
    return None if row is None else trials[row]


def value_matrix(snapshot: StudySnapshot, trials: Sequence[TrialRow]) -> np.ndarray:
    """Objective values of trials that have them; shape ``[n, k]`` in the order of the study's objectives."""
    rows = [[(trial.values or {})[o.name] for o in snapshot.objectives] for trial in trials]
    return np.array(rows, dtype=np.float64).reshape(len(trials), len(snapshot.objectives))


def extreme_trial(objective: Objective, snapshot: StudySnapshot, trials: Sequence[TrialRow]) -> TrialRow:
    """The trial with the objective's best value; of several with the same value, the knee among them."""
    values = value_matrix(snapshot, trials)
    column = values[:, snapshot.objectives.index(objective)]
    tied = np.flatnonzero(column == (column.max() if objective.direction == "maximize" else column.min()))
    directions = _directions(snapshot)
    row = pareto.knee(values[tied], directions, pareto.front_box(values, directions))
    assert row is not None, "the extremes of a front are finite"
    return trials[int(tied[row])]


def concessions(snapshot: StudySnapshot, trial: TrialRow, front: Sequence[TrialRow]) -> list[Concession]:
    """What ``trial`` (with values) gives up against the best of a front, one entry per objective where it is worse."""
    found = []
    for objective in snapshot.objectives:
        extreme = extreme_trial(objective, snapshot, front)
        assert trial.values is not None
        assert extreme.values is not None
        value, best = trial.values[objective.name], extreme.values[objective.name]
        worse = best - value if objective.direction == "maximize" else value - best
        ratio = worse / (abs(best) or 1.0)
        if worse > 0:
            found.append(Concession(objective, extreme, ratio, _in_words(objective, extreme, worse, ratio, best)))
    return found


def pick(snapshot: StudySnapshot, how: str, bounds: Sequence[Objective] = ()) -> TrialRow:
    """The chosen trial.

    Args:
        snapshot: The study.
        how: One of ``PICKS`` or the best of an objective by its name, of the front; or a trial's number (also one off
            the front).
        bounds: Limits beside the study's own, as objectives with a bound; they need not be objectives of the study.

    Raises:
        UserError: No such trial, a trial without a result, or nothing within the bounds (with the nearest and by how
            much).
    """
    if how.isascii() and how.isdigit():
        return _numbered(snapshot, int(how), bounds)
    own = {objective.name: objective for objective in snapshot.objectives}
    if how not in PICKS and how not in own:
        near = difflib.get_close_matches(how, [*PICKS, *own], n=1)
        allowed = ", ".join([*PICKS, *(name for name in own if name not in EXTREMES.values())])
        raise UserError(
            f"cannot pick {how!r}: allowed are {allowed} and a trial's number",
            hint=f"did you mean {near[0]}?" if near else f"trials with a result: {_some_numbers(snapshot, 8)}",
        )
    front = front_trials(snapshot, bounds)
    if not front:
        raise _nothing_fits(snapshot, bounds)
    if how == "knee":
        trial = knee_trial(snapshot, front)
        assert trial is not None, "a front has a knee"
        return trial
    name = EXTREMES.get(how, how)
    if how == "best" and name not in own and len(own) == 1:
        (name,) = own
    if name in own:
        return extreme_trial(own[name], snapshot, front)
    words = {name: word for word, name in EXTREMES.items()}
    possible = ["knee", *(words.get(name, name) for name in own)]
    raise UserError(
        f"cannot pick the {how}: study {snapshot.name} did not optimise {name}, only {', '.join(own)}",
        hint=f"pick one of {', '.join(possible)}, or a trial by its number",
    )


def explain(snapshot: StudySnapshot, trial: TrialRow, how: str, bounds: Sequence[Objective] = ()) -> list[str]:
    """Why ``pick`` gave this trial and what it gives up, as sentences."""
    front = front_trials(snapshot, bounds)
    on_front = any(other.number == trial.number for other in front)
    size = f"{len(front)} candidate{'s' if len(front) != 1 else ''}"
    within = f" within {_bounds_text(bounds)}" if bounds else ""
    size += within
    reasons = {
        "knee": f"It is the knee of the front of {size}: {KNEE_MEANING}.",
        "fastest": f"It is the fastest on the front of {size}.",
        "smallest": f"It needs the least memory on the front of {size}.",
        "best": f"It has the lowest held-out loss on the front of {size}.",
        "cheapest": f"It costs the least on the front of {size}.",
        "thriftiest": f"It uses the least energy on the front of {size}.",
    }
    for objective in snapshot.objectives:
        least = "highest" if objective.direction == "maximize" else "lowest"
        reasons[objective.name] = f"It has the {least} {objective.label.lower()} on the front of {size}."
    if on_front and len(front) == 1:
        return [f"It is the whole front: no other candidate{within} is better in any objective."]
    lines = [reasons.get(how) or f"It was asked for by its number; it is {'' if on_front else 'not '}on the front."]
    if not trial.feasible:
        lines.append(f"It is beyond the study's own bounds: {'; '.join(_violations(trial, snapshot.objectives))}.")
    given_up = [concession.text for concession in concessions(snapshot, trial, front)] if front else []
    if given_up:
        lines.append(f"It gives up: {'; '.join(given_up)}.")
    return lines


def least_violated(snapshot: StudySnapshot) -> Nearest | None:
    """The measured trial nearest to the study's bounds when none is within them; None when one is, or none was
    measured."""
    measured = _candidates(snapshot)
    if not measured or any(trial.feasible for trial in measured):
        return None
    nearest = min(measured, key=lambda trial: (_excess(trial, snapshot.objectives), trial.number))
    return Nearest(nearest, "; ".join(_violations(nearest, snapshot.objectives)))


def _in_words(objective: Objective, extreme: TrialRow, worse: float, ratio: float, best: float) -> str:
    other = f"trial {extreme.number}, {objective.text(best)}"
    if objective.name == "speed":
        return f"{_percent(ratio)} slower than the fastest ({other})"
    if objective.name == "memory":
        return f"{_percent(ratio)} more memory than the smallest ({other})"
    if objective.name == "quality":
        return f"held-out loss {worse:.3g} nats/token ({_percent(ratio)}) above the best ({other})"
    side = "below" if objective.direction == "maximize" else "above"
    return f"{objective.label.lower()} {_percent(ratio)} {side} the best ({other})"


def _numbered(snapshot: StudySnapshot, number: int, bounds: Sequence[Objective]) -> TrialRow:
    trial = next((trial for trial in snapshot.trials if trial.number == number), None)
    if trial is None:
        raise UserError(
            f"study {snapshot.name} has no trial {number}; it has {len(snapshot.trials)}",
            hint=f"trials with a result: {_some_numbers(snapshot, 8)}",
        )
    other = f"trials with a result: {_some_numbers(snapshot, 8)}"
    if trial.outcome is None:
        raise UserError(f"trial {number} is {trial.state}: it has no result yet", hint=other)
    if trial.outcome.kind != "ok":
        detail = f": {trial.outcome.detail}" if trial.outcome.detail else ""
        raise UserError(f"trial {number} failed ({trial.outcome.kind}){detail}", hint=other)
    if trial.values is None:
        raise UserError(f"trial {number} ended well, but not every objective was measured", hint=other)
    if trial.share < 1:
        later = next((row.number for row in snapshot.trials if row.continues == number), None)
        raise UserError(
            f"trial {number} was stopped after {100 * trial.share:.3g} % of its training",
            hint=other if later is None else f"trial {later} continues it; {other}",
        )
    if _excess(trial, bounds) > 0:
        raise UserError(
            f"trial {number} does not fit: {'; '.join(_violations(trial, bounds))}",
            hint="leave the bound out, or pick by knee, fastest, smallest or best within it",
        )
    return trial


def _candidates(snapshot: StudySnapshot) -> list[TrialRow]:
    """Full trainings that were measured, within the bounds or not."""
    return [row for row in snapshot.trials if row.values is not None and row.repeat_of is None and row.share == 1]


def _nothing_fits(snapshot: StudySnapshot, bounds: Sequence[Objective]) -> UserError:
    measured = _candidates(snapshot)
    if not measured:
        failures = Counter(t.outcome.kind for t in snapshot.trials if t.outcome is not None and t.outcome.kind != "ok")
        pending = sum(trial.outcome is None for trial in snapshot.trials)
        parts = [f"{count} {kind}" for kind, count in failures.most_common()]
        parts += [f"{pending} without an outcome yet"] if pending else []
        num_parts = sum(trial.values is not None and trial.share < 1 for trial in snapshot.trials)
        parts += [f"{num_parts} parts of trainings"] if num_parts else []
        if num_parts and not any(trial.outcome is not None and trial.share == 1 for trial in snapshot.trials):
            return UserError(
                f"no candidate of study {snapshot.name} has been trained in full yet, {num_parts} are in part",
                hint="go on with the sweep",
            )
        return UserError(
            f"study {snapshot.name} has no successful trial to pick ({', '.join(parts) or 'no trials at all'})",
            hint=f"see why with: autotune report {snapshot.name}",
        )
    for bound in bounds:
        if all(trial.outcome is None or bound.value_of(trial.outcome) is None for trial in measured):
            own = ", ".join(objective.name for objective in snapshot.objectives)
            return UserError(
                f"no trial of study {snapshot.name} measured {bound.label.lower()}, so it can't be limited",
                hint=f"leave that limit out; the objectives are {own}",
            )
    feasible = [trial for trial in measured if trial.feasible]
    limits = bounds if feasible else [*snapshot.objectives, *bounds]
    nearest = min(feasible or measured, key=lambda trial: (_excess(trial, limits), trial.number))
    whose = _bounds_text(bounds) if feasible else "the study's own bounds"
    return UserError(
        f"nothing fits {whose}: the nearest is trial {nearest.number}, {'; '.join(_violations(nearest, limits))}",
        hint=f"loosen the bound, or take that one with --pick {nearest.number}"
        + (" without it" if feasible else "" if not bounds else " alone"),
    )


def _excess(trial: TrialRow, bounds: Sequence[Objective]) -> float:
    """The largest violation of the bounds as a share of the bound; infinite where a bounded value was not measured."""
    excess = [0.0]
    for bound in bounds:
        value = None if trial.outcome is None else bound.value_of(trial.outcome)
        excess.append(np.inf if value is None else bound.violation(value))
    return max(excess)


def _violations(trial: TrialRow, bounds: Sequence[Objective]) -> list[str]:
    found = []
    for bound in bounds:
        value = None if trial.outcome is None else bound.value_of(trial.outcome)
        if value is None:
            found.append(f"{bound.label.lower()} was not measured")
        elif bound.bound is not None and bound.violation(value) > 0:
            side = "below" if bound.direction == "maximize" else "above"
            share = _percent(bound.violation(value))
            found.append(f"{bound.label.lower()} {bound.text(value)} is {share} {side} {bound.text(bound.bound)}")
    return found


def _bounds_text(bounds: Sequence[Objective]) -> str:
    return " and ".join(
        f"{bound.label.lower()} {'at least' if bound.direction == 'maximize' else 'at most'} {bound.text(bound.bound)}"
        for bound in bounds
        if bound.bound is not None
    )


def _some_numbers(snapshot: StudySnapshot, count: int) -> str:
    """Numbers of trials worth naming, in order; where there are many, those of the front rather than others."""
    usable = [trial.number for trial in front_trials(snapshot)]
    whole = [trial.number for trial in snapshot.trials if trial.values is not None and trial.share == 1]
    usable += [number for number in whole if number not in usable]
    return ", ".join(map(str, sorted(usable[:count]))) + (", ..." if len(usable) > count > 1 else "") or "none"


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.2g} %" if ratio < 0.1 else f"{100 * ratio:.0f} %"


def _directions(snapshot: StudySnapshot) -> list[Direction]:
    return [objective.direction for objective in snapshot.objectives]
