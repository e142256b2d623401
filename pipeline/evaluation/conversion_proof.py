"""Proof of a conversion: every source tensor is found again in the engine checkpoint, bit for bit.

The engine checkpoint is mapped back to Hugging Face names by the layout's backward direction, one tensor at a time, and
held against the source file itself. Where the type changed, the source is cast once more, by this module and not by the
converter, and must equal what was stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.checkpoint.layouts import layout_for

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionProof:
    """`differing` names source tensors that the engine checkpoint does not reproduce, with how many elements differ."""

    tensors: int
    elements: int
    differing: dict[str, int]
    clipped: int  # elements beyond the target type's range that the config allowed to be clipped


def prove_conversion(source: CheckpointFolder, engine: CheckpointFolder, progress: Progress) -> ConversionProof:
    """Compares every mapped tensor; reads each once, so memory is one tensor's."""
    tensors = elements = clipped = 0
    differing: dict[str, int] = {}
    layout = layout_for(source.architecture)
    progress.start("conversion proof", sum(info.nbytes for info in source.tensors.values()), "B")
    for mapping in layout.mappings():
        if mapping.target not in engine.tensors:
            if not mapping.optional or any(name in source.tensors for name in mapping.sources):
                differing.update({name: -1 for name in mapping.sources if name in source.tensors})
            continue
        parts = mapping.backward(engine.read(mapping.target).to_torch())
        for name, found in zip(mapping.sources, parts, strict=True):
            original = source.read(name).to_torch()
            wrong, beyond = _count_differences(original, found)
            tensors += 1
            elements += original.numel()
            clipped += beyond
            if wrong:
                differing[name] = wrong
            progress.advance(source.tensors[name].nbytes)
    return ConversionProof(tensors=tensors, elements=elements, differing=differing, clipped=clipped)


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
