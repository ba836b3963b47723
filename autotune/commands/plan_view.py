"""How ``autotune plan`` shows its answer in a terminal: tables, bars and sentences over the planner's plain data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autotune.commands.plan_text import (
    INDENT,
    LEAST_BAR_RATIO,
    bars,
    decimals,
    heading,
    indented,
    percent,
    plain_table,
    seconds_text,
    section,
    signed_bytes,
    signed_percent,
    signed_seconds,
    time_unit,
)
from autotune.cost.software import software_figures
from autotune.search.answer import Answer, Change, Choice, Counts, Misfit, Rival, Rung
from autotune.search.compare import Comparison
from autotune.search.estimated import MFU_CONVENTION, EstimatedPlan, Figure
from autotune.search.plan_space import PlanSpace
from autotune.search.words import (
    CHOICE_NAMES,
    MEMORY_NAMES,
    TIME_NAMES,
    choice_words,
    layout_words,
    settings_words,
    shared_settings,
    value_words,
)
from engine.flops import parameter_counts
from engine.units import GIB, format_bytes, format_count

MOST_RULES = 6
"""Rules named with their counts; the rest is summed."""
MOST_CHANGES = 6
LEAST_LOSS_RATIO = 5e-4
"""Values that lose less are as good as the best."""
LEAST_MEMORY_BYTES = 2**20
"""Differences of memory that are told."""
GAIN_WORDS = {"speed": "tokens/s", "step_time": "tokens/s"}
"""Objective -> what is gained more of."""
LESS_WORDS = {"memory": "less memory", "devices": "fewer devices", "cost": "less cost", "energy": "less energy"}
"""Objective -> what is gained by having less."""
COST_WORDS = {"speed": "step time", "step_time": "step time"} | {
    name: name for name in ("memory", "devices", "cost", "energy")
}
"""Objective -> what it means to lose."""


def print_answer(console: Console, answer: Answer) -> None:
    """Print the whole answer."""
    for part in answer_parts(answer, console.width):
        console.print(part, highlight=False, soft_wrap=False)


def answer_parts(answer: Answer, width: int) -> Iterable[RenderableType]:
    """The answer's sections in order, for a terminal of ``width`` columns."""
    yield header(answer)
    if answer.misfit is not None:
        yield from _misfit_parts(answer, answer.misfit)
    if answer.plans:
        yield ""
        yield plan_table(answer)
        yield Text(mfu_line(answer), style="dim")
        for line in tie_lines(answer):
            yield Text(line)
        best = answer.plans[0]
        yield ""
        yield bars(
            f"Step time of plan 1: {seconds_text(best.step_seconds.value)}", best.time, TIME_NAMES, seconds_text, width
        )
        hidden = hidden_line(best)
        if hidden:
            yield indented(hidden, style="dim")
        yield ""
        yield bars(memory_title(best), best.memory, MEMORY_NAMES, format_bytes, width)
        yield ""
        yield heading("What binds")
        yield from (indented(line) for line in binding_lines(answer))
        if len(answer.plans) > 1:
            yield ""
            is_front = len(answer.question.objectives) > 1
            yield heading("Plan 2 beside plan 1" if is_front else "Why not plan 2")
            yield from (indented(line) for line in runner_up_lines(answer.comparisons[1]))
    told = decisive(answer.choices)
    if told:
        yield ""
        yield choices_table(told, COST_WORDS[answer.question.objectives[0]])
    if answer.changes and answer.plans:
        yield ""
        first = answer.question.objectives[0]
        yield changes_table("What would help most", answer.changes[:MOST_CHANGES], answer.plans[0], first)
    if answer.ladder:
        yield ""
        yield ladder_table(answer.ladder, answer.question.objectives[0])
    if answer.rival is not None:
        yield ""
        yield from rival_parts(answer, answer.rival)


# --------------------------------------------------------------------------------------------------------------- header


