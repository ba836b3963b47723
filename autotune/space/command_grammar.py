"""The space file of a user's own program: YAML (or plain data) to a CommandSpace. The grammar is documented in
``docs/command_sweeps.md``."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from autotune.paths import check_name
from autotune.space.command import CommandSpace
from autotune.space.expression import Expression, parse_expression
from autotune.space.fidelity import ProgramFidelity, parse_words
from autotune.space.forms import RANGES, FormReader, range_hint
from autotune.space.layers import COMMAND, find_space, merge
from autotune.space.objectives import QUALITY
from autotune.space.program import FAILURE, OWN_PLACEHOLDERS, TRIAL_FOLDER, Template
from autotune.space.space import Dimension, Scalar
from autotune.specs.cluster import ClusterSpec, parse_cluster
from engine.errors import UserError
from engine.schema import Located, Schema, parse
from engine.units import parse_count, parse_tokens
from engine.yaml_file import KeyPath, YamlDocument

LIMITS = {"time": "seconds", "memory": "memory_bytes"}
"""Key of ``limits`` -> what it is. A program gives no sign of life, so there is no heartbeat."""
QUANTITIES = {
    "num_parameters": parse_count,
    "num_active_parameters": parse_count,
    "sequence_length": parse_count,
    "total_tokens": parse_tokens,
}
"""Keys of ``task`` that may be written as ``100M``."""
NAME = r"[A-Za-z_][^\s{}]*"
"""What a searched value may be called."""


class CommandFile(Schema):
    """Sections of a space file of a program."""

    schema_version: Literal[1] = 1
    """Version of this file format."""
    name: str | None = None
    """Name of the study, where the command line gives none; the file's stem by default."""
    use: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Files this one builds on, from first to last."""
    command: Any = None
    """The program: one line, or a list of arguments, with a placeholder such as ``{lr}`` for every searched value."""
    folder: str = "."
    """Where it runs, relative to the file that names the command; that file's folder by default."""
    cluster: Any = "local"
    """The machine: ``local``, ``cpu:2``, or a ClusterSpec."""
    devices: Any = 1
    """Devices that a trial needs: a number, or an expression over its values."""
    objectives: Any
    """What the program reports: names with a direction, and a bound where there is one."""
    space: Any
    """Searched and fixed values by name."""
    constraints: Any = None
    """Conditions that every candidate has to meet."""
    budget: Any = None
    """``trials`` and ``time``."""
    limits: Any = None
    """``time`` and ``memory`` of each trial."""
    fidelity: Any = None
    """How trials grow: ``of``, ``min`` and ``eta`` or ``rungs``, ``resumes``; each is a full training by default."""
    task: Any = None
    """What is trained, for the meta-learned prior; with ``roles``."""


def is_command_space(data: Mapping[str, Any]) -> bool:
    """Whether a space file (or the resolved space of a study) is one of a program or function."""
    return COMMAND in data or not {"model", "workload", "plan"} & set(data)


def load_command_space(path: str | Path | None, overrides: Sequence[str] = ()) -> CommandSpace:
    """Read a space file of a program.

    Args:
        path: The file; None for a space that stands on the command line alone.
        overrides: ``dotted.key=value`` texts laid over it, values as in YAML.

    Raises:
        UserError: Any mistake in it, with file and line; or there is no command.
    """
    base = YamlDocument({}, "the command line") if path is None else find_space(path)
    document = merge(base, overrides)
    space = _Builder(document, parse(CommandFile, document.data, document=document)).build(
        default_name="sweep" if path is None else Path(path).stem
    )
    if space.template is None:
        raise UserError(
            "the space has no command to run",
            hint="give --command \"python train.py --lr {lr}\", or 'command' in the space file",
            where=document.where(),
        )
    return space


