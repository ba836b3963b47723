"""``autotune sweep``: run a tuning sweep over layouts and hyperparameters."""

from __future__ import annotations

import itertools
import json
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.commands.command_sweep import (
    EXAMPLES_TITLE,
    GUESSES_TITLE,
    MAX_DRAWS,
    NUM_SHOWN_CANDIDATES,
    check_program,
    print_dry_run,
)
from autotune.paths import DEFAULT_RUNS, study_folder
from engine.errors import UserError
from engine.units import parse_duration

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.commands.sweep_view import SweepView
    from autotune.search.forecast import Forecast, Forecasted
    from autotune.space.enumerate import Enumeration
    from autotune.space.objectives import ObjectiveName
    from autotune.space.space import Scalar
    from autotune.space.training import TrainingSpace
    from autotune.specs.cluster import ClusterSpec
    from autotune.study.driver import Driver
    from autotune.study.repeats import RepeatedValue
    from autotune.study.snapshot import StudySnapshot
    from autotune.study.study import Nothing, Study
    from engine.config import RunConfig

STOPPED_EXIT_CODE = 128 + signal.SIGINT
PLAIN_WIDTH = 140
"""Columns of tables that go to a file or a pipe."""


def command(
    space: Annotated[
        str | None, typer.Argument(metavar="SPACE.yaml", help="Space file, or the name of a shipped space.")
    ] = None,
    study: Annotated[
        str | None, typer.Option(help="Name of the study. [default: the file's 'name', else its stem]")
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Trials in total; more extends a study.")] = None,
    time: Annotated[str | None, typer.Option(help="Start no trial after this time, such as 10m.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Trials at a time, on devices of their own.")] = 1,
    executor: Annotated[
        str, typer.Option(metavar="local|ray", help="What runs trials: this machine, or a Ray cluster.")
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(metavar="auto|HOST:PORT", help="Ray cluster to join. [default: one is started on this machine]"),
    ] = None,
    command_: Annotated[
        str | None,
        typer.Option("--command", metavar="'... {lr} ...'", help="Tune this program; see docs/command_sweeps.md."),
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUES", help="A value of it, such as 'lr=log_float(1e-4, 1e-2)' or 'n=[1, 2]'."),
    ] = None,
    objective: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:minimize[:BOUND]", help="What it reports, with its direction and bound."),
    ] = None,
    storage: Annotated[str | None, typer.Option(help="Database address, in place of the study's journal.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Machines, in place of the file's: local, cpu:2, h100x8.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count and show the candidates.")] = False,
    repeat_best: Annotated[int, typer.Option(min=0, metavar="K", help="Repeat the knee with K other seeds.")] = 0,
    runs_dir: Annotated[Path, typer.Option(help="Folder of studies and jobs.")] = DEFAULT_RUNS,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replace a value.")] = None,
    fidelity: Annotated[
        str | None,
        typer.Option(
            metavar="RUNGS",
            help="How trials grow: on, off, '[0.25, 1]', '{min: 0.1, eta: 3}'; of a program '{of: epochs, min: 0.1}'.",
        ),
    ] = None,
    sampler: Annotated[
        str | None, typer.Option(metavar="NAME", help="What proposes candidates; may change when a study goes on.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of a new study. [default: 0]")] = None,
    try_: Annotated[
        list[Path] | None,
        typer.Option(
            "--try", metavar="FILE", help="First guess of yours, a run file or values of the space; tried first."
        ),
    ] = None,
    enough: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="GAIN",
            help="End when one more trial is expected to gain less, as 0.01 for 1 % of the front's range.",
        ),
    ] = None,
    prior: Annotated[bool, typer.Option(help="Begin with what earlier training runs say of hyperparameters.")] = True,
    estimates: Annotated[
        bool, typer.Option(help="Rank candidates by the cost model, and leave out those it rules out.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON, progress to stderr.")] = False,
) -> None:
    """Run a tuning sweep over layouts and hyperparameters. The same command goes on with it where it was."""
    from rich.console import Console

    from autotune.prior.rows import default_rows_file, read_rows, rows_of_others
    from autotune.search.forecast import Forecast
    from autotune.search.samplers import make_sampler
    from autotune.search.warm_start import task_prior_of
    from autotune.space.command import CommandSpace
    from autotune.space.load import fidelity_override, inline_overrides, load_any_space
    from autotune.study.guesses import read_guesses
    from autotune.study.preflight import check_data
    from autotune.study.study import Study
    from autotune.study.study_file import refuse_changes

    overrides: list[str] = [*inline_overrides(command_, param or (), objective or ())]
    overrides += [*(set_ or []), *([f"cluster={json.dumps(cluster)}"] if cluster else [])]
    overrides += [fidelity_override(space, overrides, fidelity)] if fidelity else []
    loaded, enumeration = load_any_space(space, overrides)
    machines = loaded.cluster
    assert machines is not None, "programs and training runs have machines"
    folder = study_folder(runs_dir, study or loaded.name)
    seconds = parse_duration(time) if time else loaded.budget.seconds
    can_estimate = machines.figures is not None and bool(machines.links)
    forecast = None
    if isinstance(loaded, CommandSpace):
        estimates, most_devices = False, machines.devices_per_node if loaded.devices else 1
    else:
        assert enumeration is not None, "training runs have plans"
        forecast = Forecast.make(loaded, enumeration) if estimates and can_estimate else None
        most_devices = enumeration.max_devices
    guesses = read_guesses(try_ or (), loaded)
    if dry_run:
        if sampler is not None:
            make_sampler(sampler)
        if isinstance(loaded, CommandSpace):
            print_dry_run(loaded, guesses, seed or 0, as_json=as_json)
        else:
            assert enumeration is not None
            _print_dry_run(loaded, enumeration, forecast, guesses, seed or 0, as_json=as_json)
        return
    num_trials = trials or loaded.budget.trials
    if num_trials is None and seconds is None:
        raise UserError("the sweep has no budget", hint="give --trials 20 or --time 10m, or 'budget' in the space file")
    if executor == "local":
        check_machine(machines, workers)
    refuse_changes(folder, loaded, storage, seed)
    text = None
    if isinstance(loaded, CommandSpace):
        check_program(loaded)
    else:
        assert enumeration is not None
        text = check_data(_first_run(loaded, enumeration))

    from autotune.commands.sweep_view import SweepView
    from autotune.study.driver import Driver, patiently
    from autotune.study.executor import open_executor

    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    needs = {"num_devices": most_devices, "num_workers": workers}
    with ExitStack() as stack:
        placed = stack.enter_context(open_executor(executor, machines, folder, address=address, **needs))
        opened = Study.create_or_open(
            folder,
            loaded,
            enumeration,
            sampler=sampler,
            storage_url=storage,
            num_trials=num_trials,
            seed=seed,
            forecast=forecast,
            task_prior=task_prior_of(loaded, rows_of_others(read_rows(default_rows_file()), folder)) if prior else None,
            guesses=guesses,
            enough=enough,
        )
        stack.callback(opened.close)
        if text is not None:
            opened.require_corpus(text.corpus_hash)
        before = opened.snapshot()
        view = SweepView(console, before, num_trials, workers, lambda: patiently(opened.remarks))
        if repeat_best and isinstance(loaded, CommandSpace) and not loaded.is_seeded:
            view.note("the command has no {seed}: repeats differ only by what the program itself draws")
        if estimates and not can_estimate:
            view.note(f"nothing is known of {machines.device_kind}: no estimates without 'autotune profile'")
        driver = Driver(opened, placed, view, workers, seconds)
        ending = _drive(driver, view)
        chosen = None
        snapshot = patiently(opened.snapshot)
        if repeat_best and not driver.is_stopping and any(row.feasible for row in snapshot.trials):
            chosen = _plan_repeats(opened, snapshot, repeat_best)
            driver.time_limit_seconds = None
            _drive(driver, view)
        snapshot, remarks = patiently(opened.snapshot), patiently(opened.remarks)
        gain = patiently(opened.expected_gain)
    why = ending_remarks(ending, before, snapshot, num_trials)
    again = shlex.join(["autotune", *sys.argv[1:]])
    if as_json:
        said = {"remarks": remarks, "ending": why, "expected_gain": None if gain is None else gain.ratio}
        print(json.dumps({**_result(snapshot, chosen), **said}, indent=2))
    else:
        said_last = [*remarks, *([gain.text] if gain is not None else []), *why]
        _print_end(console, snapshot, ending, chosen, runs_dir, again, said_last)
    if driver.is_stopping:
        raise typer.Exit(STOPPED_EXIT_CODE)
    if not any(row.outcome is not None and row.outcome.kind == "ok" for row in snapshot.trials):
        raise typer.Exit(1)


