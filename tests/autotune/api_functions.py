"""Functions that worker processes can import, and a program that is killed while it tunes."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import autotune

SPACE = {"x": {"float": [0, 1]}, "kind": ["a", "b"]}


def quadratic(x: float, kind: str) -> float:
    return (x - 0.3) ** 2 + (kind == "b")


def breaks(x: float, kind: str, trial: Any) -> float:
    """Crashes, hangs or leaves on some trials."""
    how = trial.number % 5
    if how == 1:
        os._exit(7)
    if how == 2:
        time.sleep(60)
    if how == 3:
        raise ValueError("as asked")
    return x


def aborts(x: float, kind: str) -> float:
    os.abort()


@autotune.tune(SPACE, {"loss": "minimize"}, trials=4, sampler="random")
def tuned(x: float, kind: str) -> dict[str, float]:
    return {"loss": x, "process": os.getpid()}


def main() -> None:
    """``api_functions.py FOLDER TRIALS SECONDS``: a sweep whose trials take so long."""
    folder, trials, seconds = sys.argv[1:]

    def slow(x: float, kind: str) -> float:
        (Path(folder).parent / "started").touch()
        time.sleep(float(seconds))
        return x

    with autotune.Study(SPACE, {"loss": "minimize"}, folder=folder, sampler="random") as study:
        study.run(slow, trials=int(trials))


if __name__ == "__main__":
    main()
