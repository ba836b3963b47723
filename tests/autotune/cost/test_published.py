"""Tables of measured runs are read leniently: what is completed is said, what can't be priced is skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from autotune.cost.architectures import architectures, find_architecture
from autotune.cost.published import PublishedRun, PublishedRuns, columns, read_runs
from autotune.cost.published_source import STACKS, device_of, family_of, memory_unit_of, node_link_rate, stack_of
from autotune.cost.software import software_catalogue
from autotune.specs.cluster import catalogue
from engine.errors import UserError

pytestmark = pytest.mark.unit

ROW = {
    "id": "run-1", "source": "My cluster, table 1", "url_or_repo_path": "", "year": "2025", "model_name": "mine-8B",
    "layers": "32", "hidden": "4096", "ffn_hidden": "14336", "heads": "32", "kv_heads": "8", "vocab": "128256",
    "seq_len": "4096", "gated_mlp": "1", "gpu": "H100", "num_gpus": "16", "gpus_per_node": "8", "tp": "2", "pp": "2",
    "dp": "4", "ep": "1", "cp": "1", "sequence_parallel": "1", "micro_batch": "1", "global_batch": "64",
    "zero_stage": "1", "recompute": "none", "precision": "bf16", "schedule": "1F1B", "step_time_s_equiv": "3.5",
    "workload": "pretrain", "outcome": "ok", "inter_node_link": "8x400Gb/s InfiniBand",
}  # fmt: skip


def write(path: Path, *rows: Mapping[str, str], delimiter: str = ",", encoding: str = "utf-8") -> Path:
    """A table of rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    quoted = [[f'"{row.get(name, "")}"' for name in names] for row in rows]
    text = "\n".join([delimiter.join(names), *(delimiter.join(cells) for cells in quoted)]) + "\n"
    path.write_text(text, encoding=encoding)
    return path


def read(tmp_path: Path, **changes: str) -> PublishedRuns:
    """One row with some cells changed."""
    return read_runs(write(tmp_path / "runs.csv", {**ROW, **changes}))


def one(tmp_path: Path, **changes: str) -> PublishedRun:
    """The run that one row is read as."""
    table = read(tmp_path, **changes)
    assert table.skipped == ()
    return table.runs[0]


def reason(tmp_path: Path, **changes: str) -> str:
    """Why one row is skipped."""
    table = read(tmp_path, **changes)
    assert table.runs == ()
    return table.skipped[0].reason


def test_a_full_row_is_read_without_assumptions(tmp_path: Path) -> None:
    run = one(tmp_path)
    assert run.assumptions == ()
    assert (run.model.num_layers, run.model.num_kv_heads, run.model.mlp) == (32, 8, "gated")
    assert (run.plan.tp, run.plan.pp, run.plan.dp_shard, run.plan.sequence_parallel) == (2, 2, 4, True)
    assert (run.cluster.device_kind, run.cluster.num_devices, run.cluster.num_nodes) == ("h100", 16, 2)
    assert (run.step_seconds, run.memory_gb, run.timed, run.software) == (3.5, None, True, "default")


def test_what_a_row_does_not_say_is_completed_and_said(tmp_path: Path) -> None:
    unknown = (
        "dp",
        "zero_stage",
        "recompute",
        "sequence_parallel",
        "precision",
        "micro_batch",
        "cp",
        "kv_heads",
        "vocab",
    )
    run = one(tmp_path, **dict.fromkeys(unknown, ""), inter_node_link="")
    told = " | ".join(run.assumptions)
    for name in (*unknown, "inter_node_link"):
        assert f"{name} unknown" in told, name
    assert run.plan.dp == 4
    assert run.plan.micro_batch_size == 1