def header(answer: Answer) -> RenderableType:
    """Model, machines, batch, pins, and what became of the combinations."""
    question = answer.question
    counts = parameter_counts(question.model)
    active = f", {format_count(counts.active)} active" if counts.active != counts.total else ""
    cluster = question.cluster
    lines = [
        ("model", f"{question.model.name}, {format_count(counts.total)} parameters{active}"),
        ("cluster", f"{cluster.describe()}" + (f", {cluster.num_devices} devices" if cluster.num_nodes > 1 else "")),
        (
            "batch",
            f"{question.global_batch_size} sequences of {question.sequence_length} tokens ="
            f" {format_count(question.batch_tokens)} tokens",
        ),
    ]
    if question.memory_limit_bytes < cluster.memory_bytes:
        lines.append(("limit", f"{format_bytes(question.memory_limit_bytes)} of each device"))
    if question.pins:
        lines.append(("pinned", ", ".join(choice_words(name, values) for name, values in question.pinned.items())))
    lines.append(("stack", stack_text(question.software, question.space)))
    lines.append(("searched", counts_text(answer.counts)))
    if answer.counts.removed:
        lines.append(("rules", removed_text(answer.counts)))
    table = plain_table()
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines:
        table.add_row(name, Text(value))
    for note in answer.notes:
        table.add_row("note", Text(note, style="yellow"))
    return table


def stack_text(software: str, space: PlanSpace) -> str:
    """The training stack, with the pipeline schedules that are searched."""
    figures = software_figures(software)
    schedules = "no pipelines" if space.values["pp"] == (1,) else ", ".join(map(value_words, space.values["schedule"]))
    return f"{figures.title} ({software}), AdamW; {schedules}"


def counts_text(counts: Counts) -> str:
    """How many combinations there were, what became of them, and how long it took."""
    legal = counts.num_fitting + counts.num_not_fitting
    told = [f"{counts.num_combinations:,} combinations in {counts.seconds:.1f} s: {legal:,} legal plans"]
    if legal and not counts.num_fitting:
        told.append("none of them fits")
    elif counts.num_not_fitting:
        told.append(f"{counts.num_not_fitting:,} of them need more memory")
    if counts.gap_ratio:
        told.append(gap_text(counts.gap_ratio))
    if counts.num_redundant:
        told.append(f"{counts.num_redundant:,} say the same as another")
    return ", ".join(told)


def gap_text(ratio: float) -> str:
    """What a search that left something out may have missed."""
    if not math.isfinite(ratio):
        return "ended early: how much better the rest could be is not known"
    return f"one that was left out could be at most {percent(ratio)} better than the best"


def removed_text(counts: Counts) -> str:
    """Which rule removed how many."""
    ranked = sorted(counts.removed.items(), key=lambda item: -item[1])
    named = [f"{rule} {count:,}" for rule, count in ranked[:MOST_RULES]]
    rest = sum(count for _, count in ranked[MOST_RULES:])
    return "removed by " + ", ".join([*named, *([f"others {rest:,}"] if rest else [])])


# ---------------------------------------------------------------------------------------------------------------- plans


