"""The user's own first guesses: run files or values by name, as candidates of the space that are tried first.

Every key is checked before anything runs: a misspelt name that is silently left out, or a value from outside the space,
would make the first trials something else than what was asked for.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.space.space import Dimension, Scalar, Space
from autotune.space.training import MESH, TrainingSpace, default_values, mesh_word
from engine.config import RunConfig
from engine.errors import UserError
from engine.plan import MESH_FIELDS
from engine.schema import parse
from engine.yaml_file import read_yaml

SECTIONS = ("plan", "hyperparameters")
"""Parts of a run file that a sweep searches; what else is in it (model, data, length) is the space's."""
MAX_MEMBERS = 64
"""Values of a dimension that stand in for what a guess leaves out."""
MAX_COMPLETIONS = 2000
"""Candidates looked at for a legal one."""


def read_guesses(paths: Iterable[Path], space: Space) -> list[dict[str, Scalar]]:
    """The guesses in files: each a run file, a choice written by ``autotune apply``, a mapping of values by name, or a
    list of such mappings.

    Raises:
        UserError: A value that is not in the space, with its file.
    """
    guesses = []
    for path in paths:
        document = read_yaml(path)
        for data in document.data if isinstance(document.data, list) else [document.data]:
            if not isinstance(data, dict):
                raise UserError(
                    f"a guess is a run file or a mapping of values, got {data!r}",
                    hint="example: hyperparameters: {learning_rate: 3e-4}",
                    where=document.where(),
                )
            if isinstance(space, TrainingSpace) and "model" in data and "workload" in data:
                data = _values_of_run(parse(RunConfig, data, document=document))
            elif {"picked", "values"} <= data.keys() and isinstance(data["values"], dict):  # what 'apply' writes
                data = data["values"]
            guesses.append(guess_of(data, space, where=str(path)))
    return guesses


def guess_of(values: Mapping[str, Any], space: Space, *, where: str = "") -> dict[str, Scalar]:
    """Values by name as chosen values of a legal candidate.

    Args:
        values: Name -> value, dotted (``plan.tp``) or in sections (``plan: {tp: 2}``). Parallel degrees may be named
            one by one. What is left out has its default, or the value of the space that is nearest to it; where the
            candidate is not legal so, one or two of these are changed.
        space: The space.
        where: Place for messages.

    Raises:
        UserError: An unknown name, a value that is not in the space or not the one that is fixed there, or a candidate
            that a rule refuses.
    """
    given = _flat(values)
    known = space.names({})
    dimensions = {dimension.name: dimension for dimension in space.dimensions}
    _check_names(given, {*known, *dimensions}, dimensions, where)
    degrees = {name: given[name] for key in MESH_FIELDS if (name := f"plan.{key}") in given}
    options: dict[str, list[Scalar]] = {}
    for name, dimension in dimensions.items():
        if name in given:
            # A run file also says what has its default because it has no effect.
            is_default = name in known and _same(given[name], known[name])
            options[name] = [given[name] if is_default else _value(dimension, given[name], where)]
        elif name == MESH and isinstance(space, TrainingSpace):
            options[name] = _meshes(space, dimension, degrees, known, where)
        else:
            options[name] = _members(dimension, _default(name, known))
    told = set(degrees) if MESH in dimensions and MESH not in given else set()
    for name in given.keys() - dimensions.keys() - told:
        if not _same(given[name], known.get(name)):
            raise UserError(
                f"the guess has {name} = {given[name]!r}, the space has {known.get(name)!r} and does not search it",
                hint=f"leave {name} out of the guess, or search it: a list with both values",
                where=where,
            )
    asked = {name: value for name, value in given.items() if name in dimensions and not _same(value, known.get(name))}
    problem = None
    for chosen in itertools.islice(_completions(space, options), MAX_COMPLETIONS):
        error = _problem(space, chosen, asked, dimensions, where)
        if error is None:
            return chosen
        problem = problem or error
    assert problem is not None, "every space has a candidate to look at"
    taken = [f"{name} = {options[name][0]}" for name in dimensions if name not in given and len(options[name]) > 1]
    if taken:
        problem.hint = f"{problem.hint}; what the guess does not say was taken as {', '.join(taken)}"
    raise problem


def _completions(space: Space, options: Mapping[str, Sequence[Scalar]]) -> Iterator[dict[str, Scalar]]:
    """Chosen values: the first option of each name, then others for one name, then for two."""
    first = {name: values[0] for name, values in options.items()}
    for num_changed in range(3):
        for names in itertools.combinations([name for name, values in options.items() if len(values) > 1], num_changed):
            for values in itertools.product(*(options[name][1:] for name in names)):
                yield space.active(first | dict(zip(names, values, strict=True)))


