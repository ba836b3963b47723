"""The space file: YAML to a Space, every mistake with its file and line. The grammar is documented in
``search_spaces/README.md``."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from autotune.paths import check_name
from autotune.space.enumerate import Enumeration, enumerate_plans
from autotune.space.expression import Expression, parse_expression
from autotune.space.objectives import KNOWN, Objective
from autotune.space.space import Budget, Dimension, TrialLimits
from autotune.space.training import MESH, TrainingSpace, default_values
from autotune.specs.cluster import ClusterSpec, is_cluster_file, parse_cluster
from engine.config import EvaluationOptions, RuntimeOptions, absolute_paths
from engine.errors import UserError
from engine.hf_config import load_model
from engine.plan import MESH_FIELDS, Plan
from engine.rule import RuleContext
from engine.schema import Schema, SchemaT, parse
from engine.spec import Hyperparameters, ModelSpec, Workload
from engine.units import parse_batch, parse_bytes, parse_duration, parse_tokens
from engine.yaml_file import KeyPath, YamlDocument, parse_yaml, read_yaml

SECTIONS: dict[str, type[Schema]] = {"plan": Plan, "hyperparameters": Hyperparameters}
"""What can be searched."""

IMPLICIT_CONDITIONS = {
    "plan.schedule": "plan.pp > 1",
    "plan.zero_stage": "plan.dp_shard * plan.cp > 1",
    "plan.cp_attention": "plan.cp > 1",
    "plan.expert_replicas": "plan.ep > 1",
    "plan.expert_placement_steps": "plan.ep > 1",
    "plan.all_reduce": "plan.world_size > 1",
    "plan.sequence_parallel": "plan.tp > 1",
    "plan.vocab_parallel": "plan.tp > 1",
    "plan.recompute_period": "plan.recompute == 'every_k'",
    "hyperparameters.router_aux_loss_scope": "hyperparameters.router_aux_loss_coefficient > 0",
    "hyperparameters.decay_ratio": "hyperparameters.schedule == 'wsd'",
    "hyperparameters.min_lr_ratio": "hyperparameters.schedule != 'constant'",
    "hyperparameters.beta2": "hyperparameters.optimizer == 'adamw'",
    "hyperparameters.eps": "hyperparameters.optimizer == 'adamw'",
}
"""Values without effect elsewhere are searched only where these hold."""

DECIDED_BY = {
    "runtime.seed": "--seed",
    "runtime.device": "'cluster'",
    "runtime.threads_per_rank": "'cluster'",
    "runtime.stop_after_steps": "'workload.total_tokens'",
}
"""Settings of a run that a sweep sets itself -> what decides them."""

MERGE_DEPTH = {"space": 2, "workload": 2, "model": 0, "cluster": 0, "objectives": 0}
"""How deep the parts of a section named by ``use`` are replaced one by one (1 for sections not named)."""


class SpaceFile(Schema):
    """Sections of a space file."""

    schema_version: Literal[1] = 1
    """Version of this file format."""
    name: str | None = None
    """Name of the study, where the command line gives none; the file's stem by default."""
    use: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Files this one builds on, from first to last: names of shipped spaces, or paths ending in .yaml."""
    model: Any
    """A ModelSpec, or the path of a Hugging Face config.json."""
    cluster: Any = "local"
    """``local``, ``cpu:2``, ``h100x8:64``, or a ClusterSpec."""
    workload: Any
    """Data, sequence length, total tokens of a trial."""
    objectives: Any = ("speed", "memory", "quality")
    """Names, or mappings with ``name`` and ``bound``."""
    space: Any
    """``plan``, ``hyperparameters`` and ``constraints``."""
    budget: Any = None
    """``trials`` and ``time``."""
    limits: Any = None
    """``time``, ``memory`` and ``heartbeat`` of each trial."""
    runtime: Any = None
    """RuntimeOptions of each trial, but for what the sweep decides (``DECIDED_BY``)."""
    evaluation: Any = None
    """EvaluationOptions of each trial."""


@dataclass(frozen=True)
class MergedDocument:
    """Documents laid over each other; a value's place is in the last one that has it."""

    data: dict[str, Any]
    documents: tuple[YamlDocument, ...]

    def where(self, path: KeyPath = ()) -> str:
        """``file:line`` of the value at ``path``."""
        for length in range(len(path), 0, -1):
            for document in reversed(self.documents):
                if path[:length] in document.lines:
                    return document.where(path[:length])
        return self.documents[-1].where()


