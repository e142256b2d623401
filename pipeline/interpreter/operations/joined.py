"""What is rotated and what is not, side by side (latent attention's queries and keys): made, or written to the cache,
in one pass. T packed rows, N heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pipeline.interpreter.native import Call, count_threads, load_library
from pipeline.interpreter.native.kernel import Empty, NativeKernel
from pipeline.interpreter.numerics import NATIVE
from pipeline.interpreter.operations.attention import Places, write_rows
from pipeline.interpreter.operations.rotation import FEWEST_SHARED, compile_rotate_rows
from pipeline.interpreter.operations.site import Kernel, Site


def compile_join_rotated(site: Site) -> Kernel:
    """Inputs: left [T, N, width], right [T, N, dim], the turns of right, a factor of left. → [T, N, width + dim]."""
    held, rotate = site.held(), _compile_rotation(site)

    def joined(left: Tensor, right: Tensor, turns: Any, factor: Tensor | None = None) -> Tensor:
        left = left if factor is None else left * factor
        return torch.cat((left.to(held), rotate(right, turns)), dim=-1)

    def plan(empty: Empty, left: Tensor, right: Tensor, turns: Any, factor: Tensor | None = None) -> Call | None:
        y = empty((*left.shape[:2], left.shape[2] + right.shape[2]), dtype=held)
        return _plan(left, right, turns, factor, None, y, y)

    library = load_library()
    if site.numerics.mode != "fast" or library is None or held not in NATIVE:
        return joined
    return NativeKernel(library=library, plan=plan, otherwise=joined)


def compile_write_joined(site: Site) -> Kernel:
    """Inputs: left, right and its turns, rows of the cache, a pool [blocks, N, size, width + dim]. → the pool, with
    what they make at those rows."""
    held, rotate = site.held(), _compile_rotation(site)

    def written(left: Tensor, right: Tensor, turns: Any, target: Places, pool: Tensor) -> Tensor:
        return write_rows(pool, torch.cat((left.to(held), rotate(right, turns)), dim=-1), target)

    def plan(empty: Empty, left: Tensor, right: Tensor, turns: Any, target: Places, pool: Tensor) -> Call | None:
        places, kept = target
        if kept is not None or places.numel() != left.shape[0] * left.shape[1] or not pool.is_contiguous():
            return None
        return _plan(left, right, turns, None, places, pool, pool)

    library = load_library()
    if site.numerics.mode != "fast" or library is None or held not in NATIVE:
        return written
    return NativeKernel(library=library, plan=plan, otherwise=written, updates=(4,))


def _compile_rotation(site: Site) -> Kernel:
    turned = replace(site.spec(1), dtype=site.node.outputs[0].dtype)
    return compile_rotate_rows(replace(site, node=replace(site.node, outputs=(turned,))))


def _plan(
    left: Tensor, right: Tensor, turns: Any, factor: Tensor | None, places: Tensor | None, y: Tensor, outputs: Tensor
) -> Call | None:
    (rows, heads, width), dim = left.shape, right.shape[2]
    cos, sin = (turns, None) if isinstance(turns, Tensor) else turns
    if {left.dtype, right.dtype} != {y.dtype} or y.shape[-1] != width + dim or right.shape[:2] != left.shape[:2]:
        return None
    if left.stride(2) != 1 or right.stride(2) != 1 or not cos.is_contiguous():
        return None
    if factor is not None and (factor.dtype is not torch.float32 or factor.numel() != 1):
        return None
    return Call(
        kernel="join_rotated",
        arguments=(
            y.dtype is torch.bfloat16,
            sin is None,
            left.data_ptr(),
            right.data_ptr(),
            cos.data_ptr(),
            None if sin is None else sin.data_ptr(),
            None if factor is None else factor.data_ptr(),
            None if places is None else places.data_ptr(),
            y.data_ptr(),
            rows,
            heads,
            width,
            dim,
            left.stride(0),
            left.stride(1),
            right.stride(0),
            right.stride(1),
            y.numel() // (width + dim),
        ),
        outputs=outputs,
        threads=count_threads(rows * heads * (width + dim), FEWEST_SHARED),
        refusal=f"rows are written to places that are none of the {y.numel() // (width + dim)} of the cache",
    )
