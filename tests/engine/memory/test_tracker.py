"""Peaks of live storages against arithmetic done by hand."""

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from engine.memory.tracker import LiveStorageTracker

pytestmark = pytest.mark.unit


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_forward_and_backward_by_hand() -> None:
    x, w1, w2 = torch.randn(8, 16), torch.randn(16, 32, requires_grad=True), torch.randn(32, 4, requires_grad=True)
    inputs, hidden, out, scalar = 4 * (8 * 16 + 16 * 32 + 32 * 4), 4 * 8 * 32, 4 * 8 * 4, 4
    tracker = LiveStorageTracker()
    tracker.track([x, w1, w2])
    assert tracker.live_bytes == inputs
    with tracker:
        loss = ((x @ w1).relu() @ w2).sum()
        # The sum before the relu is freed by then; the relu's output is saved for both derivatives.
        assert tracker.peak_bytes == inputs + 2 * hidden
        assert tracker.live_bytes == inputs + hidden + scalar
        loss.backward()
        grads = 4 * (16 * 32 + 32 * 4)
        assert tracker.live_bytes == inputs + scalar + grads
    # At the relu's derivative: its output, the gradients of its output and input, and that of w2.
    assert tracker.peak_bytes == inputs + 2 * scalar + 3 * hidden + 4 * 32 * 4
    assert out < hidden


def test_views_and_in_place_operations_are_no_storages() -> None:
    with LiveStorageTracker() as tracker:
        x = torch.zeros(100)
        views = [x[:10], x.view(10, 10), x.expand(5, 100), x.t(), x.detach()]
        x.add_(1).mul_(2)
        views[0].fill_(3)
        assert tracker.live_bytes == 400
        del x
        assert tracker.live_bytes == 400, "a view keeps the storage"
        del views
        assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 400


def test_a_storage_from_before_counts_when_it_is_used() -> None:
    x, unused = torch.zeros(100), torch.zeros(1000)
    with LiveStorageTracker() as tracker:
        assert tracker.live_bytes == 0
        x.add_(1)
        assert tracker.live_bytes == 400
    tracker = LiveStorageTracker()
    tracker.track([x, unused])
    assert tracker.peak_bytes == 4400


def test_resizing_counts_at_once() -> None:
    with LiveStorageTracker() as tracker:
        x = torch.zeros(100)
        storage = x.untyped_storage()
        storage.resize_(0)
        assert tracker.live_bytes == 0
        storage.resize_(800)
        assert tracker.live_bytes == 800
        x.resize_(300)
        assert tracker.live_bytes == 1200
    assert tracker.peak_bytes == 1200


def test_meta_tensors_have_no_bytes() -> None:
    with LiveStorageTracker() as tracker:
        torch.zeros(100, device="meta").add(1)
    assert tracker.peak_bytes == 0


def test_recomputation_lowers_the_peak() -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = x.sin()
        return x

    def peak(*, recompute: bool) -> int:
        x = torch.randn(1000, requires_grad=True)
        with LiveStorageTracker() as tracker:
            y: torch.Tensor = x
            for _ in range(4):
                y = checkpoint(block, y, use_reentrant=False) if recompute else block(y)
            y.sum().backward()
        return tracker.peak_bytes

    assert peak(recompute=False) > 16 * 4000
    assert peak(recompute=True) < 12 * 4000


def test_frees_in_other_threads_count() -> None:
    with LiveStorageTracker() as tracker:
        held = [torch.zeros(100) for _ in range(50)]
        threads = [threading.Thread(target=lambda: held.pop()) for _ in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert tracker.live_bytes == 0


def test_nothing_is_left_after_exit() -> None:
    plain = torch.UntypedStorage.resize_
    with LiveStorageTracker() as tracker:
        survivor = torch.zeros(100)
    assert torch.UntypedStorage.resize_ is plain
    gone = weakref.ref(tracker)
    peak = tracker.peak_bytes
    del tracker
    gc.collect()
    assert gone() is None
    assert peak == survivor.nbytes


def test_resize_is_restored_after_an_error() -> None:
    plain = torch.UntypedStorage.resize_
    with pytest.raises(RuntimeError), LiveStorageTracker():
        torch.zeros(2) @ torch.zeros(3)
    assert torch.UntypedStorage.resize_ is plain


def test_sharded_tensors_are_seen_through(mesh: DeviceMesh) -> None:
    a = distribute_tensor(torch.randn(64, 64), mesh, [Shard(0)])
    tracker = LiveStorageTracker()
    tracker.track([a])
    assert tracker.live_bytes == 4 * 64 * 64
    with tracker:
        product = a @ a.redistribute(placements=[Replicate()])
        del product
        assert tracker.live_bytes == 4 * 64 * 64
    assert tracker.peak_bytes == 2 * 4 * 64 * 64


def test_parameters_gathered_by_fully_shard_come_and_go(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)  # the root has no parameters left; it alone would keep them gathered
    x = torch.randn(8, 64)
    weight, activation = 4 * 64 * 64, 4 * 8 * 64
    with torch.no_grad():
        model(x)  # the first call sets up the buffers that parameters are gathered into
        tracker = LiveStorageTracker()
        tracker.track([x, *model.parameters()])
        assert tracker.live_bytes == activation + 2 * weight
        with tracker:
            y = model(x)
            assert tracker.live_bytes == 2 * activation + 2 * weight
    assert y.shape == x.shape
    # The second layer: both shards, its gathered weight, and x, the first layer's output and its own.
    assert tracker.peak_bytes == 3 * activation + 3 * weight
