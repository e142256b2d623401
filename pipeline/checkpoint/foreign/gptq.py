"""GPTQ as AutoGPTQ and GPTQModel write it (quant_method gptq): arXiv 2210.17323.

For X [O, I] with b bits and g inputs per group: X.qweight I32 [I·b/32, O], X.qzeros I32 [I/g, O·b/32], X.scales F16
[I/g, O], X.g_idx I32 [I], the group of each input; W = (q - z)·s with q from 0 to 2^b - 1. checkpoint_format gptq, or
none, stores z - 1 in qzeros, gptq_v2 z itself. With desc_act, inputs are quantized in the order of their activations,
and groups are scattered over them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.checkpoint.foreign.headers import FLOAT_TYPES, Headers
from pipeline.checkpoint.foreign.linear import ForeignLinear
from pipeline.checkpoint.foreign.settings import Settings

if TYPE_CHECKING:
    import torch

KINDS = {4: "int4", 8: "int8"}
ADDED = {"gptq": 1, "gptq_v2": 0}  # what qzeros lack of the zero point


def read_gptq(settings: Settings, headers: Headers, base: str) -> ForeignLinear | None:
    """The linear `base`; None where it is not quantized. Raises CheckpointError."""
    if not headers.has(base, "qweight"):
        return None
    bits = settings.require("bits", tuple(KINDS))
    added = ADDED[settings.require("checkpoint_format", tuple(ADDED), "gptq")]
    settings.require("pack_dtype", ("int32",), "int32")
    settings.refuse("dynamic", "gives linears settings of their own")
    per_word = 32 // bits
    words = headers.matrix(base, "qweight", ("I32",))
    shape = words[1], words[0] * per_word
    group = settings.group_size(base, shape[1])
    count = shape[1] // group
    headers.check(base, "qzeros", ("I32",), (count, shape[0] // per_word))
    scale_type = headers.check(base, "scales", FLOAT_TYPES, (count, shape[0]))
    kinds = ["qweight", "qzeros", "scales"]
    if headers.has(base, "g_idx"):
        headers.check(base, "g_idx", ("I32",), (shape[1],))
        kinds.append("g_idx")
    elif settings.flag("desc_act"):
        raise headers.fail(base, "g_idx", "is missing, and desc_act says that the order of inputs matters")

    def unpack(words: torch.Tensor) -> torch.Tensor:
        from pipeline.quantization.words import unpack_signed

        return unpack_signed(words, bits)

    return ForeignLinear(
        name=base,
        shape=shape,
        kind=KINDS[bits],
        grid=(shape[0], count),
        numbers=lambda: unpack(headers.read(base, "qweight").T),
        scales=lambda: headers.read(base, "scales").float().T.contiguous(),
        scale_type=scale_type,
        offsets=lambda: (unpack(headers.read(base, "qzeros")).short() + added).T,  # one of 8 bits may be 128
        groups=(lambda: headers.read_groups(base, "g_idx", count)) if "g_idx" in kinds else None,
        tensors=headers.names(base, *kinds),
    )