def plan_table(answer: Answer) -> Table:
    """The ranked plans; under each figure its interval."""
    plans = answer.plans
    shared = shared_settings([plan.plan for plan in plans])
    columns = _columns(answer)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("plan", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for rank, plan in enumerate(plans, start=1):
        label = Text(layout_words(plan.plan), style="bold" if rank == 1 else "")
        own = settings_words(plan.plan, shared)
        if answer.num_alike[rank - 1]:
            own += f"{' ' if own else ''}(and {answer.num_alike[rank - 1]} like it, with other cp)"
        cells = [label + Text(f"\n{own}", style="dim") if own else label]
        cells += [cell(rank, plan) for cell in columns.values()]
        table.add_row(f"{'≈' if rank in tied_ranks(answer) else ''}{rank}", *cells)
    if shared:
        table.caption = Text(f"all: {', '.join(shared.values())}")
        table.caption_justify = "left"
    return table


def _columns(answer: Answer) -> dict[str, Callable[[int, EstimatedPlan], Text]]:
    """Heading -> the cell of a plan."""
    first, objectives = answer.plans[0], answer.question.objectives
    unit, scale = time_unit(first.step_seconds.value)
    digits = decimals(min(plan.step_seconds.value for plan in answer.plans) * scale)

    def seconds(value: float) -> str:
        return f"{value * scale:.{digits}f}"

    def replayed(rank: int, plan: EstimatedPlan) -> Text:
        again = answer.replays[rank - 1]
        return Text(seconds(again.step_seconds.value) if again else "no pipeline")

    columns: dict[str, Callable[[int, EstimatedPlan], Text]] = {}
    if (
        len({plan.plan.world_size for plan in answer.plans}) > 1
        or first.plan.world_size < answer.question.cluster.num_devices
    ):
        columns["devices"] = lambda _, plan: Text(str(plan.plan.world_size))
    columns[f"step {unit}"] = lambda _, plan: _interval(plan.step_seconds, seconds)
    if answer.replays:
        columns[f"replay {unit}"] = replayed
    columns["tokens/s"] = lambda _, plan: _interval(plan.tokens_per_second, format_count)
    columns["memory GiB"] = lambda _, plan: _interval(plan.memory_bytes, lambda value: f"{value / GIB:.1f}")
    columns["MFU %"] = lambda _, plan: _interval(plan.mfu, lambda value: f"{value * 100:.1f}")
    if "cost" in objectives:
        columns["$/Gtoken"] = lambda _, plan: _interval(plan.dollars_per_billion_tokens, lambda value: f"{value:.3g}")
    if "energy" in objectives:
        columns["kWh/Gtoken"] = lambda _, plan: _interval(plan.kwh_per_billion_tokens, lambda value: f"{value:.3g}")
    return columns


def tied_ranks(answer: Answer) -> list[int]:
    """Plans, ranked by speed, that the estimate can't tell from the first."""
    if not set(answer.question.objectives) <= set(GAIN_WORDS):
        return []
    return [rank for rank, other in enumerate(answer.comparisons, start=1) if rank > 1 and other.is_tie]


def mfu_line(answer: Answer) -> str:
    """How MFU is counted, with the best plan's HFU."""
    best = answer.plans[0]
    if best.mfu is None or best.hfu is None:
        return f"MFU is unknown: no peak of {best.plan.precision} is known for {answer.question.cluster.device_kind}"
    peak = answer.question.cluster.peak_flops[best.plan.precision] / 1e12
    told = f"MFU: {MFU_CONVENTION}; of the dense {best.plan.precision} peak, {peak:.4g} TFLOP/s a device."
    return f"{told} HFU (recompute counted) of plan 1: {best.hfu.value * 100:.1f}%"


def tie_lines(answer: Answer) -> list[str]:
    """Which plans the estimate can't tell from the best."""
    tied = tied_ranks(answer)
    if not tied:
        return []
    named = f"Plan {tied[0]} is" if len(tied) == 1 else f"Plans {_enumerated(tied)} are"
    return [
        f"≈ {named} as good as plan 1, as far as the estimate can tell: the difference lies within its own interval"
        " (what both plans share cancels). Measure them, or prefer the one with less memory."
    ]


def _enumerated(ranks: Sequence[int]) -> str:
    """``2``, ``2 and 4``, ``2 to 10``."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]} to {ranks[-1]}"
    return ", ".join(map(str, ranks[:-1])) + (" and " if len(ranks) > 1 else "") + str(ranks[-1])


def _interval(figure: Figure | None, text: Callable[[float], str]) -> Text:
    if figure is None:
        return Text("unknown")
    low, high = text(figure.low), text(figure.high)
    return Text(text(figure.value)) + Text(f"\n{low}–{high}", style="dim")


# -------------------------------------------------------------------------------------------------------- where it goes


def hidden_line(plan: EstimatedPlan) -> str:
    """Communication that runs beside compute; empty where there is none."""
    least = LEAST_BAR_RATIO * plan.step_seconds.value
    parts = [f"{TIME_NAMES[name]} {seconds_text(size)}" for name, size in plan.hidden.items() if size > least]
    return f"hidden beside compute: {', '.join(parts)}" if parts else ""


def memory_title(plan: EstimatedPlan) -> str:
    """What the memory bars are of."""
    stage = f" of pipeline rank {plan.fullest_stage}" if plan.plan.pp > 1 else ""
    limit = format_bytes(plan.memory_limit_bytes)
    return f"Memory of plan 1 on the fullest device{stage}: {format_bytes(plan.memory_bytes.value)} of {limit}"


def binding_lines(answer: Answer) -> list[str]:
    """What the step is spent on by resource, and whether memory limits it."""
    shares = [share for share in answer.shares if share.ratio >= LEAST_BAR_RATIO]
    first, *others = [f"{share.resource} {share.ratio * 100:.0f}%" for share in shares]
    lines = [f"{first[0].upper()}{first[1:]} of the step{'; then ' + ', '.join(others) if others else ''}."]
    if answer.memory_binds_ratio is not None:
        first = answer.question.objectives[0]
        gain = gain_text(answer.memory_binds_ratio, first).lstrip("+")
        what = LESS_WORDS.get(first, "more tokens per second")
        lines.append(f"Memory binds: with as much as one likes, {gain} {what}.")
    else:
        lines.append("Memory does not bind: more of it would gain nothing.")
    return lines


def runner_up_lines(comparison: Comparison) -> list[str]:
    """Why the second plan loses, by part and by choice."""
    lines = [f"It is {_slower(comparison)}: {parts_text(comparison)}."]
    if comparison.is_tie:
        lines.append("That is less than the estimate can tell.")
    if abs(comparison.memory_bytes) < LEAST_MEMORY_BYTES:
        lines.append("It needs as much memory.")
    else:
        more = "more" if comparison.memory_bytes > 0 else "less"
        lines.append(f"It needs {format_bytes(abs(comparison.memory_bytes))} {more} memory.")
    if comparison.choices:
        lines.append(f"It differs in {choices_text(comparison)}.")
    return lines


def parts_text(comparison: Comparison) -> str:
    """Differences by part, with signs."""
    parts = [f"{signed_seconds(size)} {TIME_NAMES[part]}" for part, size in comparison.largest_parts()]
    return ", ".join(parts) or "no part differs"


def choices_text(comparison: Comparison) -> str:
    """In which choices a plan differs, from the better plan's value to its own."""
    told = [
        f"{CHOICE_NAMES.get(name, name.replace('_', ' '))} {value_words(one)} → {value_words(other)}"
        for name, (one, other) in comparison.choices.items()
    ]
    return ", ".join(told)


def choices_table(choices: Sequence[Choice], cost: str) -> RenderableType:
    """What it costs to decide otherwise, one line a choice that makes a difference."""
    table = plain_table(header=True)
    table.add_column("choice", no_wrap=True)
    bound = "" if all(choice.is_exact for choice in choices) else "; ≤: at most, of the plans looked at"
    table.add_column(f"{cost} more with the best plan of each value{bound}")
    for name in dict.fromkeys(choice.name for choice in choices):
        own = [choice for choice in choices if choice.name == name]
        cells = [f"{_value_words(c)}: {_loss(c)}" for c in own if c.plan is not None]
        for told, is_exact in (("none fits", True), ("none found", False)):
            without = [_value_words(c) for c in own if c.plan is None and c.is_exact == is_exact]
            cells += [f"{told}: {' '.join(without)}"] if without else []
        table.add_row(CHOICE_NAMES.get(name, name), ", ".join(cells))
    return section("What each choice is worth", table)


def decisive(choices: Sequence[Choice]) -> list[Choice]:
    """Choices of fields of which a value is worse than another."""
    names = {choice.name for choice in choices if choice.plan is not None and _loss(choice) != "best"}
    return [choice for choice in choices if choice.name in names]


def _value_words(choice: Choice) -> str:
    return "some layers" if choice.value == "every_k" else value_words(choice.value)


def _loss(choice: Choice) -> str:
    if abs(choice.loss_ratio) < LEAST_LOSS_RATIO:
        return "best"
    return f"{'' if choice.is_exact else '≤'}+{percent(choice.loss_ratio)}"


# ------------------------------------------------------------------------------------------------------ what would help


def changes_table(
    title: str, changes: Sequence[Change], best: EstimatedPlan | None, objective: str = "speed"
) -> RenderableType:
    """Single changes with what the first objective gains, and the plan they lead to."""
    table = plain_table(header=True)
    gain_name = LESS_WORDS.get(objective, GAIN_WORDS["speed"]) if best is not None else GAIN_WORDS["speed"]
    for name in ("change", gain_name, "step", "best plan then"):
        is_number = name in (gain_name, "step")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number)
    for change in changes:
        if change.plan is None:
            table.add_row(change.words, "", "", "nothing fits")
            continue
        gain = (
            gain_text(change.gain_ratio, objective)
            if best is not None
            else format_count(change.plan.tokens_per_second.value)
        )
        then = "the same"
        if not change.keeps_plan:
            own = settings_words(change.plan.plan, _least_settings(change.plan, best))
            then = ", ".join(part for part in (layout_words(change.plan.plan), own) if part)
        table.add_row(change.words, gain, seconds_text(change.plan.step_seconds.value), Text(then, style="dim"))
    return section(title, table)