def command_space(
    space: Mapping[str, Any],
    objectives: Any,
    *,
    constraints: Sequence[str] = (),
    task: Mapping[str, Any] | None = None,
    fidelity: Mapping[str, Any] | None = None,
    name: str = "study",
) -> CommandSpace:
    """The space of a Python function, in the words of the grammar.

    Args:
        space: Name -> value or form, as in a space file.
        objectives: Name -> direction (or a mapping with ``direction`` and ``bound``), or a list as in a space file.
        constraints: Conditions that every candidate has to meet.
        task: What is trained, for the meta-learned prior; with ``roles``.
        fidelity: How trials grow, as in a space file; None where each is a full training.
        name: Of the study.

    Raises:
        UserError: Any mistake in it.
    """
    for key, written in space.items():
        if isinstance(written, tuple) and len(written) == 2 and all(map(_is_number, written)):
            raise UserError(
                f"'{key}': the tuple {written!r} may be a range or two values", hint=range_hint(written[0], written[1])
            )
    data = {"objectives": _plain(objectives), "space": _plain(space), "constraints": list(constraints)}
    data |= {"task": _plain(task)} if task else {}
    data |= {"fidelity": _plain(fidelity)} if fidelity is not None else {}
    return space_of_data(data, name)


def space_of_data(data: Mapping[str, Any], name: str) -> CommandSpace:
    """A space from data, such as what a study keeps of it.

    Raises:
        UserError: Any mistake in it.
    """
    document = _Data()
    return _Builder(document, parse(CommandFile, data, document=document)).build(default_name=name)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class _Data:
    """The place of what stands in no file: messages name the keys themselves."""

    def where(self, path: KeyPath = ()) -> str:
        """Nothing."""
        return ""


