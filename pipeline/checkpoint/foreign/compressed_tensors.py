"""compressed-tensors, as llm-compressor writes it and vLLM reads it (quant_method compressed-tensors).

For X [O, I], by the format that is stated for all or for the group of X:
  pack-quantized    X.weight_packed I32 [O, I·b/32] of numbers from 0 to 2^b - 1, the middle being zero; X.weight_scale
                    [O, I/g], or [O, 1]; X.weight_shape; where asymmetric X.weight_zero_point I32, packed along O
  int-quantized     X.weight I8 [O, I], X.weight_scale [O, 1] or [1]; of static inputs X.input_scale [1]
  float-quantized   X.weight F8_E4M3 [O, I], X.weight_scale [1], [O, 1] or of blocks; X.input_scale as above
Which group of config_groups a linear is in, its targets say: "Linear", a name, or "re:" and a regular expression.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from pipeline.checkpoint.foreign.headers import FLOAT_TYPES, Headers
from pipeline.checkpoint.foreign.linear import DYNAMIC, PLAIN, STATIC, ForeignLinear
from pipeline.checkpoint.foreign.settings import Settings
from pipeline.checkpoint.layouts.scales import BLOCK, count_blocks

if TYPE_CHECKING:
    import torch

BITS = {4: "int4", 8: "int8"}
PACKED, INTEGER, FLOAT, NAIVE = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"


def read_compressed_tensors(settings: Settings, headers: Headers, base: str) -> ForeignLinear | None:
    """The linear `base`; None where it is not quantized. Raises CheckpointError."""
    if not headers.has(base, "weight_scale"):
        return None
    _check(settings)
    group = _find_group(settings, base)
    weights = group.section("weights")
    if weights is None:
        raise headers.fail(base, "weight_scale", "is there, but its group of config_groups quantizes no weights")
    stated = group.values.get("format") or settings.values.get("format")
    kind = Settings({"format": stated}, settings.origin).require("format", (PACKED, INTEGER, FLOAT, NAIVE))
    group.refuse("output_activations", "rounds outputs")
    inputs, rounded = _read_inputs(group, headers, base)
    if kind == PACKED:
        return _read_packed(weights, headers, base, inputs)
    return _read_plain(weights, headers, base, inputs, rounded)


def _check(settings: Settings) -> None:
    settings.require("quantization_status", ("compressed",), "compressed")
    settings.refuse("transform_config", "turns weights and inputs")
    sparsity = settings.section("sparsity_config")
    if sparsity is not None:
        sparsity.require("format", ("dense",), "dense")


def _find_group(settings: Settings, base: str) -> Settings:
    """A name counts before an expression, that before the class, as the library sorts them."""
    groups = settings.section("config_groups")
    if groups is None:
        raise settings.fail("config_groups", "is missing")
    found: dict[int, Settings] = {}
    for name in groups.values:
        group = groups.section(name)
        for target in group.texts("targets") if group is not None else ():
            rank = _rank(settings, target, base)
            if rank is not None and group is not None:
                found.setdefault(rank, group)
    if not found:
        raise settings.fail("config_groups", f"has no group for {base}, which is quantized")
    return found[min(found)]


def _rank(settings: Settings, target: str, base: str) -> int | None:
    if target == base:
        return 0
    if target.startswith("re:"):
        try:
            return 1 if re.match(target.removeprefix("re:"), base) else None
        except re.error as error:
            raise settings.fail("config_groups", f"has the target {target!r}, no regular expression") from error
    return 2 if target == "Linear" else None


def _read_inputs(group: Settings, headers: Headers, base: str) -> tuple[str, str]:
    """What is done to the input, and in numbers of which type."""
    inputs = group.section("input_activations")
    if inputs is None:
        return PLAIN, ""
    inputs.require("num_bits", (8,))
    kind = inputs.require("type", ("int", "float"), "int")
    if inputs.flag("dynamic"):
        return DYNAMIC, kind
    inputs.require("strategy", ("tensor",))
    if not inputs.flag("symmetric", True):
        raise inputs.fail("symmetric", "is false; inputs are read symmetric")
    headers.check(base, "input_scale", FLOAT_TYPES, (), (1,))
    return STATIC, kind


def _read_packed(weights: Settings, headers: Headers, base: str, inputs: str) -> ForeignLinear:
    bits = weights.require("num_bits", tuple(BITS))
    weights.require("type", ("int",), "int")
    strategy = weights.require("strategy", ("group", "channel"))
    if inputs == STATIC:
        raise weights.fail("format", f"is {PACKED} with static inputs, which is not read")
    words = headers.matrix(base, "weight_packed", ("I32",))
    headers.check(base, "weight_shape", ("I64", "I32"), (2,))
    rows, columns = (int(size) for size in headers.read(base, "weight_shape"))
    if rows != words[0] or -(-columns * bits // 32) != words[1]:
        raise headers.fail(base, "weight_packed", f"has shape {list(words)}, weight_shape says {[rows, columns]}")
    count = columns // weights.group_size(base, columns) if strategy == "group" else 1
    scale_type = headers.check(base, "weight_scale", FLOAT_TYPES, (rows, count))
    kinds, offsets = ["weight_packed", "weight_scale", "weight_shape"], None
    if not weights.flag("symmetric", True):
        headers.check(base, "weight_zero_point", ("I32",), (-(-rows * bits // 32), count))
        kinds.append("weight_zero_point")
        offsets = _offsets(headers, base, bits, rows)
    groups = None
    if headers.has(base, "weight_g_idx"):
        headers.check(base, "weight_g_idx", ("I32", "I64"), (columns,))
        kinds.append("weight_g_idx")
        groups = partial(headers.read_groups, base, "weight_g_idx", count)
    return ForeignLinear(
        name=base,
        shape=(rows, columns),
        kind=BITS[bits],
        grid=(rows, count),
        numbers=lambda: _unpack(headers.read(base, "weight_packed"), bits)[:, :columns],
        scales=lambda: headers.read(base, "weight_scale").float(),
        scale_type=scale_type,
        offsets=offsets,
        groups=groups,
        inputs=inputs,
        tensors=headers.names(base, *kinds),
    )


def _offsets(headers: Headers, base: str, bits: int, rows: int) -> Callable[[], torch.Tensor]:
    return lambda: _unpack(headers.read(base, "weight_zero_point").T.contiguous(), bits)[:, :rows].T


def _read_plain(weights: Settings, headers: Headers, base: str, inputs: str, rounded: str) -> ForeignLinear:
    stored = {"int": ("I8", "int8"), "float": ("F8_E4M3", "fp8")}
    number_type, kind = stored[weights.require("type", tuple(stored), "int")]
    weights.require("num_bits", (8,))
    if not weights.flag("symmetric", True):
        raise weights.fail("symmetric", "is false; numbers of eight bits are read symmetric")
    if inputs != PLAIN and stored[rounded][1] != kind:
        raise weights.fail("type", f"makes {kind} weights, but inputs are rounded to {stored[rounded][1]}")
    rows, columns = headers.matrix(base, "weight", (number_type,))
    strategy = weights.require("strategy", ("tensor", "channel", "block", "group"))
    if strategy == "block":
        weights.require("block_structure", ([BLOCK, BLOCK],))
        grid = count_blocks((rows, columns))
        allowed: tuple[tuple[int, ...], ...] = (grid,)
    elif strategy == "tensor":
        grid, allowed = (1, 1), ((), (1,), (1, 1))
    else:
        grid = rows, columns // weights.group_size(base, columns, -1) if strategy == "group" else 1
        allowed = (grid, (rows,)) if grid[1] == 1 else (grid,)
    scale_type = headers.check(base, "weight_scale", FLOAT_TYPES, *allowed)
    kinds = ["weight", "weight_scale"]
    if inputs == STATIC:
        kinds.append("input_scale")
    return ForeignLinear(
        name=base,
        shape=(rows, columns),
        kind=kind,
        grid=(grid[0], grid[1]),
        numbers=lambda: headers.read(base, "weight"),
        scales=lambda: headers.read(base, "weight_scale").float().reshape(grid),
        scale_type=scale_type,
        is_blocked=strategy == "block",
        inputs=inputs,
        input_scale=(lambda: headers.read(base, "input_scale").float().reshape(1)) if inputs == STATIC else None,
        tensors=headers.names(base, *kinds),
    )


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    from pipeline.quantization.words import unpack_signed  # which imports torch

    return unpack_signed(words, bits)