def _least_settings(plan: EstimatedPlan, best: EstimatedPlan | None) -> dict[str, str]:
    """Settings that a plan shares with the best: they need no words."""
    return shared_settings([plan.plan, best.plan]) if best is not None else {}


def gain_text(ratio: float, objective: str) -> str:
    """What an objective gains: more tokens per second, or less of what the objective counts."""
    return percent(ratio / (1 + ratio)) if objective in LESS_WORDS else signed_percent(ratio)


def ladder_table(ladder: Sequence[Rung], objective: str = "speed") -> RenderableType:
    """From data parallelism alone to the best plan."""
    table = plain_table(header=True)
    for name in ("allowed so far", "step", LESS_WORDS.get(objective, "gain"), "memory GiB", "best plan"):
        left = name in ("allowed so far", "best plan")
        table.add_column(name, justify="left" if left else "right", no_wrap=not left)
    for rungs, is_idle in _grouped(ladder):
        rung, words = rungs[0], " ".join(rung.words for rung in rungs)
        if rung.plan is None:
            table.add_row(words, "", "", "", Text(rung.reason, style="dim"))
        elif is_idle:
            table.add_row(words, "", Text("none", style="dim"), "", Text("the same", style="dim"))
        else:
            step = "-" if rung.reason else seconds_text(rung.plan.step_seconds.value)
            gain = "" if rung.gain_ratio is None else gain_text(rung.gain_ratio, objective)
            memory = Text(f"{rung.plan.memory_bytes.value / GIB:.1f}", style="red" if rung.reason else "")
            plan = layout_words(rung.plan.plan) + (f" ({rung.reason})" if rung.reason else "")
            table.add_row(words, step, gain, memory, Text(plan, style="dim"))
    return section("From data parallelism alone to the best plan", table)


