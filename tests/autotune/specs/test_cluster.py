"""Clusters by name, from files and from a probe; the catalogue against published figures."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest

from autotune.specs import cluster, machine
from autotune.specs.cluster import ClusterSpec, catalogue, parse_cluster, probe_cluster
from autotune.specs.figures import DeviceFigures
from engine.errors import UserError
from engine.schema import parse
from engine.yaml_file import dump_yaml

pytestmark = pytest.mark.unit

GIB = 2**30


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with 4 cores, 8 CPUs, 16 GiB and no GPU."""
    monkeypatch.setattr(machine, "usable_cpus", lambda: list(range(8)))
    monkeypatch.setattr(machine, "num_usable_cores", lambda: 4)
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: 16 * GIB)
    monkeypatch.setattr(machine, "nvidia_gpus", list)


def fake_gpus(monkeypatch: pytest.MonkeyPatch, name: str, *, torch_has_cuda: bool = True) -> None:
    gpus = [machine.Gpu(index, f"GPU-{index}", name, 81559 * 2**20) for index in range(2)]
    monkeypatch.setattr(machine, "nvidia_gpus", lambda: gpus)
    monkeypatch.setattr(cluster, "torch_has_cuda", lambda: torch_has_cuda)


@pytest.mark.parametrize(
    ("text", "kind", "per_node", "nodes"),
    [
        ("h100x8:64", "h100", 8, 64),
        ("H100x4", "h100", 4, 1),
        ("h100", "h100", 8, 1),
        ("gb200:18", "gb200", 4, 18),
        ("mi300x8:2", "mi300x", 8, 2),
        ("mi300xx8:2", "mi300x", 8, 2),
        ("mi300x", "mi300x", 8, 1),
        ("a100-80gbx8", "a100", 8, 1),
        ("a100-40gx8:3", "a100-40g", 8, 3),
        (" h100-pciex2 ", "h100-pcie", 2, 1),
    ],
)
def test_a_cluster_by_name(text: str, kind: str, per_node: int, nodes: int) -> None:
    spec = parse_cluster(text)
    assert (spec.device_kind, spec.devices_per_node, spec.num_nodes) == (kind, per_node, nodes)
    assert spec.num_devices == per_node * nodes
    assert spec.device == "cuda"


def test_figures_come_from_the_catalogue() -> None:
    spec = parse_cluster("h100x8:64")
    assert spec.memory_bytes == 80 * GIB
    assert spec.peak_flops["bf16"] == 989e12
    assert spec.memory_bytes_per_second == 3.35e12
    assert spec.link_bytes_per_second == 450e9
    assert spec.describe() == "64 nodes of 8 h100 (80.00 GiB each)"


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("text", "devices", "threads"), [("local", 4, 1), ("cpu", 4, 1), ("cpu:1", 1, 4), ("cpu:2", 2, 2), ("cpu:8", 8, 1)]
)
def test_cpu_devices_share_the_machine(text: str, devices: int, threads: int) -> None:
    spec = parse_cluster(text)
    assert (spec.device, spec.num_devices, spec.threads_per_device) == ("cpu", devices, threads)
    assert spec.memory_bytes == 16 * GIB // devices


@pytest.mark.usefixtures("four_cores")
@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("h10x8", "unknown device 'h10' in the cluster 'h10x8'; known are h100", "did you mean 'h100'"),
        ("loca", "unknown device 'loca'", "did you mean 'local'"),
        ("", "unknown device ''", "h100x8:64"),
        ("tpu:4", "unknown device 'tpu'", "h100x8:64"),
        ("h100x0", "at least one device", "h100x8:64"),
        ("h100x8:0", "at least one device", "h100x8:64"),
        ("a100x8:-1", "nodes of a cluster are a whole number of 1 or more", "h100x8:64"),
        ("a100x8:1.5", "nodes of a cluster are a whole number of 1 or more", "h100x8:64"),
        ("a100x9000", "9000 devices in one node", "a100x8:1125"),
        ("h100x8:1000000", "8,000,000 devices", "h100x8:131072"),
        ("cpu:0", "from 1 to this machine's 8 CPUs, got 'cpu:0'", "cpu:4"),
        ("cpu:9", "from 1 to this machine's 8 CPUs, got 'cpu:9'", "cpu:4"),
        ("cpu:two", "from 1 to this machine's 8 CPUs, got 'cpu:two'", "cpu:4"),
        ("missing.yaml", "file not found: missing.yaml", ""),
    ],
)
def test_what_is_wrong_is_told(text: str, message: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_cluster(text)
    assert message in caught.value.message
    assert hint in str(caught.value.hint)


@pytest.mark.usefixtures("four_cores")
def test_this_machine_with_known_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, "NVIDIA H100 80GB HBM3")
    spec = probe_cluster()
    assert (spec.device_kind, spec.device, spec.num_devices, spec.threads_per_device) == ("h100", "cuda", 2, 2)
    assert spec.memory_bytes == 81559 * 2**20
    assert spec.peak_flops["fp8"] == 1979e12


