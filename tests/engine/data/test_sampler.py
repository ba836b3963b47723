"""The sample order is a pure function of seed and position."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.data.sampler import Sampler

pytestmark = pytest.mark.unit

sizes = st.integers(1, 40)
seeds = st.integers(0, 2**31)


@given(sizes, seeds, st.integers(0, 200), st.integers(0, 100))
def test_resuming_anywhere_gives_the_same_ids(size: int, seed: int, start: int, count: int) -> None:
    whole = Sampler(size, seed).ids(0, start + count)
    assert Sampler(size, seed).ids(start, count).tolist() == whole[start:].tolist()


@given(sizes, seeds, st.integers(0, 5))
def test_each_epoch_has_every_id_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(Sampler(size, seed).ids(epoch * size, size)) == list(range(size))


@given(sizes, seeds, st.integers(0, 100), st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 4))
def test_slices_of_all_ranks_are_the_global_batch(size: int, seed: int, start: int, ranks: int, local: int) -> None:
    sampler = Sampler(size, seed)
    slices = [sampler.ids(start + rank * local, local) for rank in range(ranks)]
    assert np.concatenate(slices).tolist() == Sampler(size, seed).ids(start, ranks * local).tolist()


def test_order_changes_with_epoch_and_seed_and_is_fixed_for_ever() -> None:
    sampler = Sampler(1000, seed=7)
    assert sampler.ids(0, 1000).tolist() != sampler.ids(1000, 1000).tolist()
    assert sampler.ids(0, 1000).tolist() != Sampler(1000, seed=8).ids(0, 1000).tolist()
    # A change of these numbers means that checkpoints made before resume on other data.
    assert sampler.ids(998, 4).tolist() == [425, 651, 513, 857]