def load_space(path: str | Path, overrides: Sequence[str] = ()) -> tuple[TrainingSpace, Enumeration]:
    """Read a space file (or a shipped space by name).

    Args:
        path: The file, or the name of a file of ``search_spaces``.
        overrides: ``dotted.key=value`` texts laid over the file, values as in YAML.

    Returns:
        The space, and the enumeration of its plans.

    Raises:
        UserError: Any mistake in it, with file and line.
    """
    document = _merge(_find(path), overrides)
    file = parse(SpaceFile, document.data, document=document)
    return _Builder(document, file).build(default_name=Path(path).stem)


def shipped_spaces() -> list[str]:
    """Names of the spaces that come with the product."""
    return sorted(
        entry.name.removesuffix(".yaml") for entry in resources.files("search_spaces").iterdir()
        if entry.name.endswith(".yaml")
    )  # fmt: skip


def _find(path: str | Path) -> YamlDocument:
    name = str(path)
    if not Path(name).exists() and "/" not in name and name.removesuffix(".yaml") in shipped_spaces():
        entry = resources.files("search_spaces") / f"{name.removesuffix('.yaml')}.yaml"
        return parse_yaml(entry.read_text(encoding="utf-8"), str(entry))
    if not Path(name).exists() and not name.endswith((".yaml", ".yml", ".json")) and "/" not in name:
        close = difflib.get_close_matches(name, shipped_spaces(), n=1)
        raise UserError(
            f"no space file and no shipped space is called {name!r}",
            hint=f"did you mean {close[0]}?"
            if close
            else f"name a .yaml file, or one of: {', '.join(shipped_spaces())}",
        )
    return read_yaml(name)


def _merge(document: YamlDocument, overrides: Sequence[str]) -> MergedDocument:
    """The file on top of what it uses, and the overrides on top of the file. Paths in it are absolute: those of a file
    are relative to its folder, those of an override to the working folder."""
    layers = [*_used_layers(document, ()), document]
    data: dict[str, Any] = {}
    for layer in layers:
        if not isinstance(layer.data, dict):
            raise UserError(
                "a space file is a mapping of sections", hint="see search_spaces/README.md", where=layer.where()
            )
        above = _absolute(layer.data, Path(layer.source).parent)
        data = {
            key: _overlay(data.get(key), value, MERGE_DEPTH.get(key, 1)) if key in data else value
            for key, value in {**data, **above}.items()
        }
    for override in overrides:
        key, separator, text = override.partition("=")
        parts = tuple(key.strip().split("."))
        if not separator or not all(parts):
            raise UserError(f"--set needs key=value, got {override!r}", hint="example: --set workload.total_tokens=1M")
        value = parse_yaml(text, f"--set {key}").data
        _set(data, parts, value, override)
        layers.append(YamlDocument(value, f"--set {override}", {parts: 1}))
    return MergedDocument(_absolute(data, Path()), tuple(layers))


