"""A folder of Hugging Face's as conversion reads it, whoever quantized it: what it has, and what becomes of that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipeline.checkpoint.casting import FLOATS
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.foreign.folder import ForeignFolder
from pipeline.checkpoint.foreign.holding import Holding
from pipeline.checkpoint.foreign.methods import find_method
from pipeline.checkpoint.layouts import Mapping, layout_for
from pipeline.checkpoint.layouts.scales import FP8
from pipeline.checkpoint.tensors import SAFETENSORS_DTYPE
from pipeline.errors import CheckpointError

Source = CheckpointFolder | ForeignFolder


def open_source(
    folder: CheckpointFolder, dtype: str | None, *, exact: bool
) -> tuple[Source, list[Mapping], list[str], str]:
    """What is read of a folder of Hugging Face's, the mappings that apply, the tensors of no use, and the type of what
    is neither quantized nor kept ("F16", …). Raises CheckpointError, `exact` or not, as `convert_checkpoint` does."""
    method = find_method(folder)
    if method is None:
        mappings, unused = layout_for(folder.architecture).match(folder.tensors, str(folder.path))
        return folder, mappings, unused, SAFETENSORS_DTYPE[dtype] if dtype else _pick_dtype(folder, mappings)
    source = ForeignFolder(folder, method)
    mappings, unused = source.match()
    plain = [mapping for mapping in mappings if not source.is_quantized(mapping)]
    target = SAFETENSORS_DTYPE[dtype] if dtype else _pick_dtype(folder, plain)
    return source, source.hold(mappings, target, exact=exact), unused, target


def list_holding(folder: CheckpointFolder, dtype: str | None) -> Holding:
    """What becomes of the linears that another tool has quantized; nothing where none has. Reads scales, zero points
    and the order of inputs, not the weights. Raises CheckpointError as `open_source` does."""
    source, *_ = open_source(folder, dtype, exact=False)
    return {**source.held, **source.widened} if isinstance(source, ForeignFolder) else {}


def _pick_dtype(source: CheckpointFolder, mappings: Sequence[Mapping]) -> str:
    """The float type of most bytes, but for FP8 and what is never cast: the model's own, whatever config.json says."""
    sizes: Counter[str] = Counter()
    for mapping in mappings:
        for name in mapping.sources if mapping.cast else ():
            if source.tensors[name].dtype != FP8:
                sizes[source.tensors[name].dtype] += source.tensors[name].nbytes
    name = sizes.most_common(1)[0][0]
    if name not in FLOATS:
        raise CheckpointError(
            f"{source.path}: most weights are {name}; read are {', '.join(FLOATS)}",
            hint="take the model's 16-bit weights",
        )
    return name
