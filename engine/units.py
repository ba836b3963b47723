"""Quantities as people write them: ``512-seqs``, ``4Mi-tokens``, ``70GiB``, ``10m``, ``200steps``."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from engine.errors import UserError

GIB = 1024**3

_COUNT_SUFFIX = {
    "": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip
_BYTE_SUFFIX = {
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40,
}  # fmt: skip
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_NUMBER = r"([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"
MAX_SUFFIXED_BATCH_TOKENS = 64 * 2**20
"""A batch of more tokens, given as sequences with a suffix (``4M``), is rather one whose ``-tokens`` was forgotten."""


def _match(text: str | int | float, suffixes: str) -> tuple[float, str] | None:
    match = re.fullmatch(rf"{_NUMBER}\s*({suffixes})", str(text).strip())
    return (float(match.group(1)), match.group(2)) if match and math.isfinite(float(match.group(1))) else None


def parse_count(text: str | int | float, *, what: str = "a count") -> int:
    """``2M``, ``4Mi``, ``1e9`` or 4096 as a whole number (M is 10^6, Mi is 2^20)."""
    found = _match(text, "|".join(_COUNT_SUFFIX))
    value = found[0] * _COUNT_SUFFIX[found[1]] if found else -1.0
    if value < 0 or value != int(value):
        kind = "a positive whole number" if str(text).strip().startswith("-") else "a whole number"
        raise UserError(f"{what} must be {kind}, got {text!r}", hint=_count_hint(str(text).strip()))
    return int(value)


def _count_hint(text: str) -> str:
    examples = "examples: 4096, 2M (10^6), 7B (10^9), 1T (10^12), 4Mi (2^20)"
    given = re.fullmatch(rf"{_NUMBER}\s*([A-Za-z]+)", text)
    if given is None:
        return examples
    number, suffix = given.groups()
    meant = next((known for known in _COUNT_SUFFIX if known.lower() == suffix.lower() != ""), None)
    if meant == suffix:  # 1.5 of a unit that leaves a fraction
        return examples
    if meant is not None:
        return f"did you mean {number}{meant}? Upper and lower case differ; {examples}"
    return f"no suffix {suffix!r} is known; {examples}"


def parse_tokens(text: str | int | float, *, what: str = "a token count") -> int:
    """A count with an optional ``-tokens`` behind it."""
    return parse_count(str(text).strip().removesuffix("-tokens"), what=what)


def parse_bytes(text: str | int | float) -> int:
    """``70GiB`` (2^30), ``80GB`` (10^9) or a plain number of bytes."""
    found = _match(text, "|".join(["", *_BYTE_SUFFIX]))
    if not found:
        raise UserError(f"a size in bytes is needed, got {text!r}", hint="examples: 70GiB, 512MiB, 80GB")
    return int(found[0] * _BYTE_SUFFIX.get(found[1], 1))


def parse_duration(text: str | int | float) -> float:
    """``30s``, ``10m``, ``2h``, ``1d`` or a plain number of seconds, as seconds (> 0)."""
    found = _match(text, "|".join(["", *_SECONDS]))
    if not found or found[0] <= 0:
        raise UserError(f"a duration above zero is needed, got {text!r}", hint="examples: 30s, 10m, 2h")
    return found[0] * _SECONDS.get(found[1], 1.0)


@dataclass(frozen=True)
class Interval:
    """How often something happens: every so many seconds, or every so many steps (exactly one is set)."""

    seconds: float | None = None
    num_steps: int | None = None


def parse_interval(text: str) -> Interval:
    """``10m``, ``30s`` or ``200steps``."""
    found = _match(text, "steps?")
    if found and found[0] >= 1 and found[0] == int(found[0]):
        return Interval(num_steps=int(found[0]))
    try:
        return Interval(seconds=parse_duration(text))
    except UserError:
        raise UserError(f"an interval is needed, got {text!r}", hint="examples: 10m, 30s, 200steps") from None


@dataclass(frozen=True)
class BatchSize:
    """A global batch in whole sequences, and what was said about rounding (empty when exact)."""

    num_sequences: int
    note: str = ""


def parse_batch(text: str | int, sequence_length: int, *, multiple_of: int = 1) -> BatchSize:
    """``512``, ``512-seqs`` or ``4Mi-tokens`` as a number of sequences, rounded to the nearest multiple allowed.

    Raises:
        UserError: No such quantity, zero, less than half a sequence, or so many sequences that tokens must be meant.
    """
    given = str(text).strip()
    examples = "examples: 512, 512-seqs, 4Mi-tokens"
    other = re.fullmatch(r"([0-9.]+[A-Za-z]{0,2}?)[\s_-]*(tok(?:en)?s?|seq(?:uence)?s?)", given)
    if other and not given.endswith(("-tokens", "-seqs", "-seq")):
        unit = "tokens" if other[2].startswith("tok") else "seqs"
        raise UserError(
            f"the global batch can't be read, got {text!r}", hint=f"did you mean {other[1]}-{unit}? {examples}"
        )
    if given.endswith("-tokens"):
        num_tokens = parse_tokens(given, what="the global batch")
        wanted = num_tokens / sequence_length
        if 0 < wanted < 0.5:
            raise UserError(
                f"the global batch is less than one sequence of {sequence_length} tokens, got {text!r}",
                hint=f"give {sequence_length}-tokens or more; {examples}",
            )
    else:
        wanted = parse_count(re.sub(r"-seqs?$", "", given), what="the global batch")
        if (
            given[-1].isalpha()
            and not given.endswith(("-seqs", "-seq"))
            and wanted * sequence_length > MAX_SUFFIXED_BATCH_TOKENS
        ):
            raise UserError(
                f"the global batch {text} is {wanted} sequences, {wanted * sequence_length:.3g} tokens a step",
                hint=f"did you mean {given}-tokens? Write {given}-seqs where sequences are meant",
            )
    if wanted <= 0:
        raise UserError(f"the global batch must be above zero, got {text!r}", hint=examples)
    nearest = max(multiple_of, round(wanted / multiple_of) * multiple_of)
    if nearest == wanted:
        return BatchSize(nearest)
    return BatchSize(
        nearest,
        f"global batch {text} is {wanted:g} sequences of {sequence_length} tokens; rounded to {nearest}"
        f" ({nearest * sequence_length} tokens)",
    )


def format_bytes(num_bytes: float) -> str:
    """Memory in GiB, in MiB below 0.1 GiB, in KiB below 0.1 MiB, in bytes below 0.1 KiB."""
    if abs(num_bytes) >= 0.1 * GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    for unit, scale in (("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= 0.1 * scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(value: float) -> str:
    """A count with three significant digits: 1.24B, 13.0M, 512."""
    for suffix, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * scale:  # what would be rounded to 1000 of the smaller unit
            return f"{value / scale:.3g}{suffix}"
    return f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """Time in the largest two units: 2h05m, 3m20s, 12.5s, 80ms."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s"
