"""``autotune warmstart`` and ``autotune prior`` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autotune.cli import main
from autotune.prior.rows import ROWS_VARIABLE, MetaRow, add_rows
from autotune.prior.task import HYPERPARAMETERS, Task

pytestmark = pytest.mark.unit

CONFIG = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 1024, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 2816, "vocab_size": 32000,
    "num_local_experts": 8, "num_experts_per_tok": 2, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(autouse=True)
def rows_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's own file, empty and in a temporary place."""
    path = tmp_path / "data" / "rows.jsonl"
    monkeypatch.setenv(ROWS_VARIABLE, str(path))
    return path


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["warmstart", *arguments, "--json"]) == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_the_answer_has_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(capsys, "--params", "1B", "--tokens", "20B")
    assert 5e-4 < answer["learning_rate"] < 4e-3
    assert 2e5 < answer["global_batch_tokens"] < 1e6
    assert {"weight_decay", "warmup_ratio", "beta1", "beta2", "schedule"} <= set(answer)
    assert answer["support"] == "inside"
    assert answer["predicted_loss"]["sd"] > 0
    low, high = answer["interval_90"]["learning_rate"]
    assert low < answer["learning_rate"] < high
    assert len(answer["portfolio"]) == 5
    assert set(answer["portfolio"][0]) <= set(HYPERPARAMETERS)


def test_quantities_are_read_as_people_write_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(capsys, "--params", "1B", "--tokens", "20B") == ask(capsys, "--params", "1e9", "--tokens", "20000M")


def test_people_get_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmstart", "--params", "500k", "--tokens", "60k", "--seq-len", "128"]) == 0
    shown = capsys.readouterr().out
    assert "learning_rate" in shown
    assert "fewer parameters" in shown


def test_parameters_are_counted_from_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    task = ask(capsys, "--model", str(path), "--tokens", "8B")["task"]
    experts = 12 * 8 * 3 * 1024 * 2816
    assert experts < task["num_parameters"] < 1.1 * experts  # neither embedding nor head
    assert task["num_active_parameters"] < 0.35 * task["num_parameters"]
    assert task["family"] == "moe"


def test_a_proposed_batch_holds_whole_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(capsys, "--params", "1B", "--tokens", "20B", "--seq-len", "3000")
    batches = [point["global_batch_tokens"] for point in (answer, *answer["portfolio"])]
    assert all(batch >= 3000 and batch % 3000 == 0 for batch in batches)


def test_a_fixed_batch_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(capsys, "--params", "1B", "--tokens", "20B", "--batch", "2Mi-tokens")
    assert answer["global_batch_tokens"] == 2 * 2**20
    assert {point["global_batch_tokens"] for point in answer["portfolio"]} == {2 * 2**20}
    assert "global_batch_tokens" not in answer["interval_90"]


