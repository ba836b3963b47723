"""Writes the generated pages of this folder: ``run_file.md`` from the schemas, ``devices.md`` from the catalogue,
``results.md`` and the tables of ``accuracy.md`` and ``prior.md`` from the result files.

python docs/generate.py            # write them
python docs/generate.py --check    # exit 1 if one is out of date
"""

from __future__ import annotations

import argparse
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from autotune.specs.cluster import DeviceEntry, catalogue
from autotune.specs.figures import DeviceFigures, LinkFigures
from engine.config import RunConfig

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS.parent / "benchmarks" / "results"


def run_file_page() -> str:
    """Every key of a run file, with type, default and meaning."""
    lines = ["# The run file", "", "Generated from `engine/config.py` and the schemas it uses.", ""]
    seen: list[type[BaseModel]] = []
    waiting: list[tuple[str, type[BaseModel]]] = [("run.yaml", RunConfig)]
    while waiting:
        title, schema = waiting.pop(0)
        if schema in seen:
            continue
        seen.append(schema)
        summary = " ".join((schema.__doc__ or "").split())
        lines += [f"## {title}", "", summary, "", "| key | type | default | meaning |", "|---|---|---|---|"]
        for name, field in schema.model_fields.items():
            cells = [f"`{name}`", _type_name(field.annotation), _default(field), _meaning(field)]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
            waiting += [
                (f"{title.removeprefix('run.yaml').strip('.')}.{name}".strip("."), inner)
                for inner in _schemas(field.annotation)
            ]
        lines.append("")
    return "\n".join(lines)


def results_page() -> str:
    """One section for each result file: its title, how it was made, and its lines."""
    lines = [
        "# Results",
        "",
        "Generated from `benchmarks/results/`; each figure comes from the script named with it.",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        lines += ["", *_section(path, "##")]
    return "\n".join([*lines, ""])


def accuracy_page() -> str:
    """The page on the planner's accuracy with its tables of results."""
    return _with_results("accuracy.md", ("planner_accuracy", "planner_memory"))


def prior_page() -> str:
    """The page on the prior with its tables of results."""
    return _with_results("prior.md", ("warm_start",))


def _with_results(page: str, names: tuple[str, ...]) -> str:
    """A page with its tables of results in place of what stands between the two marks."""
    before, rest = _read(DOCS / page).split(" written by docs/generate.py -->\n", 1)
    _, after = rest.split("<!-- end -->", 1)
    lines = [before + " written by docs/generate.py -->"]
    for name in names:
        lines += ["", *_section(RESULTS / f"{name}.json", "###")]
    return "\n".join([*lines, "", "<!-- end -->"]) + after


def _section(path: Path, heading: str) -> list[str]:
    """One result file: its title, how it was made, and its lines."""
    result = json.loads(path.read_text(encoding="utf-8"))
    arguments = result.get("arguments", [])
    assert isinstance(arguments, list), f"{path.name}: 'arguments' is a list of words"
    command = " ".join(["python", f"benchmarks/{path.stem}.py", *arguments])
    return [f"{heading} {result['title']}", "", f"`{command}`, {result['setup']}", "", *result["lines"]]


def devices_page() -> str:
    """One section for each device of the catalogue: its figures, links and sources."""
    lines = [
        "# Devices of the catalogue",
        "",
        "Generated from `autotune/specs/hardware.yaml`. Peaks are from datasheets; figures and links are what programs",
        "attain; `sustained_ratio`, `sustained_memory_ratio` and `interval_ratio` are fitted to published runs of",
        "training (`benchmarks/planner_accuracy.py`). [clusters.md](clusters.md) says how to name a cluster and how to",
        "state another network.",
        "",
    ]
    for schema in (DeviceFigures, LinkFigures):
        lines += ["| key | meaning |", "|---|---|"]
        lines += [f"| `{name}` | {_meaning(field)} |" for name, field in schema.model_fields.items()]
        lines.append("")
    for kind, entry in catalogue().items():
        lines += _device_section(kind, entry)
    return "\n".join(lines)


def _device_section(kind: str, entry: DeviceEntry) -> list[str]:
    figures = entry.figures.model_dump(mode="json", exclude={"matmul"}, exclude_defaults=True)
    attained = {precision: rate.tflops for precision, rate in entry.figures.matmul.items()}
    lines = [f"## {kind}", "", f"{entry.title}. {entry.memory_gib:g} GiB", ""]
    lines += ["| | " + " | ".join(attained) + " |", "|---|" + "---|" * len(attained)]
    for name, rates in (("peak, TFLOP/s", dict(entry.tflops)), ("attained, TFLOP/s", attained)):
        lines.append(f"| {name} | " + " | ".join(f"{rates[p]:g}" if p in rates else "" for p in attained) + " |")
    lines += ["", ", ".join(f"{name} {value:g}" for name, value in figures.items()) + ".", ""]
    for level in entry.links:
        told = level.model_dump(mode="json", exclude_none=True, exclude={"num_devices"})
        if level.reduction_gb_per_second is None:
            del told["reduction_min_devices"]
        size = f"{level.num_devices} devices" if level.num_devices else "the cluster"
        lines.append(f"* {size}: " + ", ".join(f"{name} {value:g}" for name, value in told.items()))
    lines += ["", f"Sources: {entry.source}."]
    return [*lines, "", *(f"* {name}: {source}" for name, source in entry.sources.items()), ""]


PAGES = {
    "run_file.md": run_file_page,
    "devices.md": devices_page,
    "prior.md": prior_page,
    "results.md": results_page,
    "accuracy.md": accuracy_page,
}


def main() -> int:
    """Write or check the pages."""
    parser = argparse.ArgumentParser(description="Write the generated pages of the documentation.")
    parser.add_argument("--check", action="store_true", help="only say which pages are out of date")
    check = parser.parse_args().check
    stale = [name for name, page in PAGES.items() if _read(DOCS / name) != page()]
    for name in stale:
        if check:
            print(f"docs/{name} is out of date: run python docs/generate.py", file=sys.stderr)
        else:
            (DOCS / name).write_text(PAGES[name](), encoding="utf-8")
            print(f"wrote docs/{name}")
    return int(check and bool(stale))


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _schemas(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [schema for argument in typing.get_args(annotation) for schema in _schemas(argument)]


def _meaning(field: Any) -> str:
    return " ".join((field.description or "").replace("``", "`").split())


def _type_name(annotation: Any) -> str:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _type_name(arguments[0])
    if origin is typing.Literal:
        return ", ".join(f"`{json.dumps(value) if not isinstance(value, str) else value}`" for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if argument is type(None) else _type_name(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return {int: "whole number", float: "number", bool: "true, false", str: "text"}.get(annotation, str(annotation))


def _default(field: Any) -> str:
    if field.default is PydanticUndefined:
        return "" if field.default_factory else "required"
    if isinstance(field.default, BaseModel):
        return "below"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    sys.exit(main())