def test_numbers_are_read_as_people_write_them(tmp_path: Path) -> None:
    run = one(tmp_path, hidden="4,096", vocab="128 256", num_gpus="16.0", step_time_s_equiv=" 3.50 ", heads="32")
    assert (run.model.hidden_size, run.model.vocab_size, run.step_seconds) == (4096, 128256, 3.5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layers": "many"}, "layers: 'many' is not a number"),
        ({"layers": "-3"}, "layers: '-3' is not a whole number from 1 to 10000"),
        ({"layers": "1000000000"}, "is not a whole number from 1 to 10000"),
        ({"tp": "1.5"}, "tp: '1.5' is not a whole number"),
        ({"step_time_s_equiv": "inf"}, "step_time_s_equiv: 'inf' is not a finite number"),
        ({"step_time_s_equiv": "0"}, "is not a positive number"),
        ({"gated_mlp": "maybe"}, "gated_mlp: 'maybe' is neither 0 nor 1"),
        ({"gpu": "TPUv5"}, "gpu 'TPUv5' is not in the catalogue"),
        ({"gpu": ""}, "gpu unknown"),
        ({"dp": "8"}, "tp 2 * pp 2 * cp 1 * dp 8 = 32 devices contradict num_gpus 16"),
        ({"tp": "", "dp": ""}, "tp unknown: the plan can't be told"),
        ({"tp": "3", "num_gpus": "24"}, "tp 3 does not divide the model's 32 heads [tp.divides_heads]"),
        ({"pp": "8", "vpp": "8", "num_gpus": "64"}, "64 stages for 32 layers [pp.layers]"),
        ({"global_batch": "63"}, "[batch.divides]"),
        ({"global_batch": ""}, "global_batch unknown"),
        ({"zero_stage": "5"}, "zero_stage 5 is not one of"),
        ({"precision": "int8"}, "precision 'int8' is none of"),
        ({"precision": "fp8", "gpu": "A100-SXM-80GB"}, "a100 has no figures for precision fp8"),
        ({"recompute": "sometimes"}, "recompute 'sometimes' is none of"),
        ({"workload": "lora"}, "workload lora"),
        ({"outcome": "crashed"}, "outcome 'crashed' is neither ok nor oom"),
        ({"kv_heads": "5"}, "num_kv_heads 5 must divide num_heads 32"),
        ({"layers": ""}, "layers unknown"),
        ({"hidden": ""}, "hidden unknown, and 'mine-8B' is not in the catalogue"),
        ({"ep": "4"}, "a mixture of experts whose experts are not known"),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_priced_is_skipped_with_the_reason(
    tmp_path: Path, changes: dict[str, str], words: str
) -> None:
    assert words in reason(tmp_path, **changes)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_separators_and_byte_order_marks(tmp_path: Path, delimiter: str, encoding: str) -> None:
    path = write(tmp_path / "runs.csv", ROW, delimiter=delimiter, encoding=encoding)
    assert read_runs(path).runs[0].id == "run-1"


def test_foreign_columns_are_named_and_missing_ones_are_assumed(tmp_path: Path) -> None:
    row = {"model_name": "LLAMA3-8B", "gpu": "h200", "num_gpus": "8", "tp": "1", "pp": "1", "seq_len": "8192"}
    row |= {"global_batch": "64", "my_note": "x", "Unnamed: 0": "0", "tokens_per_s_per_gpu_equiv": "10000"}
    table = read_runs(write(tmp_path / "runs.csv", row))
    run = table.runs[0]
    assert set(table.unknown_columns) == {"my_note", "Unnamed: 0"}
    assert (run.id, run.model.num_layers, run.model.vocab_size) == ("line-2", 32, 128256)
    assert run.step_seconds == pytest.approx(64 * 8192 / (10000 * 8))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"gpu,seq_len\n", "has no rows"),
        (b"name,lr\na,1\n", "has no column gpu, seq_len"),
        (b"gpu,gpu,seq_len\na,b,1\n", "column gpu more than once"),
        (b"gpu,seq_len\n\xff\xfe,1\n", "not UTF-8"),
        (b"\x00\x01\x02\x00", "has no column"),
    ],
)
def test_a_file_that_is_no_table_of_runs_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_runs(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.csv", tmp_path):
        with pytest.raises(UserError, match="can't read"):
            read_runs(path)


def test_a_short_and_a_long_row(tmp_path: Path) -> None:
    path = tmp_path / "runs.csv"
    path.write_text("gpu,seq_len,tp\nh100\nh100,1024,1,9,9\n", encoding="utf-8")
    assert [row.reason for row in read_runs(path).skipped] == ["seq_len unknown", "5 cells under 3 columns"]


def test_experts_are_never_read_as_a_dense_model(tmp_path: Path) -> None:
    unnamed = {"ffn_hidden": "", "layers": "", "hidden": "", "heads": "", "kv_heads": "", "vocab": "", "gated_mlp": ""}
    grok = one(tmp_path, model_name="Grok1-314B", **unnamed)
    assert grok.model.moe is not None
    assert (grok.model.moe.num_experts, grok.model.num_layers) == (8, 64)
    assert "num_experts unknown: 8, the catalogue's grok-1" in grok.assumptions
    assert "experts are not known" in reason(tmp_path, model_name="MyMoE-40B")
    assert "experts are not known" in reason(tmp_path, params_total_B="40", params_active_B="6")
    assert "state-space" in reason(tmp_path, model_name="Nemotron_3_Super")


def test_latent_attention_comes_from_the_catalogue(tmp_path: Path) -> None:
    known = {"layers": "4", "hidden": "7168", "heads": "128", "kv_heads": "128", "num_experts": "256", "ep": "4"}
    known |= {"experts_per_token": "8", "moe_ffn_hidden": "2048", "shared_experts": "1", "ffn_hidden": "18432"}
    run = one(tmp_path, model_name="DeepSeek-V3-L4", **known)
    assert run.model.latent_attention is not None
    assert run.model.moe is not None
    assert (run.model.moe.num_dense_layers, run.model.moe.shared_ffn_size) == (1, 2048)


@pytest.mark.parametrize(
    ("schedule", "vpp", "expected"),
    [
        ("1F1B", "", ("1f1b", 1)),
        ("interleaved 1F1B", "4", ("interleaved_1f1b", 4)),
        ("interleaved 1F1B", "", ("interleaved_1f1b", 2)),
        ("1F1B/interleaved (not stated)", "", ("1f1b", 1)),
        ("", "4", ("interleaved_1f1b", 4)),
        ("GPipe", "", ("gpipe", 1)),
        ("DualPipe", "", ("dualpipev", 2)),
        ("ZB-V", "", ("zbv", 2)),
        ("strange", "", ("1f1b", 1)),
    ],
)
def test_schedules(tmp_path: Path, schedule: str, vpp: str, expected: tuple[str, int]) -> None:
    run = one(tmp_path, schedule=schedule, vpp=vpp)
    assert (run.plan.schedule, run.plan.virtual_stages) == expected


def test_without_a_pipeline_schedule_and_stages_mean_nothing(tmp_path: Path) -> None:
    run = one(tmp_path, pp="1", dp="8", vpp="4", schedule="interleaved 1F1B")
    assert (run.plan.schedule, run.plan.virtual_stages) == ("1f1b", 1)


@pytest.mark.parametrize(
    ("word", "precision", "recipe"),
    [
        ("fp16", "fp16", ""), ("BF16", "bf16", ""), ("bfloat16", "bf16", ""), ("fp8", "fp8", "fp8"),
        ("mxfp8", "fp8", "mxfp8"),
        ("fp8-rowwise", "fp8", "fp8-rowwise"), ("fp8-subchannel", "fp8", "fp8-rowwise"), ("nvfp4", "fp8", "nvfp4"),
    ],
)  # fmt: skip
def test_precisions(tmp_path: Path, word: str, precision: str, recipe: str) -> None:
    run = one(tmp_path, precision=word, tp="2")
    assert (run.plan.precision, run.recipe) == (precision, recipe)


def test_uneven_stages_leave_room_for_embedding_and_head(tmp_path: Path) -> None:
    run = one(tmp_path, layers="30", pp="8", num_gpus="64")
    assert run.plan.layers_per_stage == (3, 4, 4, 4, 4, 4, 4, 3)


def test_hybrid_sharding_stays_in_the_node(tmp_path: Path) -> None:
    run = one(tmp_path, tp="1", pp="1", dp="16", zero_stage="3", schedule="none (FSDP)", notes="HSDP")
    assert (run.plan.dp_replicate, run.plan.dp_shard) == (2, 8)
    assert "shards over 8 ranks: the notes say HSDP" in run.assumptions


def test_groups_of_sharding_are_read_from_the_notes(tmp_path: Path) -> None:
    run = one(tmp_path, tp="1", pp="1", dp="16", notes="ZeRO-1 over 4-rank groups")
    assert (run.plan.dp_replicate, run.plan.dp_shard) == (4, 4)
    default = one(tmp_path, notes="zero_stage 1 = Megatron distributed optimizer (default), 3 = Megatron-FSDP")
    assert default.plan.dp_replicate == 1


def test_networks_of_rows_replace_the_catalogues(tmp_path: Path) -> None:
    assert one(tmp_path).cluster.links == one(tmp_path, inter_node_link="").cluster.links
    slow = one(tmp_path, inter_node_link="4x Omni-Path (OPA100) per node").cluster
    assert slow.links[-1].gb_per_second == pytest.approx(6.25 * 0.9)
    assert slow.links[0] == one(tmp_path).cluster.links[0]


@pytest.mark.parametrize(
    ("text", "per_node", "rate"),
    [
        ("8x400Gb/s InfiniBand (DGX H100 reference)", 8, 50),
        ("1600Gb/s RoCE per node", 8, 25),
        ("4x Omni-Path (OPA100) per node", 8, 6.25),
        ("400Gb/s RDMA per GPU", 8, 50),
        ("8x50GB/s InfiniBand", 8, 50),
        ("4x ConnectX-7 IB NDR 400Gb/s", 4, 50),
        ("Storage: 2x ConnectX-7 IB NDR 400Gb/s, Compute: 8x ConnectX-7 IB NDR 400Gb/s, Ma", 8, 50),
        ("BF3 200Gbps for NS and 2xBF3 400Gbps for EW", 4, 25),
        ("8x400Gb/s NDR per node", 8, 50),
        ("ROCE2; Data bandwidth for GPU-PCIe: 504 GB/s; PCIe-NIC: 500 GB/s", 8, None),
        ("Ethernet, Infiniband", 8, None),
        ("0Gb/s", 8, None),
        ("NVL72 domain", 4, None),
        ("", 8, None),
    ],
)
def test_rates_of_networks(text: str, per_node: int, rate: float | None) -> None:
    assert node_link_rate(text, per_node) == rate


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("A100", "a100"), ("A100-SXM-80GB", "a100"), ("A100-SXM-40GB", "a100-40g"), ("H100-SXM-80GB", "h100"),
        ("H100-SXM-96GB-HBM2e-500W", "h100-hbm2e"), ("H100 PCIe", "h100-pcie"), ("GB200", "gb200"), ("GB300", "gb300"),
        ("B200", "b200"), ("Blackwell-unknown", "b200"), ("MI300X", "mi300x"), ("MI350X", "mi355x"), ("H800", "h800"),
    ],
)  # fmt: skip
def test_devices(word: str, kind: str) -> None:
    found = device_of(word)
    assert found is not None
    assert found[0] == kind
    assert kind in catalogue()


