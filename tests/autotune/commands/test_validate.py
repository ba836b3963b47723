"""``autotune validate``: the JSON that programs read, the tables that people read, and files of a user's own."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from autotune.cli import main

pytestmark = pytest.mark.unit

OWN = """id,model_name,gpu,num_gpus,tp,pp,seq_len,global_batch,precision,step_time_s_equiv
a,LLAMA3-8B,H100,8,1,1,8192,128,bf16,14.2
b,LLAMA3-8B,H100,8,2,1,8192,128,bf16,15.0
c,LLAMA3-70B,H100,64,4,4,8192,128,bf16,
"""

KEYS = {
    "rows", "skipped", "time_median_abs_error_pct", "time_p90_abs_error_pct", "memory_median_abs_error_pct",
    "spearman_mean", "top1_regret_mean_pct", "top3_regret_mean_pct", "family_mean_time_median_abs_error_pct",
    "family_mean_time_p90_abs_error_pct", "family_mean_memory_median_abs_error_pct", "family_mean_spearman_mean",
    "family_mean_top1_regret_mean_pct", "family_mean_top3_regret_mean_pct", "by_family", "predictions",
}  # fmt: skip


def validated(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> dict[str, Any]:
    """The JSON of a file; a NaN in it would be refused."""
    assert main(["validate", str(path), "--json", *options]) == 0

    def refuse(word: str) -> float:
        raise AssertionError(f"{word} in JSON")

    found = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert isinstance(found, dict)
    return found


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's own three runs."""
    path = tmp_path / "mine.csv"
    path.write_text(OWN, encoding="utf-8")
    return path


def test_a_users_own_runs_as_json(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    found = validated(capsys, own)
    assert set(found) >= KEYS
    assert (found["rows"], found["num_timed"], found["skipped"]) == (3, 2, [])
    assert found["spearman_mean"] is None
    assert found["memory_median_abs_error_pct"] is None
    assert [row["id"] for row in found["predictions"]] == ["a", "b", "c"]
    for row in found["predictions"]:
        assert math.isfinite(row["predicted_step_time_s"])
        assert row["predicted_step_time_low_s"] <= row["predicted_step_time_s"] <= row["predicted_step_time_high_s"]
        assert 1 < row["predicted_memory_gb"] < 10_000
        assert row["assumptions"]


def test_the_manual_has_every_key(capsys: pytest.CaptureFixture[str], own: Path, repo_root: Path) -> None:
    found = validated(capsys, own)
    manual = (repo_root / "docs" / "accuracy.md").read_text(encoding="utf-8")
    for key in (*found, *found["predictions"][0]):
        assert f"`{key.removeprefix('family_mean_')}`" in manual, key


def test_a_users_own_runs_as_tables(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    assert main(["validate", str(own)]) == 0
    text = capsys.readouterr().out
    assert "…" not in text
    assert "3 runs estimated, 0 skipped; compared: 2 times, 0 of memory" in text
    assert "warning" not in text
    assert "ranking is not judged" in text
    assert "the catalogue's llama-3-8b" in text


def test_a_time_in_another_unit_is_warned_of(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    own.write_text(OWN.replace("15.0", "1e9") + ",LLAMA3-8B,H100,8,2,1,,128,bf16,3\n", encoding="utf-8")
    assert main(["validate", str(own)]) == 0
    text = capsys.readouterr().out
    assert "warning: 1 measured times are over 50 times off" in text
    assert "seconds a step? b" in text
    assert "seq_len unknown (line-5)" in text


def test_the_stack_can_be_chosen(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    assert validated(capsys, own, "--software", "torchtitan")["rows"] == 3
    assert main(["validate", str(own), "--software", "torchtitn"]) == 2
    assert "did you mean 'torchtitan'" in capsys.readouterr().err


def test_a_table_of_which_nothing_can_be_priced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "none.csv"
    path.write_text("id,gpu,seq_len\nx,abacus,10\n", encoding="utf-8")
    found = validated(capsys, path)
    assert (found["rows"], found["predictions"], found["time_median_abs_error_pct"]) == (0, [], None)
    assert found["skipped"][0]["id"] == "x"
    assert main(["validate", str(path)]) == 0
    text = capsys.readouterr().out
    assert "0 runs estimated, 1 skipped; compared: 0 times" in text
    assert "(x)\n" in text.partition("skipped:")[2], "the row is named"


def test_a_file_that_is_no_table_ends_in_one_message(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    assert main(["validate", str(path)]) == 2
    shown = capsys.readouterr().err
    assert "has no column gpu, seq_len" in shown
    assert "Traceback" not in shown


def test_published_runs(capsys: pytest.CaptureFixture[str], shared_data: Path) -> None:
    found = validated(capsys, shared_data / "published_runs.csv")
    assert found["rows"] + len(found["skipped"]) == 1962
    assert len(found["predictions"]) == found["rows"]
    assert len(found["by_family"]) > 10
    assert found["spearman_mean"] is not None
    assert found["baseline"]["spearman_mean"] > 0.8
    assert found["memory_gate"]["num_oom"] == 4
    assert all(set(row) == {"id", "reason"} and row["reason"] for row in found["skipped"])
