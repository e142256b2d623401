"""Checkpoints of the hub's largest models in their own names, shapes and number of files, and of no size on disk.

Every shard has a true header and the right length; its data is a hole. What reads headers cannot tell the difference.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from tests import fixtures
from tests.hub_shapes import v2_shapes

# config.json of huggingface.co/deepseek-ai/DeepSeek-V2, as far as it describes the network.
V2_236B: dict[str, Any] = {
    **fixtures.V2_CONFIG,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V2_SHARDS = 55
BYTES = {"BF16": 2, "F8_E4M3": 1, "F32": 4}

Header = dict[str, tuple[str, tuple[int, ...]]]  # name -> (safetensors type, shape)


def deepseek_v2_236b(path: Path, **overrides: Any) -> Path:
    """DeepSeek-V2: 29,000 tensors, 472 GB of holes."""
    config = {**V2_236B, **overrides}
    shapes = v2_shapes(config)
    return write_sparse(path, config, {name: ("BF16", shape) for name, shape in shapes.items()}, V2_SHARDS)


def write_sparse(path: Path, config: dict[str, Any], tensors: Header, shards: int) -> Path:
    """A folder as the hub has it, cut in order into files of about equal size; only headers take room."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    total = sum(_count_bytes(*entry) for entry in tensors.values())
    files: list[Header] = [{} for _ in range(shards)]
    done = 0
    for name, entry in tensors.items():
        files[min(done * shards // total, shards - 1)][name] = entry
        done += _count_bytes(*entry)
    weight_map: dict[str, str] = {}
    for index, header in enumerate(files, 1):
        file = f"model-{index:05}-of-{shards:06}.safetensors"
        _write_header(path / file, header)
        weight_map |= dict.fromkeys(header, file)
    document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(document, indent=2) + "\n")
    fixtures.write_tokenizer(path)
    return path


def _write_header(path: Path, tensors: Header) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        end = position + _count_bytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)


def _count_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return BYTES[dtype] * math.prod(shape)
