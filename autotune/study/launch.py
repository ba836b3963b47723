"""Becomes a trial's command after tying it to the process that asked for it. Run as a script, with the standard library
alone: ``python -I -S launch.py PARENT_PID DEATH_SIGNAL CPUS COMMAND...``.

The kernel sends the death signal when the *thread* that started this process ends, so that thread must outlive it.
Doing this between fork and exec in the parent instead would risk a deadlock, because the parent has threads.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Arguments: the parent's number, the signal to get when it dies, CPUs as ``0,1`` (or ``-``), then the command."""
    parent, death_signal, cpus, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if cpus != "-":
            os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    if os.getppid() != int(parent):  # it died before the signal was asked for
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
