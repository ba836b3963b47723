"""``autotune profile``: measure this machine and write a cluster file that plans are estimated for."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from autotune.specs.cluster import ClusterSpec
    from engine.measurement import Measurement

BUSY_CPUS = 0.25
"""More work of others than so many CPUs' worth is told of."""
HEADER = """# {cluster}, measured by autotune profile on {host}, {started}.
# Give it to --cluster of autotune plan and autotune sweep. What the keys mean: docs/clusters.md.
"""


def command(
    cluster: Annotated[
        str, typer.Option(metavar="CLUSTER", help="What to measure: local, or cpu:2 (devices of this machine's cores).")
    ] = "local",
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The cluster file to write.")] = Path(
        "cluster.yaml"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Measure less and shorter; intervals become wider.")] = False,
    measurement: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            help="Measure nothing; take what engine.probe wrote, for example on several nodes under torchrun.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the cluster as JSON.")] = False,
) -> None:
    """Measure how fast this machine computes, moves memory, communicates and starts work, and write a cluster file.

    Runs for a minute or two on the devices that trials run on, as trials run: it waits for trials to end, and other
    work on the machine makes the figures too slow. Several nodes: run "torchrun ... -m engine.probe --measure --output
    m.json" on them, then "autotune profile --from m.json --cluster h100x8:4".
    """
    from autotune.cost.machine_fit import measured_cluster
    from autotune.specs.cluster import parse_cluster
    from autotune.study.measuring import read_measurement
    from engine.atomic import write_text
    from engine.yaml_file import dump_yaml

    machines = parse_cluster(cluster)
    check_output(output)
    if measurement is not None:
        found = read_measurement(measurement)
        check_same(machines, found)
    else:
        check_local(cluster, machines)
        found = _measured(machines, quick=quick, silent=as_json)
    result = measured_cluster(machines, found)
    header = HEADER.format(cluster=result.describe(), host=found.machine.host, started=found.machine.started)
    write_text(output, header + dump_yaml(result.to_data()))
    if as_json:
        print(json.dumps({"output": str(output), "cluster": result.to_data()}, indent=2, allow_nan=False))
    else:
        _show(result, found, output)


def check_output(output: Path) -> None:
    """The file can be written, and will be found again as a cluster.

    Raises:
        UserError: It has another ending, its folder doesn't exist, or it is a folder.
    """
    from autotune.paths import check_writable_file
    from engine.errors import UserError

    if output.suffix not in (".yaml", ".yml"):
        raise UserError(f"a cluster file ends in .yaml, got {output}", hint=f"use {output.with_suffix('.yaml')}")
    check_writable_file(output, "--output")


def check_local(text: str, cluster: ClusterSpec) -> None:
    """The cluster is this machine.

    Raises:
        UserError: It is another one.
    """
    from autotune.specs.cluster import probe_cluster
    from engine.errors import UserError

    here = probe_cluster()
    fits = cluster.num_nodes == 1 and (cluster.device == "cpu" or cluster.num_devices <= here.num_devices)
    if fits and cluster.device in ("cpu", here.device):
        return
    raise UserError(
        f"only this machine can be measured ({here.describe()}), and {text!r} is another",
        hint="use local or cpu:2; to measure several nodes run 'torchrun ... -m engine.probe --measure --output m.json'"
        f" on them, then 'autotune profile --from m.json --cluster {text}'",
    )


def check_same(cluster: ClusterSpec, found: Measurement) -> None:
    """A measurement is one of a cluster's kind of device.

    Raises:
        UserError: It is not.
    """
    from engine.errors import UserError

    machine = found.machine
    per_node = max(machine.num_ranks // machine.num_nodes, 1)
    if machine.device != cluster.device or per_node != cluster.devices_per_node:
        raise UserError(
            f"the measurement is of {per_node} {machine.device} devices a node, the cluster has"
            f" {cluster.devices_per_node} {cluster.device}",
            hint="name the cluster that was measured with --cluster, for example h100x8:4 or cpu:2",
        )


def _measured(cluster: ClusterSpec, *, quick: bool, silent: bool) -> Measurement:
    from autotune.study.measuring import measure

    with _progress_bar(cluster, silent) as on_progress:
        return measure(cluster, quick=quick, on_progress=on_progress)


@contextlib.contextmanager
def _progress_bar(cluster: ClusterSpec, silent: bool) -> Iterator[Callable[[float, str], None]]:
    """A bar on standard error, so that what is printed can be piped."""
    if silent:
        yield lambda done, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("measuring {task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(cluster.describe(), total=1.0)
        yield lambda done, what: bar.update(task, completed=done, description=what)


def _show(cluster: ClusterSpec, found: Measurement, output: Path) -> None:
    """The figures for people, with what to distrust in them."""
    from rich.console import Console
    from rich.table import Table

    assert cluster.figures is not None
    assert cluster.measured is not None
    figures, measured, errors = cluster.figures, cluster.measured, cluster.measured.errors
    console = Console(highlight=False)
    console.print(f"{cluster.describe()} on {measured.host}, {measured.device_name}", markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title, align in (("", "left"), ("attained", "right"), ("fit off by", "right")):
        table.add_column(title, justify="right" if align == "right" else "left")

    def row(name: str, value: str, error: str = "") -> None:
        known = errors.get(error)
        table.add_row(name, value, "" if known is None else f"{100 * known:.0f} %")

    for precision, rate in figures.matmul.items():
        row(f"matrix products, {precision}", f"{rate.tflops:.3g} TFLOP/s", f"matmul {precision}")
    row("attention, of that", f"{100 * figures.attention_ratio:.0f} %", "attention")
    row("memory", f"{figures.memory_gb_per_second:.3g} GB/s", "memory")
    row("start of an operator", f"{figures.launch_us:.3g} µs")
    for level, name in zip(cluster.links, ("links in a node", "links between nodes"), strict=False):
        if found.collectives:
            row(name, f"{level.gb_per_second:.3g} GB/s, {level.start_us + level.latency_us:.3g} µs", name)
    row("training steps of the engine", "", "steps")
    console.print(table)
    if measured.busy_cpus > BUSY_CPUS:
        console.print(
            f"[yellow]Other processes kept {measured.busy_cpus:.1f} CPUs busy meanwhile, which makes figures too slow:"
            " measure again when the machine is quiet.[/]"
        )
    took = f"{measured.seconds:.0f} s{', quick' if measured.is_quick else ''}"
    console.print(f"Written to {output} ({took}); give it to --cluster of plan and sweep.", markup=False)
