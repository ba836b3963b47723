"""The user's file of finished trials."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from autotune.prior.rows import (
    ROWS_VARIABLE,
    MetaRow,
    add_rows,
    count_damaged,
    default_rows_file,
    read_rows,
    remove_rows,
    rows_of_others,
)
from autotune.prior.task import Task
from engine.errors import UserError

pytestmark = pytest.mark.unit

TASK = Task(num_parameters=10**6, num_active_parameters=10**6, total_tokens=10**8)


def row(trial: int, study: str = "mine", **changes: Any) -> MetaRow:
    fields = {
        "study": study,
        "trial": trial,
        "task": TASK.to_data(),
        "hyperparameters": {"learning_rate": 1e-3, "global_batch_tokens": 4096.0, "schedule": "wsd"},
        "loss": 3.5,
    }
    return MetaRow.model_validate({**fields, **changes})


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    rows = [row(0), row(1, loss=None, status="diverged")]
    assert add_rows(tmp_path / "new" / "rows.jsonl", rows) == 2
    assert read_rows(tmp_path / "new" / "rows.jsonl") == rows


def test_a_trial_is_added_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    add_rows(path, [row(0)])
    assert add_rows(path, [row(0, loss=9.0), row(1), row(0, study="other")]) == 2
    assert [(r.study, r.trial, r.loss) for r in read_rows(path)] == [
        ("mine", 0, 3.5),
        ("mine", 1, 3.5),
        ("other", 0, 3.5),
    ]


def test_a_line_torn_by_a_kill_loses_that_row_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    add_rows(path, [row(0), row(1)])
    path.write_bytes(path.read_bytes()[:-20])
    assert [r.trial for r in read_rows(path)] == [0]
    assert count_damaged(path) == 1
    add_rows(path, [row(2)])
    assert [r.trial for r in read_rows(path)] == [0, 2]


def test_those_who_add_and_remove_at_once_lose_nothing_of_each_other(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    add_rows(path, [row(0)])
    with ThreadPoolExecutor(8) as pool:
        for number in range(1, 25):
            pool.submit(add_rows, path, [row(number)])
            pool.submit(remove_rows, path, "another")
            pool.submit(add_rows, path, [row(number)])
    assert sorted(r.trial for r in read_rows(path)) == list(range(25))


def test_a_study_is_removed_and_the_others_stay(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    add_rows(path, [row(0), row(0, study="other"), row(1)])
    assert remove_rows(path, "mine") == 2
    assert [r.study for r in read_rows(path)] == ["other"]
    assert remove_rows(path, "mine") == 0


def test_a_study_is_never_predicted_from_its_own_rows(tmp_path: Path) -> None:
    """Its own: by name and folder, and by name alone where the folder is not known or the study was moved."""
    swept, elsewhere = tmp_path / "a" / "mine", tmp_path / "b" / "mine"
    elsewhere.mkdir(parents=True)
    rows = [
        row(0, folder=str(swept)),
        row(1),
        row(2, folder=str(tmp_path / "gone" / "mine")),
        row(3, folder=str(elsewhere)),
        row(4, "other"),
    ]
    assert [r.trial for r in rows_of_others(rows, swept)] == [3, 4]


def test_studies_of_one_name_in_two_folders_are_two(tmp_path: Path) -> None:
    path, folders = tmp_path / "rows.jsonl", [tmp_path / "a" / "mine", tmp_path / "b" / "mine"]
    for folder in folders:
        folder.mkdir(parents=True)
        assert add_rows(path, [row(0, folder=str(folder))]) == 1
        assert add_rows(path, [row(0, folder=str(folder))]) == 0
    assert len(read_rows(path)) == 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hyperparameters": {"learning_rate": 1e-3, "batch": 1}}, "unknown hyperparameter 'batch'"),
        ({"hyperparameters": {"learning_rate": 1e-3}}, "global_batch_tokens must be a number above zero"),
        ({"loss": None}, "loss must be given"),
        ({"loss": float("nan")}, "finite"),
    ],
)
def test_a_row_that_would_mislead_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        row(0, **changes)


def test_a_row_of_another_version_is_told_with_its_place(tmp_path: Path) -> None:
    from engine.atomic import append_line

    path = tmp_path / "rows.jsonl"
    append_line(path, {**row(0).to_data(), "schema_version": 7})
    with pytest.raises(UserError, match="row 1 cannot be used: schema_version"):
        read_rows(path)


def test_the_file_lies_in_the_data_folder_or_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(ROWS_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert default_rows_file() == tmp_path / "paretune" / "prior_rows.jsonl"
    monkeypatch.setenv(ROWS_VARIABLE, str(tmp_path / "own.jsonl"))
    assert default_rows_file() == tmp_path / "own.jsonl"
