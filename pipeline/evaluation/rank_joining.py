"""Ranks' parts of a tensor put together: one below the other, side by side, by heads, or found to be the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pipeline.errors import CheckpointError


def join(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenates, whatever the type."""
    return parts[0] if len(parts) == 1 else torch.cat([bits(part) for part in parts], dim).view(parts[0].dtype)


def join_same(parts: Sequence[torch.Tensor], name: str) -> torch.Tensor:
    """What all hold alike. Raises CheckpointError where they do not."""
    for part in parts[1:]:
        if part.shape != parts[0].shape or not torch.equal(bits(part), bits(parts[0])):
            raise CheckpointError(f"ranks hold different {name}, which they have in common")
    return parts[0]


def join_heads(parts: Sequence[torch.Tensor], queries: int, keys: int, name: str) -> torch.Tensor:
    """q, k and v of all ranks, each rank's in this order, from rows of a whole model of `queries` query heads and
    `keys` key/value heads; with fewer keys than ranks, neighbouring ranks hold the same one."""
    ranks = len(parts)
    held = max(keys, ranks) // ranks
    by_head = [bits(part).reshape(queries // ranks + 2 * held, -1, *part.shape[1:]) for part in parts]
    split = [torch.split(heads, [queries // ranks, held, held]) for heads in by_head]
    copies = max(1, ranks // keys)
    wholes = [torch.cat([q for q, _, _ in split])]
    for index in (1, 2):
        groups = [split[start : start + copies] for start in range(0, ranks, copies)]
        wholes.append(torch.cat([join_same([rank[index] for rank in group], name) for group in groups]))
    return torch.cat(wholes).flatten(0, 1).view(parts[0].dtype)


def cut_padding(whole: torch.Tensor, rows: int, name: str) -> torch.Tensor:
    """Without the rows that only make parts equal. Raises CheckpointError where they are not zero."""
    if bool(whole[rows:].any()):
        raise CheckpointError(f"the padding of {name} is not zero")
    return whole[:rows]


def pack_int4(q: torch.Tensor) -> torch.Tensor:
    """INT4 values [O, I] in pairs of rows, int8 [O/2, I]."""
    pairs = q.view(torch.uint8).reshape(-1, 2, q.shape[1]) & 15
    return (pairs[:, 0] | pairs[:, 1] << 4).view(torch.int8)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes, which torch can compare and concatenate."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
