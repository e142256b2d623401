"""Routed experts, each on the rows that chose it. E experts, T packed rows, H and I the widths outside and inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipeline.interpreter.numerics import multiplied_as
from pipeline.interpreter.operations.native_experts import Packed, compile_native
from pipeline.interpreter.operations.packed import pick_kernel
from pipeline.interpreter.operations.pointwise import compile_gate
from pipeline.interpreter.operations.products import fill_rows, round_steps
from pipeline.interpreter.operations.site import Kernel, Site

Product = Callable[[Tensor, int], Tensor]  # rows [n, in], expert → [n, out]
Expert = Callable[[Tensor, int, Sequence[Tensor | None]], Tensor]  # the same, and the inputs behind x and the weights
STACKS, PACKED = (2, 3, 4), (8, 10, 12)  # inputs
PRESCALES, STEPS, FACTORS = 5, 14, 17  # … the first of three


def compile_chosen_experts(site: Site) -> Kernel:
    """Inputs: x [1, T, H], weights [E, T, 1] in fp32, the stacks of fc, up and down, where there are any their
    prescales [E or 1, 1, in], their INT4 values and scales, the steps [1] that their inputs are rounded in (to what
    says `rounded`), the factors [E, 1, 1 or out] of their outputs. → [T, H] in fp32, each row's experts added in
    order."""
    fc, up, down = (_compile_expert(site, index) for index in range(len(STACKS)))
    gate, out = compile_gate(site), site.held()

    steady = site.numerics.mode == "exact"

    def run(x: Tensor, expert: int, rest: Sequence[Tensor | None]) -> Tensor:
        rows = len(x)
        if steady:
            x = fill_rows(x)
        result = down(gate(fc(x, expert, rest), up(x, expert, rest)), expert, rest)
        return result[:rows] if steady else result

    def experts(x: Tensor, weights: Tensor, *rest: Tensor | None) -> Tensor:
        x, weights = x[0], weights[..., 0]
        total = torch.zeros(x.shape, dtype=out)
        chosen, rows = weights.nonzero(as_tuple=True)  # sorted by expert
        if not len(rows):
            return total
        if len(x) == 1:
            numbers, parts = chosen.tolist(), (x,) * len(chosen)
        else:
            unique, counts = torch.unique_consecutive(chosen, return_counts=True)
            numbers, parts = unique.tolist(), torch.split(x.index_select(0, rows), counts.tolist())
        results = torch.cat([run(part, number, rest) for number, part in zip(numbers, parts, strict=True)])
        return total.index_add_(0, rows, results.to(out) * weights[chosen, rows].unsqueeze(1))

    if site.numerics.mode != "fast" or any(site.attribute("transposed")):
        return experts
    found = [_find_packed(site, index) for index in PACKED]
    return compile_native(site, [packed for packed in found if packed is not None], PRESCALES, experts)


def _compile_expert(site: Site, index: int) -> Expert:
    """One of the three linears, with what belongs to its input and its outputs."""
    product = _compile_product(site, STACKS[index], PACKED[index], site.attribute("transposed")[index])
    rounded = site.attribute("rounded")[index]
    to = None if rounded is None else site.numerics.held(rounded)
    # Of the inputs behind the weights of experts.
    prescales, steps, factors_at = (start + index - 2 for start in (PRESCALES, STEPS, FACTORS))

    def expert(x: Tensor, number: int, rest: Sequence[Tensor | None]) -> Tensor:
        prescale, step, factors = rest[prescales], rest[steps], rest[factors_at]
        if prescale is not None:
            x = x * (prescale[number] if len(prescale) > 1 else prescale[0])
        if step is not None and to is not None:
            x = (round_steps(x.float() / step, to).float() * step).to(x.dtype)
        y = product(x, number)
        return y if factors is None else (y.float() * factors[number]).to(y.dtype)

    return expert


def _compile_product(site: Site, index: int, packed: int, transposed: bool) -> Product:
    found = _find_packed(site, packed) if site.numerics.mode == "fast" and not transposed else None
    if found is None:
        return _compile_dense(site, index, transposed)
    rows, pairs, multiply, most_rows = found

    def few(x: Tensor, expert: int) -> Tensor:
        return multiply(x, rows[expert], pairs[expert])

    if most_rows is None:
        return few
    many = _compile_dense(site, index, transposed)
    return lambda x, expert: few(x, expert) if len(x) <= most_rows else many(x, expert)


def _compile_dense(site: Site, index: int, transposed: bool) -> Product:
    held = site.numerics.held(site.attribute("type"))
    inner = multiplied_as(held)
    weight = _compile_weight(site, index, inner)

    def product(x: Tensor, expert: int) -> Tensor:
        matrix = weight(expert)
        return torch.mm(x.to(inner), matrix.t() if transposed else matrix).to(held)

    return product


def _compile_weight(site: Site, index: int, inner: torch.dtype) -> Callable[[int], Tensor]:
    """One expert's matrix: of a stack that is kept, or made at each use where there is no room."""
    stack = site.constant(index)
    if stack is None:
        parts = site.parts(index)
        if parts is None:
            raise site.refuse("experts that can neither be kept nor be made one at a time")
        _, part = parts
        return lambda expert: part(expert)[0].to(inner)
    kept = stack
    wide = site.prepare(
        index, "plain" if stack.dtype is inner else "wide", stack.numel() * inner.itemsize, lambda: kept.to(inner)
    )
    if wide is None:
        return lambda expert: kept[expert].to(inner)
    return lambda expert: wide[expert]


def _find_packed(site: Site, index: int) -> Packed | None:
    """The packed weights [E, in, out] and their INT4 kernel; None where none takes them or there is no room."""
    if site.optional(index) is None or site.optional(index + 1) is None:
        return None
    _, width, columns = site.spec(index).shape
    group = width // site.spec(index + 1).shape[1]
    packed, scales, kernel = site.constant(index), site.constant(index + 1), pick_kernel("int4", group, columns)
    if packed is None or scales is None or kernel is None:
        return None
    values, factors = packed, scales

    def pack() -> Tensor:
        return torch.stack([kernel.pack(part) for part in values])

    def scale() -> Tensor:
        return torch.stack([kernel.scale(part) for part in factors])

    rows = site.prepare(index, kernel.name, values.numel() // 2, pack)
    pairs = site.prepare(index + 1, kernel.name, 4 * values.numel() // group, scale)
    if rows is None or pairs is None:
        return None
    return rows, pairs, kernel.multiply(group, site.numerics.held(site.attribute("type"))), kernel.most_rows
