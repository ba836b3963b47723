"""``autotune warmstart``: hyperparameters to start from, by what earlier runs tell."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.errors import UserError
from engine.units import format_count, parse_batch, parse_count, parse_tokens

if TYPE_CHECKING:
    from autotune.prior.predict import Fixed, Prior, TaskPrior
    from autotune.prior.task import Task

MAX_PORTFOLIO = 49
SUPPORT_WORDS = {
    "inside": "inside what the prior was fitted to",
    "extrapolated": "extrapolated from what the prior was fitted to",
    "outside": "far from what the prior was fitted to, a guess by the power law alone",
}


def command(
    tokens: Annotated[str, typer.Option(help="Tokens of the whole run, such as 20B.")],
    params: Annotated[
        str | None, typer.Option(help="Parameters without embedding and head, such as 1B. Or give --model.")
    ] = None,
    active_params: Annotated[
        str | None, typer.Option(help="Of a mixture of experts: parameters that a token passes.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face config.json (or a model of ours as YAML) to count parameters of.")
    ] = None,
    seq_len: Annotated[str, typer.Option(help="Tokens of one sequence, such as 4096 or 4Ki.")] = "2048",
    optimizer: Annotated[str, typer.Option(help="Name of the optimizer, in any case.")] = "adamw",
    schedule: Annotated[
        str, typer.Option(help="Learning rate after warm-up: cosine, wsd, linear or constant.")
    ] = "cosine",
    batch: Annotated[
        str | None,
        typer.Option(
            help="Global batch where it is fixed, in tokens (1M, 2Mi-tokens) or sequences (512-seqs): all else is the"
            " best beside it."
        ),
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Peak learning rate where it is fixed: all else is the best beside it.")
    ] = None,
    portfolio: Annotated[int, typer.Option(min=1, max=MAX_PORTFOLIO, help="How many points to try first.")] = 5,
    rows: Annotated[
        Path | None, typer.Option(help="File of own runs (see 'autotune prior'); by default that of your data folder.")
    ] = None,
    no_own: Annotated[bool, typer.Option("--no-own", help="Leave own runs aside.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which hyperparameters to start from for a model and a number of tokens, with intervals."""
    from autotune.prior.predict import Prior
    from autotune.prior.rows import default_rows_file, read_rows

    if no_own and rows is not None:
        raise UserError("--rows and --no-own exclude each other", hint="drop one of them")
    task = _task(params, active_params, model, tokens, _positive(seq_len, "--seq-len"), optimizer, schedule)
    if rows is not None and not rows.exists():
        raise UserError(f"--rows {rows}: there is no such file", hint="autotune prior add STUDY --rows FILE makes one")
    own = [] if no_own else read_rows(rows or default_rows_file())
    prior = Prior.load(own)
    _check_optimizer(prior, optimizer)
    answer = _answer(prior.at(task), _given(task, batch, learning_rate), portfolio, len(own))
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        _print(answer)


def _task(
    params: str | None, active: str | None, model: Path | None, tokens: str, length: int, optimizer: str, schedule: str
) -> Task:
    from autotune.prior.task import Task
    from engine.hf_config import load_model
    from engine.schema import parse

    recipe: dict[str, Any] = {
        "total_tokens": _positive(tokens, "--tokens"),
        "sequence_length": length,
        "optimizer": optimizer,
        "schedule": schedule,
    }
    if (params is None) == (model is None):
        raise UserError(
            "give the size of the model by one of --params and --model",
            hint="for example: autotune warmstart --params 1B --tokens 20B",
        )
    if model is not None:
        if active is not None:
            raise UserError("--active-params is counted from --model", hint="drop --active-params")
        return parse(Task, {**Task.of_model(load_model(str(model)), total_tokens=1).to_data(), **recipe})
    total = _positive(str(params), "--params")
    counts: dict[str, Any] = {"num_parameters": total}
    if active is not None:
        counts |= {"num_active_parameters": _positive(active, "--active-params"), "family": "moe"}
        if counts["num_active_parameters"] > total:
            raise UserError(
                f"--active-params {active} is more than --params {params}",
                hint="--params counts all experts, --active-params those a token passes",
            )
    return parse(Task, {**counts, **recipe})


def _check_optimizer(prior: Prior, name: str) -> None:
    known = prior.optimizers
    if name.lower() not in known:
        close = difflib.get_close_matches(name.lower(), known, n=1)
        raise UserError(
            f"--optimizer {name}: no run with it was seen",
            hint=(f"did you mean {close[0]}? " if close else "ask for the one most like it, ")
            + f"known are {', '.join(known)}, and those of runs added by 'autotune prior add'",
        )