def check_machine(cluster: ClusterSpec, num_workers: int) -> None:
    """A sweep measures, so the cluster has to be the machine it runs on.

    Raises:
        UserError: It isn't, or there are more workers than devices.
    """
    from autotune.specs.cluster import probe_cluster
    from autotune.specs.machine import usable_cpus

    if cluster.num_nodes > 1:
        raise UserError(
            f"the cluster {cluster.name} has {cluster.num_nodes} nodes, a sweep's trials run on one machine",
            hint="sweep one node (--cluster local); --dry-run counts candidates for any cluster",
        )
    here = probe_cluster()
    is_here = here.device == cluster.device and here.num_devices >= cluster.num_devices
    if cluster.device == "cpu":
        is_here = cluster.num_devices <= len(usable_cpus())
    if not is_here:
        raise UserError(
            f"the cluster {cluster.name} is {cluster.describe()}, this machine is {here.describe()}",
            hint="run the sweep there, or use --cluster local; --dry-run counts candidates for any cluster",
        )
    if num_workers > cluster.num_devices:
        raise UserError(
            f"{num_workers} workers need {num_workers} devices, the cluster has {cluster.num_devices}",
            hint=f"use at most --workers {cluster.num_devices}",
        )


def _first_run(space: TrainingSpace, enumeration: Enumeration) -> RunConfig:
    """A run of the space, to read its data by."""
    from autotune.search.uniform import uniform_draws

    for chosen in itertools.islice(uniform_draws(space, enumeration, 0), MAX_DRAWS):
        if (run := space.candidate(chosen).run) is not None:
            return run
    raise UserError(
        f"none of {MAX_DRAWS} candidates drawn from the space is legal",
        hint="see which rule or constraint refuses them with --dry-run, and loosen it",
    )


