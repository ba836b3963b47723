"""Published tables of training runs as rows. Read when the prior is fitted, never when it is used."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autotune.prior.rows import MetaRow
from autotune.prior.task import Task
from engine.errors import UserError

STEP_LAW = "step-law"
MARIN = "marin"
DIVERGED_ABOVE = 6.5
"""Nats per token from which a run of these tables has learnt nothing."""

_MARIN_PARAMETERS = {"130m": 130_000_000, "300m": 300_000_000, "520m": 520_000_000, "1.2b": 1_200_000_000}
_MARIN_SEQUENCE, _CHINCHILLA = 4096, 20


def step_law_rows(folder: Path) -> list[MetaRow]:
    """Step Law's grids (Li et al., arXiv 2503.04715), dense and mixtures of experts: AdamW, cosine to 1e-5, weight
    decay 0.1, betas 0.9 and 0.95, 2000 steps of warm-up, sequences of 2048 tokens."""
    rows = []
    for name in ("steplaw_dense.csv", "steplaw_moe.csv"):
        for number, row in enumerate(_records(folder / name)):
            task = step_law_task(int(row["N"]), int(row["D"]), int(row.get("Na") or row["N"]), moe="Na" in row)
            rate = 2.0 ** (round(2 * math.log2(float(row["lr"]))) / 2)  # files give half octaves in several roundings
            batch = float(row["bs_tokens"])
            values: dict[str, float | str] = {"learning_rate": rate, "global_batch_tokens": batch}
            values["warmup_ratio"] = min(1.0, 2000 * batch / task.total_tokens)
            rows.append(_row(STEP_LAW, number + 10_000 * ("Na" in row), task, values, float(row["smooth_loss"])))
    return rows


def step_law_task(num_parameters: int, total_tokens: int, num_active: int | None = None, *, moe: bool = False) -> Task:
    """A task by the recipe of those grids."""
    return Task(
        num_parameters=num_parameters,
        num_active_parameters=num_active or num_parameters,
        total_tokens=total_tokens,
        sequence_length=2048,
        family="moe" if moe else "dense",
        min_lr_ratio=0.005,  # 1e-5 below a peak of about 2e-3
    )


def marin_rows(folder: Path) -> list[MetaRow]:
    """The sweep of eleven optimizers of "Fantastic pretraining optimizers" (Wen et al., Marin project): one-factor
    changes of tuned configurations, learning rate decayed to 0, sequences of 4096 tokens."""
    rows = []
    for number, row in enumerate(_records(folder / "marin_optimizer_sweep.csv")):
        parameters = _MARIN_PARAMETERS[row["model_size"]]
        tokens = int(_CHINCHILLA * parameters * float(row["chinchilla"]))
        batch = int(row["hp_train_batch_size"]) * _MARIN_SEQUENCE
        beta2 = _number(row["hp_beta2"])
        values: dict[str, float | str] = {
            "learning_rate": float(row["hp_learning_rate"]),
            "global_batch_tokens": float(batch),
            "weight_decay": float(row["hp_weight_decay"]),
            "warmup_ratio": min(1.0, float(row["hp_warmup"]) * batch / tokens),
            "beta1": float(row["hp_beta1"]),
        }
        if beta2 is not None:
            values["beta2"] = beta2
        task = Task(
            num_parameters=parameters,
            num_active_parameters=parameters,
            total_tokens=tokens,
            sequence_length=_MARIN_SEQUENCE,
            optimizer=row["optimizer"],
            schedule="linear" if row["hp_lr_schedule"] == "linear" else "cosine",
            min_lr_ratio=0.0,
            beta2=0.98,
        )
        rows.append(_row(MARIN, number, task, values, _number(row["c4_en_loss"])))
    return rows


def _row(study: str, trial: int, task: Task, values: dict[str, float | str], loss: float | None) -> MetaRow:
    failed = loss is None or loss > DIVERGED_ABOVE
    return MetaRow(
        study=study,
        trial=trial,
        task=task,
        hyperparameters=values,
        loss=None if failed else loss,
        status="diverged" if failed else "ok",
    )


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"no such table: {path}", hint="give the folder that holds the published tables")
    with open(path, encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _number(text: str) -> float | None:
    value = float(text) if text else math.nan
    return value if math.isfinite(value) else None
