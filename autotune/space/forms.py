"""How searched values, conditions, budgets and limits are written, whatever is searched: the parts of the grammar that
all kinds of spaces share. Mistakes are told with their place."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

from autotune.space.expression import Expression, parse_expression
from autotune.space.fidelity import Fidelity, parse_words
from autotune.space.objectives import KNOWN, Objective
from autotune.space.space import Budget, Dimension, Kind, TrialLimits
from engine.errors import UserError
from engine.schema import Located, parse
from engine.units import parse_bytes, parse_duration
from engine.yaml_file import KeyPath

RANGES = ("int", "log_int", "float", "log_float")
"""Forms that have two ends."""
MAX_NUMBER = {"int": 2**53, "log_int": 2**40, "float": 1e300, "log_float": 1e300}
"""Beyond these the search, which counts in floats, could not tell numbers apart."""
EXAMPLES = "examples: [1, 2, 4]; {log_float: [1e-4, 1e-2]}; {int: [8, 64], step: 8}"

_NUMBER = r"([-+]?(?:\d+\.\d*|\.?\d+)(?:e[-+]?\d+)?)"
_LOOSE_RANGE = re.compile(rf"\s*{_NUMBER}\s*(?:\.\.+|…|\bto\b)\s*{_NUMBER}\s*", re.IGNORECASE)
"""A range as people write it."""
_INLINE_RANGE = re.compile(r"\s*(int|log_int|float|log_float)\s*\((.*)\)\s*")
"""A range as it stands on the command line."""

SomeFidelity = TypeVar("SomeFidelity", bound=Fidelity)
Check = Callable[[Any, KeyPath], Any]
"""From a value and its place to the value as it is used; refuses what is not allowed."""


def range_hint(low: object, high: object) -> str:
    """How a range is written, and how two values are."""
    form = "int" if all(re.fullmatch(r"[-+]?\d+", str(end)) for end in (low, high)) else "float"
    others = "log_float" if form == "float" else "log_int, float, log_float"
    return f"a range is {{{form}: [{low}, {high}]}} (or {others}); two values are [{low}, {high}]"


class FormReader:
    """Reads parts of a space file.

    Args:
        document: The file, for places in messages.
    """

    def __init__(self, document: Located) -> None:
        self.document = document

    def fail(self, message: str, hint: str, path: KeyPath = ()) -> NoReturn:
        """Refuse something.

        Raises:
            UserError: Always.
        """
        raise UserError(message, hint=hint, where=self.document.where(path))

    def refuse_loose_range(self, name: str, written: Any, path: KeyPath) -> None:
        """Refuse a word such as ``0..1``, which would be a fixed value.

        Args:
            name: Of the value.
            written: As it stands.
            path: Its place.
        """
        if isinstance(written, str) and (found := _LOOSE_RANGE.fullmatch(written)):
            self.fail(f"'{name}': {written!r} is no range", range_hint(found[1], found[2]), path)
        if isinstance(written, str) and (found := _INLINE_RANGE.fullmatch(written)):
            ends, more = [part.strip() for part in found[2].split(",")][:2], found[2].split(",")[2:]
            step = f", step: {more[0].rpartition('=')[2].strip()}" if more else ""
            hint = f"write {{{found[1]}: [{', '.join(ends)}]{step}}}"
            self.fail(f"'{name}': {written!r} is no range here", hint, path)

    def section(self, name: str, value: Any, allowed: set[str]) -> dict[str, Any]:
        """A mapping that has only allowed keys.

        Args:
            name: Its dotted name in the file.
            value: As written.
            allowed: Keys.
        """
        path = tuple(name.split("."))
        if not isinstance(value, dict):
            self.fail(f"'{name}' must be a mapping, got {value!r}", f"allowed keys: {', '.join(sorted(allowed))}", path)
        for key in value:
            if key not in allowed:
                close = difflib.get_close_matches(str(key), sorted(allowed), n=1)
                hint = f"did you mean '{close[0]}'?" if close else f"allowed keys: {', '.join(sorted(allowed))}"
                self.fail(f"unknown key '{name}.{key}'", hint, (*path, key))
        return value

    def converted(
        self, name: str, value: Mapping[str, Any], converters: Mapping[str, Callable[[Any], Any]]
    ) -> dict[str, Any]:
        """Quantities as written (``10m``, ``4GiB``) to numbers."""
        result = dict(value)
        for key, convert in converters.items():
            if result.get(key) is not None:
                try:
                    result[key] = convert(result[key])
                except UserError as error:
                    self.fail(f"'{name}.{key}': {error.message}", error.hint or "", (*name.split("."), key))
        return result

    def objectives(self, written: Any, allow: Callable[[str, KeyPath], None]) -> tuple[Objective, ...]:
        """A list of names or mappings; or a mapping of names to directions or to mappings.

        Args:
            written: As it stands.
            allow: Refuses the name of an objective that this space can't have.
        """
        if isinstance(written, dict):
            items = [(self._named(name, item), ("objectives", name)) for name, item in written.items()]
        elif isinstance(written, list | tuple):
            items = [({"name": i} if isinstance(i, str) else i, ("objectives", n)) for n, i in enumerate(written)]
        else:
            items = []
        if not items:
            self.fail(
                f"'objectives' must be a list of names or a mapping of names to directions, got {written!r}",
                "examples: [speed, memory, quality], {loss: minimize}",
                ("objectives",),
            )
        objectives = []
        for item, path in items:
            data = item
            if isinstance(data, dict) and isinstance(data.get("name"), str):
                allow(data["name"], path)
            if isinstance(data, dict) and data.get("name") == "memory" and isinstance(data.get("bound"), str):
                bound = self.converted("objectives", {"bound": data["bound"]}, {"bound": parse_bytes})["bound"]
                data = {**data, "bound": float(bound)}
            if isinstance(data, dict) and isinstance(data.get("bound"), int):
                data = {**data, "bound": float(data["bound"])}
            if isinstance(data, dict) and data.get("name") not in KNOWN and "direction" not in data:
                self.fail(
                    f"the objective {data.get('name')!r} needs a direction",
                    f"example: {{name: {data.get('name')}, direction: minimize}}, or maximize",
                    path,
                )
            objectives.append(parse(Objective, data, document=self.document, path=path))
        names = [objective.name for objective in objectives]
        if len(set(names)) < len(names):
            self.fail(f"an objective stands twice: {', '.join(names)}", "keep one of them", ("objectives",))
        return tuple(objectives)

    @staticmethod
    def _named(name: str, item: Any) -> Any:
        if isinstance(item, str):
            return {"name": name, "direction": item}
        return {"name": name, **item} if isinstance(item, dict) else {"name": name}

    def budget(self, written: Any) -> Budget:
        """``trials`` and ``time``."""
        data = self.section("budget", written or {}, {"trials", "time"})
        data = self.converted("budget", data, {"time": parse_duration})
        data = {"seconds" if key == "time" else key: value for key, value in data.items()}
        return parse(Budget, data, document=self.document, path=("budget",))

    def limits(self, written: Any, names: Mapping[str, str]) -> TrialLimits:
        """Limits of each trial.

        Args:
            written: As it stands.
            names: Key in the file -> field; what is not named is not allowed.
        """
        data = self.section("limits", written or {}, set(names))
        converters = {key: parse_bytes if key == "memory" else parse_duration for key in names}
        data = self.converted("limits", data, converters)
        return parse(
            TrialLimits, {names[key]: value for key, value in data.items()}, document=self.document, path=("limits",)
        )

    def fidelity(self, written: Any, kind: type[SomeFidelity]) -> SomeFidelity | None:
        """How trials grow; None where they don't."""
        words = parse_words(written)
        if words is None:
            return None
        words = self.section("fidelity", words, {"min", *kind.model_fields})
        return parse(kind, words, document=self.document, path=("fidelity",))

    def conditions(self, written: Any, path: KeyPath, known: frozenset[str]) -> tuple[Expression, ...]:
        """A list of conditions.

        Args:
            written: As it stands; None for none.
            path: Its place.
            known: Names they may read.
        """
        if written is None:
            return ()
        if not isinstance(written, list | tuple):
            name = ".".join(map(str, path))
            self.fail(f"'{name}' must be a list of conditions", "begin each with '- '", path)
        return tuple(
            parse_expression(text, known, where=self.document.where((*path, index)))
            for index, text in enumerate(written)
        )

    def dimension(
        self,
        name: str,
        written: dict[str, Any],
        path: KeyPath,
        check: Check,
        *,
        when: Expression | None = None,
        more_lists: Mapping[str, Callable[[Any], list[Any]]] | None = None,
        examples: str = EXAMPLES,
    ) -> Dimension:
        """A searched value from one of the forms.

        Args:
            name: Of the dimension.
            written: The form, with ``step`` beside ``int``; other keys are the caller's.
            path: Its place.
            check: Of each value.
            when: Condition of the dimension.
            more_lists: Further forms, name -> from what is written to the list of values.
            examples: For who gave no form.
        """
        more_lists = more_lists or {}
        forms = {"values", *RANGES, *more_lists}
        given = sorted(forms & set(written))
        if len(given) != 1:
            got = ", ".join(given) or "none"
            self.fail(f"'{name}' needs one of {', '.join(sorted(forms))}, got {got}", examples, path)
        form, value = given[0], written[given[0]]
        if "step" in written and form != "int":
            self.fail(f"'{name}': 'step' goes with 'int' only", "leave it out", path)
        if form not in RANGES:
            values = more_lists[form](value) if form in more_lists else value
            return self._categorical(name, values, (*path, form), check, when)
        low, high = self._ends(name, form, value, path, check)
        step = written.get("step", 1)
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            self.fail(f"'{name}.step' must be a whole number of at least 1, got {step!r}", "example: step: 8", path)
        kind = cast(Kind, form)
        return Dimension(name, kind, (), float(low), float(high), step, when)

    def _categorical(self, name: str, values: Any, path: KeyPath, check: Check, when: Expression | None) -> Dimension:
        if not isinstance(values, list | tuple) or not values:
            self.fail(
                f"'{name}.values' must be a list of at least one value, got {values!r}", "example: [1, 2, 4]", path[:-1]
            )
        checked = tuple(check(item, (*path, index)) for index, item in enumerate(values))
        if len(set(map(repr, checked))) < len(checked):
            self.fail(f"'{name}' has a value twice: {list(values)}", "keep one of them", path[:-1])
        return Dimension(name, "categorical", checked, when=when)

    def _ends(self, name: str, form: str, value: Any, path: KeyPath, check: Check) -> tuple[float, float]:
        if not isinstance(value, list | tuple) or len(value) != 2:
            self.fail(f"'{name}.{form}' must be [low, high], got {value!r}", f"example: {{{form}: [1, 8]}}", path)
        low, high = (check(item, path) for item in value)
        for end in (low, high):
            if isinstance(end, bool) or not isinstance(end, int | float):
                hint = "a range has two numbers; else list the values"
                self.fail(f"'{name}.{form}' is a range of numbers, got {end!r}", hint, path)
            if form in ("int", "log_int") and not isinstance(end, int):
                hint = f"write {int(end)}" if end.is_integer() else f"round it, or use {form.replace('int', 'float')}"
                self.fail(f"'{name}.{form}' is a range of whole numbers, got {end}", hint, path)
        if max(abs(low), abs(high)) > MAX_NUMBER[form]:
            self.fail(f"'{name}.{form}' reaches beyond {MAX_NUMBER[form]:g}, got {value}", "correct the two ends", path)
        is_log = form in ("log_int", "log_float")
        if not low < high or (is_log and low <= 0):
            rule = "0 < low < high" if is_log else "low < high"
            self.fail(f"'{name}.{form}' needs {rule}, got {value}", "correct the two ends", path)
        return low, high

    def ordered(self, dimensions: Sequence[Dimension]) -> tuple[Dimension, ...]:
        """Each dimension after those that its condition reads."""
        ordered: list[Dimension] = []
        waiting = list(dimensions)
        names = {dimension.name for dimension in dimensions}
        while waiting:
            placed = {dimension.name for dimension in ordered}
            ready = [d for d in waiting if d.when is None or not (d.when.names & names) - placed]
            if not ready:
                self.fail(
                    f"the conditions of {', '.join(d.name for d in waiting)} depend on each other in a circle",
                    "leave one 'when' out",
                    ("space",),
                )
            ordered.append(ready[0])
            waiting.remove(ready[0])
        return tuple(ordered)
