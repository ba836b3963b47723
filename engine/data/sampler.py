"""The order in which sequences are trained on."""

from __future__ import annotations

import numpy as np


class Sampler:
    """An endless stream of sequence ids, each id once per epoch, shuffled anew each epoch.

    The stream is a pure function of (seed, position): where a run stands in its data is one integer, the global samples
    consumed, whatever the number of ranks.

    Args:
        num_sequences: Sequences of the training set.
        seed: The run's seed.
    """

    def __init__(self, num_sequences: int, seed: int) -> None:
        assert num_sequences > 0, "a sampler needs sequences"
        self.num_sequences = num_sequences
        self.seed = seed
        self._last: tuple[int, np.ndarray] | None = None

    def ids(self, start: int, count: int) -> np.ndarray:
        """Ids of the global samples ``start`` .. ``start + count - 1``, int64 [count]."""
        parts = []
        while count > 0:
            epoch, offset = divmod(start, self.num_sequences)
            part = self._order(epoch)[offset : offset + count]
            parts.append(part)
            start, count = start + len(part), count - len(part)
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)

    def _order(self, epoch: int) -> np.ndarray:
        """The permutation of one epoch; the last one asked for is kept."""
        last = self._last
        if last is None or last[0] != epoch:
            generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence([self.seed, epoch])))
            last = self._last = (epoch, generator.permutation(self.num_sequences).astype(np.int64, copy=False))
        return last[1]
