"""What is trained and by which recipe, as the prior sees it; and the hyperparameters it speaks of."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from engine.config import RunConfig
from engine.flops import parameter_counts
from engine.schema import Schema
from engine.spec import Count, ModelSpec, NonNegative, Ratio

HYPERPARAMETERS = {
    "learning_rate": "peak learning rate",
    "global_batch_tokens": "tokens of one optimizer step",
    "weight_decay": "decoupled weight decay of matrices",
    "warmup_ratio": "share of the tokens over which the learning rate rises",
    "beta1": "first-moment decay (momentum)",
    "beta2": "second-moment decay",
    "min_lr_ratio": "final learning rate as a share of the peak",
    "decay_ratio": "share of the tokens over which wsd decays",
    "schedule": "learning rate after warm-up: constant, cosine, wsd or linear",
}
"""Name of a hyperparameter that the prior covers -> what it is."""

Schedule = Literal["constant", "cosine", "wsd", "linear"]
Family = Literal["dense", "moe"]


class Task(Schema):
    """What is trained, and the recipe's values of hyperparameters that a point does not name."""

    num_parameters: Count
    """All parameters but the embedding's and the head's."""
    num_active_parameters: Count
    """Those of them that a token passes; left out, all of them."""
    total_tokens: Count
    """Tokens of the whole run."""
    sequence_length: Count = 2048
    """Tokens of one sequence."""
    optimizer: str = "adamw"
    """Name of the optimizer in any case; of those the prior never saw it says so."""
    family: Family = "dense"
    """Dense, or mixture of experts."""
    schedule: Schedule = "cosine"
    """Learning rate after warm-up."""
    min_lr_ratio: Ratio = 0.1
    """Final learning rate as a share of the peak; left out, 1 for a constant rate."""
    decay_ratio: Ratio = 0.2
    """Share of the tokens over which wsd decays."""
    weight_decay: NonNegative = 0.1
    """Decoupled weight decay."""
    warmup_ratio: Ratio = 0.05
    """Share of the tokens over which the learning rate rises."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """First-moment decay."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Second-moment decay."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if data.get("num_active_parameters") is None and "num_parameters" in data:
            data = {**data, "num_active_parameters": data["num_parameters"]}
        if isinstance(data.get("optimizer"), str):
            data = {**data, "optimizer": data["optimizer"].lower()}
        return {"min_lr_ratio": 1.0, **data} if data.get("schedule") == "constant" else data

    @model_validator(mode="after")
    def _check(self) -> Task:
        if self.num_active_parameters > self.num_parameters:
            raise ValueError(
                f"num_active_parameters {self.num_active_parameters} exceeds num_parameters {self.num_parameters}"
            )
        return self

    @staticmethod
    def of_run(run: RunConfig) -> Task:
        """The task of a run file, with its hyperparameters as the recipe's."""
        hyper = run.hyperparameters
        decays = hyper.schedule in ("cosine", "wsd")
        return Task.of_model(
            run.model,
            total_tokens=run.workload.total_tokens,
            sequence_length=run.workload.sequence_length,
            optimizer=hyper.optimizer,
            schedule=hyper.schedule,
            min_lr_ratio=hyper.min_lr_ratio if decays else 1.0,
            decay_ratio=hyper.decay_ratio,
            weight_decay=hyper.weight_decay,
            warmup_ratio=hyper.warmup_ratio,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
        )

    @staticmethod
    def of_model(model: ModelSpec, **fields: Any) -> Task:
        """A task for an architecture.

        Args:
            model: The architecture; embedding and head are not counted.
            fields: The other fields.
        """
        counts = parameter_counts(model)
        outside = counts.embedding + counts.head
        return Task(
            num_parameters=counts.total - outside,
            num_active_parameters=counts.active - outside,
            family="moe" if model.moe else "dense",
            **fields,
        )
