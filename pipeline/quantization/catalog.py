"""The formats that a linear can be stored in, and the methods that make them, as tables.

No torch: `validate` and `plan` ask them, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pipeline.checkpoint.layouts.scales import BLOCK

GroupSize = Literal[128, 64, 32]  # those that TensorRT's INT4 dequantization fuses into a GEMM
GROUP_SIZES: tuple[int, ...] = get_args(GroupSize)
FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatRow:
    """How a linear's weight is stored: `bits` a weight, and a scale for each of what `per` says: a "group" of inputs,
    an output "channel", a "block" of BLOCK x BLOCK, or the whole "tensor".

    `static_inputs`: its input is quantized too, in steps that calibration found. `second_scale`: its scales have one of
    their own. `quant_algo`: TensorRT-LLM's name. `zeros`: each scale has a zero point beside it, of a byte; no engine
    has such a format, and those it is exported to know no vector either, so a scale of the input must be folded.
    """

    quant_algo: str
    bits: int
    per: Literal["group", "channel", "block", "tensor"]
    static_inputs: bool = False
    second_scale: bool = False
    zeros: bool = False

    @property
    def grouped(self) -> bool:
        return self.per == "group"

    def nbytes(self, shape: Sequence[int], group: int | None, scale_bytes: int = FLOAT32) -> int:
        """Bytes of a weight [out, in] and its scales; those of groups, of which there are many, of `scale_bytes`."""
        rows, columns = shape
        blocks = -(-rows // BLOCK) * -(-columns // BLOCK)
        scales = {"group": 0, "channel": rows, "block": blocks, "tensor": 1}[self.per]
        scales += self.static_inputs + self.second_scale
        grouped = rows * columns // group * (scale_bytes + self.zeros) if group else 0
        return rows * columns * self.bits // 8 + scales * FLOAT32 + grouped

    def engine_nbytes(self, shape: Sequence[int], group: int | None, scale_bytes: int) -> int:
        """The same in an engine, where blocks are whole."""
        if self.per == "block":
            shape = [-(-size // BLOCK) * BLOCK for size in shape]
        return self.nbytes(shape, group, scale_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRow:
    """The format that a method makes, and whether it `measures`: looks at activations, so that text has to go through
    the model. `moments`: it wants the second moments of what it reads. `scales`: it may multiply a linear's input, by
    one vector for all linears of the method that read it. `scale_only`: the method of the same scale that rounds to
    nearest, where this one rounds otherwise."""

    format: str
    measures: bool
    moments: bool = False
    scales: bool = False
    scale_only: str | None = None


FP8_BLOCKS = "fp8_blocks"  # the format, and the method that makes it
FORMATS = {
    "int4": FormatRow(quant_algo="W4A16_AWQ", bits=4, per="group"),
    "int4_fp8": FormatRow(quant_algo="W4A8_AWQ", bits=4, per="group", static_inputs=True, second_scale=True),
    "fp8": FormatRow(quant_algo="FP8", bits=8, per="tensor", static_inputs=True),
    FP8_BLOCKS: FormatRow(quant_algo="FP8_BLOCK_SCALES", bits=8, per="block"),
    "int8": FormatRow(quant_algo="W8A16", bits=8, per="channel"),
    "int8_sq": FormatRow(quant_algo="W8A8_SQ_PER_CHANNEL", bits=8, per="channel", static_inputs=True),
    "int4_zeros": FormatRow(quant_algo="W4A16_AWQ", bits=4, per="group", zeros=True),
}
# Formats of others' checkpoints, which no method makes.
FOREIGN_FORMATS = {"fp8_rows": FormatRow(quant_algo="FP8_PER_CHANNEL", bits=8, per="channel")}
METHODS = {
    "awq": MethodRow(format="int4", measures=True, scales=True),
    "awq_fp8": MethodRow(format="int4_fp8", measures=True, scales=True),
    "awq_gptq": MethodRow(format="int4", measures=True, moments=True, scales=True, scale_only="awq"),
    "gptq": MethodRow(format="int4", measures=True, moments=True),
    "rtn": MethodRow(format="int4", measures=False),
    "rtn_clip": MethodRow(format="int4", measures=True),
    "fp8": MethodRow(format="fp8", measures=True, moments=True),
    FP8_BLOCKS: MethodRow(format=FP8_BLOCKS, measures=False),
    "int8": MethodRow(format="int8", measures=False),
    "smoothquant": MethodRow(format="int8_sq", measures=True, scales=True),
    # What `trtseek export --asymmetric` makes of awq and rtn; no config has them, since no engine does.
    "awq_zeros": MethodRow(format="int4_zeros", measures=True, scales=True),
    "rtn_zeros": MethodRow(format="int4_zeros", measures=False),
}
WITH_ZEROS = {"awq": "awq_zeros", "rtn": "rtn_zeros"}
NONE = "none"  # the method that leaves a linear as it is
MIXED = "MIXED_PRECISION"  # TensorRT-LLM's name for more than one of them


def name_algo(formats: Iterable[str]) -> str:
    """TensorRT-LLM's name of what these formats are together."""
    algos = {(FORMATS | FOREIGN_FORMATS)[name].quant_algo for name in formats}
    return algos.pop() if len(algos) == 1 else MIXED
