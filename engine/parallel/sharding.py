"""How one module is split over an axis, as data: the placement of each parameter, what comes in and what goes out.

The module itself computes on plain tensors: with this rank's parts of its parameters, on what this rank has. All
communication is at the borders that are written down here, so what a layer sends can be read off a table. Parameters
are DTensors, and so are their gradients: one that a rank has only a part of says so by its placement (``Partial``), and
is summed by whoever reduces gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

Border = Callable[[Tensor, DeviceMesh], Tensor]
"""What becomes of a tensor where it enters or leaves a module."""


@dataclass(frozen=True)
class Move:
    """An activation at a module's border: placed as ``source`` before, as ``target`` after.

    Attributes:
        gradient: How the gradient that comes back for ``target`` is placed; None where it is as ``target``. ``Partial``
            where each rank goes on with its own part of the module: the gradients are summed, once, at this border.
    """

    source: Placement
    target: Placement
    gradient: Placement | None = None

    def __call__(self, tensor: Tensor, mesh: DeviceMesh) -> Tensor:
        """The local tensor after the border."""
        placed = DTensor.from_local(tensor, mesh, [self.source], run_check=False)
        moved = placed.redistribute(placements=[self.target])
        return moved.to_local(grad_placements=[self.gradient or self.target])


@dataclass(frozen=True)
class Use:
    """How a parameter is held, and what a rank's use of it gives.

    Attributes:
        placement: Of the parameter.
        gradient: Of the gradient that a rank's use gives.
        pieces: A rank uses one of so many equal pieces along the first dimension, neighbours the same one where there
            are more ranks than pieces.
        once: The first rank alone uses it; for the others it is zero.
    """

    placement: Placement
    gradient: Placement
    pieces: int = 1
    once: bool = False

    def __call__(self, parameter: Tensor, mesh: DeviceMesh) -> Tensor:
        """What this rank computes with."""
        assert isinstance(parameter, DTensor)
        part = parameter.to_local(grad_placements=[self.gradient])
        rank = mesh.get_local_rank()
        if self.once and rank > 0:
            return part * 0.0  # with a gradient, zero: all ranks sum theirs together
        return part.chunk(self.pieces)[rank * self.pieces // mesh.size()] if self.pieces > 1 else part


ROWS = Use(Shard(0), Shard(0))
"""Split along the first dimension (a projection's output)."""
COLUMNS = Use(Shard(1), Shard(1))
"""Split along the second dimension (a projection's input)."""
ONCE = Use(Replicate(), Partial(), once=True)
"""A bias that is added inside a sum over ranks."""
SHARED = Use(Replicate(), Partial())
"""Whole on every rank, and used by each on its own tokens or heads: gradients are parts of the whole one."""
WHOLE = Use(Replicate(), Replicate())
"""Whole on every rank, and used by all alike."""


@dataclass(frozen=True)
class Sharding:
    """How one module is split over one axis of ranks.

    Attributes:
        parameters: How each of the module's own parameters is held; those that it lacks are passed by.
        inputs: What becomes of each positional input; None for nothing.
        output: What becomes of the output. A ``bias`` is added after it, once.
    """

    parameters: Mapping[str, Use] = field(default_factory=dict)
    inputs: tuple[Border | None, ...] = ()
    output: Border | None = None

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """Split a module that is still on the meta device over a one-dimensional mesh."""
        for name, use in self.parameters.items():
            whole = module._parameters.get(name)
            if whole is not None:
                split = distribute_tensor(whole, mesh, [use.placement], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(split))
        module.forward = partial(self._forward, module, type(module), mesh)

    def _forward(self, module: nn.Module, kind: type[nn.Module], mesh: DeviceMesh, *inputs: Tensor) -> Tensor:
        """The module's own forward pass, between the borders.

        It runs on a twin that shares everything with the module but has this rank's parts for parameters: the module's
        own stay where sharding and the optimizer look for them.
        """
        twin = object.__new__(kind)
        twin.__dict__.update(module.__dict__)
        uses = self.parameters
        twin.__dict__["_parameters"] = parameters = {
            name: uses[name](whole, mesh) if whole is not None and name in uses else whole
            for name, whole in module._parameters.items()
        }
        bias = None if self.output is None else parameters.get("bias")
        if bias is not None:
            parameters["bias"] = None
        borders = self.inputs + (None,) * (len(inputs) - len(self.inputs))
        entered = [tensor if move is None else move(tensor, mesh) for move, tensor in zip(borders, inputs, strict=True)]
        output = self.compute(twin, mesh, *entered)
        if self.output is not None:
            output = self.output(output, mesh)
        return output if bias is None else output + bias.to(output.dtype)

    def compute(self, twin: nn.Module, mesh: DeviceMesh, *inputs: Tensor) -> Tensor:
        """What this rank computes of the module, with its parts of the parameters."""
        result: Tensor = type(twin).forward(twin, *inputs)
        return result
