"""What a running sweep shows: a live table on a terminal, one line per event elsewhere."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from autotune.space.objectives import Objective
from autotune.space.space import Scalar
from autotune.study.assignment import Assignment
from autotune.study.record import is_feasible, measured_values
from autotune.study.snapshot import StudySnapshot
from engine.outcome import Outcome
from engine.units import format_duration

NUM_ROWS = 8
"""Newest trials shown."""


class SweepView:
    """Listens to a driver; safe to call from its threads.

    Args:
        console: Where to show it.
        snapshot: The study at the start.
        num_trials: Trials asked for in total; None without such a limit.
        num_workers: Trials at a time, for the time left.
        remarks: What the search has to say now. Asked at the start and when the number of trials has doubled.
    """

    def __init__(
        self,
        console: Console,
        snapshot: StudySnapshot,
        num_trials: int | None,
        num_workers: int,
        remarks: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self._console = console
        self._objectives = snapshot.objectives
        self._name = snapshot.name
        self._num_trials = num_trials
        self._num_workers = num_workers
        self._remarks = remarks
        self._told: set[str] = set()
        self._lock = threading.Lock()
        self._start = time.monotonic()
        self._running: dict[int, tuple[str, float]] = {}
        self._newest: list[tuple[int, str, Outcome]] = []
        self._failures: Counter[str] = Counter()
        self._best: dict[str, tuple[float, int]] = {}
        self._seconds: list[float] = []  # of a full training
        self._notes: list[str] = []
        self._num_finished = 0
        self._spent = 0.0
        for row in snapshot.trials:
            if row.outcome is not None and row.repeat_of is None:
                self._count(row.number, row.outcome, row.share, row.cost)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show it while the block runs."""
        self._tell_remarks()
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, get_renderable=self._render, refresh_per_second=2):
            yield

    def note(self, text: str) -> None:
        """A message for the reader. Called from signal handlers too, so it takes no lock."""
        self._notes.append(text)
        if not self._console.is_terminal:
            self._console.print(text, markup=False, highlight=False)

    def _tell_remarks(self) -> None:
        for remark in self._remarks():
            if remark not in self._told:
                self._told.add(remark)
                self.note(remark)

    def waiting(self) -> None:
        """Others hold the devices."""
        self.note("waiting: others use the devices")

    def started(self, assignment: Assignment) -> None:
        """A trial begins (again)."""
        with self._lock:
            self._running[assignment.number] = (describe(assignment), time.monotonic())
        if assignment.attempt > 1:
            self._line(f"trial {assignment.number}: attempt {assignment.attempt}")

    def finished(self, assignment: Assignment, outcome: Outcome) -> None:
        """A trial has its outcome."""
        with self._lock:
            self._running.pop(assignment.number, None)
            self._newest = [*self._newest, (assignment.number, describe(assignment), outcome)][-NUM_ROWS:]
            if assignment.repeat_of is None:
                self._count(assignment.number, outcome, assignment.share, assignment.cost)
            if outcome.wall_seconds is not None:
                self._seconds.append(outcome.wall_seconds / assignment.cost)
            total = f"/{self._num_trials}" if self._num_trials is not None else ""
            place = f"[{self._spent:.4g}{total}]" if assignment.repeat_of is None else "[repeat]"
            has_doubled = self._num_finished.bit_count() == 1  # 1, 2, 4, 8 ...
        values = self._values_text(outcome, assignment.share)
        if has_doubled:
            self._tell_remarks()
        self._line(f"{place} trial {assignment.number}: {describe(assignment)}: {values}")

    def released(self, assignment: Assignment) -> None:
        """A trial was stopped and waits for the next driver."""
        with self._lock:
            self._running.pop(assignment.number, None)
        self._line(f"trial {assignment.number}: stopped, will be run again")

    def retried(self, assignment: Assignment, outcome: Outcome) -> None:
        """A trial was hit by a fault of the machine and is run again."""
        self._line(f"trial {assignment.number}: {outcome.kind} ({outcome.detail}); once more")

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _count(self, number: int, outcome: Outcome, share: float, cost: float) -> None:
        self._num_finished += 1
        self._spent += cost
        values = measured_values(outcome, self._objectives)
        if values is None:
            self._failures[outcome.kind if outcome.kind != "ok" else "not measured"] += 1
        elif share < 1:
            return  # its loss is not that of a full training
        elif is_feasible(values, self._objectives):
            for objective in self._objectives:
                self._note_best(objective, values[objective.name], number)
        else:
            self._failures["beyond a bound"] += 1

    def _note_best(self, objective: Objective, value: float, number: int) -> None:
        sign = -1 if objective.direction == "maximize" else 1
        if objective.name not in self._best or sign * value < sign * self._best[objective.name][0]:
            self._best[objective.name] = (value, number)

    def _values_text(self, outcome: Outcome, share: float) -> str:
        took = f" ({format_duration(outcome.wall_seconds)})" if outcome.wall_seconds is not None else ""
        values = measured_values(outcome, self._objectives)
        if values is None:
            return f"{outcome.kind}: {outcome.detail}{took}"
        is_beyond = share == 1 and not is_feasible(values, self._objectives)  # a part may still come within
        beyond = ", beyond a bound" if is_beyond else ""
        return ", ".join(_told(objective, values[objective.name]) for objective in self._objectives) + beyond + took

    def _render(self) -> RenderableType:
        with self._lock:
            table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
            table.add_column("trial", justify="right")
            table.add_column("candidate", ratio=1, no_wrap=True, overflow="ellipsis")
            for objective in self._objectives:
                table.add_column(objective.label.lower(), justify="right", no_wrap=True)
            for number, text, outcome in self._newest:
                table.add_row(str(number), escape(text), *self._cells(outcome))
            now = time.monotonic()
            for number, (text, begun) in sorted(self._running.items()):
                running = f"[cyan]running {format_duration(now - begun)}[/]"
                table.add_row(str(number), escape(text), running, *[""] * (len(self._objectives) - 1))
            return Group(self._headline(now), table, self._best_line(), *map(Text, self._notes[-3:]))

    def _cells(self, outcome: Outcome) -> list[str]:
        values = measured_values(outcome, self._objectives)
        if values is None:
            return [f"[red]{outcome.kind}[/]", *[""] * (len(self._objectives) - 1)]
        cells = []
        for objective in self._objectives:
            text = objective.text(values[objective.name])
            is_best = self._best.get(objective.name, (None, 0))[0] == values[objective.name]
            cells.append(f"[bold green]{text}[/]" if is_best else text)
        return cells

    def _headline(self, now: float) -> Text:
        total = f" of {self._num_trials}" if self._num_trials is not None else ""
        if self._num_finished == self._spent:
            parts = [f"{self._num_finished}{total} trials"]
        else:
            parts = [f"{self._spent:.4g}{total} full trainings in {self._num_finished} parts"]
        parts.append(f"{format_duration(now - self._start)} so far")
        if self._num_trials is not None and self._seconds:
            left = max(0, self._num_trials - self._spent)
            parts.append(f"about {format_duration(left * median(self._seconds) / self._num_workers)} left")
        if self._failures:
            failures = ", ".join(f"{count} {kind}" for kind, count in sorted(self._failures.items()))
            parts.append(f"without result: {failures}")
        return Text.assemble((f"{self._name}  ", "bold"), " · ".join(parts))

    def _best_line(self) -> Text:
        if not self._best:
            return Text("no feasible trial yet", style="dim")
        by_name = {objective.name: objective for objective in self._objectives}
        texts = [f"{_told(by_name[name], value)} (trial {number})" for name, (value, number) in self._best.items()]
        return Text("best so far: " + ", ".join(texts), style="green")


def _told(objective: Objective, value: float) -> str:
    """A value for people, with the objective's name where no unit tells it."""
    return objective.text(value) if objective.unit else f"{objective.label} {objective.text(value)}"


def describe(assignment: Assignment) -> str:
    """A candidate in one line: its plan and the hyperparameters that were searched."""
    text = " ".join([assignment.label, *hyperparameter_texts(assignment.parameters)])
    if assignment.repeat_of is not None:
        return f"repeats {assignment.repeat_of}: {text}"
    if assignment.continues is not None:
        text = f"continues {assignment.continues}: {text}"
    return text if assignment.share == 1 else f"{text} to {100 * assignment.share:.3g} %"


def hyperparameter_texts(parameters: Mapping[str, Scalar]) -> list[str]:
    """``learning_rate=0.0012`` for every searched hyperparameter."""
    texts = []
    for name, value in parameters.items():
        section, _, key = name.partition(".")
        if section == "hyperparameters":
            texts.append(f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}")
    return texts
