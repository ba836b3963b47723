"""Named random streams. A stream's draws follow from (seed, name, how often it was used, this rank's place along the
axes named): their whole state is a few counts, equal on all ranks and independent of the world size, which fit a
checkpoint. Ranks that stand alike along those axes draw alike, on every device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from engine.plan import Plan


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Generators:
    """The streams of one process.

    Args:
        seed: The run's seed.
        device: Where draws happen.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self._devices = [device] if device.type == "cuda" else []
        self._uses: dict[str, int] = {}

    @contextmanager
    def stream(self, name: str, **place: int) -> Iterator[None]:
        """Draw from the stream ``name`` inside the block; torch's own generators are as before afterwards.

        Recomputation of activations inside the block repeats the draws, because torch's checkpointing saves and
        restores its own generators, which the block uses.

        Args:
            name: The stream; each use of it gives other draws.
            place: Coordinates of this process by axis, for the axes along which draws must differ. The first rank of
                an axis draws as if there were none.
        """
        use = self._uses.get(name, 0)
        self._uses[name] = use + 1
        with torch.random.fork_rng(self._devices):
            away = [f"{axis}{rank}" for axis, rank in sorted(place.items()) if rank]
            torch.manual_seed(derive_seed(self._seed, name, use, *away))
            yield

    def state_dict(self) -> dict[str, int]:
        """How often each stream was used."""
        return dict(self._uses)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where ``state_dict`` was taken."""
        self._uses = dict(state)


def draw_alike(one: Plan, other: Plan) -> bool:
    """Whether dropout under one plan goes on as it would have under another. If not, it goes on with draws that were
    never used: each step has its own."""
    return _drawn_by(one) == _drawn_by(other)


def _drawn_by(plan: Plan) -> tuple[object, ...]:
    """What decides which draws fall on which activation."""
    stages = (plan.schedule, plan.virtual_stages, plan.layers_per_stage) if plan.pp > 1 else ()
    tp = plan.tp if plan.sequence_parallel else 1
    return plan.dp, plan.cp, plan.pp, tp, plan.micro_batch_size, *stages
