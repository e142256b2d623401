"""Proof of a conversion: every source tensor is found again in the engine checkpoint, bit for bit.

The engine checkpoint is mapped back to Hugging Face names by the layout's backward direction, one tensor at a time, and
held against the source file itself. Where the type changed, the source is cast once more, by this module and not by the
converter, and must equal what was stored. FP8 blocks that were multiplied out are multiplied out again here, value by
value from the format's definition and block by block. What another tool has quantized must stand for the same matrix,
to the last bit, and round its input in the same steps; or be that matrix in the model's type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts import layout_for
from pipeline.checkpoint.layouts.scales import BLOCK, FP8, scale_mapping, source_scale
from pipeline.evaluation.foreign_weights import compare_foreign, open_foreign

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionProof:
    """`differing` names source tensors that the engine checkpoint does not reproduce, with how many elements differ; -1
    where it has none to compare, or has them in a type that they must not be cast to."""

    tensors: int
    elements: int
    differing: dict[str, int]
    clipped: int  # elements beyond the target type's range, which sit at its largest value


def prove_conversion(source: CheckpointFolder, engine: CheckpointFolder, progress: Progress) -> ConversionProof:
    """Compares every mapped tensor; reads each once, so memory is one tensor's."""
    tensors = elements = clipped = 0
    differing: dict[str, int] = {}
    layout, foreign = layout_for(source.architecture), open_foreign(source)
    progress.start("conversion proof", sum(info.nbytes for info in source.tensors.values()), "B")
    for mapping in layout.mappings():
        if foreign is not None and (wrongs := compare_foreign(foreign, engine, mapping)) is not None:
            tensors += len(wrongs)
            elements += mapping.elements
            differing |= {name: wrong for name, wrong in wrongs.items() if wrong}
            progress.advance(sum(foreign.count_bytes(name) for name in mapping.sources))
            continue
        if mapping.target not in engine.tensors:
            if not mapping.optional or any(name in source.tensors for name in mapping.sources):
                differing.update({name: -1 for name in mapping.sources if name in source.tensors})
            continue
        kept = engine.tensors[mapping.target].dtype == FP8
        for each in (mapping, scale_mapping(mapping)) if kept else (mapping,):
            if each.target not in engine.tensors:
                differing.update(dict.fromkeys(each.sources, -1))
                continue
            parts = each.backward(engine.read(each.target).to_torch())
            for name, found in zip(each.sources, parts, strict=True):
                if not each.cast and engine.tensors[each.target].dtype != source.tensors[name].dtype:
                    differing[name] = -1
                    continue
                wrong, beyond = _count_differences(_read_original(source, name, found.dtype), found)
                tensors += 1
                elements += found.numel()
                clipped += beyond
                if wrong:
                    differing[name] = wrong
                progress.advance(source.tensors[name].nbytes)
    return ConversionProof(tensors=tensors, elements=elements, differing=differing, clipped=clipped)


def _read_original(source: CheckpointFolder, name: str, wanted: torch.dtype) -> torch.Tensor:
    """As stored, or in float32 where it is FP8 in blocks and was `wanted` in another type."""
    import torch

    weight = source.read(name).to_torch()
    if weight.dtype != torch.float8_e4m3fn or wanted == torch.float8_e4m3fn:
        return weight
    scales = source.read(source_scale(name)).to_torch()
    table, values = _list_e4m3(), torch.empty(weight.shape)
    for row in range(scales.shape[0]):  # the index of a row of blocks takes eight times its bytes, not the weight's
        rows = slice(BLOCK * row, BLOCK * (row + 1))
        values[rows] = table[weight[rows].view(torch.uint8).to(torch.int64)]
        for column in range(scales.shape[1]):
            values[rows, BLOCK * column : BLOCK * (column + 1)] *= scales[row, column]
    return values


def _list_e4m3() -> torch.Tensor:
    """The 256 values of E4M3 (arXiv 2209.05433, table 1): a sign, 4 bits of exponent, bias 7, and 3 of fraction."""
    import torch

    values = []
    for byte in range(256):
        exponent, fraction = byte >> 3 & 15, byte & 7
        magnitude = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
        values.append(float("nan") if byte & 0x7F == 0x7F else -magnitude if byte & 0x80 else magnitude)
    return torch.tensor(values, dtype=torch.float32)


def _count_differences(original: torch.Tensor, found: torch.Tensor) -> tuple[int, int]:
    """(elements that differ, elements that the target type cannot hold); the latter must sit at its largest value."""
    import torch

    if original.shape != found.shape:
        return original.numel(), 0
    if original.dtype == found.dtype:
        # Compared as integers: -0.0 and 0.0 are different bits, and NaN equals itself.
        bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[original.element_size()]
        same = torch.equal(original.view(bits), found.contiguous().view(bits))
        return (0 if same else int((original.view(bits) != found.contiguous().view(bits)).sum())), 0
    largest = torch.finfo(found.dtype).max
    expected = original.to(found.dtype)
    beyond = ~torch.isfinite(expected)
    expected = torch.where(beyond, torch.sign(original).to(found.dtype) * largest, expected)
    return int((expected != found).sum()), int(beyond.sum())
