"""The run file: everything the engine needs to train, evaluate or branch one run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from engine.errors import UserError
from engine.hf_config import load_model
from engine.plan import Plan
from engine.schema import Schema, parse
from engine.spec import Count, CountOrZero, Hyperparameters, ModelSpec, Name, NonNegative, Positive, Workload
from engine.stage_split import BY_COST, split_by_cost
from engine.units import parse_batch, parse_tokens
from engine.yaml_file import YamlDocument, dump_yaml, read_yaml


class EvaluationOptions(Schema):
    """When and on how much of the held-out documents the loss is measured. The end of a run is always evaluated."""

    every_tokens: Count | None = None
    """Evaluate each time so many tokens were trained on; null for the end only."""
    max_tokens: Count = 65536
    """Evaluate on at most so many held-out tokens, always the same ones."""


class CheckpointOptions(Schema):
    """When checkpoints are written and how many are kept."""

    every_steps: CountOrZero = 0
    """Write one each so many steps; 0 for the end and on request only."""
    keep: Count = 3
    """The newest so many are kept."""
    at_end: bool = True
    """Write one when the run (or the branch) ends."""


class LoggingOptions(Schema):
    """Where metrics go beside the telemetry."""

    tensorboard: bool = False
    """Write TensorBoard events into the run folder."""
    mlflow_uri: str | None = None
    """MLflow tracking address; null for none."""


class BranchOptions(Schema):
    """A short fork of a run from one of its checkpoints, on the same batches the run itself will see."""

    checkpoint: str
    """The checkpoint folder to fork from."""
    num_steps: Count
    """Steps to train."""
    learning_rate_scale: Positive
    """Factor on the schedule's learning rate."""
    anneal_steps: CountOrZero = 0
    """Over the last so many steps the learning rate goes linearly to the schedule's minimum."""


class RuntimeOptions(Schema):
    """Settings of the process that change neither the result nor the plan."""

    seed: CountOrZero = 0
    """Seed of the initialisation, the sample order and dropout."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Kind of device to train on."""
    threads_per_rank: Count = 1
    """CPU threads of each rank (device cpu)."""
    init_from: str | None = None
    """A Hugging Face folder or ``.safetensors`` file whose weights training starts from; null for random weights."""
    topology: str | None = None
    """What ``engine.probe --pairs`` measured of these devices: ranks are placed by it, and ``plan.all_reduce``
    ``topology`` chooses its routes by it; null leaves each process the rank it was started with."""
    refresh_topology: bool = False
    """Measure one pair of ranks after every step (``plan.all_reduce: topology``), to notice links that changed."""
    learning_rate_scale: Positive = 1.0
    """Factor on the schedule's learning rate at the start; the retuner may change it later."""
    stop_after_steps: Count | None = None
    """End early, with a checkpoint, after so many steps in total; null to train all tokens."""
    measure_warmup_steps: CountOrZero = 2
    """First steps of a process that are left out when its speed is measured."""
    measure_memory: bool = True
    """Track live tensor storages in the second step of a process (device cpu), for the peak memory figure. That step
    takes several times as long and never counts as speed."""
    diverged_above: Positive | None = None
    """End as diverged when the smoothed training loss stays above this; null for the loss at the start plus one nat."""
    max_skipped_steps: Count = 20
    """End with the outcome ``nan`` after so many non-finite steps in a row."""
    hang_timeout_seconds: Positive = 600.0
    """Time limit of one collective operation."""
    step_delay_seconds: NonNegative = 0.0
    """Sleep in each step: emulates a slow machine in tests and demonstrations."""


