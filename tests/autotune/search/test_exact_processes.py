"""The search over plans with processes: the same answer, and none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import numpy as np
import psutil
import pytest

from autotune.search.blocks import Expander
from autotune.search.exact import search
from autotune.search.plan_space import PlanSpace, plan_space
from autotune.specs.cluster import parse_cluster
from engine.rule import RuleContext
from engine.spec import ModelSpec, MoESpec

MODEL = ModelSpec(
    num_layers=6, hidden_size=1024, num_heads=16, num_kv_heads=4, head_dim=64, ffn_size=4096, vocab_size=32000,
    moe=MoESpec(num_experts=8, experts_per_token=2, ffn_size=2048, num_dense_layers=1),
)  # fmt: skip
CLUSTER = parse_cluster("h100x4:2")


def space_of(*pins: str) -> PlanSpace:
    return plan_space(MODEL, CLUSTER, global_batch_sizes=[32], sequence_lengths=[2048], pins=pins)


def test_processes_change_nothing() -> None:
    space = space_of()
    assert len(Expander(space, RuleContext(MODEL, CLUSTER.num_devices)).parts()) > 2
    one, two = (search(MODEL, CLUSTER, space, num_processes=number) for number in (1, 2))
    assert two.front.plans == one.front.plans
    assert {k: rows.plans for k, rows in two.top.items()} == {k: rows.plans for k, rows in one.top.items()}
    np.testing.assert_array_equal(two.front.values, one.front.values)
    assert two.counts == one.counts


def test_what_progress_raises_ends_the_search_and_its_processes() -> None:
    class Enough(Exception):
        pass

    def stop(share: float) -> None:
        raise Enough

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(Enough):
        search(MODEL, CLUSTER, space_of(), num_processes=2, progress=stop)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_an_interrupt_ends_all_processes_with_one_message() -> None:
    code = """
import time
from autotune.search.blocks import Expander
from autotune.search.exact import search
from autotune.search.plan_space import plan_space
from autotune.specs.cluster import parse_cluster
from engine.rule import RuleContext
from engine.spec import ModelSpec
model = ModelSpec(num_layers=64, hidden_size=8192, num_heads=64, num_kv_heads=64, head_dim=128, ffn_size=28672,
                  vocab_size=32000)
cluster = parse_cluster("h100x8:512")
space = plan_space(model, cluster, global_batch_sizes=[4096, 8192, 16384], sequence_lengths=[4096])
calls = []
def progress(share):
    calls.append(share)
    print(share, flush=True)
    if len(calls) == 2:
        time.sleep(60)
search(model, cluster, space, num_processes=2, progress=progress)
"""
    command = [sys.executable, "-c", code]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert child.stdout is not None
    # The first wave has no processes of its own; the next has, and waits for the interrupt.
    assert float(child.stdout.readline()) <= float(child.stdout.readline()) < 1
    os.killpg(child.pid, signal.SIGINT)
    _, told = child.communicate(timeout=120)
    assert child.returncode != 0
    assert told.count("Traceback") == 1
    assert "KeyboardInterrupt" in told
