"""Public problems for search, of kinds that the prior was not fitted to: mathematical problems, a conditional space
with constraints and failures, and published tables of training runs as functions.

Not a benchmark itself: others import it. Problems made of tables need the reference data beside the checkout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.interpolate import PchipInterpolator
from search_loop import Failed

from autotune.space.expression import parse_expression
from autotune.space.objectives import Objective
from autotune.space.space import Dimension, Scalar, Space

Parameters = Mapping[str, Scalar]


@dataclass(frozen=True)
class Problem:
    """A function over a space."""

    name: str
    group: str
    """Problems of one group are averaged."""
    space: Space
    function: Callable[[Parameters], dict[str, float]]
    """Values by objective; raises ``Failed``."""


def cube(num: int) -> tuple[Dimension, ...]:
    """``num`` numbers from 0 to 1."""
    return tuple(Dimension(f"x{index}", "float", low=0.0, high=1.0) for index in range(num))


def vector(parameters: Parameters, num: int) -> np.ndarray:
    """The numbers of a point of ``cube(num)``, ``[num]``."""
    return np.array([float(parameters[f"x{index}"] or 0.0) for index in range(num)])


# Mathematical problems ------------------------------------------------------------------------------------------------


def zdt(kind: int, num: int = 8) -> Problem:
    """ZDT1 to ZDT3 (Zitzler, Deb, Thiele 2000): a convex, a concave and a broken front of two costs."""

    def function(parameters: Parameters) -> dict[str, float]:
        x = vector(parameters, num)
        g = 1 + 9 * x[1:].mean()
        ratio = x[0] / g
        shape = {1: 1 - math.sqrt(ratio), 2: 1 - ratio**2}.get(kind)
        if shape is None:
            shape = 1 - math.sqrt(ratio) - ratio * math.sin(10 * math.pi * x[0])
        return {"f1": float(x[0]), "f2": float(g * shape)}

    space = Space(f"zdt{kind}", _objectives("f1", "f2"), cube(num), {})
    return Problem(space.name, "ZDT", space, function)


def dtlz2(num: int = 7) -> Problem:
    """DTLZ2 (Deb et al. 2002) with three costs: the front is a part of a sphere."""

    def function(parameters: Parameters) -> dict[str, float]:
        x = vector(parameters, num)
        g = float(((x[2:] - 0.5) ** 2).sum())
        a, b = x[0] * math.pi / 2, x[1] * math.pi / 2
        values = (math.cos(a) * math.cos(b), math.cos(a) * math.sin(b), math.sin(a))
        return {f"f{index}": (1 + g) * float(value) for index, value in enumerate(values, start=1)}

    space = Space("dtlz2", _objectives("f1", "f2", "f3"), cube(num), {})
    return Problem("dtlz2", "DTLZ", space, function)


def conditional() -> Problem:
    """Words, conditional numbers, a rule, a bound and a region that fails: two costs of an imagined training run, whose
    loss has a different best learning rate under each optimizer and grows beyond a size that does not fit."""
    dimensions = (
        Dimension("optimizer", "categorical", ("adam", "sgd", "lion")),
        Dimension("learning_rate", "log_float", low=1e-5, high=1.0),
        Dimension("momentum", "float", low=0.0, high=0.99, when=_when("optimizer == 'sgd'")),
        Dimension("beta2", "float", low=0.8, high=0.999, when=_when("optimizer != 'sgd'")),
        Dimension("layers", "int", low=1, high=12),
        Dimension("width", "categorical", (64, 128, 256, 512, 1024)),
        Dimension("is_checkpointed", "categorical", (False, True)),
    )
    best = {"adam": 1e-3, "sgd": 1e-1, "lion": 1e-4}

    def function(p: Parameters) -> dict[str, float]:
        layers, width, rate = int(p["layers"] or 0), int(p["width"] or 0), float(p["learning_rate"] or 0)
        size = layers * width**2 / 1e6
        if size * (0.4 if p["is_checkpointed"] else 1.0) > 6.0:
            raise Failed("oom")
        target = best[str(p["optimizer"])] * (256 / width) ** 0.5
        off = math.log10(rate / target)
        if off > 1.2:
            raise Failed("diverged")
        inner = (float(p["momentum"] or 0) - 0.9) ** 2 if "momentum" in p else 4 * (float(p["beta2"] or 0) - 0.95) ** 2
        worse = {"adam": 0.0, "sgd": 0.06, "lion": 0.02}[str(p["optimizer"])]
        loss = 2.0 + 0.6 * (1 + size) ** -0.4 + 0.12 * off**2 + 0.3 * inner + worse
        seconds = (0.05 + size * 0.2 + layers * 0.01) * (1.33 if p["is_checkpointed"] else 1.0)
        return {"loss": loss, "seconds": seconds}

    space = Space(
        "conditional",
        (Objective(name="loss", bound=2.7), Objective(name="seconds", bound=1.5)),
        dimensions,
        {},
        constraints=(_when("layers * width >= 256"),),
    )
    return Problem("conditional", "conditional", space, function)


# Tables ---------------------------------------------------------------------------------------------------------------

LCBENCH_TASKS = ("3945", "34539", "126025", "167152", "168868", "189906")
LCBENCH_INPUTS = (
    "epoch", "batch_size", "learning_rate", "momentum", "weight_decay", "num_layers", "max_units", "max_dropout",
)  # fmt: skip


def lcbench(shared: Path, task: str) -> Problem:
    """Networks on tabular data (LCBench, Zimmer et al. 2021) by the surrogate of YAHPO Gym: error and training time."""
    folder = shared / "data" / "hpo" / "yahpo_lcbench"
    written = json.loads((folder / "config_space.json").read_text())["hyperparameters"]
    bounds = {item["name"]: item for item in written}
    code = json.loads((folder / "encoding.json").read_text())["OpenML_task_id"][task]
    names = [name for name in LCBENCH_INPUTS if name != "epoch"]
    dimensions = tuple(_lcbench_dimension(name, bounds[name]) for name in names)

    def function(parameters: Parameters) -> dict[str, float]:
        values = [[float(parameters.get(name, bounds["epoch"]["upper"]) or 0.0) for name in LCBENCH_INPUTS]]
        inputs = {"x_cat": np.array([[code]], np.int32), "x_cont": np.array(values, np.float32)}
        seconds, accuracy = _session(folder / "model.onnx").run(None, inputs)[0][0][:2]
        return {"error": 1 - float(accuracy) / 100, "seconds": float(seconds)}

    space = Space(f"lcbench-{task}", _objectives("error", "seconds"), dimensions, {})
    return Problem(space.name, "LCBench", space, function)


def _lcbench_dimension(name: str, bound: Mapping[str, Any]) -> Dimension:
    low, high = bound["lower"], bound["upper"]
    if bound["type"] == "uniform_int" and bound["log"]:
        sizes = tuple(round(low * (high / low) ** (step / 10)) for step in range(11))
        return Dimension(name, "categorical", sizes)
    if bound["type"] == "uniform_int":
        return Dimension(name, "int", low=low, high=high)
    return Dimension(name, "log_float" if bound["log"] else "float", low=low, high=high)


@cache
def _session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


TASKSET_INPUTS = ("learning_rate", "beta1", "beta2", "epsilon", "l1", "l2", "linear_decay", "exponential_decay")


def taskset(shared: Path) -> list[Problem]:
    """Recurrent networks on text under a thousand settings of Adam (TaskSet, Metz et al. 2020). A proposal stands for
    the tabled setting nearest to it in the logarithms; a setting whose loss is no number counts as diverged."""
    import pandas as pd

    table = pd.read_parquet(shared / "data" / "hpo" / "taskset_rnn9.parquet")
    problems = []
    for index, (task, rows) in enumerate(table.groupby("task")):
        values = _on_log_scale(rows[list(TASKSET_INPUTS)].to_numpy(float))
        low, high = values.min(axis=0), values.max(axis=0)
        losses = rows["valid_final"].to_numpy(float)
        problems.append(_tabled(f"taskset-{index}", low, high, (values - low) / (high - low), losses))
        assert task
    return problems


def _on_log_scale(values: np.ndarray) -> np.ndarray:
    """Logarithms; of betas those of the distance to 1."""
    values = values.copy()
    for column, name in enumerate(TASKSET_INPUTS):
        if name.startswith("beta"):
            values[:, column] = 1 - values[:, column]
    return np.log10(np.maximum(values, 1e-12))


def _tabled(name: str, low: np.ndarray, high: np.ndarray, unit: np.ndarray, losses: np.ndarray) -> Problem:
    names = ["learning_rate", *(f"log_{name}" for name in TASKSET_INPUTS[1:])]
    first = Dimension("learning_rate", "log_float", low=10 ** float(low[0]), high=10 ** float(high[0]))
    rest = [
        Dimension(dimension, "float", low=float(low[column]), high=float(high[column]))
        for column, dimension in enumerate(names)
        if column
    ]

    def function(parameters: Parameters) -> dict[str, float]:
        values = [math.log10(float(parameters["learning_rate"] or 0)), *(float(parameters[n] or 0) for n in names[1:])]
        point = (np.array(values) - low) / (high - low)
        loss = float(losses[int(((unit - point) ** 2).sum(axis=1).argmin())])
        if not math.isfinite(loss):
            raise Failed("diverged")
        return {"quality": loss}

    space = Space(name, (Objective(name="quality"),), (first, *rest), {})
    return Problem(name, "TaskSet", space, function)


MARIN_SCALES: Mapping[str, bool] = {
    "hp_learning_rate": True,
    "hp_train_batch_size": True,
    "hp_weight_decay": False,
    "hp_warmup": False,
    "hp_beta1": False,
    "hp_beta2": False,
    "hp_max_grad_norm": False,
}
"""Column -> whether it is one of magnitudes."""
MARIN_NAMES = {"hp_learning_rate": "learning_rate", "hp_weight_decay": "weight_decay", "hp_beta1": "beta1",
               "hp_beta2": "beta2"}  # fmt: skip
MARIN_SIZES = {"130m": 130_000_000, "300m": 300_000_000, "520m": 520_000_000, "1.2b": 1_200_000_000}
TOKENS_PER_PARAMETER = 20
SEQUENCE_LENGTH = 4096


def marin(shared: Path, optimizer: str = "adamw") -> list[Problem]:
    """Language models under one optimizer, one problem a size and token budget, from the best configuration and its
    one-factor changes (Wen et al. 2025): the excess losses of the factors add up, each between its measured values by
    monotone cubics. Interactions are not in the table, so they are not in the function."""
    import pandas as pd

    table = pd.read_csv(shared / "data" / "hpo" / "marin_optimizer_sweep.csv")
    table = table[table["optimizer"] == optimizer]
    problems = []
    for (size, ratio), rows in table.groupby(["model_size", "chinchilla"]):
        curves = {name: curve for name in MARIN_SCALES if (curve := _one_factor(rows, name)) is not None}
        if "hp_learning_rate" in curves and len(curves) >= 3:
            problems.append(_additive(f"marin-{size}-{ratio}x", str(size), int(ratio), curves, rows))
    return problems


def _one_factor(rows: Any, name: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Values of one hyperparameter and the excess losses under them, both ``[n]``, the best configuration's at 0."""
    base = rows[rows["changed"].isna()].sort_values("c4_en_loss")
    if base.empty:
        return None
    best = base.iloc[0]
    changed = rows[rows["changed"] == name.removeprefix("hp_")]
    points = {float(best[name]): 0.0}
    for _, row in changed.iterrows():
        loss = row["c4_en_loss"]
        points[float(row[name])] = 5.0 if not math.isfinite(loss) else max(0.0, float(loss - best["c4_en_loss"]))
    if len(points) < 3 or not all(map(math.isfinite, points)):
        return None
    values = np.array(sorted(points))
    return values, np.array([points[value] for value in values])


