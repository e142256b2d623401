"""Rotary embedding tables and the softmax scale, computed as transformers computes them, in float32.

Powers are taken in float64 and rounded: that is what torch's float32 `pow` gives, where numpy's own float32 `power` is
an ulp off, which at position 100,000 is 0.006 radians.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pipeline.errors import CompatibilityError

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture, Rope

Floats = npt.NDArray[np.float32]


def rope_table(rope: Rope, dim: int, positions: int, *, max_position_embeddings: int) -> tuple[Floats, Floats]:
    """cos and sin [positions, dim/2] in float32, multiplied by the attention scaling.

    dim: the rotated width of a head. max_position_embeddings: the model's own, which stands in where the scaling names
    no original length. Raises CompatibilityError where dynamic scaling would have to change with the sequence.
    """
    if rope.kind == "dynamic" and positions > max_position_embeddings:
        raise CompatibilityError(
            f"dynamic RoPE scaling beyond {max_position_embeddings} positions changes with each sequence's length, "
            f"and a table of {positions} cannot",
            hint=f"set max_seq_len to {max_position_embeddings} or less, or give the model yarn or linear scaling",
        )
    frequencies, scaling = inverse_frequencies(rope, dim, max_position_embeddings)
    angles = np.arange(positions, dtype=np.float32)[:, None] * frequencies[None, :]
    wide = angles.astype(np.float64)
    cos, sin = np.cos(wide).astype(np.float32), np.sin(wide).astype(np.float32)
    return cos * np.float32(scaling), sin * np.float32(scaling)


def inverse_frequencies(rope: Rope, dim: int, max_position_embeddings: int) -> tuple[Floats, float]:
    """Angle per position of each pair, [dim/2], and the attention scaling."""
    return KINDS[rope.kind](rope, dim, max_position_embeddings)


def softmax_scale(architecture: Architecture) -> float:
    """What attention scores are multiplied by: 1/sqrt(head size), and DeepSeek's m² where YaRN sets mscale_all_dim
    (transformers' yarn_apply_mscale; DeepSeek-V2's modeling_deepseek.py)."""
    scale = float(architecture.head_dim**-0.5)
    rope = architecture.rope
    if architecture.latent is None or rope.kind == "default":
        return scale
    all_dim = rope.get("mscale_all_dim", 0.0)
    return scale * _yarn_mscale(rope.get("factor", 1.0), all_dim) ** 2 if all_dim else scale


def _powers(theta: float, dim: int) -> Floats:
    exponents = np.arange(0, dim, 2).astype(np.float32) / np.float32(dim)
    powers: Floats = (np.float64(theta) ** exponents.astype(np.float64)).astype(np.float32)
    return powers


def _default(rope: Rope, dim: int, max_position_embeddings: int) -> tuple[Floats, float]:
    return np.float32(1) / _powers(rope.theta, dim), 1.0


def _linear(rope: Rope, dim: int, max_position_embeddings: int) -> tuple[Floats, float]:
    return np.float32(1) / _powers(rope.theta, dim) / np.float32(rope.scaling["factor"]), 1.0


def _yarn_mscale(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _yarn(rope: Rope, dim: int, max_position_embeddings: int) -> tuple[Floats, float]:
    """arXiv 2309.00071, §3.2 (NTK by parts) and §3.4 (attention scaling)."""
    factor = rope.scaling["factor"]
    original = rope.get("original_max_position_embeddings", max_position_embeddings)
    mscale, all_dim = rope.get("mscale", 0.0), rope.get("mscale_all_dim", 0.0)
    if "attention_factor" in rope.scaling:
        scaling = rope.scaling["attention_factor"]
    elif mscale and all_dim:
        scaling = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, all_dim)
    else:
        scaling = _yarn_mscale(factor)

    def correction_dim(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(correction_dim(rope.get("beta_fast", 0.0) or 32.0)), 0)
    high: float = min(math.ceil(correction_dim(rope.get("beta_slow", 0.0) or 1.0)), dim - 1)
    high += 0.001 if high == low else 0.0  # the ramp must have a width
    ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    powers = _powers(rope.theta, dim)
    kept = np.float32(1) - ramp
    interpolated = np.float32(1) / (np.float32(factor) * powers)
    extrapolated = np.float32(1) / powers
    return (interpolated * (np.float32(1) - kept) + extrapolated * kept).astype(np.float32), scaling


def _llama3(rope: Rope, dim: int, max_position_embeddings: int) -> tuple[Floats, float]:
    """Meta's Llama 3.1 `apply_scaling`: long wavelengths are slowed, short ones kept, those between interpolated."""
    factor, original = np.float32(rope.scaling["factor"]), rope.scaling["original_max_position_embeddings"]
    low, high = rope.scaling["low_freq_factor"], rope.scaling["high_freq_factor"]
    plain = np.float32(1) / _powers(rope.theta, dim)
    wavelength = np.float32(2 * math.pi) / plain
    slowed = np.where(wavelength > np.float32(original / low), plain / factor, plain)
    smooth = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
    between = (np.float32(1) - smooth) * slowed / factor + smooth * slowed
    medium = (wavelength >= np.float32(original / high)) & (wavelength <= np.float32(original / low))
    return np.where(medium, between, slowed).astype(np.float32), 1.0


# "dynamic" equals the default up to the original length, beyond which the table is refused.
KINDS: dict[str, Callable[[Rope, int, int], tuple[Floats, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "yarn": _yarn,
    "llama3": _llama3,
}