def _plain(value: Any) -> Any:
    """Tuples and mappings as the lists and dictionaries that YAML has."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


class _Builder(FormReader):
    """Turns the file into a space."""

    def __init__(self, document: Located, file: CommandFile) -> None:
        super().__init__(document)
        self._file = file

    def build(self, default_name: str) -> CommandSpace:
        """The space."""
        file = self._file
        objectives = self.objectives(file.objectives, self._check_objective)
        if not isinstance(file.space, dict) or not file.space:
            self.fail("'space' must be a mapping of names to values", "example: space: {lr: [0.1, 0.2]}", ("space",))
        self._check_names(file.space)
        known = frozenset(file.space)
        dimensions: list[Dimension] = []
        fixed: dict[str, Any] = {}
        for name, written in file.space.items():
            value = self._value(name, written, known)
            if isinstance(value, Dimension):
                dimensions.append(value)
                if "default" in written:
                    fixed[name] = self._scalar(written["default"], ("space", name, "default"))
            else:
                fixed[name] = value
        if not dimensions:
            self.fail("nothing is searched", "give at least one value in 'space' as a list or a range", ("space",))
        constraints = self.conditions(file.constraints, ("constraints",), known)
        devices = self._devices(known)
        absent = {d.name for d in dimensions if d.when is not None} - set(fixed)
        self._check_reads([*(d.when for d in dimensions), *constraints, devices], absent)
        template = self._template(dimensions, absent)
        cluster = self._cluster() if template else None
        roles, task = self._task({objective.name for objective in objectives})
        space = CommandSpace(
            name=check_name(file.name or default_name, "sweep"),
            objectives=objectives,
            dimensions=self.ordered(dimensions),
            fixed=fixed,
            constraints=constraints,
            budget=self.budget(file.budget),
            limits=self.limits(file.limits, LIMITS),
            fidelity=self._fidelity(fixed, template),
            template=template,
            folder=Path(file.folder),
            devices=devices,
            cluster=cluster,
            task=task,
            roles=roles,
        )
        return replace(space, data=self._data(space))

    def _data(self, space: CommandSpace) -> dict[str, Any]:
        """The resolved file; what is left out stands for the default."""
        file = self._file
        data: dict[str, Any] = {"schema_version": 1}
        if space.template is not None:
            assert space.cluster is not None
            data |= {"command": list(space.template.arguments), "cluster": space.cluster.to_data()}
        data |= {"objectives": [objective.to_data() for objective in space.objectives], "space": file.space}
        for key, value in (("constraints", file.constraints), ("limits", file.limits), ("task", file.task)):
            data |= {key: value} if value else {}
        data |= {"fidelity": space.fidelity.to_data()} if space.fidelity else {}
        return data | ({"devices": file.devices} if space.devices else {})

    def _check_objective(self, name: str, path: KeyPath) -> None:
        if name == FAILURE and self._file.command is not None:
            self.fail(f"a program says by {name!r} how it failed", "call the objective something else", path)

    def _check_names(self, space: dict[Any, Any]) -> None:
        for name in space:
            if not isinstance(name, str) or not re.fullmatch(NAME, name):
                hint = "begin with a letter, and use no spaces and braces"
                self.fail(f"{name!r} is no name of a value", hint, ("space", name))
            if name in OWN_PLACEHOLDERS:
                self.fail(f"'{name}' is given by the sweep, so it can't be searched", "rename it", ("space", name))

    def _check_reads(self, expressions: Sequence[Expression | None], absent: set[str]) -> None:
        """Refuse conditions that read what may not be there."""
        for expression in filter(None, expressions):
            for name in sorted(absent & expression.names):
                raise UserError(
                    f"the condition {expression.text!r} reads {name!r}, which is not always searched",
                    hint=f"give '{name}' a 'default' for where it is not",
                    where=expression.where,
                )

    def _value(self, name: str, written: Any, known: frozenset[str]) -> Dimension | Scalar:
        """A searched value, or a fixed one."""
        path: KeyPath = ("space", name)
        if isinstance(written, list):
            written = {"values": written}
        if not isinstance(written, dict):
            self.refuse_loose_range(name, written, path)
            return self._scalar(written, path)
        allowed = {"values", *RANGES, "step", "when", "default"}
        for key in written:
            if key not in allowed:
                close = difflib.get_close_matches(str(key), sorted(allowed), n=1)
                hint = f"did you mean '{close[0]}'?" if close else f"allowed keys: {', '.join(sorted(allowed))}"
                self.fail(f"unknown key 'space.{name}.{key}'", hint, (*path, key))
        when = None
        if written.get("when") is not None:
            when = parse_expression(written["when"], known, where=self.document.where((*path, "when")))
        elif "default" in written:
            self.fail(f"'{name}' has a default but no 'when'", "leave it out: it is always searched", path)
        dimension = self.dimension(name, written, path, self._scalar, when=when)
        return dimension.values[0] if len(dimension.values) == 1 and when is None else dimension

    def _scalar(self, value: Any, path: KeyPath) -> Scalar:
        name = path[1]
        if value is not None and not isinstance(value, str | int | float | bool):
            self.fail(f"'{name}': {value!r} is no plain value", "numbers, words, true, false and null are", path)
        if isinstance(value, float) and not math.isfinite(value):
            self.fail(f"'{name}': {value} is not finite", "leave it out", path)
        return value

    def _template(self, dimensions: Sequence[Dimension], absent: set[str]) -> Template | None:
        written, path = self._file.command, (COMMAND,)
        if written is None:
            return None
        if not isinstance(written, str) and not (
            isinstance(written, list) and all(isinstance(argument, str) for argument in written)
        ):
            self.fail(
                f"'command' must be one line or a list of words, got {written!r}",
                'example: command: "python train.py --lr {lr}"',
                path,
            )
        try:
            template = Template.parse(written)
        except UserError as error:
            self.fail(error.message, error.hint or "", path)
        placeholders = [*self._file.space, *OWN_PLACEHOLDERS]
        for name in sorted(template.names - set(placeholders)):
            close = difflib.get_close_matches(name, placeholders, n=1)
            known = ", ".join(f"{{{known}}}" for known in placeholders)
            hint = f"did you mean {{{close[0]}}}?" if close else f"known: {known}; write {{{{ and }}}} for braces"
            self.fail(f"the command has an unknown placeholder {{{name}}}", hint, path)
        for name in (dimension.name for dimension in dimensions):
            if name not in template.names:
                hint = f"add it, for example: --{name} {{{name}}}"
                self.fail(f"'{name}' is searched but stands nowhere in the command", hint, ("space", name))
            if name in absent:
                self.fail(
                    f"'{name}' stands in the command also where it is not searched",
                    "give it a 'default' for there",
                    ("space", name),
                )
        return template

    def _fidelity(self, fixed: Mapping[str, Any], template: Template | None) -> ProgramFidelity | None:
        """How trials grow, by a fixed number that the program is given."""
        written, path = parse_words(self._file.fidelity), ("fidelity",)
        if written is None:
            return None
        example = "example: fidelity: {of: epochs, min: 0.1}, with 'epochs: 27' in 'space'"
        if not isinstance(written, dict):
            self.fail(f"'fidelity' must be a mapping, or rungs in a list; got {written!r}", example, path)
        if "of" not in written:
            self.fail("'fidelity' needs 'of': the value that says how long a trial trains", example, path)
        of, names = written["of"], self._file.space
        if not isinstance(of, str) or of not in names:
            close = difflib.get_close_matches(str(of), sorted(names), n=1)
            hint = f"did you mean '{close[0]}'?" if close else example
            self.fail(f"'fidelity.of': nothing is called {of!r}", hint, path)
        full = None if isinstance(names[of], dict | list) else fixed.get(of)
        if isinstance(full, bool) or not isinstance(full, int | float) or full <= 0:
            hint = "give it one positive number: that of a full training"
            self.fail(f"'fidelity.of': '{of}' is {names[of]!r} in the space", hint, path)
        fidelity = self.fidelity(self._file.fidelity, ProgramFidelity)
        assert fidelity is not None
        lengths = fidelity.lengths(full)
        if len(set(lengths)) < len(lengths):
            told = ", ".join(map(str, lengths))
            self.fail(
                f"'fidelity': rungs come to the same {of}: {told}",
                f"take a larger 'min', fewer rungs, or a larger '{of}'",
                path,
            )
        fidelity = fidelity.changed(rungs=tuple(length / full for length in lengths))  # whole numbers were rounded
        if template is not None and of not in template.names:
            hint = f"add it, for example: --{of} {{{of}}}"
            self.fail(f"'fidelity.of': '{of}' stands nowhere in the command", hint, path)
        if template is not None and fidelity.resumes and TRIAL_FOLDER not in template.names:
            hint = "tell it where by {trial_folder}: it resumes from 'checkpoints' there; or leave 'resumes' out"
            self.fail("'fidelity.resumes': the command does not say where its checkpoints are", hint, path)
        return fidelity

    def _cluster(self) -> ClusterSpec:
        if not isinstance(self._file.cluster, str):
            return parse(ClusterSpec, self._file.cluster, document=self.document, path=("cluster",))
        try:
            return parse_cluster(self._file.cluster)
        except UserError as error:
            where = error.where or self.document.where(("cluster",))
            raise UserError(error.message, hint=error.hint, where=where) from None

    def _devices(self, known: frozenset[str]) -> Expression | None:
        written = self._file.devices
        if written == 1 and not isinstance(written, bool):
            return None
        text = str(written) if isinstance(written, int) and not isinstance(written, bool) else written
        return parse_expression(text, known, where=self.document.where(("devices",)))

    def _task(self, objectives: set[str]) -> tuple[dict[str, str], dict[str, Any]]:
        """Roles and task. What words they may have is known where the prior is (``search.warm_start``)."""
        written = self._file.task
        if written is None:
            return {}, {}
        if not isinstance(written, dict):
            self.fail(f"'task' must be a mapping, got {written!r}", "example: task: {num_parameters: 1e8}", ("task",))
        roles = written.get("roles") or {}
        names = {*self._file.space, *objectives}
        if not isinstance(roles, dict):
            self.fail(f"'task.roles' must be a mapping, got {roles!r}", "example: learning_rate: lr", ("task", "roles"))
        for role, name in roles.items():
            if not isinstance(name, str) or name not in names:
                close = difflib.get_close_matches(str(name), sorted(names), n=1)
                hint = f"did you mean '{close[0]}'?" if close else f"known: {', '.join(sorted(names))}"
                self.fail(f"'task.roles.{role}': nothing is called {name!r}", hint, ("task", "roles", role))
        if roles.get(QUALITY, QUALITY) not in objectives:
            hint = f"say which one is: task: {{roles: {{quality: {min(objectives)}}}}}; or leave 'task' out"
            self.fail("'task' says what is trained, but no objective is its held-out loss", hint, ("task",))
        task = self.converted("task", {key: value for key, value in written.items() if key != "roles"}, QUANTITIES)
        return roles, task
