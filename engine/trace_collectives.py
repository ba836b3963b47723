"""Counts the collectives of a dry run: calls, message bytes, bytes sent, by operation and axis of the mesh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed import ProcessGroup, get_process_group_ranks

from engine.context import OWN_GROUP, ParallelContext
from engine.torch_private import TorchDispatchMode, collective_group
from engine.traced import CollectiveUse

_OPERATIONS = {
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
}
"""Part of an operator's name -> operation; the first that fits."""

_AXES = {
    "tp": "tp", "pp": "pp", "fsdp": "dp", "dp_replicate": "dp", "data": "dp", "efsdp": "dp", "edp_replicate": "dp",
    "expert_data": "dp",
}  # fmt: skip
"""Axis of the context -> the plan's axis that it is counted under; beside them those with a group of their own."""


Key = tuple[str, str, int]
"""Kind of a collective: axis, operation, group size."""


class CollectiveCounter(TorchDispatchMode):
    """Counts every collective that runs while it is entered.

    Args:
        context: Whose mesh names the groups.
    """

    def __init__(self, context: ParallelContext) -> None:
        super().__init__()
        # Axes of the same ranks share a group: the first name that stands for it is the one that is counted under.
        self._axes = {
            _members(context.group(axis)): name for axis, name in reversed(_AXES.items()) if context.has_axis(axis)
        }
        # These may be of the same ranks as one of those.
        self._own = {context.group(axis).group_name: axis for axis in OWN_GROUP if context.has_axis(axis)}
        self._counts: dict[Key, list[int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the wrapper takes itself apart and comes back with its parts
        result = function(*args, **(kwargs or {}))
        group = collective_group(function, args)
        if group is not None:
            # The whole is an input of a scatter and the output of a gather.
            whole = max(sum(map(_num_bytes, tensors_in(value))) for value in (*args, result))
            operation = _operation(function)
            axis = self._own.get(group.group_name) or self._axes.get(_members(group), "world")
            key = (axis, operation, group.size())
            count = self._counts.setdefault(key, [0, 0])
            count[0] += 1
            count[1] += whole
        return result

    def counts(self) -> dict[Key, tuple[float, float]]:
        """Calls and message bytes by kind."""
        return {key: (calls, num_bytes) for key, (calls, num_bytes) in self._counts.items()}


def collective_use(key: Key, calls: float, message_bytes: float) -> CollectiveUse:
    """Calls of one operation over one axis, with the bytes that a rank sends over rings."""
    axis, operation, size = key
    others = {"send": 1.0, "receive": 0.0, "all_reduce": 2 * (size - 1) / size}.get(operation, (size - 1) / size)
    return CollectiveUse(
        axis=axis,  # type: ignore[arg-type]
        operation=operation,
        group_size=size,
        calls=calls,
        message_bytes=message_bytes,
        sent_bytes=others * message_bytes,
    )


def _members(group: ProcessGroup) -> tuple[int, ...]:
    """What tells groups apart: several may be of the same ranks."""
    return tuple(get_process_group_ranks(group))


def _operation(function: Any) -> str:
    name = str(function)
    return next((operation for part, operation in _OPERATIONS.items() if part in name), name)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of an operator's argument."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