def _additive(
    name: str, size: str, ratio: int, curves: Mapping[str, tuple[np.ndarray, np.ndarray]], rows: Any
) -> Problem:
    level = float(rows["c4_en_loss"].min())
    splines, dimensions = {}, []
    for column, (values, excess) in curves.items():
        is_log = MARIN_SCALES[column]
        if column == "hp_train_batch_size":
            values = values * SEQUENCE_LENGTH
        scale = np.log(values) if is_log else values
        label = "global_batch_tokens" if column == "hp_train_batch_size" else MARIN_NAMES.get(column, column[3:])
        splines[label] = (PchipInterpolator(scale, excess), is_log)
        kind: Any = "log_float" if is_log else "float"
        dimensions.append(Dimension(label, kind, low=float(values[0]), high=float(values[-1])))

    def function(parameters: Parameters) -> dict[str, float]:
        excess = 0.0
        for label, (spline, is_log) in splines.items():
            value = float(parameters[label] or 0.0)
            excess += float(spline(math.log(value) if is_log else value))
        return {"quality": level + excess}

    num_parameters = MARIN_SIZES.get(size, 0)
    facts = {"num_parameters": num_parameters, "total_tokens": num_parameters * TOKENS_PER_PARAMETER * ratio}
    space = Space(name, (Objective(name="quality"),), tuple(dimensions), {}, data=facts)
    return Problem(name, "Marin", space, function)


def _objectives(*names: str) -> tuple[Objective, ...]:
    return tuple(Objective(name=name) for name in names)


def _when(text: str) -> Any:
    names = ("optimizer", "layers", "width", "learning_rate")
    return parse_expression(text, frozenset(names), where=None)


def everything(shared: Path | None) -> Sequence[Problem]:
    """All problems; without the reference data those that need none."""
    problems = [zdt(1), zdt(2), zdt(3), dtlz2(), conditional()]
    if shared is not None:
        problems += [lcbench(shared, task) for task in LCBENCH_TASKS] + taskset(shared) + marin(shared)
    return problems
