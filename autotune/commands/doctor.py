"""``autotune doctor``: what this machine has, and what is missing for what."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from autotune.paths import DEFAULT_RUNS
from autotune.specs import machine
from autotune.specs.cluster import probe_cluster
from engine.errors import UserError
from engine.units import GIB, format_bytes

Status = Literal["ok", "optional", "missing"]

LEAST_PYTHON = (3, 11)
LEAST_FREE_BYTES = 2 * GIB
PROBE_TIMEOUT_SECONDS = 180.0


@dataclass(frozen=True)
class Package:
    """A package that a part of the product needs."""

    module: str
    distribution: str
    serves: str
    extra: str | None = None
    """The extra of ours that brings it; None for one that always comes along."""


PACKAGES = (
    Package("optuna", "optuna", "sweeps"),
    Package("plotly", "plotly", "reports"),
    Package("jinja2", "jinja2", "reports"),
    Package("moocore", "moocore", "reports"),
    Package("safetensors", "safetensors", "weights in and out"),
    Package("tokenizers", "tokenizers", "Hugging Face tokenizers"),
    Package("tensorboard", "tensorboard", "TensorBoard logging", "logging"),
    Package("mlflow", "mlflow", "MLflow logging", "logging"),
    Package("triton", "triton", "GPU extras", "gpu"),
    Package("pynvml", "nvidia-ml-py", "GPU extras", "gpu"),
)


@dataclass(frozen=True)
class Check:
    """One thing looked at."""

    area: str
    name: str
    status: Status
    detail: str
    """What was found, or what is missing."""
    hint: str = ""
    """What to do about it."""


@dataclass
class Diagnosis:
    """All checks, and what this machine is ready for."""

    checks: list[Check] = field(default_factory=list)
    ready: dict[str, str] = field(default_factory=dict)
    """What for -> empty when ready, else what is missing."""

    def add(self, area: str, name: str, status: Status, detail: str, hint: str = "") -> bool:
        """Note a check; true when it is ok."""
        self.checks.append(Check(area, name, status, detail, hint if status != "ok" else ""))
        return status == "ok"


def command(
    runs_dir: Annotated[Path, typer.Option(help="Folder of studies and jobs.")] = DEFAULT_RUNS,
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
) -> None:
    """Say what this machine has, and what is missing for what."""
    diagnosis = diagnose(runs_dir)
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in diagnosis.checks], "ready": diagnosis.ready}, indent=2))
    else:
        _print(diagnosis)
    if any(check.status == "missing" for check in diagnosis.checks):
        raise typer.Exit(1)


def diagnose(runs: Path) -> Diagnosis:
    """Look at Python, the machine, torch (in a process of its own), folders and packages.

    Args:
        runs: The folder that studies and jobs go to.
    """
    diagnosis = Diagnosis()
    _check_machine(diagnosis)
    facts = probe_torch()
    can_train = _check_torch(diagnosis, facts)
    runs_ok = _check_folder(diagnosis, "runs folder", runs, "choose another with --runs-dir, or free some space")
    cache_ok = _check_cache(diagnosis, facts)
    present = {package.module: _check_package(diagnosis, package) for package in PACKAGES}
    _check_compiler(diagnosis)

    missing = [] if can_train else ["a working torch with gloo"]
    missing += [] if runs_ok else ["a writable runs folder with free space"]
    missing += [] if cache_ok else ["a writable cache folder"]
    diagnosis.ready["training"] = ", ".join(missing)
    gpu_error = facts.get("error") or (None if facts.get("devices") else "a GPU that torch can use") or facts["nccl"]
    diagnosis.ready["training on GPUs"] = gpu_error or diagnosis.ready["training"]
    for purpose in dict.fromkeys(package.serves for package in PACKAGES):
        lacking = [p.distribution for p in PACKAGES if p.serves == purpose and not present[p.module]]
        diagnosis.ready[purpose] = ", ".join(lacking)
    if diagnosis.ready["training"]:
        diagnosis.ready["sweeps"] = diagnosis.ready["sweeps"] or "what training needs"
    return diagnosis


def probe_torch() -> dict[str, Any]:
    """What ``engine.probe`` prints, or ``error`` with the reason why it didn't."""
    command = [sys.executable, "-P", "-m", "engine.probe"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"importing torch took longer than {PROBE_TIMEOUT_SECONDS:.0f} s"}
    except OSError as error:
        return {"error": f"cannot start {sys.executable}: {error.strerror}"}
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        facts: dict[str, Any] = json.loads(lines[-1])
        return facts
    reason = (done.stderr.strip().splitlines() or [f"the probe ended with exit status {done.returncode}"])[-1]
    return {"error": reason}