def test_families_are_publishers_or_repositories_not_pages() -> None:
    github = "github.com/NVIDIA-NeMo/Megatron-Bridge@abc:docs/performance-summary.md"
    assert family_of("Megatron-Bridge performance summary, 25.09 container", github) == "NVIDIA-NeMo/Megatron-Bridge"
    assert family_of("Megatron-Bridge performance summary, 26.06 container", github) == "NVIDIA-NeMo/Megatron-Bridge"
    rounds = {
        family_of(f"MLPerf Training v{v}, Dell", f"github.com/mlcommons/training_results_v{v}") for v in ("4.0", "5.0")
    }
    assert rounds == {"MLPerf"}
    assert family_of("Narayanan et al. 2021 (SC21) Table 1", "") == family_of(
        "Narayanan et al. 2021 (SC21) section 5", ""
    )
    assert family_of("My cluster, table 1", "") == family_of("My cluster, table 2", "") == "My cluster"
    assert family_of("", "https://example.org/runs") == "example.org"
    assert family_of("", "") == "unknown"


def test_every_stack_has_figures_and_generations_are_told_apart() -> None:
    assert {stack.name for stack in STACKS} <= set(software_catalogue())
    assert stack_of("MLPerf Training v3.0", "", "", 2023).name == "mlperf-2023"
    assert stack_of("MLPerf Training v5.0", "", "", 2025).name == "mlperf-2025"
    assert stack_of("something else", "", "", 2025).name == "default"


