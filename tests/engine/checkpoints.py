"""Random engine checkpoints, written straight in their final form, of any size: what engines are built from in tests
and benchmarks. Names and shapes come from the layouts; values only have to be finite and vary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint.architecture import parse_architecture
from pipeline.checkpoint.layouts import layout_for
from pipeline.checkpoint.layouts.scales import cache_scale
from pipeline.checkpoint.safetensors_file import write_safetensors
from pipeline.checkpoint.tensors import RawTensor, TensorInfo
from tests.fixtures import LLAMA_CONFIG, MOE_CONFIG, V2_CONFIG

# Llama with head size 64, which has fused attention kernels.
TINY_LLAMA: dict[str, Any] = LLAMA_CONFIG | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "torch_dtype": "float16",
}
# Likewise, one dense and one routed layer.
TINY_MOE: dict[str, Any] = MOE_CONFIG | {"hidden_size": 256, "num_hidden_layers": 2, "torch_dtype": "float16"}
# One dense and one routed layer; every INT4 dimension a multiple of 64.
TINY_V2: dict[str, Any] = V2_CONFIG | {"num_hidden_layers": 2, "torch_dtype": "float16"}

_TYPES = {"float16": ("F16", np.float16), "float32": ("F32", np.float32)}
_PATTERN = 65537  # values before a tensor repeats: a prime, so that rows differ


def write_engine_checkpoint(
    path: Path,
    config: dict[str, Any],
    *,
    int4: Collection[str] = (),
    group: int = 128,
    seed: int = 0,
    cache_scales: bool = False,
) -> Path:
    """Writes config.json and one shard; `int4` names the roles to quantize, `cache_scales` adds those of a quantized KV
    cache. Streams: one tensor is held at a time."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    dtype, _ = _TYPES[config["torch_dtype"]]
    infos: list[TensorInfo] = []
    for mapping in layout_for(parse_architecture(config)).mappings():
        if mapping.optional:
            continue
        if mapping.role in int4:
            rows, columns = mapping.target_shape
            base = mapping.target.removesuffix(".weight")
            infos.append(TensorInfo(f"{base}.weight", "I8", (rows // 2, columns)))
            infos.append(TensorInfo(f"{base}.weights_scaling_factor", "F32", (rows, columns // group)))
        else:
            infos.append(TensorInfo(mapping.target, dtype, mapping.target_shape))
    if cache_scales:
        infos += [TensorInfo(cache_scale(layer), "F32", (1,)) for layer in range(config["num_hidden_layers"])]
    write_safetensors(path / "model.safetensors", infos, _draw(infos, seed), metadata={"format": "pt"})
    return path


def _draw(infos: list[TensorInfo], seed: int) -> Iterator[RawTensor]:
    generator = np.random.default_rng(seed)
    for info in infos:
        count = math.prod(info.shape)
        if info.dtype == "I8":
            values = generator.integers(-128, 128, min(count, _PATTERN)).astype(np.int8)
        elif info.name.endswith("weights_scaling_factor"):
            # Eighths of a power of two: exact in any 16-bit type.
            values = (generator.integers(8, 16, min(count, _PATTERN)) / 1024).astype(np.float32)
        else:
            noise = generator.standard_normal(min(count, _PATTERN))
            is_norm = len(info.shape) == 1
            kind = np.float16 if info.dtype == "F16" else np.float32
            values = (1 + 0.1 * noise if is_norm else 0.05 * noise).astype(kind)
        yield RawTensor(info.dtype, info.shape, np.resize(values, count).view(np.uint8))