def test_what_is_fixed_is_kept_and_the_rest_follows(capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--params", "1B", "--tokens", "20B")
    free, sequences = ask(capsys, *size), ask(capsys, *size, "--batch", "64-seqs", "--seq-len", "2Ki")
    assert sequences["global_batch_tokens"] == 64 * 2048
    assert sequences["interval_90"]["learning_rate"][1] < free["interval_90"]["learning_rate"][1]
    assert sequences["predicted_loss"]["mean"] > free["predicted_loss"]["mean"]
    far = ask(capsys, *size, "--batch", "4Ki")
    assert (far["support"], far["predicted_loss"]) == ("outside", None)
    rate = ask(capsys, *size, "--learning-rate", "0.01")
    assert (rate["learning_rate"], rate["support"]) == (0.01, "extrapolated")
    assert "learning_rate" not in rate["interval_90"]
    constant = ask(capsys, *size, "--schedule", "constant", "--optimizer", "AdamW")
    assert constant["schedule"] == "constant"
    assert {point["schedule"] for point in constant["portfolio"]} == {"constant"}
    assert constant["predicted_loss"]["mean"] > free["predicted_loss"]["mean"] + 0.03
    assert constant["task"]["optimizer"] == "adamw"


def test_own_runs_move_the_answer_unless_left_aside(capsys: pytest.CaptureFixture[str], rows_file: Path) -> None:
    before = ask(capsys, "--params", "20M", "--tokens", "200M")["learning_rate"]
    task = Task(num_parameters=15_000_000, num_active_parameters=15_000_000, total_tokens=150_000_000)
    rows = [
        MetaRow(
            study="mine",
            trial=number,
            task=task,
            hyperparameters={"learning_rate": 4 * before * 2.0 ** (number - 3), "global_batch_tokens": 4e4},
            loss=3.0 + 0.02 * (number - 3) ** 2,
        )
        for number in range(7)
    ]
    add_rows(rows_file, rows)
    answer = ask(capsys, "--params", "20M", "--tokens", "200M")
    assert answer["learning_rate"] > 1.5 * before
    assert answer["num_own_rows"] == 7
    assert ask(capsys, "--params", "20M", "--tokens", "200M", "--no-own")["learning_rate"] == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tokens", "20B"], "--params and --model"),
        (["--params", "1B", "--model", "config.json", "--tokens", "20B"], "--params and --model"),
        (["--params", "0", "--tokens", "20B"], "--params must be above zero"),
        (["--params", "much", "--tokens", "20B"], "--params must be a whole number, got 'much'"),
        (["--params", "1B", "--tokens", "-5"], "--tokens"),
        (["--params", "1B", "--tokens", "20B", "--active-params", "2B"], "--active-params 2B is more than"),
        (["--params", "1B", "--tokens", "20B", "--schedule", "step"], "'schedule'"),
        (["--model", "nowhere.json", "--tokens", "20B"], "nowhere.json"),
        (["--params", "7b", "--tokens", "20B"], "did you mean 7B?"),
        (["--params", "1B", "--tokens", "20"], "--tokens 20 is less than one sequence of 2048"),
        (["--params", "1B", "--tokens", "20B", "--batch", "512"], "did you mean 512-seqs?"),
        (["--params", "1B", "--tokens", "20B", "--batch", "100B"], "more than the 20000000000 of the whole run"),
        (["--params", "1B", "--tokens", "20B", "--learning-rate", "0"], "--learning-rate must be above 0"),
        (["--params", "1B", "--tokens", "20B", "--optimizer", "adamwx"], "did you mean adamw? known are adamw,"),
        (["--params", "1B", "--tokens", "20B", "--seq-len", "0"], "--seq-len must be above zero"),
        (["--params", "1B", "--tokens", "20B", "--rows", "x", "--no-own"], "exclude each other"),
        (["--params", "1B", "--tokens", "20B", "--rows", "nowhere.jsonl"], "nowhere.jsonl: there is no such file"),
    ],
)
def test_mistakes_are_told_in_one_message(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["warmstart", *arguments]) == 2
    shown = capsys.readouterr().err
    assert told in shown
    assert "Traceback" not in shown


def test_own_runs_are_shown_and_removed(capsys: pytest.CaptureFixture[str], rows_file: Path) -> None:
    task = Task(num_parameters=10**7, num_active_parameters=10**7, total_tokens=10**8)
    values: dict[str, float | str] = {"learning_rate": 1e-3, "global_batch_tokens": 1e4}
    add_rows(rows_file, [MetaRow(study="mine", trial=0, task=task, hyperparameters=values, loss=3.25)])
    assert main(["prior", "show"]) == 0
    assert "mine" in capsys.readouterr().out
    assert main(["prior", "show", "--json"]) == 0
    studies = json.loads(capsys.readouterr().out)["studies"]
    assert [(s["study"], s["num_rows"], s["best_loss"]) for s in studies] == [("mine", 1, 3.25)]
    rows_file.write_text(rows_file.read_text() + "changed by hand\n")
    assert main(["prior", "show"]) == 0
    assert "1 line is damaged" in capsys.readouterr().err
    assert main(["prior", "remove", "other"]) == 2
    assert "studies in it: mine" in capsys.readouterr().err
    assert main(["prior", "remove", "mine"]) == 0
    assert main(["prior", "show"]) == 0
    assert "no own runs" in capsys.readouterr().out


def test_a_study_that_does_not_exist_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["prior", "add", "nothing", "--runs-dir", str(tmp_path)]) == 2
    assert "nothing" in capsys.readouterr().err
