"""How the ranks of a group hand rows to each other, and the count of what goes over the wire.

An operation's `Exchange` says what is exchanged; a transport knows one group and one kind of memory: addresses on a GPU
(`nccl`), tensors of bytes on the CPU (`gloo`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from pipeline.errors import CompatibilityError
from plugins.operation import Exchange

M = TypeVar("M", contravariant=True)


@dataclass(slots=True)
class Bytes:
    """What one rank sent to others, and received from them."""

    sent: int = 0
    received: int = 0


@dataclass(slots=True)
class Traffic:
    """Bytes by the name of the exchange, summed up until they are taken. What a rank keeps goes over no wire, and does
    not count."""

    by_name: dict[str, Bytes] = field(default_factory=dict)

    def take(self) -> dict[str, Bytes]:
        """What was counted since the last time: of a step, when it is taken after each."""
        taken, self.by_name = self.by_name, {}
        return taken


class Transport(Protocol[M]):
    """One rank's end of a group. rank: its place in the group, which has `ranks`."""

    rank: int
    ranks: int
    traffic: Traffic

    def exchange(self, source: M, target: M, sends: Sequence[int], receives: Sequence[int], stream: int) -> None:
        """Moves bytes. sends, receives: how many go to each rank, and come from each, itself among them; they lie side
        by side, in order of the ranks. Every rank of the group must call it."""


def exchange_rows(
    transport: Transport[M],
    name: str,
    source: M,
    target: M,
    *,
    goes: Sequence[int],
    comes: Sequence[int],
    row_bytes: int,
    most: int,
    stream: int = 0,
) -> None:
    """goes, comes: rows for each rank, and from each. See operation.Exchange. Raises CompatibilityError where more rows
    come than the target has room for: its ranks do not run the same step."""
    if sum(comes) > most:
        raise CompatibilityError(
            f"{name}: {sum(comes)} rows come to rank {transport.rank} of {transport.ranks}, which has room for {most}",
            hint="every rank of a group must run the same step, with as many rows as the others",
        )
    sends, receives = ([count * row_bytes for count in rows] for rows in (goes, comes))
    transport.exchange(source, target, sends, receives, stream)
    counted = transport.traffic.by_name.setdefault(name, Bytes())
    counted.sent += sum(sends) - sends[transport.rank]
    counted.received += sum(receives) - receives[transport.rank]


def run_exchange(
    exchange: Exchange, transport: Transport[M], source: M, target: M, counts: Sequence[int], stream: int = 0
) -> None:
    """counts: the 2 * ranks numbers that `exchange.counts` names; not looked at where it names none."""
    ranks = exchange.ranks
    goes, comes = ([1] * ranks, [1] * ranks) if exchange.counts is None else (counts[:ranks], counts[ranks:])
    if exchange.reverse:
        goes, comes = comes, goes
    exchange_rows(
        transport,
        exchange.name,
        source,
        target,
        goes=goes,
        comes=comes,
        row_bytes=exchange.row_bytes,
        most=exchange.most,
        stream=stream,
    )