def _grouped(ladder: Sequence[Rung]) -> list[tuple[list[Rung], bool]]:
    """Rungs, those together that gain nothing or fail for the same reason; and whether they gain nothing."""
    groups: list[tuple[list[Rung], bool]] = []
    for before, rung in zip([None, *ladder], ladder, strict=False):
        is_same = before is not None and _outcome(before) == _outcome(rung)
        is_idle = is_same and not rung.reason
        if groups and ((is_same and rung.reason) or (is_idle and groups[-1][1])):
            groups[-1][0].append(rung)
        else:
            groups.append(([rung], is_idle))
    return groups


def _outcome(rung: Rung) -> tuple[object, ...]:
    """What a rung comes to; plans that differ in a choice without effect come to the same."""
    plan = rung.plan
    return (rung.reason, plan and layout_words(plan.plan), plan and plan.step_seconds.value, plan and plan.memory_bytes)


# ------------------------------------------------------------------------------------------------ nothing fits, a rival


def _misfit_parts(answer: Answer, misfit: Misfit) -> Iterable[RenderableType]:
    closest = misfit.closest
    needed = f"{format_bytes(closest.memory_bytes.high)} with its margin"
    yield ""
    yield Text("No plan fits.", style="bold red")
    yield Text(
        f"Closest is {layout_words(closest.plan)} ({settings_words(closest.plan)}): it needs {needed},"
        f" {format_bytes(closest.excess_bytes)} more than the {format_bytes(closest.memory_limit_bytes)} allowed."
    )
    yield Text(f"Most of it: {MEMORY_NAMES[misfit.largest_part]}, {format_bytes(closest.memory[misfit.largest_part])}.")
    yield ""
    yield bars("Memory of the closest plan", closest.memory, MEMORY_NAMES, format_bytes, 100)
    yield ""
    if misfit.fixes:
        yield changes_table("What makes it fit, smallest change first", misfit.fixes, None)
    if misfit.tried:
        yield Text(f"Not enough alone: {'; '.join(misfit.tried)}.", style="dim")


