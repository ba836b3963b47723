"""A sample of the equality matrix (``benchmarks/parallel_matrix.py`` runs all of it): every axis of parallelism, every
pipeline schedule and the combinations most often wrong elsewhere train as one process does on the whole batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.parallel.launch import result, run_cases
from tests.engine.parallel.matrix import AXES, SCHEDULES, TOLERANCE, Cell, cells, difference, sample

pytestmark = pytest.mark.dist

SAMPLE = sample()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with what each cell gave."""
    folder = tmp_path_factory.mktemp("matrix")
    for world_size in (2, 4, 8):
        run_cases([cell.case for cell in SAMPLE if cell.case and cell.world_size == world_size], world_size, folder)
    return folder


@pytest.mark.parametrize("cell", SAMPLE, ids=lambda cell: cell.name)
def test_combination_equals_one_process(cell: Cell, results: Path) -> None:
    assert not cell.refused
    assert cell.case is not None
    worst = difference(cell.case, result(cell.case, results))
    assert worst.ratio <= TOLERANCE, worst


@pytest.mark.unit
def test_sample_covers_every_axis_and_schedule() -> None:
    assert {axis for cell in SAMPLE for axis in cell.axes} == set(AXES)
    used = {cell.case.plan.get("schedule", "1f1b") for cell in SAMPLE if cell.case}
    assert used == {name for names in SCHEDULES.values() for name in names}


@pytest.mark.unit
def test_every_single_axis_and_pair_is_a_cell() -> None:
    found = {cell.axes for cell in cells()}
    assert all((axis,) in found for axis in AXES)
    assert all((a, b) in found for a in AXES for b in AXES if list(AXES).index(a) < list(AXES).index(b))
    assert max(cell.world_size for cell in cells() if cell.case) <= 8