def _absolute(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A copy of a layer whose paths, relative to ``folder``, are absolute."""
    data = absolute_paths(data, folder)
    cluster = data.get("cluster")
    if isinstance(cluster, str) and is_cluster_file(cluster):
        data["cluster"] = str(folder.absolute() / Path(cluster).expanduser())
    return data


def _used_layers(document: YamlDocument, seen: tuple[str, ...]) -> list[YamlDocument]:
    used = document.data.get("use") if isinstance(document.data, dict) else None
    if used is None:
        return []
    if not isinstance(used, list) or not all(isinstance(name, str) for name in used):
        raise UserError(
            "'use' must be a list of names", hint="example: use: [tiny_llama]", where=document.where(("use",))
        )
    layers: list[YamlDocument] = []
    for name in used:
        if name in seen:
            raise UserError(
                f"'use' goes in a circle through {name!r}", hint="leave one out", where=document.where(("use",))
            )
        path = Path(document.source).parent / name if name.endswith((".yaml", ".yml")) else name
        try:
            layer = _find(path)
        except UserError as error:
            raise UserError(error.message, hint=error.hint, where=document.where(("use",))) from None
        layers += [*_used_layers(layer, (*seen, name)), layer]
    return layers


def _overlay(below: Any, above: Any, depth: int) -> Any:
    if depth == 0 or not isinstance(below, dict) or not isinstance(above, dict):
        return above
    return {**below, **{key: _overlay(below.get(key), value, depth - 1) for key, value in above.items()}}


def _set(data: dict[str, Any], parts: tuple[str, ...], value: Any, override: str) -> None:
    for part in parts[:-1]:
        below = data.get(part) or {}
        if not isinstance(below, dict):
            raise UserError(f"--set {override}: {part!r} is not a section", hint="name a key that holds a value")
        data[part] = dict(below)
        data = data[part]
    data[parts[-1]] = value


class _Builder:
    """Turns the merged file into a Space; holds the document for places in messages."""

    def __init__(self, document: MergedDocument, file: SpaceFile) -> None:
        self._document = document
        self._file = file
        self._notes: list[str] = []

    def build(self, default_name: str) -> tuple[TrainingSpace, Enumeration]:
        file = self._file
        model = self._model()
        cluster = self._cluster()
        workload = self._workload()
        objectives = self._objectives(cluster)
        raw = self._section("space", file.space, {"plan", "hyperparameters", "constraints"})
        fixed: dict[str, Any] = {}
        dimensions: list[Dimension] = []
        self._facts: dict[str, Any] = {
            f"model.{key}": value for key, value in model if isinstance(value, int | float | str)
        }
        self._facts |= {"devices": cluster.num_devices, "workload.sequence_length": workload.sequence_length}
        self._facts |= {"workload.total_tokens": workload.total_tokens}
        self._known = frozenset([*self._facts, *default_values(), "plan.dp", "plan.world_size"])
        for section, schema in SECTIONS.items():
            written = self._section(
                f"space.{section}", raw.get(section) or {}, set(schema.model_fields) - {"schema_version"}
            )
            for key in sorted(written, key=list(schema.model_fields).index):
                dimension = self._dimension(f"{section}.{key}", written[key], schema)
                is_conditional = isinstance(written[key], dict) and "when" in written[key]
                if isinstance(dimension, Dimension) and (len(dimension.values) != 1 or is_conditional):
                    dimensions.append(dimension)
                else:
                    fixed[f"{section}.{key}"] = dimension.values[0] if isinstance(dimension, Dimension) else dimension
        if not dimensions:
            self._fail("nothing is searched", "give at least one value in 'space' as a list or a range", ("space",))
        constraints = self._constraints(raw.get("constraints"))

        context = RuleContext(model, cluster.num_devices)
        values = self._facts | default_values() | fixed
        discrete = [
            d
            for d in dimensions
            if d.choices() and (d.name.startswith("plan.") or d.name.endswith("global_batch_size"))
        ]
        enumeration = enumerate_plans(discrete, values, constraints, context)
        if enumeration.num_legal == 0:
            worst = sorted(enumeration.removed.items(), key=lambda item: -item[1])
            counts = ", ".join(f"{rule} removes {count}" for rule, count in worst[:4])
            self._fail(
                f"none of the {enumeration.num_combinations} combinations of plan values is legal: {counts}",
                "widen the plan values or the batch; --dry-run shows the counts of each rule",
                ("space",),
            )
        meshes = enumeration.meshes()
        degrees = {f"plan.{key}" for key in MESH_FIELDS}
        searched = [d for d in dimensions if d.name not in degrees]
        if len(searched) < len(dimensions) and len(meshes) > 1:
            searched.insert(0, Dimension(MESH, "categorical", tuple(meshes)))
        elif len(searched) < len(dimensions):
            fixed |= {f"plan.{key}": value for key, value in next(iter(meshes.values())).items()}
        space = TrainingSpace(
            name=check_name(file.name or default_name, "sweep"),
            model=model,
            cluster=cluster,
            workload=workload,
            objectives=objectives,
            dimensions=tuple(self._ordered(searched)),
            fixed=fixed,
            constraints=tuple(constraints),
            meshes=meshes,
            budget=self._budget(),
            limits=self._limits(),
            runtime=self._runtime(cluster, objectives),
            evaluation=self._options("evaluation", EvaluationOptions, file.evaluation),
        )
        resolved: dict[str, Any] = {
            "schema_version": 1,
            "model": model.to_data(),
            "cluster": cluster.to_data(),
            "workload": workload.to_data(),
            "objectives": [objective.to_data() for objective in space.objectives],
            "space": raw,
            "limits": file.limits or {},
            "runtime": {key: v for key, v in space.runtime.to_data().items() if f"runtime.{key}" not in DECIDED_BY},
            "evaluation": space.evaluation.to_data(),
        }
        return replace(space, data=resolved, notes=tuple(self._notes)), enumeration

    def _fail(self, message: str, hint: str, path: KeyPath = ()) -> NoReturn:
        raise UserError(message, hint=hint, where=self._document.where(path))

    def _section(self, name: str, value: Any, allowed: set[str]) -> dict[str, Any]:
        path = tuple(name.split("."))
        if not isinstance(value, dict):
            self._fail(
                f"'{name}' must be a mapping, got {value!r}", f"allowed keys: {', '.join(sorted(allowed))}", path
            )
        for key in value:
            if key not in allowed:
                close = difflib.get_close_matches(str(key), sorted(allowed), n=1)
                hint = f"did you mean '{close[0]}'?" if close else f"allowed keys: {', '.join(sorted(allowed))}"
                self._fail(f"unknown key '{name}.{key}'", hint, (*path, key))
        return value

    def _converted(self, name: str, value: dict[str, Any], converters: dict[str, Any]) -> dict[str, Any]:
        """Quantities as written (``10m``, ``4GiB``) to numbers, errors with their place."""
        result = dict(value)
        for key, convert in converters.items():
            if result.get(key) is not None:
                try:
                    result[key] = convert(result[key])
                except UserError as error:
                    self._fail(f"'{name}.{key}': {error.message}", error.hint or "", (*name.split("."), key))
        return result

    def _model(self) -> ModelSpec:
        if isinstance(self._file.model, str):
            try:
                return load_model(Path(self._file.model))
            except UserError as error:
                raise UserError(
                    error.message, hint=error.hint, where=error.where or self._document.where(("model",))
                ) from None
        return parse(ModelSpec, self._file.model, document=self._document, path=("model",))

    def _cluster(self) -> ClusterSpec:
        if isinstance(self._file.cluster, str):
            try:
                return parse_cluster(self._file.cluster)
            except UserError as error:
                raise UserError(
                    error.message, hint=error.hint, where=error.where or self._document.where(("cluster",))
                ) from None
        return parse(ClusterSpec, self._file.cluster, document=self._document, path=("cluster",))

    def _workload(self) -> Workload:
        data = self._file.workload
        if isinstance(data, dict):
            data = self._converted("workload", data, {"total_tokens": parse_tokens})
        workload = parse(Workload, data, document=self._document, path=("workload",))
        for index, path in enumerate(workload.data.paths):
            if path != "python-stdlib" and not Path(path).exists():
                self._fail(
                    f"the corpus {path} does not exist", "correct the path", ("workload", "data", "paths", index)
                )
        return workload

    def _objectives(self, cluster: ClusterSpec) -> tuple[Objective, ...]:
        written = self._file.objectives
        if not isinstance(written, list | tuple) or not written:
            self._fail("'objectives' must be a list", "example: objectives: [speed, memory, quality]", ("objectives",))
        objectives = []
        for index, item in enumerate(written):
            path = ("objectives", index)
            data = {"name": item} if isinstance(item, str) else item
            if isinstance(data, dict) and data.get("name") == "memory" and isinstance(data.get("bound"), str):
                data = {
                    **data,
                    "bound": float(
                        self._converted("objectives", {"bound": data["bound"]}, {"bound": parse_bytes})["bound"]
                    ),
                }
            objectives.append(parse(Objective, data, document=self._document, path=path))
            self._check_objective(objectives[-1].name, cluster, path)
        names = [objective.name for objective in objectives]
        if len(set(names)) < len(names):
            self._fail(f"an objective stands twice: {', '.join(names)}", "keep one of them", ("objectives",))
        return tuple(objectives)

    def _check_objective(self, name: str, cluster: ClusterSpec, path: KeyPath) -> None:
        if name not in KNOWN:
            close = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"choose from {', '.join(KNOWN)}"
            self._fail(f"a training run has no objective {name!r}", hint, path)
        needed = {"cost": "dollars_per_device_hour", "energy": "watts"}.get(name)
        if needed is not None and getattr(cluster, needed) is None:
            hint = "add it to the cluster's file (autotune profile writes one), and name that file as 'cluster'"
            self._fail(f"the objective {name!r} needs the cluster's {needed}", hint, path)

    def _budget(self) -> Budget:
        data = self._section("budget", self._file.budget or {}, {"trials", "time"})
        data = self._converted("budget", data, {"time": parse_duration})
        data = {"seconds" if key == "time" else key: value for key, value in data.items()}
        return parse(Budget, data, document=self._document, path=("budget",))

    def _limits(self) -> TrialLimits:
        data = self._section("limits", self._file.limits or {}, {"time", "memory", "heartbeat"})
        data = self._converted(
            "limits", data, {"time": parse_duration, "memory": parse_bytes, "heartbeat": parse_duration}
        )
        names = {"time": "seconds", "memory": "memory_bytes", "heartbeat": "heartbeat_seconds"}
        return parse(
            TrialLimits, {names[key]: value for key, value in data.items()}, document=self._document, path=("limits",)
        )

    def _runtime(self, cluster: ClusterSpec, objectives: tuple[Objective, ...]) -> RuntimeOptions:
        runtime = self._options("runtime", RuntimeOptions, self._file.runtime)
        for key in self._file.runtime or {}:
            if f"runtime.{key}" in DECIDED_BY:
                decider = DECIDED_BY[f"runtime.{key}"]
                self._fail(f"'runtime.{key}' is decided by {decider} in a sweep", f"use {decider}", ("runtime", key))
        if not runtime.measure_memory and cluster.device == "cpu" and any(o.name == "memory" for o in objectives):
            self._fail(
                "the objective 'memory' needs runtime.measure_memory", "leave one out", ("runtime", "measure_memory")
            )
        return runtime

    def _options(self, name: str, schema: type[SchemaT], value: Any) -> SchemaT:
        return parse(schema, value or {}, document=self._document, path=(name,))

    def _constraints(self, written: Any) -> list[Expression]:
        path: KeyPath = ("space", "constraints")
        if written is None:
            return []
        if not isinstance(written, list):
            self._fail("'space.constraints' must be a list of conditions", "begin each with '- '", path)
        return [
            parse_expression(text, self._known, where=self._document.where((*path, index)))
            for index, text in enumerate(written)
        ]

    def _dimension(self, name: str, written: Any, schema: type[Schema]) -> Dimension | Any:
        """A Dimension, or the fixed value."""
        path: KeyPath = ("space", *name.split("."))
        forms = {"values", "int", "float", "log_float", "divisors_of"}
        if isinstance(written, list) and name != "plan.layers_per_stage":
            written = {"values": written}
        if not isinstance(written, dict):
            return self._value(name, written, schema, path)
        self._section(f"space.{name}", written, forms | {"step", "when"})
        given = sorted(forms & set(written))
        if len(given) != 1:
            self._fail(
                f"'{name}' needs one of {', '.join(sorted(forms))}, got {', '.join(given) or 'none'}",
                "examples: [1, 2, 4]; {log_float: [1e-4, 1e-2]}; {int: [8, 64], step: 8}; {divisors_of: devices}",
                path,
            )
        form, value = given[0], written[given[0]]
        if "step" in written and form != "int":
            self._fail(f"'{name}': 'step' goes with 'int' only", "leave it out", path)
        when = self._when(name, written.get("when"))
        if form in ("values", "divisors_of"):
            values = self._divisors(name, value, path) if form == "divisors_of" else value
            if not isinstance(values, list) or not values:
                self._fail(
                    f"'{name}.values' must be a list of at least one value, got {values!r}", "example: [1, 2, 4]", path
                )
            checked = tuple(self._value(name, item, schema, (*path, form, i)) for i, item in enumerate(values))
            if len(set(map(repr, checked))) < len(checked):
                self._fail(f"'{name}' has a value twice: {values}", "keep one of them", path)
            return Dimension(name, "categorical", checked, when=when)
        if not isinstance(value, list) or len(value) != 2:
            self._fail(f"'{name}.{form}' must be [low, high], got {value!r}", f"example: {{{form}: [1, 8]}}", path)
        low, high = (self._value(name, item, schema, path) for item in value)
        numbers = int if form == "int" else int | float
        if isinstance(low, bool) or not isinstance(low, numbers) or not isinstance(high, numbers):
            self._fail(f"'{name}' is not a number, so it has no range", "list its values instead", path)
        if not low < high or (form == "log_float" and low <= 0):
            rule = "0 < low < high" if form == "log_float" else "low < high"
            self._fail(f"'{name}.{form}' needs {rule}, got {value}", "correct the two ends", path)
        if form != "int" and isinstance(default_values()[name], int):
            self._fail(f"'{name}' is a whole number", "use {int: [low, high]} or a list", path)
        step = written.get("step", 1)
        if isinstance(step, bool) or not isinstance(step, int) or step < 1:
            self._fail(f"'{name}.step' must be a whole number of at least 1, got {step!r}", "example: step: 8", path)
        return Dimension(name, form, (), float(low), float(high), step, when)  # type: ignore[arg-type]

    def _value(self, name: str, value: Any, schema: type[Schema], path: KeyPath) -> Any:
        """One value checked against its field."""
        info = schema.model_fields[name.partition(".")[2]]
        if name == "hyperparameters.global_batch_size" and isinstance(value, str):
            try:
                length, devices = self._facts["workload.sequence_length"], self._facts["devices"]
                batch = parse_batch(value, length, multiple_of=devices if value.strip().endswith("-tokens") else 1)
                self._notes += [batch.note] if batch.note else []
                return batch.num_sequences
            except UserError as error:
                self._fail(f"'{name}': {error.message}", error.hint or "", path)
        adapter: TypeAdapter[Any] = TypeAdapter(
            Annotated[info.annotation, info],  # type: ignore[arg-type]  # a type made at run time
            config=ConfigDict(strict=True),
        )
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"].removeprefix("Input should be ")
            self._fail(f"'{name}': must be {reason}, got {value!r}", "correct the value", path)

    def _divisors(self, name: str, of: Any, path: KeyPath) -> list[int]:
        number = self._facts.get(of) if isinstance(of, str) else of
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            names = ", ".join(sorted(key for key, value in self._facts.items() if isinstance(value, int)))
            self._fail(
                f"'{name}.divisors_of' must be a number of at least 1 or one of {names}, got {of!r}",
                "example: devices",
                path,
            )
        return [divisor for divisor in range(1, number + 1) if number % divisor == 0]

    def _when(self, name: str, written: Any) -> Expression | None:
        texts = [IMPLICIT_CONDITIONS[name]] if name in IMPLICIT_CONDITIONS else []
        path = ("space", *name.split("."), "when")
        if written is not None:
            if name.partition(".")[2] in MESH_FIELDS:
                self._fail(f"'{name}' is a parallel degree and can't have a condition", "use space.constraints", path)
            texts.append(parse_expression(written, self._known, where=self._document.where(path)).text)
        if not texts:
            return None
        return parse_expression(
            " and ".join(f"({text})" for text in texts), self._known, where=self._document.where(path)
        )

    def _ordered(self, dimensions: list[Dimension]) -> list[Dimension]:
        """Each dimension after those that its condition reads."""
        ordered: list[Dimension] = []
        waiting = list(dimensions)
        names = {dimension.name for dimension in dimensions}
        while waiting:
            placed = {dimension.name for dimension in ordered}
            ready = [d for d in waiting if d.when is None or not (d.when.names & names) - placed]
            if not ready:
                self._fail(
                    f"the conditions of {', '.join(d.name for d in waiting)} depend on each other in a circle",
                    "leave one 'when' out",
                    ("space",),
                )
            ordered.append(ready[0])
            waiting.remove(ready[0])
        return ordered
