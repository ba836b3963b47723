"""Sums a tensor over the members of a group along a route: each rank does its own part of the list of messages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.comm.transport import Message, Transport
from engine.routes import Route, Transfer


@dataclass(frozen=True)
class Move:
    """What one rank does in one step."""

    send: Transfer | None
    receive: Transfer | None


def moves_of(route: Route, rank: int) -> list[Move]:
    """A rank's part of a route, in order."""
    moves = []
    for step in route.steps:
        send = next((move for move in step if move.source == rank), None)
        receive = next((move for move in step if move.target == rank), None)
        if send or receive:
            moves.append(Move(send, receive))
    return moves


@torch.no_grad()
def all_reduce(values: Tensor, route: Route, moves: list[Move], transport: Transport) -> None:
    """Sum ``values`` in place; bitwise equal on all ranks.

    All ranks of the route call it together, with tensors of one length and dtype; sums are made in that dtype.

    Args:
        values: Flat and contiguous, [n]; any n.
        route: The messages.
        moves: This rank's part of it.
        transport: Between the ranks of the route.
    """
    bounds = [values.numel() * piece // route.num_pieces for piece in range(route.num_pieces + 1)]

    def span(transfer: Transfer | None) -> Tensor | None:
        if transfer is None or bounds[transfer.start] == bounds[transfer.stop]:
            return None
        return values[bounds[transfer.start] : bounds[transfer.stop]]

    for move in moves:
        sent, kept = span(move.send), span(move.receive)
        taken = torch.empty_like(kept) if kept is not None and move.receive and move.receive.adds else kept
        transport.exchange(
            Message(sent, move.send.target) if sent is not None and move.send else None,
            Message(taken, move.receive.source) if taken is not None and move.receive else None,
        )
        if kept is not None and taken is not None and taken is not kept:
            kept.add_(taken)
