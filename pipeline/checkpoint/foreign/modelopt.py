"""modelopt's unified Hugging Face checkpoints (quant_method modelopt, hf_quant_config.json), for the quant_algo of each
linear; X is [O, I].

  W4A16_AWQ              X.weight U8 [O/2, I], row 2r in the low nibble, two's complement: our own layout;
  (or INT4_AWQ)          X.weight_scale [O, I/g]; X.pre_quant_scale [I] where no norm could take it
  FP8                    X.weight F8_E4M3, X.weight_scale and X.input_scale []
  W8A8_SQ_PER_CHANNEL    X.weight I8, X.weight_scale [O], X.input_scale [], X.pre_quant_scale [I]
With MIXED_PRECISION each linear's is in quantized_layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.checkpoint.foreign.headers import FLOAT_TYPES, Headers
from pipeline.checkpoint.foreign.linear import PLAIN, STATIC, ForeignLinear
from pipeline.checkpoint.foreign.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

INT4, FP8, SMOOTH = "int4", "fp8", "int8"
ALGOS = {"w4a16_awq": INT4, "int4_awq": INT4, "fp8": FP8, "w8a8_sq_per_channel": SMOOTH}
MIXED = "mixed_precision"


def read_modelopt(settings: Settings, headers: Headers, base: str) -> ForeignLinear | None:
    """The linear `base`; None where it is not quantized. Raises CheckpointError."""
    if not headers.has(base, "weight_scale"):
        return None
    settings = _find_settings(settings, headers, base)
    kind = ALGOS[settings.require("quant_algo", tuple(ALGOS))]
    if settings.flag("has_zero_point"):
        raise settings.fail("has_zero_point", "is true; this format is read without zero points")
    kinds = ["weight", "weight_scale"]
    prescale = None
    if kind == INT4:
        half, columns = headers.matrix(base, "weight", ("U8",))
        # Without a file of its own it does not say; then the scales' number does.
        stated = columns // headers.matrix(base, "weight_scale", FLOAT_TYPES)[1]
        rows, count = 2 * half, columns // settings.group_size(base, columns, stated)
        allowed: tuple[tuple[int, ...], ...] = ((rows, count),)
    else:
        rows, columns = headers.matrix(base, "weight", ({FP8: "F8_E4M3", SMOOTH: "I8"}[kind],))
        count = 1
        allowed = ((), (1,)) if kind == FP8 else ((rows,), (rows, 1))
        headers.check(base, "input_scale", ("F32",), (), (1,))
        kinds.append("input_scale")
    scale_type = headers.check(base, "weight_scale", FLOAT_TYPES, *allowed)
    if headers.has(base, "pre_quant_scale"):
        headers.check(base, "pre_quant_scale", FLOAT_TYPES, (columns,))
        kinds.append("pre_quant_scale")
        prescale = _reader(headers, base, "pre_quant_scale")
    grid = (1 if kind == FP8 else rows, count)
    return ForeignLinear(
        name=base,
        shape=(rows, columns),
        kind=kind,
        grid=grid,
        numbers=_reader(headers, base, "weight") if kind != INT4 else lambda: _unpack(headers.read(base, "weight")),
        scales=lambda: headers.read(base, "weight_scale").float().reshape(grid),
        scale_type=scale_type,
        prescale=prescale,
        inputs=PLAIN if kind == INT4 else STATIC,
        input_scale=None if kind == INT4 else lambda: headers.read(base, "input_scale").float().reshape(1),
        tensors=headers.names(base, *kinds),
    )


def _find_settings(settings: Settings, headers: Headers, base: str) -> Settings:
    """Those of one linear; groups, pre-scales and zero points are stated for all, or for each."""
    algo = settings.values.get("quant_algo")
    if not isinstance(algo, str) or algo.lower() != MIXED:
        return settings
    layers = settings.section("quantized_layers")
    own = layers.section(base) if layers is not None else None
    if own is None:
        raise headers.fail(base, "weight_scale", "is there, but quantized_layers does not name the linear")
    return own


def _reader(headers: Headers, base: str, kind: str) -> Callable[[], torch.Tensor]:
    return lambda: headers.read(base, kind)


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [O/2, I] → int8 [O, I], from -8 to 7."""
    import torch

    from pipeline.quantization.int4 import unpack

    return unpack(packed.view(torch.int8))
