"""The user's own first guesses: run files or values by name, as candidates of the space that are tried first.

Every key is checked before anything runs: a misspelt name that is silently left out, or a value from outside the space,
would make the first trials something else than what was asked for.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
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


def read_guesses(paths: Iterable[Path], space: Space) -> list[dict[str, Scalar]]:
    """The guesses in files: each a run file, a mapping of values by name, or a list of such mappings.

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
            guesses.append(guess_of(data, space, where=str(path)))
    return guesses


def guess_of(values: Mapping[str, Any], space: Space, *, where: str = "") -> dict[str, Scalar]:
    """Values by name as chosen values of a legal candidate.

    Args:
        values: Name -> value, dotted (``plan.tp``) or in sections (``plan: {tp: 2}``). Parallel degrees may be named
            one by one. What is left out has its default, which then has to be in the space.
        space: The space.
        where: Place for messages.

    Raises:
        UserError: An unknown name, a value that is not in the space or not the one that is fixed there, a name that is
            missing, or a candidate that a rule refuses.
    """
    given = _flat(values)
    known = space.names({})
    dimensions = {dimension.name: dimension for dimension in space.dimensions}
    _check_names(given, {*known, *dimensions}, where)
    if MESH in dimensions and MESH not in given:
        given = _with_mesh(given, known, dimensions[MESH], where)
    chosen: dict[str, Scalar] = {}
    for dimension in space.dimensions:
        if space.is_active(dimension, chosen):
            chosen[dimension.name] = _value(dimension, given, known, where)
    for name in given.keys() - dimensions.keys():
        if not _same(given[name], known.get(name)):
            raise UserError(
                f"the guess has {name} = {given[name]!r}, the space has {known.get(name)!r} and does not search it",
                hint=f"leave {name} out of the guess, or search it: a list with both values",
                where=where,
            )
    for name in dimensions.keys() & given.keys() - chosen.keys():
        if not _same(given[name], known.get(name)):
            condition = dimensions[name].when
            raise UserError(
                f"{name} = {given[name]!r} would have no effect beside the guess's other values",
                hint=f"leave it out: it is searched only when {condition.text}" if condition else "leave it out",
                where=where,
            )
    candidate = space.candidate(chosen)
    if not candidate.is_legal:
        raise UserError(f"the guess is not legal: {candidate.reason}", hint="correct it, or leave it out", where=where)
    return chosen


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


def _check_names(given: Iterable[str], known: set[str], where: str) -> None:
    for name in given:
        if name in known:
            continue
        tails = [other for other in sorted(known) if other.rpartition(".")[2] == name]
        close = tails or difflib.get_close_matches(str(name), sorted(known), n=1)
        hint = f"did you mean {close[0]}?" if close else f"names are {', '.join(sorted(known))}"
        raise UserError(f"a guess can't set {name!r}: the space has no such name", hint=hint, where=where)


def _with_mesh(given: Mapping[str, Any], known: Mapping[str, Any], mesh: Dimension, where: str) -> dict[str, Any]:
    """Parallel degrees as the one word that stands for them."""
    names = {f"plan.{key}": key for key in MESH_FIELDS}
    degrees = {key: given.get(name, known[name]) for name, key in names.items()}
    word = mesh_word(degrees)
    if not mesh.contains(word):
        raise UserError(
            f"the guess's parallel degrees are {word}, which is not in the space",
            hint=f"the space has {', '.join(map(str, mesh.values))}",
            where=where,
        )
    return {name: value for name, value in given.items() if name not in names} | {MESH: word}


def _value(dimension: Dimension, given: Mapping[str, Any], known: Mapping[str, Any], where: str) -> Scalar:
    name = dimension.name
    choices = dimension.choices()
    if name in given:
        value = given[name]
    elif choices is not None and len(choices) == 1:
        return choices[0]
    elif (value := _default(name, known)) is None or not dimension.contains(_as_number(dimension, value)):
        raise UserError(
            f"the guess does not say {name}, and its default is not in the space",
            hint=f"add it: {dimension.describe()}",
            where=where,
        )
    number: Scalar = _as_number(dimension, value)
    if dimension.contains(number):
        return number
    raise UserError(
        f"the guess has {name} = {value!r}, which is not in the space: {dimension.describe()}",
        hint=_nearest(dimension, value),
        where=where,
    )


def _default(name: str, known: Mapping[str, Any]) -> Any:
    return known[name] if name in known else default_values().get(name)


def _as_number(dimension: Dimension, value: Any) -> Any:
    """A whole number where the dimension has real ones, as one of these."""
    is_real = dimension.kind in ("float", "log_float")
    return float(value) if is_real and isinstance(value, int) and not isinstance(value, bool) else value


def _nearest(dimension: Dimension, value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        numbers = [c for c in dimension.choices() or (dimension.low, dimension.high) if isinstance(c, int | float)]
        if numbers:
            return f"the nearest is {min(numbers, key=lambda number: abs(number - value))}; or widen the space"
    close = difflib.get_close_matches(str(value), list(map(str, dimension.choices() or ())), n=1)
    return f"did you mean {close[0]}?" if close else "choose one of these, or widen the space"


def _same(one: Any, other: Any) -> bool:
    as_lists = (
        list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value for value in (one, other)
    )
    first, second = as_lists
    return bool(first == second)