@pytest.mark.usefixtures("four_cores")
def test_this_machine_with_unknown_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, "NVIDIA Future-1 (beta)")
    spec = probe_cluster()
    assert (spec.device_kind, spec.num_devices, spec.peak_flops) == ("nvidia-future-1-beta", 2, {})


@pytest.mark.usefixtures("four_cores")
def test_gpus_that_torch_cannot_use_leave_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus(monkeypatch, "NVIDIA H100 80GB HBM3", torch_has_cuda=False)
    assert probe_cluster().device == "cpu"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("Tesla V100-SXM2-32GB", "v100"),
    ],
)
def test_driver_names_are_recognised(monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    fake_gpus(monkeypatch, name)
    assert probe_cluster().device_kind == kind


def test_a_cluster_file_is_read_back(tmp_path: Path) -> None:
    spec = parse_cluster("h200x8:2")
    path = tmp_path / "mine.yaml"
    path.write_text(dump_yaml(spec.to_data()), encoding="utf-8")
    assert parse_cluster(str(path)) == spec
    assert parse(ClusterSpec, spec.to_data()) == spec
    path.write_text(dump_yaml(spec.to_data() | {"num_node": 2}), encoding="utf-8")
    with pytest.raises(UserError, match="unknown key 'num_node'") as caught:
        parse_cluster(str(path))
    assert "mine.yaml:" in str(caught.value.where)


def test_the_catalogue_holds_what_was_promised() -> None:
    wanted = (
        "h100 h100-hbm2e h100-pcie h200 h800 h20 a100 a100-40g b200 b300 gb200 gb300 v100 l40s"
        " mi250x mi300x mi325x mi355x cpu"
    )
    assert set(catalogue()) == set(wanted.split())
    names = [name for kind, entry in catalogue().items() for name in (kind, *entry.aliases)]
    assert len(names) == len(set(names))
    assert all(entry.source for entry in catalogue().values())


PUBLISHED = {
    "H100-SXM": "h100", "H100-PCIe": "h100-pcie", "H200-SXM": "h200", "A100-SXM": "a100", "A100-SXM-80GB": "a100",
    "B200": "b200", "B300": "b300", "GB200": "gb200", "GB300": "gb300", "MI300X": "mi300x", "MI325X": "mi325x",
    "MI355X": "mi355x",
}  # fmt: skip


def test_the_catalogue_agrees_with_published_figures(shared_data: Path) -> None:
    """Within 2 %: sources round differently."""
    checked = 0
    with (shared_data / "hardware.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["kind"] != "datasheet" or row["device"] not in PUBLISHED:
                continue
            entry = catalogue()[PUBLISHED[row["device"]]]
            ours = {
                "peak_dense_bf16": entry.tflops.get("bf16"),
                "peak_dense_fp8": entry.tflops.get("fp8"),
                "capacity": entry.memory_gib,
                "peak_bandwidth": entry.memory_gb_per_second / 1000,
            }.get(row["quantity"])
            if ours is not None:
                assert ours == pytest.approx(float(row["value"]), rel=0.02), row["id"]
                checked += 1
    assert checked > 30


def test_every_device_has_figures_with_their_sources() -> None:
    for kind, entry in catalogue().items():
        assert entry.watts, kind
        told = {"node_links", "figures"} if entry.device == "cpu" else {"matmul", "memory_gb_per_second", "node_links"}
        assert told <= set(entry.sources), kind
        assert set(entry.sources) <= {*DeviceFigures.model_fields, "figures", "node_links", "cluster_links", "watts"}
        assert entry.links[-1].num_devices is None, kind
        attained = {precision: rate.tflops for precision, rate in entry.figures.matmul.items()}
        assert all(rate <= entry.tflops.get(precision, rate) for precision, rate in attained.items()), kind  # type: ignore[call-overload]
        assert entry.figures.memory_gb_per_second <= entry.memory_gb_per_second, kind
        assert entry.links[0].gb_per_second <= entry.link_gb_per_second, kind


def test_levels_of_the_network_follow_the_nodes() -> None:
    def sizes(text: str) -> list[int | None]:
        return [level.num_devices for level in parse_cluster(text).links]

    assert sizes("h100x8:2") == [8, None]
    assert sizes("h100x4:2") == [4, None]
    assert sizes("gb200x4:36") == [72, None]
    assert sizes("l40sx2:4") == [2, 2, None]
    assert sizes("l40sx8") == [4, 8, None]


@pytest.mark.usefixtures("four_cores")
def test_a_cpu_device_has_the_figures_of_its_cores() -> None:
    one, two = parse_cluster("cpu:4"), parse_cluster("cpu:2")
    assert one.figures is not None
    assert two.figures is not None
    assert two.figures.matmul["fp32"].tflops == 2 * one.figures.matmul["fp32"].tflops
    assert two.links == one.links != ()


def test_a_cluster_file_needs_only_what_differs_from_the_catalogue(tmp_path: Path) -> None:
    usual = parse_cluster("h100x8:16")
    path = tmp_path / "mine.yaml"
    mine = {"name": "mine", "device_kind": "h100", "devices_per_node": 8, "num_nodes": 16}
    path.write_text(dump_yaml(mine), encoding="utf-8")
    assert parse_cluster(str(path)) == usual.changed(name="mine")
    links = [{"num_devices": 8, "gb_per_second": 365, "latency_us": 0.6}, {"gb_per_second": 12, "latency_us": 9}]
    path.write_text(dump_yaml(mine | {"links": links, "dollars_per_device_hour": 2.5}), encoding="utf-8")
    spec = parse_cluster(str(path))
    assert [level.gb_per_second for level in spec.links] == [365, 12]
    assert (spec.figures, spec.dollars_per_device_hour) == (usual.figures, 2.5)


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        ({"links": [{"num_devices": 7}, {}]}, "joins 7 devices", "num_devices: 8"),
        ({"links": [{"num_devices": 4}, {"num_devices": 8}, {"num_devices": 12}, {}]}, "joins 12 devices", "8"),
        ({"links": [{}, {"num_devices": 8}]}, "only the last", "joins all"),
        ({"device_kind": "h101"}, "unknown device_kind 'h101'", "did you mean 'h100'?"),
    ],
)
def test_a_cluster_file_that_cannot_be(tmp_path: Path, changes: dict[str, Any], message: str, hint: str) -> None:
    path = tmp_path / "mine.yaml"
    level = {"gb_per_second": 100, "latency_us": 1}
    if "links" in changes:
        changes = {"links": [level | link for link in changes["links"]]}
    mine = {"name": "mine", "device_kind": "h100", "devices_per_node": 8, "num_nodes": 3}
    path.write_text(dump_yaml(mine | changes), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        parse_cluster(str(path))
    assert message in caught.value.message
    assert hint in str(caught.value.hint)
    assert "mine.yaml:" in str(caught.value.where)


def test_a_file_that_is_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "v7.csv").write_text("id,tp\n1,2\n", encoding="utf-8")
    (tmp_path / "plan.yaml").write_text("tp: 2\n", encoding="utf-8")
    for name in ("v7.csv", "plan.yaml"):
        with pytest.raises(UserError, match="no cluster file"):
            parse_cluster(name)


def test_a_cluster_file_of_before_is_still_read(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    text = (
        "schema_version: 1\nname: old\ndevice_kind: future-1\ndevice: cuda\ndevices_per_node: 2\nmemory_bytes: 1000\n"
    )
    path.write_text(text, encoding="utf-8")
    spec = parse_cluster(str(path))
    assert (spec.figures, spec.links, spec.watts, spec.dollars_per_device_hour) == (None, (), None, None)