def _drive(driver: Driver, view: SweepView) -> Nothing | None:
    with view.shown(), _stopping(driver, view):
        return driver.run()


@contextmanager
def _stopping(driver: Driver, view: SweepView) -> Iterator[None]:
    """The first SIGINT, SIGTERM or SIGHUP ends the sweep at checkpoints, the second at once."""

    def handle(number: int, _: FrameType | None) -> None:
        if driver.is_stopping:
            driver.stop_now()
            return
        driver.stop_soon()
        driver.study.stop_proposing()
        view.note("stopping: running trials end, at a checkpoint where they have one; once more to end them at once")

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _plan_repeats(study: Study, snapshot: StudySnapshot, count: int) -> int:
    """Have the knee of the front repeated; its number."""
    from autotune.apply.select import pick

    number = pick(snapshot, "knee").number
    study.plan_repeats(number, count)
    return number


def _print_dry_run(
    space: TrainingSpace,
    enumeration: Enumeration,
    forecast: Forecast | None,
    guesses: Sequence[Mapping[str, Scalar]],
    seed: int,
    *,
    as_json: bool,
) -> None:
    from autotune.search.seeds import derive_seed
    from autotune.search.uniform import uniform_draws

    num_legal, ranks = enumeration.num_legal, None
    if forecast is not None:
        enumeration, ranks = forecast.enumeration, forecast.ranks
    draws = itertools.islice(uniform_draws(space, enumeration, derive_seed(seed, "uniform", 0), ranks), MAX_DRAWS)
    legal = (chosen for chosen in draws if space.candidate(chosen).run is not None)
    candidates = list(itertools.islice(legal, NUM_SHOWN_CANDIDATES))
    removed = dict(sorted(enumeration.removed.items(), key=lambda item: -item[1]))
    if as_json:
        data = {
            "name": space.name,
            "num_combinations": enumeration.num_combinations,
            "num_legal": num_legal,
            "num_left": enumeration.num_legal,
            "removed": removed,
            "dimensions": {dimension.name: dimension.describe() for dimension in space.dimensions},
            "first_guesses": [dict(guess) for guess in guesses],
            "candidates": candidates,
            "forecasts": [_forecast_data(space, forecast, chosen) for chosen in candidates] if forecast else None,
        }
        print(json.dumps(data, indent=2))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    objectives = ", ".join(objective.label.lower() for objective in space.objectives)
    console.print(f"{space.name}: {objectives}, on {space.cluster.describe()}", highlight=False)
    dimensions = Table("searched", "values", box=None, header_style="dim")
    for dimension in space.dimensions:
        dimensions.add_row(dimension.name, escape(dimension.describe()))
    console.print(dimensions)
    left = f", {enumeration.num_legal} of them worth a trial by the cost model" if forecast else ""
    console.print(
        f"\n{enumeration.num_combinations} combinations of plan values, {num_legal} are legal{left}", highlight=False
    )
    counts = Table("removed by (one may be removed by several)", "combinations", box=None, header_style="dim")
    for rule, count in removed.items():
        counts.add_row(escape(rule), str(count))
    console.print(counts)
    if space.fidelity is not None:
        rungs = ", ".join(f"{100 * space.fidelity.share(rung):.3g} %" for rung in range(space.fidelity.last + 1))
        console.print(f"\ntrials grow from part to part of their work: {rungs}", highlight=False)
    for title, shown in ((GUESSES_TITLE, guesses), (EXAMPLES_TITLE, candidates)):
        if shown:
            console.print(f"\n{title}", highlight=False)
            _print_candidates(console, space, forecast, shown)


