"""Prefetched batches are those of the sampler; errors and ends are clean."""

import threading

import numpy as np
import pytest

from engine.data.loader import Loader
from engine.data.sampler import Sampler
from engine.data.sequences import Batch, SequenceSet, TokenSet

pytestmark = pytest.mark.unit


def sequences() -> SequenceSet:
    tokens = np.arange(101, dtype=np.uint16)
    return TokenSet(tokens, np.ones(101, dtype=np.uint8), end_of_document=200, pad_tail=False).sequences(10)


def loader(rank: int = 0, ranks: int = 1, position: int = 0) -> Loader:
    return Loader(sequences(), Sampler(10, seed=3), 4, rank, ranks, position)


def loader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("loader")]


def test_ranks_share_each_global_batch() -> None:
    loaders = [loader(rank, 2) for rank in range(2)]
    for step in range(5):
        parts = [one.next() for one in loaders]
        assert np.concatenate([part.ids for part in parts]).tolist() == Sampler(10, 3).ids(4 * step, 4).tolist()
        assert all(one.position == 4 * (step + 1) for one in loaders)
        assert parts[0].tokens[0, 0] == 10 * parts[0].ids[0]
    for one in loaders:
        one.close()


def test_a_new_loader_and_a_seek_go_on_at_the_position() -> None:
    one = loader()
    seen = [one.next().ids.tolist() for _ in range(6)]
    two = loader(position=12)
    assert [two.next().ids.tolist() for _ in range(3)] == seen[3:]
    one.seek(4)
    assert one.next().ids.tolist() == seen[1]
    assert one.position == 8
    one.close()
    two.close()


def test_errors_of_the_background_come_out_of_next(monkeypatch: pytest.MonkeyPatch) -> None:
    one = loader()
    good = SequenceSet.batch

    def bad(self: SequenceSet, ids: np.ndarray) -> Batch:
        raise OSError("disk gone")

    monkeypatch.setattr(SequenceSet, "batch", bad)
    for _ in range(2):
        with pytest.raises(OSError, match="disk gone"):
            one.next()
    assert one.position == 0
    monkeypatch.setattr(SequenceSet, "batch", good)
    one.seek(0)
    assert one.next().ids.tolist() == Sampler(10, 3).ids(0, 4).tolist()
    one.close()


def test_close_ends_the_thread() -> None:
    before = len(loader_threads())
    one = loader()
    one.next()
    assert len(loader_threads()) == before + 1
    one.close()
    one.close()
    assert len(loader_threads()) == before
