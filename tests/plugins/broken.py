# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
# ruff: noqa: F821, N803
"""A kernel with a mistake in a function that it calls."""

import triton
import triton.language as tl


@triton.jit
def add_missing(x):
    return x + missing


@triton.jit
def copy(source, target, TILE: tl.constexpr):
    at = tl.arange(0, TILE)
    tl.store(target + at, add_missing(tl.load(source + at)))