def test_equal_inputs_share_a_fold_across_families(tmp_path: Path) -> None:
    first = {**ROW, "id": "a", "source": "One"}
    same = {**ROW, "id": "b", "source": "Two", "model_name": "other-name", "step_time_s_equiv": "9"}
    relative = {**ROW, "id": "c", "source": "Two", "model_name": "other-name", "global_batch": "128"}
    apart = {**ROW, "id": "d", "source": "Three", "layers": "16"}
    folds = {run.id: run.fold for run in read_runs(write(tmp_path / "runs.csv", first, same, relative, apart)).runs}
    assert folds["a"] == folds["b"] == folds["c"]
    assert folds["d"] != folds["a"]


def test_columns_give_back_every_run(tmp_path: Path) -> None:
    rows = (
        {**ROW, "id": "a"},
        {**ROW, "id": "b", "gpu": "H200", "layers": "16"},
        {**ROW, "id": "c", "tp": "4", "dp": "2"},
    )
    runs = read_runs(write(tmp_path / "runs.csv", *rows)).runs
    table = columns(runs)
    assert [table.models[i] for i in table.model_index] == [run.model for run in runs]
    assert [table.clusters[i] for i in table.cluster_index] == [run.cluster for run in runs]
    assert [table.software[i] for i in table.software_index] == [run.software for run in runs]
    np.testing.assert_array_equal(table.plans.tp, [2, 2, 4])
    np.testing.assert_array_equal(table.plans.first_stage_layers, [16, 8, 16])


