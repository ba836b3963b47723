"""Peak memory of a dry run, by owner.

Fake tensors have storages with a size and no bytes, whose lives are those of real ones. The first run of a step finds
the moment of the peak, the second one looks who owns what then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from engine.memory.tracker import LiveStorageTracker
from engine.parallel.shards import local
from engine.step import Stepper
from engine.torch_private import FakeTensor, fsdp_parameters
from engine.trace_collectives import tensors_in
from engine.traced import MemoryPart

Owners = Mapping[MemoryPart, Iterable[torch.Tensor]]
"""Tensors by part; a storage belongs to the first part that names it."""

_SHARDING = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")
"""Collectives of data parallelism, whose inputs and outputs are buffers unless somebody owns them."""


class OwnedStorageTracker(LiveStorageTracker):
    """Live bytes of fake tensors, and at one moment their owners.

    Args:
        owners: Who owns what now.
        num_logits: Elements of a micro-batch's logits on this rank; storages of tensors with so many are logits.
        look_at: The event at which to look, by the number that ``peak_event`` gave in an equal run; None for none.
        keeps_sent: Whether what is sent to other stages lives on until this tracker ends: a real message, while nobody
            has waited for it, keeps its tensor.
    """

    def __init__(
        self,
        owners: Callable[[], Owners],
        num_logits: int,
        look_at: int | None = None,
        *,
        keeps_sent: bool = False,
    ) -> None:
        super().__init__()
        self.peak_event = 0
        """Number of the event after which the most bytes lived."""
        self.parts: dict[MemoryPart, int] = {}
        """Bytes by part after the event ``look_at``."""
        self._owners = owners
        self._num_logits = num_logits
        self._look_at = look_at
        self._num_events = 0
        self._marks: dict[int, MemoryPart] = {}
        self._keeps_sent = keeps_sent
        self._sent: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(name in str(function) for name in _SHARDING):
            for tensor in tensors_in(args[:2]):
                self._marks[id(tensor.untyped_storage())] = "buffers"
        if self._keeps_sent and "c10d.send" in str(function):
            self._sent += tensors_in(args[:1])
        return super().__torch_dispatch__(function, types, args, kwargs)

    def _counts(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
        if tensor.numel() == self._num_logits:
            self._marks.setdefault(id(storage), "logits")
        return isinstance(tensor, FakeTensor) and tensor.fake_device.type != "meta"

    def _update(self, storage: torch.UntypedStorage) -> None:
        before = self.peak_bytes
        super()._update(storage)
        self._num_events += 1
        if self.peak_bytes > before:
            self.peak_event = self._num_events
        if self._num_events == self._look_at:
            self.parts = self._by_owner()

    def _freed(self, key: int) -> None:
        self._marks.pop(key, None)
        super()._freed(key)

    def _by_owner(self) -> dict[MemoryPart, int]:
        owner: dict[int, MemoryPart] = {}
        for part, tensors in self._owners().items():
            for tensor in tensors:
                owner.setdefault(id(local(tensor).untyped_storage()), part)
        parts: dict[MemoryPart, int] = dict.fromkeys(
            ("parameters", "gradients", "optimizer", "activations", "logits", "buffers"), 0
        )
        for key, (_, size) in self._storages.items():
            parts[owner.get(key) or self._marks.get(key) or "activations"] += size
        return parts


def owners_of(stepper: Stepper) -> Owners:
    """The tensors that a rank keeps, by part."""
    parameters = list(stepper.state_dict()["model"].values())
    return {
        "parameters": parameters,
        "optimizer": [
            value
            for state in stepper.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ],
        "gradients": _gradients(stepper),
        "buffers": [tensor for part in stepper.parts for tensor in _gathered(part)],
    }


def kept(stepper: Stepper, batch: torch.Tensor) -> Iterator[torch.Tensor]:
    """All that lives before a step begins."""
    yield batch
    for tensors in owners_of(stepper).values():
        yield from tensors


def _gradients(stepper: Stepper) -> Iterator[torch.Tensor]:
    """Gradients of the shards, and of gathered parameters before they are reduced."""
    yield from stepper.gradients()
    for part in stepper.parts:
        for parameter in fsdp_parameters(part):
            whole = getattr(parameter, "_unsharded_param", None)
            yield from (
                g for g in (getattr(whole, "grad", None), parameter.unsharded_accumulated_grad) if g is not None
            )


def _gathered(part: nn.Module) -> Iterator[torch.Tensor]:
    """Gathered parameters."""
    for parameter in fsdp_parameters(part):
        yield from parameter.all_gather_outputs
        if hasattr(parameter, "_unsharded_param"):
            yield parameter._unsharded_param