def _print_candidates(
    console: Console, space: TrainingSpace, forecast: Forecast | None, candidates: Sequence[Mapping[str, Scalar]]
) -> None:
    for chosen in candidates:
        run = space.candidate(chosen).run
        assert run is not None
        line = "  " + _one_line(run.plan.describe(), chosen)
        if forecast:
            line += f"    estimated {_forecast_text(space, forecast.of(run))}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _forecast_data(space: TrainingSpace, forecast: Forecast, chosen: dict[str, Any]) -> dict[str, dict[str, float]]:
    run = space.candidate(chosen).run
    assert run is not None
    return {name: value._asdict() for name, value in forecast.of(run).items()}


def _forecast_text(space: TrainingSpace, forecasts: Mapping[ObjectiveName, Forecasted]) -> str:
    known = [objective for objective in space.objectives if objective.name in forecasts]
    return ", ".join(objective.text(forecasts[objective.name].value) for objective in known)


def _one_line(plan: str, chosen: Mapping[str, Scalar]) -> str:
    from autotune.commands.sweep_view import hyperparameter_texts

    return " ".join([plan, *hyperparameter_texts(chosen)])


def _print_end(
    console: Console,
    snapshot: StudySnapshot,
    ending: Nothing | None,
    chosen: int | None,
    runs_dir: Path,
    again: str,
    remarks: Sequence[str],
) -> None:
    from reports.forecasts import get_forecasts
    from reports.info import apply_command
    from reports.terminal import front_table

    console.print()
    console.print(front_table(snapshot, width=console.width))
    if chosen is not None:
        console.print(f"\ntrial {chosen} repeated with other seeds (mean and 95 % interval):", highlight=False)
        for value in _repeats(snapshot, chosen):
            count = f"{value.num_repeats} repeat{'s' if value.num_repeats != 1 else ''}"
            line = f"  {value.objective.label.lower()}: {value.text} ({count})"
            console.print(line, highlight=False)
    if forecasts := get_forecasts(snapshot):
        console.print("\nestimated before the trials, against what they measured:", highlight=False)
        for forecast in forecasts:
            console.print(f"  {forecast.summary}", markup=False, highlight=False)
    for remark in remarks:
        console.print(f"\n{remark}", markup=False, highlight=False)
    where = [] if runs_dir == DEFAULT_RUNS else ["--runs-dir", str(runs_dir)]
    lines = [f"\nall of it: {snapshot.folder}", "next:"]
    if any(row.feasible for row in snapshot.trials):
        lines.append("  " + apply_command(snapshot, "knee"))
    lines.append("  " + shlex.join(["autotune", "report", snapshot.name, *where]))
    if ending is None:
        lines.append(f"  {again}    goes on where it was")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def ending_remarks(
    ending: Nothing | None, before: StudySnapshot, after: StudySnapshot, num_trials: int | None
) -> list[str]:
    """Why a sweep ended, where that is not plain to see: nothing was run, or it ended below its budget.

    Args:
        ending: Why there is no further trial; None where it was stopped or its time was up.
        before: The study when the sweep began.
        after: The study now.
        num_trials: Trials in total, in full trainings.
    """
    from autotune.search.fidelity import TOLERANCE
    from autotune.study.study import Nothing

    if ending in (Nothing.EXHAUSTED, Nothing.ENOUGH):
        return [ending.value]
    if ending is not Nothing.DONE or num_trials is None:
        return []
    ended, ended_before = ([row for row in study.trials if row.outcome is not None] for study in (after, before))
    spent = after.spent
    remarks = []
    if len(ended) == len(ended_before):
        remarks.append(f"nothing was run: the study has {spent:.4g} trials already; give a larger --trials for more")
    if num_trials - spent > TOLERANCE:
        left = f"{num_trials - spent:.4g} of a full training is left"
        remarks.append(f"ended at {spent:.4g} of {num_trials} trials: {left}, too little to train one more to the end")
    return remarks