def test_the_catalogue_of_architectures_names_its_sources() -> None:
    assert all(architecture.source for architecture in architectures().values())
    names = {"GPT-OSS 120B": "gpt-oss-120b", "GPT3-175B": "gpt-3-175b", "BloombergGPT-50B": "bloomberg"}
    names |= {"Nemotron-340B": "nemotron-4", "Nemotron_3_Ultra": "nemotron-3", "LLAMA3.1-405B-proxy": "llama-3-405b"}
    for name, expected in names.items():
        found = find_architecture(name)
        assert found is not None
        assert found[0] == expected
    assert find_architecture("mine-8B") is None


def test_published_rows_are_taken(shared_data: Path) -> None:
    """At least nine of ten rows with known inputs; no mixture of experts read as dense; every skip has its reason."""
    table = read_runs(shared_data / "published_runs.csv")
    tiers = Counter(run.tier for run in table.runs) + Counter()
    skipped = Counter(row.tier for row in table.skipped)
    taken = tiers["A"] + tiers["B"]
    assert taken >= 0.9 * (taken + skipped["A"] + skipped["B"])
    assert all(row.reason for row in table.skipped)
    for run in table.runs:
        expects = any(word in run.model_name.lower() for word in ("mixtral", "grok", "oss", "a3b", "a22b", "deepseek"))
        assert (run.model.moe is not None) >= expects, run.id
        assert run.plan.world_size == run.cluster.num_devices
    assert len({run.family for run in table.runs}) < 40
    assert len({run.fold for run in table.runs}) > 50


def test_memory_that_is_printed_in_other_units() -> None:
    assert memory_unit_of("torchao training docs", "peak memory as printed (GB)") == 2**30 / 1e9
    assert memory_unit_of("TorchTitan", "memory GiB max over GPUs converted to GB") == 1