class RunConfig(Schema):
    """One run of the engine (``run.yaml``)."""

    schema_version: Literal[1] = 1
    """Version of this file format."""
    name: Name = "run"
    """Name of the run."""
    model: ModelSpec
    """The architecture."""
    workload: Workload
    """Data, sequence length, total tokens."""
    hyperparameters: Hyperparameters = Hyperparameters()
    """What changes the result."""
    plan: Plan = Plan()
    """How the work is split."""
    runtime: RuntimeOptions = RuntimeOptions()
    """Process settings."""
    evaluation: EvaluationOptions = EvaluationOptions()
    """Held-out evaluation."""
    checkpoint: CheckpointOptions = CheckpointOptions()
    """Checkpoints."""
    logging: LoggingOptions = LoggingOptions()
    """TensorBoard and MLflow."""
    branch: BranchOptions | None = None
    """Set in forks only."""
    origin: dict[str, str] = Field(default_factory=dict)
    """Where the file comes from (study, trial, how it was picked); for people."""

    @model_validator(mode="after")
    def _check_balancing(self) -> Self:
        names = ("router_aux_loss_coefficient", "router_z_loss_coefficient", "expert_bias_rate")
        given = [name for name in names if getattr(self.hyperparameters, name)]
        if given and self.model.moe is None:
            raise ValueError(f"hyperparameters.{given[0]} is for mixtures of experts, the model has none: set it to 0")
        if self.hyperparameters.expert_bias_rate and self.model.moe and not self.model.moe.selection_bias:
            raise ValueError(
                "hyperparameters.expert_bias_rate needs model.moe.selection_bias to be true; or set it to 0"
            )
        return self

    @model_validator(mode="after")
    def _check_topology(self) -> Self:
        if self.runtime.refresh_topology and self.plan.all_reduce != "topology":
            raise ValueError(
                "runtime.refresh_topology is for plan.all_reduce topology, which is native here: set it to false, or"
                " plan.all_reduce to topology"
            )
        return self

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.hyperparameters.global_batch_size * self.workload.sequence_length

    @property
    def num_steps(self) -> int:
        """Steps of the whole run: the total tokens in whole global batches, rounded up."""
        return -(-self.workload.total_tokens // self.tokens_per_step)


def prepare_run_data(data: Any, *, document: YamlDocument | None = None) -> tuple[Any, list[str]]:
    """Bring the written forms of quantities (``512-seqs``, ``4Mi-tokens``) to numbers, a model named by a file to its
    spec, and layers per stage ``by_cost`` to a list.

    Args:
        data: A run file's mapping, as read.
        document: Where it came from; relative model paths are taken from its folder.

    Returns:
        The data ready for ``RunConfig`` and notes on what was rounded or chosen.
    """
    if not isinstance(data, dict):
        return data, []
    folder = Path(document.source).parent if document else Path()
    data = absolute_paths(data, folder)
    notes: list[str] = []
    if isinstance(data.get("model"), str):
        data["model"] = load_model(data["model"]).to_data()
    workload, hyper, plan = data.get("workload"), data.get("hyperparameters"), data.get("plan")
    if isinstance(workload, dict) and isinstance(workload.get("total_tokens"), str):
        workload["total_tokens"] = parse_tokens(workload["total_tokens"], what="workload.total_tokens")
    if isinstance(workload, dict) and isinstance(hyper, dict) and isinstance(hyper.get("global_batch_size"), str):
        length = workload.get("sequence_length")
        if isinstance(length, int) and length > 0:
            degrees = plan if isinstance(plan, dict) else {}
            multiple = 1
            for key in ("dp_replicate", "dp_shard", "micro_batch_size"):
                multiple *= degrees[key] if isinstance(degrees.get(key), int) and degrees[key] > 0 else 1
            batch = parse_batch(hyper["global_batch_size"], length, multiple_of=multiple)
            hyper["global_batch_size"] = batch.num_sequences
            notes += [batch.note] if batch.note else []
    if isinstance(plan, dict) and isinstance(plan.get("layers_per_stage"), str):
        plan["layers_per_stage"], note = _layers_by_cost(data)
        notes += [note] if note else []
    return data, notes


def _layers_by_cost(data: dict[str, Any]) -> tuple[list[int] | None, str]:
    """The layers of each stage by cost, and a note that prints them; nothing where the data is wrong or the stages are
    too many, which is told when the run is checked.

    Raises:
        UserError: The plan says something else than by_cost.
    """
    if data["plan"]["layers_per_stage"] != BY_COST:
        raise UserError(
            f"plan.layers_per_stage must be a list of layers or {BY_COST}, got {data['plan']['layers_per_stage']!r}",
            hint=f"write the layers of each stage, such as [4, 3], or {BY_COST}; or leave it out for an even split",
        )
    try:
        spec = ModelSpec.model_validate(data.get("model"))
        plan = Plan.model_validate({**data["plan"], "layers_per_stage": None})
        length = Workload.model_validate(data.get("workload")).sequence_length
    except ValidationError:
        return None, ""
    if plan.num_stages > spec.num_layers:
        return None, ""
    sizes = split_by_cost(spec, plan, length)
    return list(sizes), f"layers_per_stage {BY_COST} is {list(sizes)}"


def absolute_paths(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A copy in which the model, corpus, tokenizer, weights, topology and checkpoint named relative to the file's
    ``folder`` are absolute, so that the run can be started from anywhere. Names that stand for something built in
    stay."""
    data = {key: dict(value) if isinstance(value, dict) else value for key, value in data.items()}
    base = folder.absolute()

    def absolute(value: Any, builtin: str | None) -> Any:
        return value if not isinstance(value, str) or value == builtin else str(base / Path(value).expanduser())

    if "model" in data:
        data["model"] = absolute(data["model"], None)
    workload = data.get("workload")
    if isinstance(workload, dict) and isinstance(workload.get("data"), dict):
        corpus = workload["data"] = dict(workload["data"])
        if isinstance(corpus.get("paths"), list):
            corpus["paths"] = [absolute(path, "python-stdlib") for path in corpus["paths"]]
        if "tokenizer" in corpus:
            corpus["tokenizer"] = absolute(corpus["tokenizer"], "bytes")
    for section, key in (("runtime", "init_from"), ("runtime", "topology"), ("branch", "checkpoint")):
        values = data.get(section)
        if isinstance(values, dict) and key in values:
            values[key] = absolute(values[key], None)
    return data


def start_from(config: RunConfig, weights: Path) -> RunConfig:
    """The run, begun with Hugging Face weights: a folder or a ``.safetensors`` file, relative to where we are."""
    return config.changed(runtime=config.runtime.changed(init_from=str(weights.expanduser().absolute())))


def load_run(path: str | Path) -> tuple[RunConfig, list[str]]:
    """Read and validate a run file.

    Returns:
        The configuration, and notes on what was rounded.

    Raises:
        UserError: Missing or malformed file; every problem with file and line.
    """
    document = read_yaml(path)
    try:
        data, notes = prepare_run_data(document.data, document=document)
    except UserError as error:
        raise UserError(error.message, hint=error.hint, where=error.where or str(path)) from None
    return parse(RunConfig, data, document=document), notes


def dump_run(config: RunConfig) -> str:
    """The run file's text; ``load_run`` of it gives an equal configuration."""
    return dump_yaml(config.to_data())
