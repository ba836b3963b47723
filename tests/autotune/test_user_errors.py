"""What people get wrong: each ends in one message with a hint and exit code 2, no traceback, and nothing is lost."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.cli import main

pytestmark = pytest.mark.unit

SPACE = """\
use: [tiny_llama]
cluster: cpu:1
space:
  plan: {micro_batch_size: [4, 8]}
  hyperparameters: {learning_rate: {log_float: [1e-4, 1e-2]}}
budget: {trials: 2}
"""

RUN = """\
model: {num_layers: 2, hidden_size: 32, num_heads: 2, num_kv_heads: 2, head_dim: 16, ffn_size: 64, vocab_size: 264}
workload:
  data: {max_bytes: 200000}
  sequence_length: 32
  total_tokens: 1024
hyperparameters: {global_batch_size: 8}
plan: {micro_batch_size: 8}
"""

HF_CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 264,
}


@dataclass(frozen=True)
class Mistake:
    """A command typed in a folder with certain files, and words that the message must have."""

    name: str
    arguments: tuple[str, ...]
    words: tuple[str, ...]
    files: dict[str, str | bytes]


def mistake(name: str, command: str, *words: str, **files: str | bytes) -> Mistake:
    """File names are written with ``__`` for the dot."""
    return Mistake(name, tuple(command.split()), words, {key.replace("__", "."): text for key, text in files.items()})


def sweep(name: str, old: str, new: str, *words: str, **files: str | bytes) -> Mistake:
    """A sweep of SPACE with one part replaced."""
    assert old in SPACE
    return mistake(name, "sweep space.yaml", *words, space__yaml=SPACE.replace(old, new, 1), **files)


def train(name: str, old: str, new: str, *words: str, **files: str | bytes) -> Mistake:
    """A training of RUN with one part replaced."""
    assert old in RUN
    return mistake(name, "train run.yaml", *words, run__yaml=RUN.replace(old, new, 1), **files)


MISTAKES = [
    # The space file.
    mistake("space missing", "sweep spaec.yaml", "not found", "space.yaml", space__yaml=SPACE),
    mistake("shipped name misspelt", "sweep demoo", "demoo", "demo"),
    mistake("space is a folder", "sweep folder.yaml", "folder", **{"folder__yaml/x": ""}),
    mistake("space empty", "sweep space.yaml", "mapping", space__yaml=""),
    mistake("space a list", "sweep space.yaml", "mapping", space__yaml="- 1\n- 2\n"),
    mistake("space not YAML", "sweep space.yaml", "not valid YAML", space__yaml="a: [1, 2"),
    mistake("space not text", "sweep space.yaml", "UTF-8", space__yaml=b"\xff\xfe\x00\x01"),
    sweep("duplicate key", "cluster: cpu:1", "cluster: cpu:1\ncluster: local", "stands twice", "space.yaml:3"),
    sweep("section misspelt", "budget:", "budjet:", "budjet", "budget", "space.yaml:6"),
    sweep("dimension misspelt", "learning_rate:", "learnin_rate:", "learnin_rate", "learning_rate"),
    sweep("wrong type", "[4, 8]", "[4, eight]", "'eight'", "space.yaml:4"),
    sweep("number in quotes", "[1e-4, 1e-2]", "['1e-4', 1e-2]", "'1e-4'"),
    sweep("range backwards", "[1e-4, 1e-2]", "[1e-2, 1e-4]", "low < high"),
    sweep("budget of nothing", "trials: 2", "trials: 0", "trials", "greater than or equal to 1"),
    sweep("no budget", "budget: {trials: 2}", "budget: {}", "budget"),
    sweep("unknown device", "cluster: cpu:1", "cluster: h10x8", "h10x8"),
    sweep("more devices than there are", "cluster: cpu:1", "cluster: cpu:4096", "4096"),
    sweep("machines that this is not", "cluster: cpu:1", "cluster: h100x8:64", "h100"),
    sweep("impossible degrees", "plan: {", "plan: {tp: [3], ", "tp.", "none of the"),
    sweep("unknown objective", "cluster: cpu:1", "cluster: cpu:1\nobjectives: [sped]", "sped", "speed"),
    sweep("corpus missing", "cluster: cpu:1", "cluster: cpu:1\nworkload: {data: {paths: [books]}}", "books", "exist"),
    sweep("tokenizer missing", "cluster: cpu:1", "cluster: cpu:1\nworkload: {data: {tokenizer: t.json}}", "t.json"),
    sweep(
        "corpus empty",
        "cluster: cpu:1",
        "cluster: cpu:1\nworkload: {data: {paths: [books]}}",
        "books",
        **{"books/readme.xyz": "no text file"},
    ),
    sweep(
        "one document cannot be held out",
        "cluster: cpu:1",
        "cluster: cpu:1\nworkload: {data: {paths: [book.txt]}}",
        "document",
        book__txt="once upon a time " * 50,
    ),
    sweep(
        "corpus is not text",
        "cluster: cpu:1",
        "cluster: cpu:1\nworkload: {data: {paths: [book.txt]}}",
        "book.txt",
        book__txt=bytes(range(256)) * 20,
    ),
    sweep(
        "JSONL line broken",
        "cluster: cpu:1",
        "cluster: cpu:1\nworkload: {data: {paths: [books.jsonl]}}",
        "books.jsonl:2",
        books__jsonl='{"text": "fine"}\n{"text": \n',
    ),
    sweep(
        "JSONL key missing",
        "cluster: cpu:1",
        "cluster: cpu:1\nworkload: {data: {paths: [books.jsonl]}}",
        "text",
        books__jsonl='{"txt": "fine"}\n{"txt": "fine too"}\n',
    ),
    # The model.
    sweep("model missing", "cluster: cpu:1", "cluster: cpu:1\nmodel: config.json", "config.json"),
    sweep("model broken", "cluster: cpu:1", "cluster: cpu:1\nmodel: config.json", "config.json", config__json="{"),
    sweep(
        "model type unknown",
        "cluster: cpu:1",
        "cluster: cpu:1\nmodel: config.json",
        "lama",
        "llama",
        config__json=json.dumps({**HF_CONFIG, "model_type": "lama"}),
    ),
    sweep(
        "model incomplete",
        "cluster: cpu:1",
        "cluster: cpu:1\nmodel: config.json",
        "hidden_size",
        config__json=json.dumps({key: value for key, value in HF_CONFIG.items() if key != "hidden_size"}),
    ),
    # Options of the sweep.
    mistake("no trials", "sweep space.yaml --trials 0", "trials", space__yaml=SPACE),
    mistake("no workers", "sweep space.yaml --workers 0", "workers", space__yaml=SPACE),
    mistake("too many workers", "sweep space.yaml --workers 9", "workers", space__yaml=SPACE),
    mistake("time in words", "sweep space.yaml --time soon", "soon", "10m", space__yaml=SPACE),
    mistake("--set without a value", "sweep space.yaml --set budget.trials", "key=value", space__yaml=SPACE),
    mistake("--set of an unknown key", "sweep space.yaml --set budgt.trials=3", "budgt", "budget", space__yaml=SPACE),
    mistake("study leaves its folder", "sweep space.yaml --study ../../etc", "../../etc", space__yaml=SPACE),
    mistake("storage unknown", "sweep space.yaml --storage nosql://x", "nosql", space__yaml=SPACE),
    mistake("folder not writable", "sweep space.yaml --runs-dir file/runs", "file", space__yaml=SPACE, file="x"),
    mistake("option unknown", "sweep space.yaml --trails 3", "trails", space__yaml=SPACE),
    mistake("command unknown", "swep space.yaml", "swep"),
    # Studies, reports, apply.
    mistake("report of an unknown study", "report nothing", "nothing"),
    mistake("apply of an unknown study", "apply nothing -o run.yaml", "nothing"),
    mistake("show an unknown study", "studies show nothing", "nothing"),
    mistake("stop an unknown study", "studies stop nothing", "nothing"),
    mistake(
        "journal destroyed",
        "report broken",
        "broken",
        **{"runs/studies/broken/study__yaml": "x: [", "runs/studies/broken/journal__log": "rubbish\nmore\n"},
    ),
    # Training.
    mistake("run missing", "train rnu.yaml", "not found", "run.yaml", run__yaml=RUN),
    train("key misspelt", "sequence_length", "sequence_lenght", "sequence_lenght", "sequence_length", "run.yaml:4"),
    train("bool in YAML 1.1", "plan: {", "plan: {sequence_parallel: on, ", "'on'", "true or false"),
    train("rate as text", "hyperparameters: {", "hyperparameters: {learning_rate: '1e-4', ", "'1e-4'"),
    train("degree that no head divides", "plan: {", "plan: {tp: 3, ", "3", "heads"),
    train("batch not divisible", "micro_batch_size: 8", "micro_batch_size: 3", "3", "8"),
    train("device absent", "plan:", "runtime: {device: cuda}\nplan:", "cuda"),
    train("feature not built", "plan: {", "plan: {precision: fp8, ", "fp8"),
    train("weights missing", "plan:", "runtime: {init_from: weights}\nplan:", "weights"),
    train("corpus gone", "max_bytes: 200000", "paths: [gone]", "gone"),
    mistake("interval in words", "train run.yaml --retune-every often", "often", "10m", run__yaml=RUN),
    mistake("job leaves its folder", "train run.yaml --name ../x", "../x", run__yaml=RUN),
    mistake("monitor an unknown run", "monitor nothing", "nothing"),
]


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: case.name)
def test_a_mistake_ends_in_one_message(case: Mistake, tmp_path: Path, monkeypatch, capfd) -> None:
    for name, content in case.files.items():
        path = tmp_path / name.replace("__", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["autotune", *case.arguments])
    code = main(case.arguments)
    output = capfd.readouterr()
    said = " ".join((output.out + output.err).replace("│", " ").split())
    assert code == 2, said
    assert "Traceback" not in said
    assert "error" in said.lower()
    for word in case.words:
        assert word in said, f"{word!r} is not in: {said}"
    if "Usage:" not in said:
        assert "hint: " in said
        assert said.count("error: ") == 1
    after = {path: path.read_bytes() for path in before}
    assert after == before, "what the user had is as it was"


def test_there_are_at_least_forty() -> None:
    assert len({case.name for case in MISTAKES}) == len(MISTAKES) >= 40


def test_the_engine_alone_tells_mistakes_the_same_way(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN.replace("plan: {", "plan: {tp: 2, "))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-P", "-m", "engine.train", "run.yaml"]
    end = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert end.returncode == 2, end.stderr
    assert "Traceback" not in end.stderr
    assert "hint: " in end.stderr
    assert "torchrun" in end.stderr