def _check_machine(diagnosis: Diagnosis) -> None:
    version = platform.python_version()
    needed = ".".join(map(str, LEAST_PYTHON))
    diagnosis.add(
        "machine",
        "Python",
        "ok" if sys.version_info >= LEAST_PYTHON else "missing",
        f"{version} ({sys.executable})",
        f"install Python {needed} or newer",
    )
    diagnosis.add("machine", "system", "ok", f"{platform.system()} {platform.release()}, {platform.machine()}")
    cores, cpus = machine.num_usable_cores(), len(machine.usable_cpus())
    diagnosis.add("machine", "cores", "ok", f"{cores} usable physical, {cpus} logical in the affinity mask")
    diagnosis.add("machine", "memory", "ok", format_bytes(machine.memory_limit_bytes()))
    try:
        diagnosis.add("machine", "cluster 'local'", "ok", probe_cluster().describe())
    except UserError as error:
        diagnosis.add("machine", "cluster 'local'", "missing", error.message, error.hint or "")


def _check_torch(diagnosis: Diagnosis, facts: dict[str, Any]) -> bool:
    """Whether training can work at all."""
    if "error" in facts:
        return diagnosis.add("torch", "torch", "missing", facts["error"], "pip install --force-reinstall torch")
    build = facts["accelerator"] or "CPU only"
    diagnosis.add("torch", "torch", "ok", f"{facts['torch']} ({build})")
    devices = facts["devices"]
    gpus = machine.nvidia_gpus()
    if devices:
        told = ", ".join(f"{device['name']} ({format_bytes(device['memory_bytes'])})" for device in devices)
        diagnosis.add("torch", "GPUs", "ok", told)
    elif gpus:
        hint = "install a torch build for CUDA (see pytorch.org)" if not facts["accelerator"] else "update the driver"
        diagnosis.add("torch", "GPUs", "optional", f"{len(gpus)} {gpus[0].name}, but torch can't use them", hint)
    else:
        diagnosis.add("torch", "GPUs", "optional", "none; training runs on CPU")
    nccl = facts["nccl"]
    diagnosis.add("torch", "NCCL", "optional" if nccl else "ok", nccl or "usable")
    gloo = facts["gloo"]
    return diagnosis.add(
        "torch",
        "gloo",
        "missing" if gloo else "ok",
        gloo or "a process group starts",
        "make the host name resolve, or set GLOO_SOCKET_IFNAME to an interface such as lo",
    )


def _check_cache(diagnosis: Diagnosis, facts: dict[str, Any]) -> bool:
    if facts.get("cache"):
        return _check_folder(diagnosis, "corpus cache", Path(facts["cache"]), "set PARETUNE_CACHE to another folder")
    reason = facts.get("cache_error") or "not looked at without torch"
    return diagnosis.add("folders", "corpus cache", "missing", reason)


def _check_folder(diagnosis: Diagnosis, name: str, folder: Path, hint: str) -> bool:
    """A folder (or, while it isn't there, its nearest parent) can be written to and has space."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
        free = shutil.disk_usage(existing).free
    except OSError as error:
        return diagnosis.add("folders", name, "missing", f"{folder}: {error.strerror}", hint)
    new = "" if existing == folder.absolute() else ", will be created"
    detail = f"{folder} ({format_bytes(free)} free{new})"
    return diagnosis.add("folders", name, "ok" if free >= LEAST_FREE_BYTES else "missing", detail, hint)


def _check_package(diagnosis: Diagnosis, package: Package) -> bool:
    if importlib.util.find_spec(package.module) is not None:
        return diagnosis.add("packages", package.distribution, "ok", package.serves)
    if package.extra is None:
        hint = f"pip install {package.distribution}"
        return diagnosis.add("packages", package.distribution, "missing", f"needed for {package.serves}", hint)
    hint = f"pip install -e '.[{package.extra}]'"
    return diagnosis.add("packages", package.distribution, "optional", f"for {package.serves}", hint)


def _check_compiler(diagnosis: Diagnosis) -> None:
    names = (os.environ.get("CXX", "c++"), "g++", "clang++")
    found = next((path for name in names if (path := shutil.which(name))), None)
    diagnosis.add(
        "packages",
        "C++ compiler",
        "ok" if found else "optional",
        found or "for torch.compile",
        "install g++ or clang++",
    )


def _print(diagnosis: Diagnosis) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    colours = {"ok": "green", "optional": "yellow", "missing": "red"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(3):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    area = ""
    for check in diagnosis.checks:
        shown, area = ("" if check.area == area else check.area), check.area
        status = f"[{colours[check.status]}]{check.status}[/]"
        hint = f"\n[dim]{_plain(check.hint)}[/]" if check.hint else ""
        table.add_row(f"[bold]{shown}[/]", check.name, status, _plain(check.detail) + hint)
    console.print(table)
    console.print("\n[bold]Ready for[/]")
    for purpose, missing in diagnosis.ready.items():
        told = f"[yellow]no[/], missing: {_plain(missing)}" if missing else "[green]yes[/]"
        console.print(f"  {purpose}: {told}")


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