def _problem(
    space: Space,
    chosen: Mapping[str, Scalar],
    asked: Mapping[str, Any],
    dimensions: Mapping[str, Dimension],
    where: str,
) -> UserError | None:
    """Why chosen values are no candidate that tries what was asked for."""
    for name, value in asked.items():
        if name not in chosen:
            condition = dimensions[name].when
            return UserError(
                f"{name} = {value!r} would have no effect beside the guess's other values",
                hint=f"leave it out: it is searched only when {condition.text}" if condition else "leave it out",
                where=where,
            )
    candidate = space.candidate(chosen)
    if candidate.is_legal:
        return None
    return UserError(f"the guess is not legal: {candidate.reason}", hint="correct it, or leave it out", where=where)


def _values_of_run(run: RunConfig) -> dict[str, Any]:
    """What a run file says of the searched sections, its defaults included."""
    return {section: dict(getattr(run, section)) for section in SECTIONS}


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sections by dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= (
            {f"{name}.{key}": below for key, below in value.items()} if isinstance(value, Mapping) else {name: value}
        )
    return flat


def _check_names(given: Iterable[str], known: set[str], searched: Iterable[str], where: str) -> None:
    for name in given:
        if name in known:
            continue
        tails = [other for other in sorted(known) if other.rpartition(".")[2] == name]
        close = tails or difflib.get_close_matches(str(name), sorted(known), n=1)
        hint = f"did you mean {close[0]}?" if close else f"the space searches {', '.join(searched)}"
        raise UserError(f"a guess can't set {name!r}: the space has no such name", hint=hint, where=where)


def _meshes(
    space: TrainingSpace, mesh: Dimension, degrees: Mapping[str, Any], known: Mapping[str, Any], where: str
) -> list[Scalar]:
    """The words for parallel degrees that agree with the given ones, the one with defaults for the others first."""
    wanted = mesh_word({key: degrees.get(f"plan.{key}", known[f"plan.{key}"]) for key in MESH_FIELDS})
    fit = [
        word
        for word in map(str, mesh.values)
        if all(space.meshes[word][name.removeprefix("plan.")] == degree for name, degree in degrees.items())
    ]
    if not fit:
        raise UserError(
            f"the guess's parallel degrees are {wanted}, which is not in the space",
            hint=f"the space has {', '.join(map(str, mesh.values))}",
            where=where,
        )
    return sorted(fit, key=lambda word: word != wanted)


def _value(dimension: Dimension, value: Any, where: str) -> Scalar:
    number: Scalar = _as_number(dimension, value)
    if dimension.contains(number):
        return number
    raise UserError(
        f"the guess has {dimension.name} = {value!r}, which is not in the space: {dimension.describe()}",
        hint=_nearest(dimension, value),
        where=where,
    )


def _members(dimension: Dimension, default: Any) -> list[Scalar]:
    """Values of a dimension for what a guess leaves out: one first, then the others, where they are few."""
    first = _first_member(dimension, default)
    choices = dimension.choices()
    if choices is None or len(choices) > MAX_MEMBERS:
        return [first]
    return [first, *(choice for choice in choices if type(choice) is not type(first) or choice != first)]


def _first_member(dimension: Dimension, default: Any) -> Scalar:
    """The default or the nearest to it; without a default the middle of a range or the first of a list."""
    if not dimension.is_range and dimension.contains(default):
        return default  # type: ignore[no-any-return]  # a member is a scalar
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    low, high = dimension.low, dimension.high
    middle = (low * high) ** 0.5 if dimension.is_log else (low + high) / 2
    nearest = dimension.nearest(default if is_number else middle) if is_number or dimension.is_range else None
    return dimension.values[0] if nearest is None else nearest


def _default(name: str, known: Mapping[str, Any]) -> Any:
    return known[name] if name in known else default_values().get(name)


def _as_number(dimension: Dimension, value: Any) -> Any:
    """A whole number where the dimension has real ones, as one of these."""
    return float(value) if dimension.is_real and isinstance(value, int) and not isinstance(value, bool) else value


def _nearest(dimension: Dimension, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        nearest = dimension.nearest(value)
        if nearest is not None:
            return f"the nearest is {nearest}; or widen the space"
    close = difflib.get_close_matches(str(value), list(map(str, dimension.values)), n=1)
    return f"did you mean {close[0]}?" if close else "choose one of these, or widen the space"


def _same(one: Any, other: Any) -> bool:
    as_lists = (
        list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value for value in (one, other)
    )
    first, second = as_lists
    return bool(first == second)
