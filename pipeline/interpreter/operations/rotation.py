"""Rotary embedding as rules/rotary.py parts it. B sequences, N heads, S rows, D head size, T packed rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pipeline.interpreter.native import Call, count_threads, load_library
from pipeline.interpreter.native.kernel import Empty, NativeKernel
from pipeline.interpreter.numerics import NATIVE
from pipeline.interpreter.operations.attention import Places, write_rows
from pipeline.interpreter.operations.site import Kernel, Site

Turns = tuple[Tensor, Tensor]
FEWEST_SHARED = 1 << 17  # values, from which on another thread pays


def compile_rotary_rows(site: Site) -> Kernel:
    """The rows of the tables as `rotate` wants them: complex [B, 1, S, d/2] for pairs; for halves cos and sin laid out
    over the whole width [B, 1, S, d], with the sign of the rotation in sin."""
    if site.attribute("interleaved"):
        return lambda cos, sin, positions: torch.complex(cos[positions].float(), sin[positions].float()).unsqueeze(1)

    def rows(cos: Tensor, sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        c, s = cos[positions].float().unsqueeze(1), sin[positions].float().unsqueeze(1)
        return torch.cat((c, c), dim=-1), torch.cat((-s, s), dim=-1)

    return rows


def compile_rotate(site: Site) -> Kernel:
    """The rotation of attention.compile_rotation, in half the calls."""
    held, width = site.held(), site.spec(0).shape[-1]
    dim = int(site.attribute("dim")) or width
    if dim % 2 or not 0 < dim <= width:
        raise site.refuse(f"dim {dim} does not fit a head of {width}")
    half = dim // 2

    def rotate_pairs(x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], half, 2))
        return torch.view_as_real(pairs * turns).flatten(-2).to(held)

    def rotate_halves(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = turns
        x = x.float()
        swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
        return (x * cos).add_(swapped.mul_(sin)).to(held)

    rotate = rotate_pairs if site.attribute("interleaved") else rotate_halves
    if dim == width:
        return rotate
    return lambda x, turns: torch.cat((rotate(x[..., :dim], turns), x[..., dim:]), dim=-1)


def compile_row_turns(site: Site) -> Kernel:
    """As rotary_rows, for packed rows of one position each: [T, 1, …]; times a number, where one is given."""
    interleaved = bool(site.attribute("interleaved"))

    def turns(cos: Tensor, sin: Tensor, positions: Tensor, factor: Tensor | None = None) -> Tensor | Turns:
        c, s = cos[positions].float(), sin[positions].float()
        if factor is not None:
            c, s = c * factor, s * factor
        return torch.complex(c, s) if interleaved else (torch.cat((c, c), dim=-1), torch.cat((-s, s), dim=-1))

    return turns


def compile_head_turns(site: Site) -> Kernel:
    """Two tables of the same rows, each repeated for as many heads as turn by it: [T, heads, …]."""
    counts = [int(count) for count in site.attribute("counts")]

    def lay_out(*tables: Tensor) -> Tensor:
        return torch.cat([table.expand(-1, n, -1) for table, n in zip(tables, counts, strict=True)], dim=1)

    def turns(left: Any, right: Any) -> Any:
        if isinstance(left, Tensor):
            return lay_out(left, right)
        return tuple(lay_out(*pair) for pair in zip(left, right, strict=True))

    return turns


def compile_rotate_heads(site: Site) -> Kernel:
    """The first heads of [T, heads, D], rotated at once and taken apart again."""
    rotate, (left, right) = compile_rotate_rows(site), site.attribute("counts")

    def rotate_heads(x: Tensor, turns: Any) -> tuple[Tensor, Tensor]:
        turned: Tensor = rotate(x.narrow(1, 0, left + right), turns)
        return turned.narrow(1, 0, left), turned.narrow(1, left, right)

    return rotate_heads


def compile_rotate_into_cache(site: Site) -> Kernel:
    """Inputs: x [T, heads, D] in any shape, of which the first heads are queries, keys and values; turns, rows of the
    cache, the pools of keys and values. → queries rotated; the pools, with keys rotated and values written to those
    rows."""
    held, library = site.held(), load_library()
    (heads, kv_heads), (all_heads, width) = site.attribute("counts"), site.attribute("shape")
    values_at, dim = heads + kv_heads, int(site.attribute("dim")) or width
    rotate_heads = compile_rotate_heads(site)

    def in_parts(x: Tensor, turns: Any, target: Places, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        x = x.reshape(-1, all_heads, width)
        q, k = rotate_heads(x, turns)
        return q, write_rows(keys, k, target), write_rows(values, x.narrow(1, values_at, kv_heads), target)

    if library is None or held not in NATIVE:
        return in_parts

    def plan(empty: Empty, x: Tensor, turns: Any, target: Places, keys: Tensor, values: Tensor) -> Call | None:
        places, kept = target
        cos, sin = (turns, None) if isinstance(turns, Tensor) else turns
        if kept is not None or x.dtype is not held or not x.is_contiguous() or keys.shape[:3] != values.shape[:3]:
            return None
        count, cached = x.numel() // (all_heads * width), keys.numel() // width
        q = empty((count, heads, width), dtype=held)
        return Call(
            kernel="rotate_into_cache",
            arguments=(
                held is torch.bfloat16,
                sin is None,
                x.data_ptr(),
                cos.data_ptr(),
                None if sin is None else sin.data_ptr(),
                places.data_ptr(),
                keys.data_ptr(),
                values.data_ptr(),
                q.data_ptr(),
                count,
                heads,
                kv_heads,
                all_heads - values_at - kv_heads,
                width,
                dim,
                cached,
            ),
            outputs=(q, keys, values),
            threads=count_threads(x.numel(), FEWEST_SHARED),
            refusal=f"rows are written to places that are none of the {cached} of the cache",
        )

    return NativeKernel(library=library, plan=plan, otherwise=in_parts, updates=(3, 4))


def compile_rotate_rows(site: Site) -> Kernel:
    """[T, heads, D], rotated in fp32 and rounded once."""
    held, width = site.held(), site.node.outputs[0].shape[-1]
    dim = int(site.attribute("dim")) or width
    half = dim // 2
    fast = site.numerics.mode == "fast"  # one rounding less: a fused multiply-add

    def rotate_pairs(x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], half, 2))
        return torch.view_as_real(pairs * turns).flatten(-2)

    def rotate_halves(x: Tensor, turns: Turns) -> Tensor:
        cos, sin = turns
        x = x.float()
        swapped = x.roll(half, -1)
        return (x * cos).addcmul_(swapped, sin) if fast else (x * cos).add_(swapped.mul_(sin))

    rotate = rotate_pairs if site.attribute("interleaved") else rotate_halves
    if dim == width:
        return lambda x, turns: rotate(x, turns).to(held)
    return lambda x, turns: torch.cat((rotate(x[..., :dim], turns).to(held), x[..., dim:].to(held)), dim=-1)
