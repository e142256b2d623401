"""What the ranks of a parallel model do together: one process each, over torch.distributed on gloo.

Results are the same bytes on every rank, and at every run: what is summed is summed in the order of the ranks, in fp32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeline.interpreter.operations.site import Kernel, Site
from plugins.gloo import find_group
from plugins.transport import Transport


def compile_dist_collective(site: Site) -> Kernel:
    """`ranks` are neighbours. Where there are several, torch.distributed must be initialized when it runs."""
    ranks = [int(rank) for rank in site.attribute("ranks")]
    first, count = ranks[0], len(ranks)
    if ranks != list(range(first, first + count)):
        raise site.refuse(f"ranks {ranks} are not neighbours")
    site.require("reduce", "sum" if site.attribute("op") == "all_reduce" else "none")
    run = site.choose("op", COLLECTIVES)
    return lambda x: run(find_group(first, count), x.contiguous())


def _all_reduce(group: Transport[Tensor], x: Tensor) -> Tensor:
    parts = _all_gather(group, x.unsqueeze(0))
    return parts.sum(0, dtype=torch.float32 if x.is_floating_point() else x.dtype).to(x.dtype)


def _all_gather(group: Transport[Tensor], x: Tensor) -> Tensor:
    return _exchange(group, x.expand(group.ranks, *x.shape).contiguous()).flatten(0, 1)


def _all_to_all(group: Transport[Tensor], x: Tensor) -> Tensor:
    if x.shape[0] != group.ranks:
        raise ValueError(f"{x.shape[0]} entries are exchanged among {group.ranks} ranks")
    return _exchange(group, x)


def _exchange(group: Transport[Tensor], x: Tensor) -> Tensor:
    """x [ranks, …] → the entries that the ranks had for this one."""
    result = torch.empty_like(x)
    sizes = [x[0].numel() * x.element_size()] * group.ranks
    group.exchange(_bytes(x), _bytes(result), sizes, sizes, 0)
    return result


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


COLLECTIVES: dict[str, Callable[[Transport[Tensor], Tensor], Tensor]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
}
