"""``autotune plan``: which parallel layout, from the cost model alone, in seconds and without a GPU."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.paths import check_writable_file
from engine.errors import UserError
from engine.units import GIB, parse_duration

if TYPE_CHECKING:
    from autotune.search.answer import Answer
    from autotune.search.rival import RivalPlan
    from autotune.specs.cluster import ClusterSpec

PLAIN_WIDTH = 120
"""Columns of what goes to a file or a pipe, where COLUMNS says nothing."""
DEFAULT_SOFTWARE = "default"
"""Training stack of ``software.yaml`` that is assumed without ``--engine``; for CPUs our engine is, without it too."""
NOTHING_FITS_EXIT_CODE = 1


def command(
    model: Annotated[
        str, typer.Option(metavar="FILE", help="A config.json, a folder with one, a model as YAML, or a run file.")
    ],
    cluster: Annotated[
        str, typer.Option(metavar="CLUSTER", help="h100x8:64 (64 nodes of 8), local, cpu:2, or a cluster file.")
    ],
    seq_len: Annotated[str, typer.Option(metavar="TOKENS", help="Tokens per sequence: 8192, 8Ki.")],
    global_batch: Annotated[str, typer.Option(metavar="BATCH", help="512-seqs, 4Mi-tokens or 512 (sequences).")],
    precision: Annotated[
        str | None,
        typer.Option(metavar="WORD", help="Of matrix products; bf16,fp8 tries both. [default: the device's usual one]"),
    ] = None,
    pin: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Hold a choice: tp=8, or mb=1,2 for either.")
    ] = None,
    max_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Most memory of a device, such as 70GiB. [default: all of it]")
    ] = None,
    objective: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="speed, memory, devices, cost or energy; several: their front. [default: speed]"
        ),
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=1000, help="Plans to show.")] = 10,
    path: Annotated[bool, typer.Option("--path", help="The ladder from data parallel only to the best.")] = False,
    compare: Annotated[
        Path | None, typer.Option(metavar="PLAN.yaml", help="A plan or run file to hold against the best.")
    ] = None,
    replay: Annotated[bool, typer.Option("--replay", help="Replay the plans' pipeline schedules too.")] = False,
    price: Annotated[
        float | None, typer.Option(metavar="DOLLARS", help="Of a device and hour, for the objective cost.")
    ] = None,
    watts: Annotated[
        float | None,
        typer.Option(metavar="WATTS", help="Of a busy device, for the objective energy. [default: its limit]"),
    ] = None,
    software: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Training stack assumed, such as fsdp. [default: a recent Megatron; on CPUs, our own]"
        ),
    ] = None,
    engine: Annotated[bool, typer.Option("--engine", help="Only plans that our own engine runs.")] = False,
    time: Annotated[str | None, typer.Option(metavar="DURATION", help="End the search after so long: 30s, 2m.")] = None,
    save: Annotated[Path | None, typer.Option(metavar="PLAN.yaml", help="Write the best plan to a file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the plans as CSV.")] = False,
    more_pins: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="NAME=VALUE")] = None,
) -> None:
    """Say which parallel layout is best, why, and what would help, from the cost model: no GPU needed."""
    from autotune.cost.software import OWN_ENGINE
    from autotune.search.question import ask, read_count, read_model
    from autotune.search.solve import solve
    from autotune.specs.cluster import parse_cluster

    if as_json and as_csv:
        raise UserError("--json and --csv exclude each other", hint="--json has all of it, --csv the plans")
    machines = _priced(parse_cluster(cluster), price, watts)
    question = ask(
        model=read_model(model),
        cluster=machines,
        sequence_length=read_count(seq_len, "--seq-len"),
        global_batch=global_batch,
        pins=[*(pin or ()), *(more_pins or ())],
        precision=precision,
        max_memory=max_memory,
        objectives=[name.strip() for given in objective or ("speed",) for name in given.split(",")],
        software=software or (OWN_ENGINE if engine or machines.device == "cpu" else DEFAULT_SOFTWARE),
        engine_only=engine,
    )
    if save is not None:
        check_writable_file(save, "--save")
    rival = None if compare is None else _read_rival(compare)
    seconds = None if time is None else parse_duration(time)
    with _progress() as told:
        answer = solve(question, top=top, ladder=path, rival=rival, replay=replay, max_seconds=seconds, progress=told)
    if save is not None and answer.plans:
        _save(answer, save)
    _print(answer, as_json=as_json, as_csv=as_csv)
    if not answer.plans:
        raise typer.Exit(NOTHING_FITS_EXIT_CODE)


@contextmanager
def _progress() -> Iterator[Callable[[float], None] | None]:
    """A bar on standard error while a search lasts, where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("searching", total=1.0)
        yield lambda share: bar.update(task, completed=share)


def _priced(cluster: ClusterSpec, price: float | None, watts: float | None) -> ClusterSpec:
    """The cluster with prices from the command line.

    Raises:
        UserError: A price or power of nothing.
    """
    for option, value, example in (("--price", price, "2.5"), ("--watts", watts, "700")):
        if value is not None and value <= 0:
            raise UserError(f"{option} must be above 0, got {value:g}", hint=f"example: {option} {example}")
    given = {"dollars_per_device_hour": price, "watts": watts}
    return cluster.changed(**{name: value for name, value in given.items() if value is not None})


def _read_rival(path: Path) -> RivalPlan:
    """A plan file, or the plan of a run file with its batch.

    Raises:
        UserError: Neither, or a mistake in it.
    """
    from autotune.search.rival import RivalPlan
    from engine.config import load_run
    from engine.plan import Plan
    from engine.schema import parse
    from engine.yaml_file import read_yaml

    document = read_yaml(path)
    if isinstance(document.data, dict) and "plan" in document.data:
        run, _ = load_run(path)
        return RivalPlan(path.name, run.plan, run.hyperparameters.global_batch_size)
    plan = parse(Plan, document.data, document=document)
    return RivalPlan(path.name, plan, None, frozenset(Plan.model_fields) - plan.model_fields_set)


def _save(answer: Answer, path: Path) -> None:
    """Write the best plan, with where it comes from as comments."""
    from engine.atomic import write_text
    from engine.yaml_file import dump_yaml

    question, best = answer.question, answer.plans[0]
    lines = [
        f"# best of {answer.counts.num_combinations} combinations for {question.model.name}",
        f"# on {question.cluster.describe()}",
        f"# batch: {question.global_batch_size} sequences of {question.sequence_length} tokens",
        f"# estimated: {best.step_seconds.value:.4g} s a step, {best.memory_bytes.value / GIB:.1f} GiB a device",
    ]
    write_text(path, "\n".join(lines) + "\n" + dump_yaml(best.plan.to_data()))


def _print(answer: Answer, *, as_json: bool, as_csv: bool) -> None:
    if as_json:
        from autotune.commands.plan_data import answer_data

        print(json.dumps(answer_data(answer), indent=2))
    elif as_csv:
        from autotune.commands.plan_data import plans_csv

        print(plans_csv(answer), end="")
        if not answer.plans:
            print("no plan fits; without --csv the answer says what would help", file=sys.stderr)
    else:
        from rich.console import Console

        from autotune.commands.plan_view import print_answer

        console = Console(highlight=False)
        if not console.is_terminal and "COLUMNS" not in os.environ:
            console.width = PLAIN_WIDTH
        print_answer(console, answer)
