"""Engine checkpoints in memory for tests of the network, made from the hub checkpoints of tests/fixtures.py.

The engine's names, fusions and INT4 layout are spelled out here again, apart from the converter and the quantizer, so
that a mistake in either is not hidden by being made twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pipeline.checkpoint.architecture import Architecture, parse_architecture
from pipeline.checkpoint.tensors import RawTensor, TensorInfo, TensorSource
from pipeline.network.network import NetworkSpec
from pipeline.network.readback import Program
from tests import fixtures
from tests.whole_model import load_whole

# HF module below "model.layers.N." -> engine module below "transformer.layers.N."; q, k and v become one.
MODULES = {
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_proj": "attention.q_proj",
    "self_attn.k_proj": "attention.k_proj",
    "self_attn.v_proj": "attention.v_proj",
    "self_attn.q_a_proj": "attention.q_a_proj",
    "self_attn.q_a_layernorm": "attention.q_a_layernorm",
    "self_attn.q_b_proj": "attention.q_b_proj",
    "self_attn.kv_a_proj_with_mqa": "attention.kv_a_proj_with_mqa",
    "self_attn.kv_a_layernorm": "attention.kv_a_layernorm",
    "self_attn.kv_b_proj": "attention.kv_b_proj",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_layernorm",
    "mlp.gate": "mlp.router",
}
MLP = {"gate_proj": "fc", "up_proj": "gate", "down_proj": "proj"}
OUTER = {
    "model.embed_tokens.weight": "transformer.vocab_embedding.weight",
    "model.norm.weight": "transformer.ln_f.weight",
    "lm_head.weight": "lm_head.weight",
}


@dataclass
class MemorySource:
    """A TensorSource over a dictionary."""

    raw: dict[str, RawTensor] = field(default_factory=dict)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: TensorInfo(name, raw.dtype, raw.shape) for name, raw in self.raw.items()}

    def read(self, name: str) -> RawTensor:
        return self.raw[name]


@dataclass
class Int4:
    """A linear rounded to INT4: y = dequant(q, scales) @ (x * prescale)."""

    q: torch.Tensor  # [out, in], -8..7
    scales: torch.Tensor  # [out, in/group]
    prescale: torch.Tensor | None

    def weight(self) -> torch.Tensor:
        """The same function as one float32 matrix."""
        group = self.q.shape[1] // self.scales.shape[1]
        dequantized = self.q.float() * self.scales.float().repeat_interleave(group, 1)
        return dequantized if self.prescale is None else dequantized * self.prescale.float()

    def pack(self) -> torch.Tensor:
        """[out/2, in]: row 2r in the low nibble, row 2r+1 in the high one."""
        low, high = self.q[0::2].int() & 15, self.q[1::2].int() & 15
        return (low | high << 4).to(torch.uint8).view(torch.int8)


@dataclass
class Model:
    """A hub folder (for transformers), and the same model as an engine checkpoint."""

    path: Path
    architecture: Architecture
    source: MemorySource

    def reference(self) -> Any:
        """transformers' model in float32 with eager attention."""
        return load_whole(self.path)

    def spec(self, **options: Any) -> NetworkSpec:
        return NetworkSpec(**{"dtype": self.architecture.dtype, "block_size": 8, "max_seq_len": 256, **options})

    def program(self, **options: Any) -> Program:
        return read_program(self.spec(**options), self.architecture, self.source)


def read_program(spec: NetworkSpec, architecture: Architecture, source: TensorSource) -> Program:
    """Builds and reads back. The program keeps the memory of its constants."""
    import tensorrt_rtx as trt

    from pipeline.network.network import build_network
    from pipeline.network.readback import read_network

    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    return read_network(build_network(trt, builder.create_network(0), spec, architecture, source))


def load(path: Path) -> Model:
    """A hub folder as it is."""
    architecture, tensors = _read(path)
    source = MemorySource()
    for name, tensor in tensors.items():
        _place(source, name, tensor)
    _fuse(source, architecture)
    return Model(path, architecture, source)


