"""Checkpoints of the hub's largest models without their weights, and random ones of any size.

*Sparse*: true names, shapes, types and files; the data are holes, which read as zeros and take no disk. For what reads
headers (`plan`, `validate`), and for builds without weights, which read every byte once and keep none.
*Random*: a routed model cut down in layers to so many gigabytes of bfloat16, for what moves bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.checkpoint.architecture import parse_architecture
from pipeline.checkpoint.layouts import layout_for
from pipeline.checkpoint.layouts.scales import WEIGHT_SCALES
from pipeline.checkpoint.safetensors_file import write_safetensors
from pipeline.checkpoint.safetensors_header import make_header
from pipeline.checkpoint.shards import METADATA, plan_shards, write_index
from pipeline.checkpoint.tensors import RawTensor, TensorInfo
from pipeline.quantization.selection import Decision, Rules
from tests import fixtures, sparse
from tests.hub_shapes import v2_shapes, v3_shapes

YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
# config.json of huggingface.co/deepseek-ai/DeepSeek-V2-Lite, DeepSeek-V2 and DeepSeek-V3, as far as they describe the
# network.
V2_LITE: dict[str, Any] = {
    **fixtures.V2_CONFIG,
    **fixtures.V2_LITE_SHAPES,
    "hidden_size": 2048,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "rope_scaling": YARN,
    "vocab_size": 102400,
}
V3: dict[str, Any] = {
    **fixtures.V3_CONFIG,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": fixtures.FP8_CONFIG,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
MODELS: dict[str, tuple[dict[str, Any], int]] = {  # config, files on the hub
    "v2-lite": (V2_LITE, 4),
    "v2-236b": (sparse.V2_236B, sparse.V2_SHARDS),
    "v3": (V3, 163),
}
BLOCK = 128  # of FP8 scales
SPARSE_SHARD = 16_000_000_000  # bytes; the header of more of V3 would be larger than any reader takes
# The defaults of stages.quantize.
RULES = Rules(method="rtn", include=("experts", "shared_experts", "mlp", "attention_output"))


def sparse_hub(path: Path, model: str) -> Path:
    """The model as the hub has it: V3 in FP8 with scales by block."""
    shutil.rmtree(path, ignore_errors=True)
    config, files = MODELS[model]
    return sparse.write_sparse(path, config, _hub_tensors(config), files)


def _hub_tensors(config: dict[str, Any]) -> sparse.Header:
    is_v3 = config["architectures"] == fixtures.V3_CONFIG["architectures"]
    shapes = v3_shapes(config) if is_v3 else v2_shapes(config)
    tensors: sparse.Header = {}
    for name, shape in shapes.items():
        if is_v3 and len(shape) == 2 and not any(part in name for part in fixtures.NOT_FP8):
            tensors[name] = ("F8_E4M3", shape)
            tensors[f"{name}_scale_inv"] = ("F32", tuple(-(-size // BLOCK) for size in shape))
        else:
            tensors[name] = ("F32" if name.endswith("e_score_correction_bias") else "BF16", shape)
    return tensors


def sparse_int4(path: Path, config: dict[str, Any]) -> Path:
    """The quantized engine checkpoint that the default rules make of a model, in float16."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    config = {key: value for key, value in config.items() if key != "quantization_config"} | {"torch_dtype": "float16"}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    infos: list[TensorInfo] = []
    for mapping in layout_for(parse_architecture(config)).mappings():
        matrix = len(mapping.target_shape) == 2
        decision = RULES.decide(mapping.target, mapping.role, mapping.target_shape) if matrix else ""
        if mapping.optional or mapping.role == "mtp":
            continue
        if isinstance(decision, Decision):
            (rows, columns), base = mapping.target_shape, mapping.target.removesuffix(".weight")
            infos.append(TensorInfo(f"{base}.weight", "I8", (rows // 2, columns)))
            infos.append(TensorInfo(f"{base}.{WEIGHT_SCALES}", "F32", (rows, columns // (decision.group or columns))))
        else:
            infos.append(TensorInfo(mapping.target, "F16" if mapping.cast else "F32", mapping.target_shape))
    shards = plan_shards(infos, SPARSE_SHARD)
    for shard in shards:
        with open(path / shard.name, "wb") as file:
            file.write(make_header(shard.infos, METADATA))
            file.truncate(file.tell() + shard.nbytes)
    write_index(path, shards)
    return path


def random_moe(path: Path, gigabytes: float) -> int:
    """A DeepSeek-V2 of V2-Lite's layers, as many as fill so many gigabytes (10^9) of bfloat16; its bytes of weights."""
    config = {**V2_LITE, "vocab_size": 32000}
    outside, dense, routed = _count_layers(config)
    config["num_hidden_layers"] = 1 + max(1, round((gigabytes * 1e9 - outside - dense) / routed))
    infos = [TensorInfo(name, "BF16", shape) for name, shape in v2_shapes(config).items()]
    return _write_random(path, config, infos)


def random_fp8(path: Path, gigabytes: float) -> int:
    """A DeepSeek-V3 of true sizes but for 16 experts, as many layers as fill so many gigabytes of FP8 with scales by
    block; its bytes of weights."""
    config = {**V3, "first_k_dense_replace": 1, "n_group": 4, "n_routed_experts": 16, "num_nextn_predict_layers": 0}
    config |= {"topk_group": 2, "vocab_size": 32000}
    infos: list[TensorInfo] = []
    for layers in range(2, 1000):
        infos = _list_infos(config | {"num_hidden_layers": layers})
        if sum(info.nbytes for info in infos) >= gigabytes * 1e9:
            config["num_hidden_layers"] = layers
            break
    return _write_random(path, config, infos)


def _write_random(path: Path, config: dict[str, Any], infos: Sequence[TensorInfo]) -> int:
    """A checkpoint of random weights in an empty folder; its bytes of weights."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    shards = plan_shards(infos)
    for shard in shards:
        write_safetensors(path / shard.name, shard.infos, _draw(shard.infos), metadata=METADATA)
    write_index(path, shards)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    fixtures.write_tokenizer(path)
    return sum(info.nbytes for info in infos)


def count_bytes(model: str) -> int:
    """Bytes of weights of a model as the hub has it."""
    return sum(info.nbytes for info in _list_infos(MODELS[model][0]))


def _list_infos(config: dict[str, Any]) -> list[TensorInfo]:
    return [TensorInfo(name, dtype, shape) for name, (dtype, shape) in _hub_tensors(config).items()]


def _count_layers(config: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes of what surrounds the layers, of the dense first, of a routed one."""
    sizes = [
        sum(TensorInfo(n, "BF16", s).nbytes for n, s in v2_shapes(config | {"num_hidden_layers": k}).items())
        for k in (0, 1, 2)
    ]
    return sizes[0], sizes[1] - sizes[0], sizes[2] - sizes[1]


def _draw(infos: Sequence[TensorInfo]) -> Iterator[RawTensor]:
    """Normal numbers of a weight's size; tensors start at different places of one long row of them."""
    noise = (np.random.default_rng(0).standard_normal(1 << 22) * 0.02).astype(np.float32)
    half = (noise.view(np.uint32) >> 16).astype(np.uint16)
    # E4M3 of both signs, below 32 and never NaN.
    eight = (half.view(np.uint8)[: 1 << 22] & 0xBF) | 0x20
    kinds: dict[str, npt.NDArray[Any]] = {"BF16": half, "F8_E4M3": eight, "F32": np.abs(noise) + np.float32(0.001)}
    for index, info in enumerate(infos):
        row = kinds[info.dtype]
        values = np.resize(np.roll(row, -7919 * index), info.nbytes // row.itemsize)
        yield RawTensor(info.dtype, info.shape, values.view(np.uint8))
