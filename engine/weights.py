"""Weights of one rank's stages: their first values, and whole ones in and out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from engine.context import ParallelContext
from engine.errors import UserError
from engine.models.decoder import initial_value
from engine.parallel.pipeline import gather_to_main
from engine.parallel.shards import fill, gather
from engine.parallel.tied import model_name, without_copies
from engine.parametrization import ScalesOf
from engine.spec import ModelSpec


class Weights:
    """Every method is called by all ranks together.

    Args:
        named: This rank's parameters and those buffers that are weights, live, by the names of ``rank_parameters``.
        spec: The architecture, with its final vocabulary.
        seed: Of the first values.
        context: This rank's place.
        scales_of: Factors on the first values.
    """

    def __init__(
        self, named: Mapping[str, Tensor], spec: ModelSpec, seed: int, context: ParallelContext, scales_of: ScalesOf
    ) -> None:
        self.named = named
        self._spec = spec
        self._seed = seed
        self._context = context
        self._scales_of = scales_of

    def initialise(self) -> None:
        """Give all weights their first values, which depend on the seed and the name alone."""
        for name, weight in self.named.items():
            fill(weight, partial(self._initial, model_name(name), weight))

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take over whole weights by name. Names of other stages are passed by; a vocabulary with fewer rows than the
        model's fills the first ones.

        Raises:
            UserError: A weight of this rank's part is missing or has another shape.
        """
        missing = set(self.named)
        for fqn, whole in weights:
            holders = [name for name in self.named if model_name(name) == fqn]
            if not holders:
                continue
            missing.difference_update(holders)
            weight = self.named[holders[0]]
            if fqn in ("embedding.weight", "head.weight") and whole.shape[0] < weight.shape[0]:
                whole = torch.cat([whole, self._initial(fqn, weight, range(len(whole), len(weight)))])
            if whole.shape != weight.shape:
                raise UserError(
                    f"the weight {fqn} has shape {list(whole.shape)}, the model needs {list(weight.shape)}",
                    hint="use the model section that belongs to these weights (its config.json)",
                )
            for name in holders:
                fill(self.named[name], partial(_rows, whole))
        if missing:
            raise UserError(
                f"{len(missing)} weights are missing, the first is {min(map(model_name, missing))}",
                hint="use the model section that belongs to these weights (its config.json)",
            )

    @torch.no_grad()
    def whole(self) -> dict[str, Tensor]:
        """All weights of all stages, whole, on the CPU of rank 0; empty on the other ranks. A device holds one whole
        weight at a time, and one rank of each stage keeps a copy."""
        keeps = self._context.dp_rank == self._context.cp_rank == self._context.tp_rank == 0
        weights: dict[str, Tensor] = {}
        for fqn, weight in without_copies(self.named).items():
            whole = gather(weight)
            if keeps:
                weights[fqn] = whole.detach().to("cpu", copy=True)
        return gather_to_main(weights, self._context)

    def _initial(self, fqn: str, weight: Tensor, rows: range) -> Tensor:
        return initial_value(self._spec, self._seed, fqn, weight.shape, rows).mul_(self._scales_of(fqn).initial_value)


def _rows(whole: Tensor, rows: range) -> Tensor:
    return whole[rows.start : rows.stop]