def _given(task: Task, batch: str | None, learning_rate: float | None) -> dict[str, float | str]:
    """What is fixed, by the prior's names, once it is seen to be possible."""
    given: dict[str, float | str] = {"schedule": task.schedule}
    length, total = task.sequence_length, task.total_tokens
    if total < length:
        raise UserError(
            f"--tokens {total} is less than one sequence of {length}",
            hint=f"give {length} tokens or more, such as --tokens 20B, or a shorter --seq-len",
        )
    if learning_rate is not None:
        if not 0 < learning_rate <= 1:
            raise UserError(
                f"--learning-rate must be above 0 and at most 1, got {learning_rate:g}", hint="example: 1e-3"
            )
        given["learning_rate"] = learning_rate
    if batch is not None:
        is_sequences = batch.strip().endswith(("-seqs", "-seq"))
        num_tokens = parse_batch(batch, length).num_sequences * length if is_sequences else _positive(batch, "--batch")
        if num_tokens < length:
            raise UserError(
                f"--batch {batch} is {num_tokens} tokens, less than one sequence of {length}",
                hint=f"did you mean {num_tokens}-seqs? Give {length} tokens or more, or a shorter --seq-len",
            )
        if num_tokens > total:
            raise UserError(
                f"--batch {batch} is {num_tokens} tokens, more than the {total} of the whole run (--tokens)",
                hint="give a smaller batch, or more tokens",
            )
        given["global_batch_tokens"] = float(num_tokens)
    return given


def _positive(text: str, option: str) -> int:
    value = parse_count(text, what=option) if "params" in option else parse_tokens(text, what=option)
    if value < 1:
        raise UserError(f"{option} must be above zero, got {text!r}", hint="examples: 350M, 1B, 20B")
    return value


def _answer(prior: TaskPrior, given: Fixed, num_points: int, num_own: int) -> dict[str, Any]:
    best, level = prior.optimum(given), prior.loss_level(given)
    support, reasons = prior.support_beside(given)
    length = prior.task.sequence_length
    return {
        **_in_sequences(best, given, length),
        "predicted_loss": None if level is None else {"mean": level[0], "sd": level[1]},
        "interval_90": {name: list(ends) for name, ends in prior.interval_90(given).items()},
        "support": support,
        "reasons": list(reasons),
        "portfolio": [_in_sequences(point, given, length) for point in prior.portfolio(num_points, given)],
        "task": prior.task.to_data(),
        "num_own_rows": num_own,
    }


def _in_sequences(point: Fixed, given: Fixed, length: int) -> dict[str, float | str]:
    """With the batch as whole sequences, where it is not fixed."""
    if "global_batch_tokens" in given or "global_batch_tokens" not in point:
        return dict(point)
    return {**point, "global_batch_tokens": max(1, round(float(point["global_batch_tokens"]) / length)) * length}


def _print(answer: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from autotune.prior.task import HYPERPARAMETERS

    console = Console(highlight=False)
    task = answer["task"]
    active = task["num_active_parameters"]
    sparse = f" ({format_count(active)} active)" if active < task["num_parameters"] else ""
    console.print(
        f"{format_count(task['num_parameters'])} parameters{sparse}, {format_count(task['total_tokens'])} tokens,"
        f" {task['optimizer']}, sequences of {task['sequence_length']}: {SUPPORT_WORDS[answer['support']]}"
    )
    for reason in answer["reasons"]:
        console.print(f"  {reason}", markup=False)
    table = Table("", "start from", "90 % interval", "", box=None, header_style="dim")
    for name in HYPERPARAMETERS:
        if name in answer:
            low, high = answer["interval_90"].get(name, (None, None))
            ends = "" if low is None else f"{_text(name, low)} to {_text(name, high)}"
            table.add_row(name, _text(name, answer[name]), ends, HYPERPARAMETERS[name])
    console.print(table)
    if answer["predicted_loss"]:
        loss = answer["predicted_loss"]
        console.print(
            f"predicted loss {loss['mean']:.3f} ± {loss['sd']:.3f} nats/token, on the tables' text and tokenizer"
        )
    points = Table("try", "learning_rate", "global_batch_tokens", box=None, header_style="dim")
    for number, point in enumerate(answer["portfolio"], start=1):
        points.add_row(str(number), *(_text(name, point[name]) for name in ("learning_rate", "global_batch_tokens")))
    console.print(points)


def _text(name: str, value: float | str) -> str:
    if isinstance(value, str):
        return value
    return format_count(value) if name == "global_batch_tokens" else f"{value:.3g}"