def _repeats(snapshot: StudySnapshot, number: int) -> list[RepeatedValue]:
    from autotune.study.repeats import repeated_values

    return repeated_values(snapshot, number)


def _result(snapshot: StudySnapshot, chosen: int | None) -> dict[str, Any]:
    """The result of a sweep as plain data."""
    from autotune.apply.select import front_trials, least_violated
    from reports.forecasts import get_forecasts

    nearest = least_violated(snapshot)
    kinds = [row.outcome.kind for row in snapshot.trials if row.outcome is not None]
    result: dict[str, Any] = {
        "study": snapshot.name,
        "folder": str(snapshot.folder),
        "num_trials_asked": snapshot.num_trials_asked,
        "outcomes": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "num_refused": snapshot.num_refused,
        "front": [
            {"trial": row.number, "plan": row.plan, "parameters": row.parameters, "values": row.values}
            for row in front_trials(snapshot)
        ],
        "first_guesses": [row.number for row in snapshot.trials if row.is_guess and row.repeat_of is None],
        "least_violated": None if nearest is None else {"trial": nearest.trial.number, "why": nearest.text},
        "forecasts": {
            forecast.axis.name: {
                "num_trials": len(forecast.numbers),
                "median_error_ratio": forecast.median_error_ratio,
                "within_interval_ratio": forecast.within_ratio,
                "rank_correlation": forecast.rank_correlation,
            }
            for forecast in get_forecasts(snapshot)
        },
    }
    if chosen is not None:
        result["repeats"] = {
            "trial": chosen,
            "values": {
                v.objective.name: {"mean": v.mean, "half_width_95": v.half_width, "count": v.num_repeats}
                for v in _repeats(snapshot, chosen)
            },
        }
    return result
