"""A pipeline stage that knows what it does and what it waits for, and whether its backward pass can be split."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage

from engine.context import ParallelContext
from engine.models.decoder import Decoder
from engine.stage_split import stage_rank
from engine.torch_private import accumulate_fsdp_gradients

SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv", "dualpipev")
"""Schedules that make gradients of inputs and of weights apart."""


class Stage(PipelineStage):
    """One stage of the pipeline.

    Schedules that split the backward pass walk the recorded graph twice, and once more for every group of weights. A
    stage that recomputes activations would compute them again each time, so there the first half is the whole backward
    pass and the second half does nothing.

    Args:
        part: The layers.
        context: This rank's place.
        inputs: What comes in, on the meta device.
        outputs: What goes out, on the meta device.
    """

    def __init__(self, part: Decoder, context: ParallelContext, inputs: Tensor, outputs: Tensor) -> None:
        plan = context.plan
        super().__init__(
            part, part.stage, plan.num_stages, context.device,
            input_args=inputs, output_args=outputs, group=context.group("pp"),
        )  # fmt: skip
        self._ranks = [stage_rank(plan, stage) for stage in range(plan.num_stages)]
        self._whole_backward = any(plan.recomputes(int(layer)) for layer in part.layers)
        self._received: dict[tuple[str, int], bool] = {}
        self._sent: tuple[str, int] | None = None
        self._doing = ""
        if plan.schedule in SPLIT_BACKWARD and isinstance(part, FSDPModule):
            # Gradients of weights are made when the weights may be gone again: the second half looks for them.
            part.set_reshard_after_forward(False)

    def check_place(self) -> None:
        """Make sure that torch sends to the ranks that hold the stages."""
        found = [self.stage_index_to_group_rank[stage] for stage in range(self.num_stages)]
        assert found == self._ranks, f"torch has the stages on ranks {found}, the plan on {self._ranks}"

    def start(self) -> None:
        """Forget the step before."""
        self._received.clear()
        self._sent = None
        self._doing = ""

    def doing(self) -> str:
        """The pass that is being computed, in words; empty between two passes."""
        return f"stage {self.stage_index} stood still in {self._doing}" if self._doing else ""

    def waiting(self, ahead: Collection[tuple[str, int, int]]) -> str:
        """The input that is being waited for, in words; empty if none is.

        Args:
            ahead: (``forward`` or ``backward``, stage, micro-batch) of inputs that may come in, but nobody waits for
                yet.
        """
        for (kind, number), received in self._received.items():
            if not received and (kind, self.stage_index, number) not in ahead:
                source = self.stage_index + (1 if kind == "backward" else -1)
                return (
                    f"stage {self.stage_index} waited for the {kind} of micro-batch {number} from {self._named(source)}"
                )
        return ""

    def sending(self) -> str:
        """What was sent last, and who must take it, in words; empty if nothing was sent."""
        if self._sent is None:
            return ""
        kind, number = self._sent
        target = self.stage_index + (1 if kind == "forward" else -1)
        return (
            f"stage {self.stage_index} waited for {self._named(target)} to take what it was sent, at last the {kind} of"
            f" micro-batch {number}"
        )

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """See ``PipelineStage``."""
        return self._noted("forward", fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """See ``PipelineStage``."""
        return self._noted("backward", bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """See ``PipelineStage``."""
        return self._sendable("forward", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """See ``PipelineStage``."""
        return self._sendable("backward", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """See ``PipelineStage``."""
        self._begin("forward", fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._doing = ""
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """See ``PipelineStage``."""
        self._begin("backward", bwd_chunk_id)
        whole = full_backward or self._whole_backward
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=whole, last_backward=last_backward)
        self._doing = ""

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """See ``PipelineStage``."""
        if self._whole_backward:
            return
        self._begin("backward of the weights", bwd_chunk_id)
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward=last_backward)
        accumulate_fsdp_gradients(self.submod)
        self._doing = ""

    def _noted(self, kind: str, number: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        if operations:
            self._received[kind, number] = False
        return operations

    def _sendable(self, kind: str, number: int, operations: list[dist.P2POp]) -> list[dist.P2POp]:
        for operation in operations:
            operation.tensor = operation.tensor.contiguous()
            self._sent = kind, number
        return operations

    def _named(self, stage: int) -> str:
        return f"stage {stage} (pipeline rank {self._ranks[stage]})"

    def _begin(self, kind: str, number: int) -> None:
        self._received[kind, number] = True
        self._doing = f"the {kind} of micro-batch {number}"
