"""One rank of the probe's test: ``python -m tests.engine.probe_worker OUTPUT`` under torchrun."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from engine import probe_steps
from engine.config import RuntimeOptions
from engine.context import open_context
from engine.plan import Plan
from engine.probe_collectives import measure_collectives, measure_overlap
from engine.probe_timing import Timer


def main(output: Path) -> None:
    """Collectives, overlap and the tiny steps, each as short as can be."""
    context = open_context(Plan(dp_shard=2), RuntimeOptions())
    timer = Timer(context, 0.001, min_blocks=3)
    collectives = measure_collectives(timer, 2, (64, 2**16))
    overlap = measure_overlap(timer, 64, 2**14)
    probe_steps._real_cases = lambda *_: iter(())  # type: ignore[assignment]
    steps = probe_steps.measure_steps(timer, seconds=0.001, quick=True)
    if context.is_main:
        found = {
            "collectives": [sample.to_data() for sample in collectives],
            "overlap": overlap.to_data(),
            "steps": [sample.to_data() for sample in steps],
        }
        output.write_text(json.dumps(found))
    context.barrier()
    os._exit(0)  # taken down, gloo's threads sometimes abort


if __name__ == "__main__":
    main(Path(sys.argv[1]))
