"""The space file: YAML to a Space, every mistake with its file and line. The grammar is documented in
``search_spaces/README.md``."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from autotune.paths import check_name
from autotune.space.enumerate import Enumeration, enumerate_plans
from autotune.space.expression import Expression, parse_expression
from autotune.space.fidelity import Fidelity
from autotune.space.forms import EXAMPLES, RANGES, FormReader
from autotune.space.layers import MergedDocument, find_space, merge
from autotune.space.objectives import KNOWN, Objective
from autotune.space.space import Dimension
from autotune.space.training import MESH, TrainingSpace, default_values
from autotune.specs.cluster import ClusterSpec, parse_cluster
from engine.config import EvaluationOptions, RuntimeOptions
from engine.errors import UserError
from engine.hf_config import load_model
from engine.plan import MESH_FIELDS, Plan
from engine.rule import RuleContext
from engine.schema import Schema, SchemaT, parse
from engine.spec import Hyperparameters, ModelSpec, Workload
from engine.units import parse_batch, parse_tokens
from engine.yaml_file import KeyPath

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
    "hyperparameters.base_hidden_size": "hyperparameters.parametrization == 'mup'",
    "hyperparameters.base_num_layers": "hyperparameters.parametrization == 'mup' and"
    " hyperparameters.optimizer == 'adamw'",
}
"""Values without effect elsewhere are searched only where these hold."""

DECIDED_BY = {
    "runtime.seed": "--seed",
    "runtime.device": "'cluster'",
    "runtime.threads_per_rank": "'cluster'",
    "runtime.stop_after_steps": "'workload.total_tokens'",
}
"""Settings of a run that a sweep sets itself -> what decides them."""

LIMITS = {
    "time": "seconds",
    "memory": "memory_bytes",
    "heartbeat": "heartbeat_seconds",
    "checkpoint": "checkpoint_seconds",
}
"""Key of ``limits`` -> what it is."""


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
    """``time``, ``memory``, ``heartbeat`` and ``checkpoint`` of each trial."""
    runtime: Any = None
    """RuntimeOptions of each trial, but for what the sweep decides (``DECIDED_BY``)."""
    evaluation: Any = None
    """EvaluationOptions of each trial."""
    fidelity: Any = None
    """How trials grow: ``on``, shares of the training, or ``min``, ``eta``, ``rungs`` and ``widths``; ``off`` for full
    trainings alone."""


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
    document = merge(find_space(path), overrides)
    file = parse(SpaceFile, document.data, document=document)
    return _Builder(document, file).build(default_name=Path(path).stem)


class _Builder(FormReader):
    """Turns the merged file into a Space; holds the document for places in messages."""

    def __init__(self, document: MergedDocument, file: SpaceFile) -> None:
        super().__init__(document)
        self._file = file
        self._notes: list[str] = []

    def build(self, default_name: str) -> tuple[TrainingSpace, Enumeration]:
        file = self._file
        model = self._model()
        cluster = self._cluster()
        workload = self._workload()
        objectives = self._objectives(cluster)
        raw = self.section("space", file.space, {"plan", "hyperparameters", "constraints"})
        fixed: dict[str, Any] = {}
        dimensions: list[Dimension] = []
        self._facts: dict[str, Any] = {
            f"model.{key}": value for key, value in model if isinstance(value, int | float | str)
        }
        self._facts |= {"devices": cluster.num_devices, "workload.sequence_length": workload.sequence_length}
        self._facts |= {"workload.total_tokens": workload.total_tokens}
        self._known = frozenset([*self._facts, *default_values(), "plan.dp", "plan.world_size"])
        for section, schema in SECTIONS.items():
            written = self.section(
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
            self.fail("nothing is searched", "give at least one value in 'space' as a list or a range", ("space",))
        constraints = self.conditions(raw.get("constraints"), ("space", "constraints"), self._known)

        context = RuleContext(model, cluster.num_devices)
        values = self._facts | default_values() | fixed
        discrete = [
            d
            for d in dimensions
            if d.choices() and (d.name.startswith("plan.") or d.name.endswith("global_batch_size"))
        ]
        undecided = frozenset(d.name for d in dimensions) - {d.name for d in discrete}
        enumeration = enumerate_plans(discrete, values, constraints, context, undecided=undecided)
        if enumeration.num_legal == 0:
            worst = sorted(enumeration.removed.items(), key=lambda item: -item[1])
            counts = ", ".join(f"{rule} removes {count}" for rule, count in worst[:4])
            self.fail(
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
            dimensions=self.ordered(searched),
            fixed=fixed,
            constraints=constraints,
            meshes=meshes,
            budget=self.budget(file.budget),
            limits=self.limits(file.limits, LIMITS),
            fidelity=self.fidelity(file.fidelity, Fidelity),
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
        if space.fidelity is not None:
            resolved["fidelity"] = space.fidelity.to_data()
        return replace(space, data=resolved, notes=tuple(self._notes)), enumeration

    def _model(self) -> ModelSpec:
        if isinstance(self._file.model, str):
            try:
                return load_model(Path(self._file.model))
            except UserError as error:
                raise UserError(
                    error.message, hint=error.hint, where=error.where or self.document.where(("model",))
                ) from None
        return parse(ModelSpec, self._file.model, document=self.document, path=("model",))

    def _cluster(self) -> ClusterSpec:
        if isinstance(self._file.cluster, str):
            try:
                return parse_cluster(self._file.cluster)
            except UserError as error:
                raise UserError(
                    error.message, hint=error.hint, where=error.where or self.document.where(("cluster",))
                ) from None
        return parse(ClusterSpec, self._file.cluster, document=self.document, path=("cluster",))

    def _workload(self) -> Workload:
        data = self._file.workload
        if isinstance(data, dict):
            data = self.converted("workload", data, {"total_tokens": parse_tokens})
        workload = parse(Workload, data, document=self.document, path=("workload",))
        for index, path in enumerate(workload.data.paths):
            if path != "python-stdlib" and not Path(path).exists():
                self.fail(f"the corpus {path} does not exist", "correct the path", ("workload", "data", "paths", index))
        return workload

    def _objectives(self, cluster: ClusterSpec) -> tuple[Objective, ...]:
        return self.objectives(self._file.objectives, lambda name, path: self._check_objective(name, cluster, path))

    def _check_objective(self, name: str, cluster: ClusterSpec, path: KeyPath) -> None:
        if name not in KNOWN:
            close = difflib.get_close_matches(name, KNOWN, n=1)
            hint = f"did you mean '{close[0]}'?" if close else f"choose from {', '.join(KNOWN)}"
            self.fail(f"a training run has no objective {name!r}", hint, path)
        needed = {"cost": "dollars_per_device_hour", "energy": "watts"}.get(name)
        if needed is not None and getattr(cluster, needed) is None:
            hint = "add it to the cluster's file (autotune profile writes one), and name that file as 'cluster'"
            self.fail(f"the objective {name!r} needs the cluster's {needed}", hint, path)

    def _runtime(self, cluster: ClusterSpec, objectives: tuple[Objective, ...]) -> RuntimeOptions:
        runtime = self._options("runtime", RuntimeOptions, self._file.runtime)
        for key in self._file.runtime or {}:
            if f"runtime.{key}" in DECIDED_BY:
                decider = DECIDED_BY[f"runtime.{key}"]
                self.fail(f"'runtime.{key}' is decided by {decider} in a sweep", f"use {decider}", ("runtime", key))
        if not runtime.measure_memory and cluster.device == "cpu" and any(o.name == "memory" for o in objectives):
            self.fail(
                "the objective 'memory' needs runtime.measure_memory", "leave one out", ("runtime", "measure_memory")
            )
        return runtime

    def _options(self, name: str, schema: type[SchemaT], value: Any) -> SchemaT:
        return parse(schema, value or {}, document=self.document, path=(name,))

    def _dimension(self, name: str, written: Any, schema: type[Schema]) -> Dimension | Any:
        """A Dimension, or the fixed value."""
        path: KeyPath = ("space", *name.split("."))
        if isinstance(written, list) and name != "plan.layers_per_stage":
            written = {"values": written}
        if not isinstance(written, dict):
            self.refuse_loose_range(name, written, path)
            return self._value(name, written, schema, path)
        forms = {"values", *RANGES, "divisors_of"}
        self.section(f"space.{name}", written, forms | {"step", "when"})
        dimension = self.dimension(
            name,
            written,
            path,
            lambda value, place: self._value(name, value, schema, place),
            when=self._when(name, written.get("when")),
            more_lists={"divisors_of": lambda of: self._divisors(name, of, path)},
            examples=f"{EXAMPLES}; {{divisors_of: devices}}",
        )
        if dimension.is_real and isinstance(default_values()[name], int):
            self.fail(f"'{name}' is a whole number", "use {int: [low, high]}, {log_int: [low, high]} or a list", path)
        return dimension

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
                self.fail(f"'{name}': {error.message}", error.hint or "", path)
        adapter: TypeAdapter[Any] = TypeAdapter(
            Annotated[info.annotation, info],  # type: ignore[arg-type]  # a type made at run time
            config=ConfigDict(strict=True),
        )
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            reason = error.errors(include_url=False)[0]["msg"].removeprefix("Input should be ")
            self.fail(f"'{name}': must be {reason}, got {value!r}", "correct the value", path)

    def _divisors(self, name: str, of: Any, path: KeyPath) -> list[int]:
        number = self._facts.get(of) if isinstance(of, str) else of
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            names = ", ".join(sorted(key for key, value in self._facts.items() if isinstance(value, int)))
            self.fail(
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
                self.fail(f"'{name}' is a parallel degree and can't have a condition", "use space.constraints", path)
            texts.append(parse_expression(written, self._known, where=self.document.where(path)).text)
        if not texts:
            return None
        return parse_expression(
            " and ".join(f"({text})" for text in texts), self._known, where=self.document.where(path)
        )