def load_int4(
    write: Callable[..., Path], path: Path, *, pattern: str, group: int, prescale: str = "none", **options: Any
) -> Model:
    """Writes a hub folder whose linears that match `pattern` hold what INT4 can represent, and the engine checkpoint
    with those linears in INT4. prescale: "none", "each" (random, per linear) or "all" (one per input width)."""
    quantized: dict[str, Int4] = {}

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        generator = torch.Generator().manual_seed(7)
        shared: dict[int, torch.Tensor] = {}
        for name in [name for name in tensors if re.search(pattern, name)]:
            width, dtype = tensors[name].shape[1], tensors[name].dtype
            scale = (0.5 + torch.rand(width, generator=generator)).to(dtype)
            scale = {"none": None, "each": scale, "all": shared.setdefault(width, scale)}[prescale]
            quantized[name] = quantize(tensors[name], group, scale)
            tensors[name] = quantized[name].weight()

    architecture, tensors = _read(write(path, edit=edit, **options))
    source = MemorySource()
    for name, tensor in tensors.items():
        _place(source, name, quantized.get(name, tensor))
    _fuse(source, architecture)
    return Model(path, architecture, source)


def load_fp8(write: Callable[..., Path], path: Path, **options: Any) -> Model:
    """Writes a hub folder of float32 products, which transformers reads as they are, and the engine checkpoint with the
    FP8 blocks that they are the products of."""
    blocks: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        fixtures.quantize_fp8(tensors)
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            scales, weight = tensors.pop(name), tensors[name.removesuffix("_scale_inv")]
            blocks[name.removesuffix("_scale_inv")] = weight, scales
            factors = scales.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)
            tensors[name.removesuffix("_scale_inv")] = weight.float() * factors[:, : weight.shape[1]]

    architecture, tensors = _read(write(path, edit=edit, **options))
    source = MemorySource()
    for name, tensor in tensors.items():
        target = engine_name(name)
        source.raw[target] = RawTensor.from_torch(blocks[name][0] if name in blocks else tensor)
        if name in blocks:
            scales_name = f"{target.removesuffix('.weight')}.weights_block_scaling_factor"
            source.raw[scales_name] = RawTensor.from_torch(blocks[name][1])
    return Model(path, architecture, source)


def quantize(weight: torch.Tensor, group: int, prescale: torch.Tensor | None = None) -> Int4:
    """Rounds to nearest; scales are rounded to the weight's own type first."""
    scaled = weight.float() if prescale is None else weight.float() / prescale.float()
    grouped = scaled.reshape(len(weight), -1, group)
    scales = (grouped.abs().amax(2) / 7).to(weight.dtype)
    q = (grouped / scales.float()[..., None]).round().clamp(-8, 7).to(torch.int8)
    return Int4(q.reshape(weight.shape), scales, prescale)


def _read(path: Path) -> tuple[Architecture, dict[str, torch.Tensor]]:
    architecture = parse_architecture(json.loads((path / "config.json").read_text()))
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return architecture, {name: t for name, t in tensors.items() if not _is_beyond(name, architecture)}


def _place(source: MemorySource, name: str, value: torch.Tensor | Int4) -> None:
    base, _, kind = engine_name(name).rpartition(".")
    if isinstance(value, torch.Tensor):
        source.raw[f"{base}.{kind}"] = RawTensor.from_torch(value)
        return
    source.raw[f"{base}.weight"] = RawTensor.from_torch(value.pack())
    source.raw[f"{base}.weights_scaling_factor"] = RawTensor.from_torch(value.scales.float())
    if value.prescale is not None:
        source.raw[f"{base}.prequant_scaling_factor"] = RawTensor.from_torch(value.prescale)


def _is_beyond(name: str, architecture: Architecture) -> bool:
    """Of a layer for multi-token prediction, which the network has no part for."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= architecture.num_layers


def engine_name(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    layer, module, kind = re.fullmatch(
        r"model\.layers\.(\d+)\.(.+)\.(weight|bias|e_score_correction_bias)", name
    ).groups()  # type: ignore[union-attr]
    if module not in MODULES:
        head, _, last = module.replace("shared_experts", "shared_expert").rpartition(".")
        return f"transformer.layers.{layer}.{head}.{MLP[last]}.{kind}"
    return f"transformer.layers.{layer}.{MODULES[module]}.{kind}"


def _fuse(source: MemorySource, architecture: Architecture) -> None:
    """q, k and v of an attention without latents under one name, their rows one after another."""
    if architecture.latent is not None:
        return
    for layer in range(architecture.num_layers):
        base = f"transformer.layers.{layer}.attention."
        for kind in ("weight", "bias", "weights_scaling_factor", "prequant_scaling_factor"):
            names = [f"{base}{part}_proj.{kind}" for part in "qkv"]
            if names[0] not in source.raw:
                continue
            tensors = [source.raw.pop(name).to_torch() for name in names]
            fused = tensors[0] if kind == "prequant_scaling_factor" else torch.cat(tensors)
            source.raw[f"{base}qkv.{kind}"] = RawTensor.from_torch(fused)
