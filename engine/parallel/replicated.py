"""Data parallelism with whole parameters: gradients are summed over the ranks that hold the same ones, once a step.

Gradients travel in flat buckets, filled in the reverse order of the parameters, which is about the order in which a
backward pass gives gradients. With overlap a bucket leaves as soon as its gradients have come from all micro-batches;
what is left goes when the backward passes are over. That is all of them where a pipeline splits the backward pass: what
it computes of the weights passes by autograd's hooks. Ranks start buckets in one order, whichever gradients come first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from engine.context import ParallelContext
from engine.optim.groups import of_experts
from engine.parallel.shards import local, split_axes, with_local

BUCKET_BYTES = 25 * 2**20
"""A bucket is closed when it holds so many bytes: large enough for full bandwidth, small enough to overlap."""


class Pending(Protocol):
    """A sum under way."""

    def wait(self) -> object:
        """Return when the values are summed (on an accelerator: when what is enqueued from now on finds them so)."""


SumOver = Callable[[Tensor, str, ParallelContext], Pending]
"""Begins to sum a flat tensor in place over an axis of the context. The members of the axis call it in one order."""


def native_sum(values: Tensor, axis: str, context: ParallelContext) -> Pending:
    """The backend's all-reduce."""
    work = dist.all_reduce(values, group=context.group(axis), async_op=True)
    assert work is not None
    return work


@dataclass(frozen=True)
class Bucket:
    """Parameters that travel together, of one dtype."""

    axis: str
    """Of the context: over which they travel."""
    parameters: tuple[nn.Parameter, ...]

    @property
    def num_bytes(self) -> int:
        """Of the parameters on this rank."""
        return sum(local(parameter).nbytes for parameter in self.parameters)


def in_buckets(parameters: Iterable[tuple[str, nn.Parameter]]) -> list[Bucket]:
    """Parameters, each with the axis it travels over, in buckets of one axis and dtype, those that are full first."""
    buckets: list[Bucket] = []
    filling: dict[tuple[str, torch.dtype], list[nn.Parameter]] = {}
    for axis, parameter in parameters:
        members = filling.setdefault((axis, parameter.dtype), [])
        members.append(parameter)
        bucket = Bucket(axis, tuple(members))
        if bucket.num_bytes >= BUCKET_BYTES:
            buckets.append(bucket)
            members.clear()
    return buckets + [Bucket(axis, tuple(members)) for (axis, _), members in filling.items() if members]


def gradient_buckets(parameters: Mapping[str, nn.Parameter], context: ParallelContext) -> list[Bucket]:
    """The buckets of those parameters whose gradients nothing else sums, in the order in which they are sent.

    Args:
        parameters: This rank's by name; those that are sharded over data-parallel ranks are passed by.
        context: This rank's place.
    """
    found = []
    for fqn, parameter in reversed(list(parameters.items())):
        axis = "expert_data" if of_experts(fqn) else "data"
        if context.has_axis(axis) and not split_axes(parameter) & {"fsdp", "efsdp"} and parameter.requires_grad:
            found.append((axis, parameter))
    return in_buckets(found)


class GradientReducer:
    """Sums the gradients of a rank's whole parameters over data-parallel ranks.

    Args:
        parameters: All parameters of the rank by name.
        context: Its place.
        overlap: Whether to begin during the last backward pass.
        sum_over: How values are summed.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        context: ParallelContext,
        *,
        overlap: bool,
        sum_over: SumOver = native_sum,
    ) -> None:
        self.buckets = gradient_buckets(parameters, context)
        self._context = context
        self._overlap = overlap
        self._sum_over = sum_over
        self._under_way: list[Pending] = []
        self._hooks: list[RemovableHandle] = []
        self._missing: list[int] = []

    def begin_step(self, num_micro_batches: int) -> None:
        """Prepare for the backward passes of a step.

        Args:
            num_micro_batches: How many contributions each gradient gets.
        """
        self._remove_hooks()
        self._under_way.clear()
        if not self._overlap:
            return
        self._missing = [len(bucket.parameters) for bucket in self.buckets]
        seen: Counter[nn.Parameter] = Counter()
        for index, bucket in enumerate(self.buckets):

            def came(parameter: nn.Parameter, index: int = index) -> None:
                seen[parameter] += 1
                if seen[parameter] == num_micro_batches:
                    self._missing[index] -= 1
                    self._start_ready()

            self._hooks += [parameter.register_post_accumulate_grad_hook(came) for parameter in bucket.parameters]

    def reduce_gradients(self) -> None:
        """Sum what is not summed yet; afterwards every gradient is the sum over the ranks of its axis."""
        self._remove_hooks()
        for bucket in self.buckets[len(self._under_way) :]:
            self._start(bucket)
        for pending in self._under_way:
            pending.wait()
        self._under_way.clear()

    def _start_ready(self) -> None:
        while len(self._under_way) < len(self.buckets) and not self._missing[len(self._under_way)]:
            self._start(self.buckets[len(self._under_way)])

    def _start(self, bucket: Bucket) -> None:
        self._under_way.append(self._sum_over(flatten_gradients(bucket.parameters), bucket.axis, self._context))

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


@torch.no_grad()
def flatten_gradients(parameters: Iterable[nn.Parameter]) -> Tensor:
    """One flat tensor that all gradients become views of. A gradient that did not come on this rank is zero."""
    parameters = list(parameters)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    wholes = [parameter.grad for parameter in parameters if parameter.grad is not None]
    gradients = [local(whole) for whole in wholes]
    if len(gradients) == 1 and gradients[0].is_contiguous():
        return gradients[0].view(-1)
    flat = gradients[0].new_empty(sum(gradient.numel() for gradient in gradients))
    parts = flat.split([gradient.numel() for gradient in gradients])
    views = [part.view(gradient.shape) for part, gradient in zip(parts, gradients, strict=True)]
    torch._foreach_copy_(views, gradients)
    for parameter, whole, view in zip(parameters, wholes, views, strict=True):
        parameter.grad = with_local(whole, view) if isinstance(whole, DTensor) else view
    return flat
