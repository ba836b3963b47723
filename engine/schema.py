"""The base of every file format of ours: frozen pydantic models that reject unknown keys and explain themselves."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from engine.errors import UserError


class Located(Protocol):
    """Something that knows the file and line of a value: a YAML document, or several merged."""

    def where(self, path: tuple[str | int, ...] = ()) -> str:
        """``file:line`` of the value at ``path``."""


class Schema(BaseModel):
    """Frozen, strict, no unknown keys. The docstring under each field is its documentation everywhere.

    Strict: ``"4"`` is not 4 and ``"on"`` is not true, so a quoting mistake is told instead of guessed at.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, validate_default=True
    )

    KEY_HINTS: ClassVar[Mapping[str, str]] = {}
    """Key that people write but the schema lacks -> what to write instead."""

    def changed(self, **changes: Any) -> Self:
        """A validated copy with some fields changed (``model_copy`` alone does not validate)."""
        return type(self).model_validate({**dict(self), **changes})

    def to_data(self) -> dict[str, Any]:
        """Plain JSON-compatible data; ``parse(type(self), self.to_data())`` gives an equal object."""
        return self.model_dump(mode="json")


SchemaT = TypeVar("SchemaT", bound=Schema)


def parse(
    schema: type[SchemaT], data: Any, *, document: Located | None = None, path: tuple[str | int, ...] = ()
) -> SchemaT:
    """Validate ``data`` against ``schema``.

    Args:
        schema: The model to build.
        data: Mapping as read from YAML or JSON.
        document: The document the data came from, for line numbers in messages.
        path: Where in the document the data stands.

    Raises:
        UserError: All problems in one message, each with its place, the value given and what is allowed; a misspelt
            key with the nearest right name.
    """
    if not isinstance(data, Mapping):
        place = ".".join(map(str, path)) or "the document"
        raise UserError(
            f"{place} must be a mapping of keys to values, got {data!r}",
            hint=f"allowed keys: {', '.join(schema.model_fields)}",
            where=document.where(path) if document else None,
        )
    try:
        return schema.model_validate(data)
    except ValidationError as error:
        raise explain(error, schema, document=document, path=path) from None


def explain(
    error: ValidationError,
    schema: type[BaseModel],
    *,
    document: Located | None = None,
    path: tuple[str | int, ...] = (),
) -> UserError:
    """Turn a pydantic error into one message for people."""
    messages: list[str] = []
    hints: list[str] = []
    first_path: tuple[str | int, ...] | None = None
    problems = error.errors(include_url=False)
    meant = {
        (*problem["loc"][:-1], name)
        for problem in problems
        if problem["type"] == "extra_forbidden"
        for name in _nearest(problem["loc"], schema)
    }
    for problem in problems:
        if problem["type"] == "missing" and problem["loc"] in meant:
            continue  # it is there, misspelt
        full = (*path, *problem["loc"])
        first_path = first_path or full
        name = ".".join(str(part) for part in full)
        if problem["type"] == "extra_forbidden":
            allowed = _fields_at(schema, problem["loc"][:-1])
            close = _nearest(problem["loc"], schema)
            known = getattr(_schema_at(schema, problem["loc"][:-1]), "KEY_HINTS", {}).get(problem["loc"][-1])
            messages.append(f"unknown key '{name}'")
            hints.append(known or (f"did you mean '{close[0]}'?" if close else f"allowed keys: {', '.join(allowed)}"))
        elif problem["type"] == "missing":
            messages.append(f"'{name}' is missing")
            hints.append(f"add '{problem['loc'][-1]}'")
        else:
            reason = problem["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
            reason = reason.replace("a valid tuple", "a list")
            wanted = reason if problem["type"] == "value_error" else f"must be {reason}"
            given = "" if isinstance(problem["input"], Mapping | BaseModel) else f", got {problem['input']!r}"
            messages.append((f"'{name}': " if name else "") + wanted + given)
            if problem["type"] == "bool_type":
                hints.append("write true or false (YAML 1.2: on, off, yes and no are plain words)")
    return UserError(
        "; ".join(messages),
        hint="; ".join(dict.fromkeys(hints)) or "correct the value and run the same command again",
        where=document.where(first_path or path) if document else None,
    )


def _nearest(loc: tuple[str | int, ...], schema: type[BaseModel]) -> list[str]:
    """The allowed key that an unknown one at ``loc`` was probably meant to be; empty when none is near."""
    return difflib.get_close_matches(str(loc[-1]), _fields_at(schema, loc[:-1]), n=1)


def _fields_at(schema: type[BaseModel], loc: tuple[str | int, ...]) -> list[str]:
    """Names of the keys allowed at ``loc`` below ``schema``."""
    current = _schema_at(schema, loc)
    return list(current.model_fields) if current else []


def _schema_at(schema: type[BaseModel], loc: tuple[str | int, ...]) -> type[BaseModel] | None:
    """The schema of the mapping at ``loc`` below ``schema``."""
    current: type[BaseModel] | None = schema
    for part in loc:
        if current is None or not isinstance(part, str) or part not in current.model_fields:
            continue
        current = _schema_in(current.model_fields[part].annotation)
    return current


def _schema_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _schema_in(argument)
        if found:
            return found
    return None
