"""Engine checkpoints in the 8-bit formats, alone or mixed, made from the hub checkpoints of tests/fixtures.py.

The formats are spelled out here again with torch's own casts, apart from the quantizer, so that a mistake in either is
not hidden by being made twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.checkpoint.tensors import RawTensor
from tests.network import models

WEIGHT, CHANNEL, STEP, PRESCALE = (
    "weights_scaling_factor",
    "per_channel_scale",
    "activation_scaling_factor",
    "prequant_scaling_factor",
)
FP8_MAX, INT8_MAX = 448.0, 127.0


@dataclass
class Stored:
    """A linear's tensors by suffix, and the float32 matrix that they stand for."""

    tensors: dict[str, torch.Tensor]
    matrix: torch.Tensor


def fp8(weight: torch.Tensor, amax: float, step: float, prescale: torch.Tensor) -> Stored:
    """amax: of all weights that share the scale."""
    scale = torch.tensor([amax / FP8_MAX])
    q = (weight.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return Stored({"weight": q, WEIGHT: scale, STEP: torch.tensor([step])}, q.float() * scale)


def fp8_rows(weight: torch.Tensor, amax: float, step: float, prescale: torch.Tensor) -> Stored:
    scales = weight.float().abs().amax(1) / FP8_MAX
    q = (weight.float() / scales[:, None]).to(torch.float8_e4m3fn)
    return Stored({"weight": q, CHANNEL: scales, STEP: torch.tensor([step])}, q.float() * scales[:, None])


def fp8_wide_inputs(weight: torch.Tensor, amax: float, step: float, prescale: torch.Tensor) -> Stored:
    stored = fp8_rows(weight, amax, step, prescale)
    return Stored({kind: t for kind, t in stored.tensors.items() if kind != STEP}, stored.matrix)


def int8(weight: torch.Tensor, amax: float, step: float, prescale: torch.Tensor) -> Stored:
    scales = weight.float().abs().amax(1) / INT8_MAX
    q = (weight.float() / scales[:, None]).round().to(torch.int8)
    return Stored({"weight": q, CHANNEL: scales}, q.float() * scales[:, None])


def int8_sq(weight: torch.Tensor, amax: float, step: float, prescale: torch.Tensor) -> Stored:
    stored = int8(weight.float() / prescale.float(), amax, step, prescale)
    tensors = {"weight": stored.tensors["weight"], WEIGHT: stored.tensors[CHANNEL]}
    tensors |= {STEP: torch.tensor([step]), PRESCALE: prescale}
    return Stored(tensors, stored.matrix * prescale.float())


def int4(weight: torch.Tensor, amax: float, step: float, prescale: torch.Tensor) -> Stored:
    rounded = models.quantize(weight, 32, prescale)
    tensors = {"weight": rounded.pack(), WEIGHT: rounded.scales.float(), PRESCALE: prescale}
    return Stored(tensors, rounded.weight())


STORE: dict[str, Callable[[torch.Tensor, float, float, torch.Tensor], Stored]] = {
    "fp8": fp8,
    "fp8_rows": fp8_rows,
    "fp8_wide_inputs": fp8_wide_inputs,
    "int8": int8,
    "int8_sq": int8_sq,
    "int4": int4,
}


def load(write: Callable[..., Path], path: Path, formats: Mapping[str, str], **options: Any) -> models.Model:
    """Writes a hub folder whose linears hold what their formats can represent, and the engine checkpoint that holds
    them in these. formats: pattern of hub names -> format; the first that fits."""
    stored: dict[str, Stored] = {}

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        chosen = {name: kind for name in tensors if (kind := _choose(name, formats)) and tensors[name].ndim == 2}
        # Linears that read one input, and are one matrix of the engine or one stack, have one step, prescale, amax.
        shared = {name: re.sub(r"experts\.\d+|[qkv]_proj", "*", name) for name in chosen}
        generator = torch.Generator().manual_seed(7)
        steps: dict[str, float] = {}
        prescales: dict[str, torch.Tensor] = {}
        for name, kind in chosen.items():
            own, width, dtype = shared[name], tensors[name].shape[1], tensors[name].dtype
            steps.setdefault(own, 0.01 + 0.02 * float(torch.rand(1, generator=generator)))
            prescales.setdefault(own, (0.5 + torch.rand(width, generator=generator)).to(dtype))
            is_expert = ".experts." in name
            amax = max(float(tensors[n].abs().max()) for n in ([name] if is_expert else shared) if shared[n] == own)
            stored[name] = STORE[kind](tensors[name], amax, steps[own], prescales[own])
            tensors[name] = stored[name].matrix

    architecture, tensors = models._read(write(path, edit=edit, **options))
    source = models.MemorySource()
    for name, tensor in tensors.items():
        base = models.engine_name(name)
        parts = stored[name].tensors if name in stored else {"weight": tensor}
        base = base.removesuffix(".weight") if name in stored else base
        for kind, value in parts.items():
            source.raw[f"{base}.{kind}" if name in stored else base] = RawTensor.from_torch(value)
    _fuse(source, architecture)
    return models.Model(path, architecture, source)


def _choose(name: str, formats: Mapping[str, str]) -> str | None:
    return next((kind for pattern, kind in formats.items() if re.search(pattern, name)), None)


def _fuse(source: models.MemorySource, architecture: Any) -> None:
    """q, k and v as one: rows and what belongs to rows below each other, what belongs to the input once."""
    if architecture.latent is not None:
        return
    for layer in range(architecture.num_layers):
        base = f"transformer.layers.{layer}.attention."
        for kind in ("weight", "bias", WEIGHT, CHANNEL, STEP, PRESCALE):
            if f"{base}q_proj.{kind}" not in source.raw:
                continue
            parts = [source.raw.pop(f"{base}{part}_proj.{kind}").to_torch() for part in "qkv"]
            once = kind in (STEP, PRESCALE) or parts[0].shape == (1,)
            whole = parts[0] if once else torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
            source.raw[f"{base}qkv.{kind}"] = RawTensor.from_torch(whole.contiguous())
