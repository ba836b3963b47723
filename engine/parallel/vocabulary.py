"""A vocabulary that is split over ranks: its rows, the embedding, the loss.

Where the ranks do not divide the vocabulary the last of them has fewer rows, as ``torch.chunk`` cuts: there are no rows
of padding, so none has to be masked in the loss or kept out of checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from engine.models.loss import IGNORED
from engine.parallel.sharding import Sharding
from engine.parallel.shards import chunk_of
from engine.plan import Plan
from engine.precision.policy import wide


def local_vocab_size(vocab_size: int, plan: Plan, tp_rank: int) -> int:
    """Width of the logits on a tensor-parallel rank."""
    return len(chunk_of(range(vocab_size), plan.tp, tp_rank)) if plan.vocab_parallel else vocab_size


@dataclass(frozen=True, kw_only=True)
class EmbeddingRows(Sharding):
    """An embedding of which each rank has some rows: tokens of other ranks give zeros here."""

    vocab_size: int

    def compute(self, twin: nn.Module, mesh: DeviceMesh, *inputs: Tensor) -> Tensor:
        """Tokens int64 [B, L] to this rank's part [B, L, H] of the sum over ranks."""
        (tokens,) = inputs
        rows = chunk_of(range(self.vocab_size), mesh.size(), mesh.get_local_rank())
        here = (tokens >= rows.start) & (tokens < rows.stop)
        embedded = super().compute(twin, mesh, torch.where(here, tokens - rows.start, 0))
        return embedded.masked_fill(~here[..., None], 0.0)


class SplitLoss:
    """``summed_loss`` of logits of which each rank has the columns of its rows of the vocabulary.

    Two all-reduces: of the largest logit of each token, and of the sum of exponentials with the label's logit.

    Args:
        mesh: The ranks.
        vocab_size: Of the whole vocabulary.
    """

    def __init__(self, mesh: DeviceMesh, vocab_size: int) -> None:
        self._group = mesh.get_group()
        self._rows = chunk_of(range(vocab_size), mesh.size(), mesh.get_local_rank())

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Logits [B, L, this rank's rows] and labels int64 [B, L] of the whole vocabulary to a scalar, equal on all
        ranks."""
        loss: Tensor = _SplitCrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), self._rows.start, self._group)
        return loss


class _SplitCrossEntropy(torch.autograd.Function):
    """Summed cross-entropy, log Σ exp(z) - z[label] over the labels that count, in at least fp32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first_row: int, group: dist.ProcessGroup) -> Tensor:
        dtype = wide(logits.dtype)
        largest = logits.amax(dim=-1).to(dtype)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        scores = logits.to(dtype, copy=True).sub_(largest[:, None])
        columns = labels - first_row
        here = (columns >= 0) & (columns < logits.shape[-1])
        columns = torch.where(here, columns, 0)[:, None]
        of_labels = scores.gather(-1, columns).squeeze(-1) * here
        exponentials = scores.exp_()
        sums = torch.stack([exponentials.sum(dim=-1), of_labels])
        dist.all_reduce(sums, group=group)
        counts = labels != IGNORED
        ctx.save_for_backward(exponentials, sums[0], columns, here, counts)
        ctx.dtype = logits.dtype
        return torch.where(counts, sums[0].log() - sums[1], 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        exponentials, total, columns, here, counts = ctx.saved_tensors
        # In place: nothing is as large as the logits, and nobody asks for this gradient twice.
        into_logits = exponentials.mul_((counts * grad / total)[:, None])
        into_logits.scatter_add_(-1, columns, (here * -grad)[:, None])
        return into_logits.to(ctx.dtype), None, None, None