def rival_parts(answer: Answer, rival: Rival) -> Iterable[RenderableType]:
    """A plan that the user brought, part by part beside the best."""
    yield heading(f"{rival.source}: {layout_words(rival.plan)}, {settings_words(rival.plan)}")
    for note in rival.notes:
        yield indented(note, style="yellow")
    plan = rival.estimated
    if plan is None:
        yield indented("It can't run:", style="red")
        yield from (indented(f"  {message}") for message in rival.broken_rules)
        return
    if not plan.fits:
        needed, excess = format_bytes(plan.memory_bytes.high), format_bytes(plan.excess_bytes)
        yield indented(f"It needs {needed} with the margin, {excess} too much.", style="red")
    if rival.comparison is None:
        return
    comparison, best = rival.comparison, answer.plans[0]
    yield indented(f"Beside plan 1 it is {_slower(comparison)}: {parts_text(comparison)}.")
    if comparison.choices:
        yield indented(f"It differs in {choices_text(comparison)}.")
    table = plain_table(header=True)
    for name in ("part", "plan 1", "this plan", "difference"):
        table.add_column(name, justify="left" if name == "part" else "right", no_wrap=True)
    scale = best.batch_tokens / plan.batch_tokens
    for part, size in best.time.items():
        if size or plan.time[part]:
            other = plan.time[part] * scale
            table.add_row(TIME_NAMES[part], seconds_text(size), seconds_text(other), signed_seconds(other - size))
    whole = (best.step_seconds.value, plan.step_seconds.value * scale)
    table.add_row("step time", *map(seconds_text, whole), signed_seconds(comparison.seconds), style="bold")
    table.add_row()
    for part, size in best.memory.items():
        if size or plan.memory[part]:
            sizes = (size, plan.memory[part])
            table.add_row(MEMORY_NAMES[part], *map(format_bytes, sizes), signed_bytes(comparison.memory[part]))
    totals = (best.memory_bytes.value, plan.memory_bytes.value)
    table.add_row("memory", *map(format_bytes, totals), signed_bytes(comparison.memory_bytes), style="bold")
    yield Padding(table, INDENT, expand=False)


def _slower(comparison: Comparison) -> str:
    word = "slower" if comparison.seconds >= 0 else "faster"
    much = f"{1 + comparison.ratio:.3g} times" if comparison.ratio >= 1 else percent(abs(comparison.ratio))
    return f"{much} {word} ({signed_seconds(comparison.seconds)})"
