"""Processes told apart beyond their recycled numbers: identities for leases, and the marked processes of a trial.

A process number alone says little: it is used again after the process ended, and it means nothing on another machine.
So the owner of a lease is known by machine, number and start time, and everything a trial starts carries a random mark
in its environment, which children inherit through any session or process group. Only marked processes are ever ended.
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import psutil

from engine.atomic import write_json

MARK = "PARETUNE_TRIAL_MARK"
"""Environment variable that every process of a trial carries."""

PROCESS_FILE = "process.json"

_IS_LINUX = platform.system() == "Linux"


@cache
def machine_id() -> str:
    """Names this boot of this machine, and the process namespace in it: equal ids mean that process numbers compare."""
    if _IS_LINUX:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    return f"{platform.node()}/{psutil.boot_time():.0f}"


def start_time(pid: int) -> float | None:
    """When process ``pid`` started, on a clock that no time adjustment moves; None when there is none (or a zombie)."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if not _IS_LINUX:
            return process.create_time()
        # Ticks since boot: field 22; the name in brackets before it may hold spaces and brackets.
        return float(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    except (psutil.Error, OSError):
        return None


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of one machine, never confused with a later one of the same number."""

    machine: str
    pid: int
    started: float

    @classmethod
    def current(cls) -> Self:
        """This process."""
        return cls(machine_id(), os.getpid(), start_time(os.getpid()) or 0.0)

    def is_alive(self) -> bool | None:
        """Whether it still runs; None when it is (or was) on another machine, where nobody here can tell."""
        if self.machine != machine_id():
            return None
        return start_time(self.pid) == self.started

    def to_data(self) -> dict[str, Any]:
        """Plain data; ``ProcessIdentity(**data)`` reads it."""
        return asdict(self)


def new_mark(folder: Path) -> str:
    """A fresh mark for the processes about to be started, recorded in the trial's folder first: whoever comes after a
    crash finds them by it."""
    mark = uuid.uuid4().hex
    write_json(folder / PROCESS_FILE, {"mark": mark})
    return mark


def recorded_mark(folder: Path) -> str | None:
    """The mark of the last start in this folder."""
    try:
        mark = json.loads((folder / PROCESS_FILE).read_text(encoding="utf-8"))["mark"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return mark if isinstance(mark, str) and len(mark) == 32 else None


def marked_processes(mark: str) -> list[psutil.Process]:
    """Running processes of ours that carry ``mark``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:  # ended meanwhile, or another user's
            continue
    return found


def end_marked(mark: str, *, timeout_seconds: float = 10.0) -> int:
    """Kill every process that carries ``mark``, and what they start meanwhile.

    Returns:
        How many were killed.
    """
    killed: set[int] = set()
    deadline = time.monotonic() + timeout_seconds
    while processes := marked_processes(mark):
        for process in processes:
            try:
                process.kill()  # psutil compares the start time first
                killed.add(process.pid)
            except psutil.Error:
                continue
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    return len(killed)


def tree_memory_bytes(pid: int, *, above: int = 0) -> int:
    """Resident memory of a process and all its descendants.

    Summed resident sizes count shared pages (the libraries of every rank) once per process, so where that sum exceeds
    ``above`` the proportional sizes are taken instead, which are right but slower to read.
    """
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0
    resident = sum(_memory(process, "rss") for process in processes)
    if resident <= above:
        return resident
    return sum(_memory(process, "pss") for process in processes)


def _memory(process: psutil.Process, kind: str) -> int:
    try:
        if kind == "pss":
            full = process.memory_full_info()
            return int(getattr(full, "pss", full.rss))
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
