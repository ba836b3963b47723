"""``autotune plan`` as a user calls it; and a few answers kept as golden files.

The golden files hold the best plan and rounded figures. After a change of the cost model that is meant to move them:

    python tests/autotune/commands/test_plan.py --write
"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.cli import main
from autotune.search.answer import Answer
from autotune.search.question import ask
from autotune.search.solve import solve
from autotune.specs.cluster import parse_cluster
from engine.config import RunConfig, dump_run
from engine.plan import Plan
from engine.spec import Hyperparameters, ModelSpec, MoESpec, Workload
from engine.yaml_file import dump_yaml, read_yaml

pytestmark = pytest.mark.unit

GOLDENS = Path(__file__).with_name("goldens")

DENSE = ModelSpec(
    name="dense-8b", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336,
    vocab_size=128256, max_positions=8192,
)  # fmt: skip
SPARSE = ModelSpec(
    name="sparse-47b", family="mixtral", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128,
    ffn_size=14336, vocab_size=32000, max_positions=32768,
    moe=MoESpec(num_experts=8, experts_per_token=2, ffn_size=14336),
)  # fmt: skip
LARGE = DENSE.changed(
    name="dense-405b", num_layers=126, hidden_size=16384, num_heads=128, ffn_size=53248
)  # of the size of Llama 3.1's largest

NARROW = ["dp_replicate=1", "schedule=1f1b,interleaved_1f1b", "virtual_stages=1,2", "rank_order=tp-cp-dp-pp"]
"""Pins that leave a space which is searched in a moment."""

QUESTIONS: dict[str, dict[str, Any]] = {
    "dense_8_h100": {"model": DENSE, "cluster": "h100x8:1", "sequence_length": 8192, "global_batch": "64"},
    "sparse_64_h200": {"model": SPARSE, "cluster": "h200x8:8", "sequence_length": 4096, "global_batch": "4Mi-tokens"},
    "large_512_a100": {"model": LARGE, "cluster": "a100x8:64", "sequence_length": 4096, "global_batch": "512"},
    "large_16_h100": {"model": LARGE, "cluster": "h100x8:2", "sequence_length": 8192, "global_batch": "64"},
}
"""Name of the golden file -> the question; nothing fits the last one."""


def answer_to(name: str) -> Answer:
    question = dict(QUESTIONS[name])
    cluster = parse_cluster(question.pop("cluster"))
    return solve(ask(cluster=cluster, pins=NARROW, **question), top=3)


def essence(answer: Answer) -> dict[str, Any]:
    """What a golden file holds."""
    plans = answer.plans or ((answer.misfit.closest,) if answer.misfit else ())
    return {
        "fits": bool(answer.plans),
        "combinations": answer.counts.num_combinations,
        "removed": dict(answer.counts.removed),
        "plans": [
            {
                "plan": plan.plan.describe(),
                "step_seconds": float(f"{plan.step_seconds.value:.2g}"),
                "memory_gib": float(f"{plan.memory_bytes.value / 2**30:.2g}"),
                "mfu": plan.mfu and round(plan.mfu.value, 2),
            }
            for plan in plans
        ],
        "fixes": [fix.id for fix in answer.misfit.fixes] if answer.misfit else [],
    }


@pytest.mark.parametrize("name", QUESTIONS)
def test_answers_are_those_of_the_golden_files(name: str) -> None:
    assert essence(answer_to(name)) == json.loads((GOLDENS / f"{name}.json").read_text(encoding="utf-8")), (
        "meant to change? python tests/autotune/commands/test_plan.py --write"
    )


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the models as YAML, and a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for model in (DENSE, LARGE):
        (tmp_path / f"{model.name}.yaml").write_text(dump_yaml(model.to_data()), encoding="utf-8")
    return tmp_path


def arguments(*more: str, model: str = "dense-8b.yaml", cluster: str = "h100x8:1", batch: str = "64") -> list[str]:
    question = ["plan", "--model", model, "--cluster", cluster, "--seq-len", "8192", "--global-batch", batch]
    return [*question, *(word for pin in NARROW for word in ("--pin", pin)), *more]


def run_json(capsys: pytest.CaptureFixture[str], *more: str, code: int = 0, **question: str) -> Any:
    assert main(arguments(*more, "--json", **question)) == code
    return json.loads(capsys.readouterr().out)


def test_the_answer_fits_a_narrow_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("--path", "--top", "4")) == 0
    text = capsys.readouterr().out
    for part in ("MFU", "causal attention, no recompute", "What binds", "Why not plan 2", "What each choice is worth",
                 "What would help most", "twice the devices", "From data parallelism alone", "removed by"):  # fmt: skip
        assert part in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_json_has_the_documented_keys(folder: Path, capsys: pytest.CaptureFixture[str], repo_root: Path) -> None:
    data = run_json(capsys, "--path", "--replay", "--top", "3")
    manual = (repo_root / "docs" / "planner.md").read_text(encoding="utf-8")
    for key in (*data, *data["counts"], *data["plans"][0], *data["plans"][0]["against_best"]):
        assert f"`{key}`" in manual, key
    assert [plan["rank"] for plan in data["plans"]] == [1, 2, 3]
    steps = [plan["step_seconds"]["value"] for plan in data["plans"]]
    assert steps == sorted(steps)
    assert data["plans"][0]["against_best"]["ratio"] == 0
    assert len(data["replays"]) == 3
    best = data["plans"][0]
    assert data["ladder"][-1]["best"]["step_seconds"] == pytest.approx(best["step_seconds"])
    assert all(rung["gain_ratio"] is None or rung["gain_ratio"] >= -1e-9 for rung in data["ladder"])
    assert sum(share["ratio"] for share in data["shares"]) == pytest.approx(1)


def test_csv_is_one_row_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("--csv", "--top", "3")) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["rank"] for row in rows] == ["1", "2", "3"]
    assert float(rows[0]["step_seconds_low"]) < float(rows[0]["step_seconds"]) < float(rows[0]["step_seconds_high"])
    parts = [float(value) for name, value in rows[0].items() if name.startswith("time_")]
    assert sum(parts) == pytest.approx(float(rows[0]["step_seconds"]))


def test_pins_hold_and_are_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "--pin", "tp=2", "pp=2", "--pin", "mb=1,2")
    assert data["pins"]["tp"] == [2]
    for plan in data["plans"]:
        assert (plan["plan"]["tp"], plan["plan"]["pp"]) == (2, 2)
        assert plan["plan"]["micro_batch_size"] in (1, 2)
    assert main(arguments("--pin", "tp=8")) == 0
    text = capsys.readouterr().out
    assert "tp 8" in text
    assert "without the pin tp 8" in text


def test_the_batch_is_rounded_and_that_is_said(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, batch="1M-tokens")
    assert data["global_batch_size"] == 122
    assert "rounded to 122" in data["notes"][0]
    data = run_json(capsys, "--pin", "dp=8", batch="1M-tokens")
    assert data["global_batch_size"] == 120
    assert "no multiple of 8, as pinned by dp=8; 120 are taken" in data["notes"][0]
    data = run_json(capsys, "--pin", "mb=7", "--top", "1", batch="512")
    assert data["global_batch_size"] == 504, "511 = 7 * 73 would leave no data parallelism"


def test_when_nothing_fits_it_says_what_would(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, model="dense-405b.yaml", cluster="h100x8:2", code=1)
    misfit = data["misfit"]
    assert misfit["excess_bytes"] > 0
    assert misfit["closest"]["memory_bytes"]["high"] > data["memory_limit_bytes"]
    assert len(misfit["fixes"]) >= 2
    assert all(fix["best"]["fits"] for fix in misfit["fixes"])
    assert main(arguments(model="dense-405b.yaml", cluster="h100x8:2")) == 1
    text = capsys.readouterr().out
    assert "No plan fits" in text
    assert "What makes it fit" in text
    data = run_json(capsys, "--max-memory", "14GiB", "--pin", "tp=1", code=1)
    assert any(fix["id"].startswith("memory") for fix in data["misfit"]["fixes"])


def test_a_cpu_is_offered_what_it_can_have(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = DENSE.changed(name="small", num_layers=4, hidden_size=256, num_heads=4, num_kv_heads=4, head_dim=64,
                          ffn_size=704, vocab_size=4096)  # fmt: skip
    (folder / "small.yaml").write_text(dump_yaml(small.to_data()), encoding="utf-8")
    measured = parse_cluster("cpu:1").to_data() | {"measured": {
        "started": "2026-01-01T00:00:00Z", "host": "h", "device_name": "c", "versions": {}, "seconds": 1,
        "is_quick": False, "busy_cpus": 0, "noise_ratio": 0,
    }}  # fmt: skip
    measured["figures"]["matmul"] |= {"bf16": {"tflops": 1.0}, "fp32": {"tflops": 0.2}}
    (folder / "cpu.yaml").write_text(dump_yaml(measured), encoding="utf-8")
    data = run_json(capsys, model="small.yaml", cluster="cpu.yaml", batch="8")
    assert data["software"] == "paretune"
    changes = {change["id"] for change in data["changes"]}
    assert "precision_bf16" in changes
    assert "devices_x2" not in changes
    data = run_json(capsys, "--max-memory", "50MiB", model="small.yaml", cluster="cpu.yaml", batch="8", code=1)
    told = str([fix["id"] for fix in data["misfit"]["fixes"]]) + str(data["misfit"]["tried"])
    assert "host memory" not in told
    assert "offload" not in told
    assert "devices" not in told


def test_a_rival_is_told_apart_part_by_part(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best = run_json(capsys, "--save", "best.yaml")["plans"][0]["plan"]
    assert read_yaml("best.yaml").data == best
    own = run_json(capsys, "--compare", "best.yaml")["rival"]
    assert own["against_best"]["seconds"] == pytest.approx(0)
    (folder / "slow.yaml").write_text("{tp: 8, zero_stage: 1, recompute: full, precision: bf16}", encoding="utf-8")
    assert main(arguments("--compare", "slow.yaml")) == 0
    text = capsys.readouterr().out
    assert "slower" in text.partition("slow.yaml")[2]
    assert "recompute" in text.partition("slow.yaml")[2]
    (folder / "short.yaml").write_text("{tp: 8, zero_stage: 1}", encoding="utf-8")
    short = run_json(capsys, "--compare", "short.yaml")["rival"]
    assert short["plan"]["precision"] == "bf16", "the question's, not the default of a plan"
    assert short["notes"][0].startswith("not in its file, so assumed: precision=bf16, micro_batch_size=1,")
    assert "sequence_parallel=false" in short["notes"][0]
    assert "zero_stage" not in short["notes"][0]
    (folder / "dp.yaml").write_text("{tp: 4, dp: 2}", encoding="utf-8")
    assert main(arguments("--compare", "dp.yaml")) == 2
    assert "write dp_shard" in capsys.readouterr().err
    (folder / "wrong.yaml").write_text("{tp: 3, precision: bf16}", encoding="utf-8")
    wrong = run_json(capsys, "--compare", "wrong.yaml")["rival"]
    assert wrong["estimated"] is None
    assert any("tp.divides_heads" in message for message in wrong["broken_rules"])


def test_a_run_file_is_a_model_and_a_rival(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunConfig(
        model=DENSE,
        workload=Workload(sequence_length=8192, total_tokens=10**9),
        hyperparameters=Hyperparameters(global_batch_size=32),
        plan=Plan(dp_shard=8, precision="bf16", recompute="full"),
    )
    (folder / "run.yaml").write_text(dump_run(run), encoding="utf-8")
    data = run_json(capsys, "--compare", "run.yaml", model="run.yaml")
    assert data["model"]["name"] == DENSE.name
    assert data["rival"]["plan"]["dp_shard"] == 8
    assert "batch of 32 sequences" in data["rival"]["notes"][0]


def test_several_objectives_give_their_front(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "--objective", "speed", "--objective", "memory", "--top", "1000")
    assert run_json(capsys, "--objective", "speed,memory", "--top", "1000")["plans"] == data["plans"]
    points = [(plan["step_seconds"]["value"], plan["memory_bytes"]["value"]) for plan in data["plans"]]
    assert len(points) > 2
    assert points == sorted(points)
    memory = [size for _, size in points]
    assert memory == sorted(memory, reverse=True)
    shown = run_json(capsys, "--objective", "speed,memory", "--top", "3")
    assert [plan["plan"] for plan in shown["plans"]][::2] == [data["plans"][0]["plan"], data["plans"][-1]["plan"]]
    assert f"the front has {len(points)} plans, 3 are shown" in " ".join(shown["notes"])
    least = run_json(capsys, "--objective", "memory", "--top", "1")["plans"][0]
    assert least["memory_bytes"]["value"] == pytest.approx(min(memory))
    few = run_json(capsys, "--objective", "devices", "--top", "1")["plans"][0]
    assert few["num_devices"] < 8


def test_only_what_the_engine_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = run_json(capsys, "--engine", "--software", "default")
    assert data["software"] == "paretune"
    assert "that of paretune is assumed, not of default" in data["notes"][0]
    data = run_json(capsys, "--engine")
    assert data["engine_only"]
    assert not data["notes"]
    assert data["software"] == "paretune"
    for plan in data["plans"]:
        assert plan["plan"]["recompute"] != "selective"
        assert not plan["plan"]["overlap_tp"]


@pytest.mark.parametrize(
    ("changed", "message", "hint"),
    [
        (["--model", "nowhere.json"], "file not found", "check the path"),
        (["--cluster", "h10x8"], "unknown device 'h10'", "h100"),
        (["--pin", "tq=2"], "no choice 'tq'", "did you mean tp?"),
        (["--pin", "tp"], "NAME=VALUE", "--pin tp=8"),
        (["--pin", "expert_replicas=2"], "no estimate depends on it", "autotune sweep"),
        (["--pin", "cp_attention=all_gather"], "cp_attention=all_gather is pinned", "--engine"),
        (["--pin", "recompute=fulll"], "recompute can't be 'fulll'", "full"),
        (["--pin", "tp=3"], "tp 3 does not divide the devices (8)", "allowed are 1, 2, 4, 8"),
        (["--pin", "pp=8,tp=2"], "is the number of devices (8)", "unpin a degree"),
        (["--pin", "precision=bf16"], "option of its own", "--precision bf16"),
        (["--global-batch", "many"], "must be a whole number", "4Mi"),
        (["--pin", "tp=-2"], "tp must be a positive whole number", "4096"),
        (["--seq-len", "-8"], "--seq-len must be a positive whole number", "4096"),
        (["--seq-len", "0"], "--seq-len must be 1 or more", "8192"),
        (["--max-memory", "0"], "above zero", "70GiB"),
        (["--max-memory", "70"], "is 70 bytes", "did you mean 70GiB?"),
        (["--price", "0"], "--price must be above 0", "--price 2.5"),
        (["--watts", "-1"], "--watts must be above 0", "--watts 700"),
        (["--pin", "mb=1000"], "no multiple of 1000, as pinned by micro_batch_size=1000", "--global-batch 1000"),
        (["--pin", "dp=8,mb=5"], "as pinned by dp=8 and micro_batch_size=5", "--global-batch 40 or 80"),
        (["--global-batch", "4M"], "3.28e+10 tokens", "did you mean 4M-tokens?"),
        (["--objective", "speedy"], "unknown objective 'speedy'", "speed"),
        (["--objective", "cost"], "needs a price", "--price"),
        (["--software", "fsdb"], "unknown software 'fsdb'", "fsdp"),
        (["--precision", "fp4"], "precision can't be 'fp4'", "allowed are"),
        (["--time", "soon"], "a duration above zero", "10m"),
        (["--save", "nowhere/best.yaml"], "lies in a folder that does not exist", "another --save"),
        (["--json", "--csv"], "exclude each other", "--json has all"),
        (["--compare", "nowhere.yaml"], "file not found", "check the path"),
    ],
)
def test_mistakes_end_in_one_message(
    folder: Path, capsys: pytest.CaptureFixture[str], changed: list[str], message: str, hint: str
) -> None:
    assert main(arguments(*changed)) == 2
    told = capsys.readouterr().err
    assert message in told
    assert hint in told.partition("hint: ")[2]


def test_pins_that_no_plan_is_legal_with_name_the_rule(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments()[:9], "--pin", "schedule=dualpipev,pp=8,mb=8"]) == 2
    told = capsys.readouterr().err
    assert "needs 16 or more micro-batches" in told
    assert "[pp.micro_batches]" in told
    assert "set global_batch_size to 128 or more" in told


def test_learned_positions_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learned = DENSE.changed(positions="learned", max_positions=2048)
    (folder / "learned.yaml").write_text(dump_yaml(learned.to_data()), encoding="utf-8")
    assert main(arguments(model="learned.yaml")) == 2
    assert "--seq-len 2048 or less" in capsys.readouterr().err
    rotary = DENSE.changed(max_positions=2048)
    (folder / "rotary.yaml").write_text(dump_yaml(rotary.to_data()), encoding="utf-8")
    assert "longer than the model's 2048 positions" in run_json(capsys, model="rotary.yaml")["notes"][0]


def test_a_plan_needs_nothing_heavy(folder: Path) -> None:
    """No torch, no pandas, no scipy: an answer in seconds."""
    code = f"""
import sys
from autotune.cli import main
assert main({arguments("--top", "2")!r}) == 0
print({{"torch", "pandas", "scipy", "optuna", "sklearn"}} & set(sys.modules), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr.strip().splitlines()[-1] == "set()"


def write_goldens() -> None:
    """Replace the golden files by today's answers."""
    for name in QUESTIONS:
        text = json.dumps(essence(answer_to(name)), indent=2) + "\n"
        (GOLDENS / f"{name}.json").write_text(text, encoding="utf-8")
        print(f"wrote {GOLDENS / f'{name}.json'}")


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: python tests/autotune/commands/test_plan.py --write")
    write_goldens()
