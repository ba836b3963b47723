"""When no plan fits, or none is legal: what is in the way, with the numbers, and the smallest change that helps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

import numpy as np

from autotune.cost.parts import MEMORY_PARTS
from autotune.search.advice import measured
from autotune.search.answer import Change, Misfit
from autotune.search.blocks import EVEN_STAGES, Counts
from autotune.search.changes import Variant, memory_variant, offload_variants, pin_variants
from autotune.search.estimated import EstimatedPlan
from autotune.search.neighbourhood import explore, space_around
from autotune.search.plan_space import DEGREES, FIELDS, PlanSpace
from autotune.search.question import Question
from engine.errors import UserError
from engine.plan import Plan
from engine.rule import RuleContext
from engine.rules import explain_row, violations
from engine.units import GIB

MORE_NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256)
SHORTER = (2, 4, 8, 16, 32)
MOST_TIMES_MEMORY = 64
"""More memory than so many times what a device has is no advice."""
NUM_FIXES = 6
SAMPLED_ROWS = 20_000
"""Combinations among which the one nearest to legal is looked for."""
SAMPLING_SEED = 0


def explain_misfit(question: Question, closest: Sequence[EstimatedPlan]) -> Misfit:
    """Why nothing fits and what would.

    Args:
        question: The question that no plan answers.
        closest: Legal plans with the least memory, least first.
    """
    nearest = closest[0]
    seeds = [plan.plan for plan in closest]
    found: list[tuple[float, Change]] = []
    tried: list[str] = []
    for candidates in _fixes(question, nearest):
        words = ""
        for variant in candidates:
            words = variant.words
            change = _verified(variant, seeds)
            if change is not None:
                found.append((variant.factor, change))
                break
        else:
            if words:
                tried.append(words)
    part = max(MEMORY_PARTS, key=lambda name: nearest.memory[name])
    fixes = [change for _, change in sorted(found, key=lambda pair: pair[0])]
    return Misfit(nearest, part, tuple(fixes[:NUM_FIXES]), tuple(tried))


def _fixes(question: Question, closest: EstimatedPlan) -> Iterator[Iterator[Variant]]:
    """Kinds of changes, those that cost nothing first; each from its smallest to its largest."""
    for variant in pin_variants(question):
        yield iter([variant])
    is_limited = question.memory_limit_bytes < question.cluster.memory_bytes
    if is_limited:
        yield _more_memory(question, closest)
    yield offload_variants(question)
    if not is_limited:
        yield _more_memory(question, closest)
    yield _more_nodes(question)
    yield _shorter_sequences(question)


def _more_memory(question: Question, closest: EstimatedPlan) -> Iterator[Variant]:
    """What the closest plan needs in whole GiB, where a device could have that."""
    needed = int(-(-closest.memory_bytes.high // GIB) * GIB)
    if needed <= MOST_TIMES_MEMORY * question.cluster.memory_bytes:
        yield memory_variant(question, needed)


def _more_nodes(question: Question) -> Iterator[Variant]:
    cluster = question.cluster
    if cluster.device == "cpu":
        return  # one machine has the cores that it has
    for factor in MORE_NODES:
        larger = cluster.changed(num_nodes=cluster.num_nodes * factor)
        try:
            changed = question.changed(cluster=larger)
        except UserError:
            continue
        words = f"{larger.num_devices} devices in place of {cluster.num_devices}"
        yield Variant(f"devices_x{factor}", words, "space", changed, factor=factor)


def _shorter_sequences(question: Question) -> Iterator[Variant]:
    length = question.sequence_length
    for factor in SHORTER:
        if length % factor == 0 and length // factor >= 512:
            words = f"sequences of {length // factor} tokens in place of {length}, as many tokens a step"
            batch = question.global_batch_size * factor
            changed = question.changed(sequence_length=length // factor, global_batch_size=batch)
            yield Variant(f"sequence_over_{factor}", words, "space", changed, factor=factor)


def _verified(variant: Variant, seeds: Sequence[Plan]) -> Change | None:
    """The change with a plan that fits under it, by a search around the plans that need the least memory."""
    space = space_around(variant.question, seeds, variant.freed)
    return measured(variant, explore(variant.question, space, must_fit=True), None)


# ------------------------------------------------------------------------------------------------------ no legal plan


def refuse_empty_space(question: Question, counts: Counts) -> NoReturn:
    """Say which rule is in the way of every plan, with the numbers of the plan that comes nearest.

    Raises:
        UserError: Always.
    """
    table = _sample(question)
    context = RuleContext(question.model, question.cluster.num_devices)
    flags = violations(context, table, question.space.scopes)
    broken = np.sum(list(flags.values()), axis=0)
    row = int(np.argmin(broken))
    if not broken[row] and EVEN_STAGES in counts.removed:
        layers = question.model.num_layers
        raise UserError(
            f"no plan is legal{_pinned(question)}: the stack {question.software} gives all stages but the first and the"
            f" last equally many layers, which {layers} layers in the stages that are left can't be given",
            hint="pin other values of pp and virtual_stages, or layers_per_stage=even,light_ends to allow any",
        )
    rules = [rule for rule, wrong in flags.items() if wrong[row]]
    texts = [explain_row(rule, context, table, row) for rule in rules]
    removed = ", ".join(f"{rule} {count:,}" for rule, count in sorted(counts.removed.items(), key=lambda i: -i[1]))
    number = f"{len(rules)} rule{'s' if len(rules) != 1 else ''}"
    messages = "; ".join(f"{message} [{rule}]" for rule, (message, _) in zip(rules, texts, strict=True))
    raise UserError(
        f"no plan is legal{_pinned(question)}. The nearest one breaks {number}: {messages}."
        f" Of {counts.combinations:,} combinations rules removed: {removed}",
        hint="; ".join(dict.fromkeys(hint for _, hint in texts)),
    )


def _pinned(question: Question) -> str:
    return f" with {', '.join(question.pins)}" if question.pins else ""


def _sample(question: Question) -> dict[str, np.ndarray]:
    """Combinations of a space, legal or not: all the degrees with values drawn at random."""
    space: PlanSpace = question.space
    draw = np.random.default_rng(SAMPLING_SEED)
    degrees = space.degrees
    rows = np.resize(np.arange(len(degrees)), max(SAMPLED_ROWS, len(degrees)))
    columns: dict[str, np.ndarray] = {f"plan.{name}": degrees[rows, i] for i, name in enumerate(DEGREES)}
    for name in FIELDS:
        if name in DEGREES:
            continue
        values = space.values[name]
        choice = draw.integers(len(values), size=len(rows))
        if name == "etp":
            picked = np.array([0 if value == "tp" else value for value in values])[choice]
            columns["plan.etp"] = np.where(picked == 0, columns["plan.tp"], picked)
        elif name != "layers_per_stage":
            columns[f"plan.{name}"] = np.array(values)[choice]
    batch, length = columns.pop("plan.global_batch_size"), columns.pop("plan.sequence_length")
    table = {
        name: columns.get(f"plan.{name}", np.full(len(rows), Plan.model_fields[name].default))
        for name in Plan.model_fields
    }
    return {**table, "global_batch_size": batch, "sequence_length": length}
