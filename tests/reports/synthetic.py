"""Made-up studies of any size and misfortune, as snapshots."""

from pathlib import Path
from typing import Any

import numpy as np

from autotune.search.forecast import Forecasted
from autotune.space.objectives import Objective, ObjectiveName
from autotune.study.snapshot import StudySnapshot, TrialRow
from engine.outcome import FAILURE_KINDS, Outcome

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">&amp;{{ 7 * 7 }}[red]'\"`"
GIB = 2**30
ALL: tuple[ObjectiveName, ...] = ("speed", "memory", "quality")
MESHES = ["single", "dp2", "tp2", "pp2"]


def make_trial(
    number: int,
    *,
    speed: float = 1e4,
    memory: float = GIB,
    loss: float = 2.5,
    kind: str = "ok",
    detail: str = "",
    objectives: tuple[Objective, ...] = tuple(Objective(name=name) for name in ALL),
    parameters: dict[str, Any] | None = None,
    **changes: Any,
) -> TrialRow:
    """A finished trial."""
    measured: dict[str, Any] = {"tokens_per_second": speed, "peak_memory_bytes": int(memory), "held_out_loss": loss}
    measured["metrics"] = {"cost": 1e4 / speed, "energy": 4e4 / speed}
    outcome = Outcome(kind=kind, detail=detail, **(measured if kind == "ok" else {}))
    values = {o.name: o.value_of(outcome) for o in objectives} if kind == "ok" else None
    feasible = values is not None and all(o.violation(values[o.name]) <= 0 for o in objectives)
    fields: dict[str, Any] = {
        "number": number, "state": "finished", "parameters": parameters or {}, "outcome": outcome, "values": values,
        "feasible": feasible, "plan": "dp2 mb4 bf16", "seconds": 12.5,
    }  # fmt: skip
    return TrialRow(**fields | changes)


def make_forecast(speed: float, memory: float, random: np.random.Generator) -> dict[ObjectiveName, Forecasted]:
    """Estimates some per cent off, with intervals."""
    speed, memory = speed * random.normal(1, 0.1), memory * random.normal(1, 0.05)
    return {
        "speed": Forecasted(speed, 0.8 * speed, 1.25 * speed),
        "memory": Forecasted(memory, 0.9 * memory, 1.1 * memory),
    }


def make_snapshot(
    num_trials: int = 40,
    *,
    names: tuple[ObjectiveName, ...] = ALL,
    bounds: dict[ObjectiveName, float] | None = None,
    failure_ratio: float = 0.2,
    num_pending: int = 0,
    num_repeats: int = 0,
    hostile: bool = False,
    estimated: bool = False,
    folder: Path = Path("runs/studies/tiny"),
    seed: int = 0,
) -> StudySnapshot:
    """A study whose values depend on its parameters as in life: bigger batches are faster and need memory, the learning
    rate has an optimum, larger micro-batches run out of memory."""
    random = np.random.default_rng(seed)
    objectives = tuple(Objective(name=name, bound=(bounds or {}).get(name)) for name in names)
    trials = []
    for number in range(num_trials):
        mesh = str(random.choice(MESHES))
        micro = int(2 ** random.integers(0, 4))
        recompute = str(random.choice(["none", "full", "every_k"]))
        parameters: dict[str, Any] = {
            "plan.mesh": mesh,
            "plan.micro_batch_size": micro,
            "plan.recompute": recompute,
            "hyperparameters.learning_rate": float(10 ** random.uniform(-4, -1.5)),
            "hyperparameters.global_batch_size": int(2 ** random.integers(3, 7)),
            "hyperparameters.warmup_ratio": float(random.uniform(0, 0.2)),
        }
        if mesh == "tp2":
            parameters["plan.sequence_parallel"] = bool(random.integers(2))
        if recompute == "every_k":
            parameters["plan.recompute_period"] = int(random.integers(2, 5))
        if hostile and number % 3 == 0:
            parameters[f"plan.{HOSTILE}"] = HOSTILE if number % 2 else "tame"
        log_rate = np.log10(parameters["hyperparameters.learning_rate"])
        batch = parameters["hyperparameters.global_batch_size"]
        speed = 6000 * (1 + 0.25 * np.log2(micro)) * (0.75 if recompute == "full" else 1) * random.normal(1, 0.03)
        memory = GIB * (0.6 + 0.25 * micro * (0.4 if recompute == "full" else 1)) * random.normal(1, 0.002)
        loss = 2.2 + 0.5 * (log_rate + 2.7) ** 2 + 0.06 * np.log2(batch / 8) + random.normal(0, 0.01)
        failed = random.random() < failure_ratio
        kind = str(random.choice(FAILURE_KINDS)) if failed else "ok"
        detail = (HOSTILE if hostile else f"{kind} after 12 steps on rank 1") if failed else ""
        plan = f"{HOSTILE if hostile else mesh} mb{micro} fp32"
        trials.append(
            make_trial(
                number,
                speed=speed,
                memory=memory,
                loss=loss,
                kind=kind,
                detail=detail,
                objectives=objectives,
                parameters=parameters,
                plan=plan,
                forecast=make_forecast(speed, memory, random) if estimated else {},
                seconds=float(random.uniform(5, 30)),
                folder=folder / "trials" / str(number),
            )
        )
    for repeat in range(num_repeats):
        original = next(trial for trial in trials if trial.feasible)
        trials.append(
            make_trial(
                len(trials),
                loss=2.3 + 0.01 * repeat,
                objectives=objectives,
                parameters=original.parameters,
                plan=original.plan,
                repeat_of=original.number,
            )
        )
    for pending in range(num_pending):
        state = "running" if pending % 2 == 0 else "waiting"
        trials.append(
            TrialRow(len(trials), state, {"plan.mesh": "dp2"}, None, None, feasible=False, plan="dp2 mb1 fp32")
        )
    return StudySnapshot(
        name=HOSTILE if hostile else "tiny",
        folder=folder,
        objectives=objectives,
        trials=tuple(trials),
        space={"space": {"plan": {"mesh": MESHES}}, "note": HOSTILE if hostile else "made up"},
        num_trials_asked=num_trials,
        created="2026-08-01T12:00:00+00:00",
        num_refused={"tp.divides_heads": 12},
    )
