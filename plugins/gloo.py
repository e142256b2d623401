"""Exchanges between processes of the interpreter, over torch.distributed; memory is tensors of bytes on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipeline.errors import CompatibilityError
from plugins.transport import Traffic


class Alone:
    """A group of one rank: what it sends is what it receives. See transport.Transport."""

    def __init__(self) -> None:
        self.rank, self.ranks, self.traffic = 0, 1, Traffic()

    def exchange(
        self, source: Tensor, target: Tensor, sends: Sequence[int], receives: Sequence[int], stream: int
    ) -> None:
        target[: receives[0]] = source[: sends[0]]


class GlooTransport:
    """A rank's end of a process group. See transport.Transport."""

    def __init__(self, group: Any) -> None:
        self.rank, self.ranks, self.traffic = dist.get_rank(group), dist.get_world_size(group), Traffic()
        self._group = group

    def exchange(
        self, source: Tensor, target: Tensor, sends: Sequence[int], receives: Sequence[int], stream: int
    ) -> None:
        dist.all_to_all_single(
            target[: sum(receives)], source[: sum(sends)], list(receives), list(sends), group=self._group
        )


def find_group(first: int, ranks: int) -> Alone | GlooTransport:
    """This process' end of the group of ranks [first, first + ranks), made when first asked for. Raises
    CompatibilityError where torch.distributed is not initialized."""
    if ranks == 1:
        return _ALONE
    if not dist.is_initialized():
        raise CompatibilityError(
            f"ranks {first} to {first + ranks - 1} exchange rows, and this process is none of several",
            hint="run each rank in a process of its own, with torch.distributed initialized on gloo",
        )
    return _make_group(dist.group.WORLD, first, ranks)


@cache
def _make_group(world: Any, first: int, ranks: int) -> GlooTransport:
    if ranks == dist.get_world_size(world):
        return GlooTransport(world)
    members = list(range(first, first + ranks))
    return GlooTransport(dist.new_group(members, backend="gloo", use_local_synchronization=True))


_ALONE = Alone()
