"""AutoAWQ's GEMM layout (quant_method awq): arXiv 2306.00978, as the hub's -AWQ repositories have it.

For X [O, I] with g inputs per group: X.qweight I32 [I, O/8], X.qzeros I32 [I/g, O/8], X.scales F16 [I/g, O];
W = (q - z)·s with q and z from 0 to 15. Pre-scales are in the norms and linears before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.checkpoint.foreign.headers import Headers
from pipeline.checkpoint.foreign.linear import ForeignLinear
from pipeline.checkpoint.foreign.settings import Settings

if TYPE_CHECKING:
    import torch


def read_awq(settings: Settings, headers: Headers, base: str) -> ForeignLinear | None:
    """The linear `base`; None where it is not quantized. Raises CheckpointError."""
    if not headers.has(base, "qweight"):
        return None
    settings.require("version", ("gemm",), "gemm")
    settings.require("bits", (4,))
    wide = headers.matrix(base, "qweight", ("I32",))
    shape = wide[1] * 8, wide[0]
    group = settings.group_size(base, shape[1])
    count = shape[1] // group
    headers.check(base, "qzeros", ("I32",), (count, wide[1]))
    scale_type = headers.check(base, "scales", ("F16", "BF16"), (count, shape[0]))

    def numbers() -> torch.Tensor:
        return _unpack(headers.read(base, "qweight"))

    return ForeignLinear(
        name=base,
        shape=shape,
        kind="int4",
        grid=(shape[0], count),
        numbers=numbers,
        scales=lambda: headers.read(base, "scales").float().T.contiguous(),
        scale_type=scale_type,
        offsets=lambda: _unpack(headers.read(base, "qzeros")),
        tensors=headers.names(base, "qweight", "qzeros", "scales"),
    )


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """int32 [C, O/8] → int8 [O, C], from -8 to 7."""
    import torch

    from pipeline.quantization.words import AWQ, ZERO, unpack_words

    return unpack_words(words, AWQ).view(torch.int8).sub_(ZERO).T.contiguous()
