"""Batches for one data-parallel rank, read ahead by a background thread."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from engine.data.sampler import Sampler
from engine.data.sequences import Batch, SequenceSet


class Loader:
    """Rank r of d takes the r-th contiguous slice of each global batch.

    ``position`` (global samples consumed) is the whole state. An error in the background comes out of ``next``,
    again and again until ``seek``.

    Args:
        sequences: The training sequences.
        sampler: Their order.
        global_batch_size: Sequences of one optimizer step over all ranks; a multiple of ``dp_size``.
        dp_rank: This rank's place among the data-parallel ranks.
        dp_size: Data-parallel ranks.
        position: Global samples consumed before.
        num_ahead: Batches read ahead.
    """

    def __init__(
        self,
        sequences: SequenceSet,
        sampler: Sampler,
        global_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
        position: int = 0,
        *,
        num_ahead: int = 2,
    ) -> None:
        assert global_batch_size % dp_size == 0, "the global batch must be a multiple of the data-parallel ranks"
        self.position = position
        self._sequences = sequences
        self._sampler = sampler
        self._global_batch_size = global_batch_size
        self._local_batch_size = global_batch_size // dp_size
        self._offset = dp_rank * self._local_batch_size
        self._num_ahead = num_ahead
        self._ahead: deque[Future[Batch]] = deque()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")

    def next(self) -> Batch:
        """This rank's slice of the next global batch; ``position`` moves on by the whole global batch."""
        while len(self._ahead) <= self._num_ahead:
            start = self.position + len(self._ahead) * self._global_batch_size
            self._ahead.append(self._executor.submit(self._read, start))
        batch = self._ahead[0].result()
        self._ahead.popleft()
        self.position += self._global_batch_size
        return batch

    def seek(self, position: int) -> None:
        """Go on from the global sample ``position``; what was read ahead is dropped."""
        self._drop()
        self.position = position

    def close(self) -> None:
        """End the background thread."""
        self._drop()
        self._executor.shutdown(wait=True)

    def _read(self, start: int) -> Batch:
        return self._sequences.batch(self._sampler.ids(start + self._offset, self._local_batch_size))

    def _drop(self) -> None:
        while self._ahead:
            self._ahead.popleft().cancel()
