"""Other tools' quantized checkpoints, made from the hub folders of tests/fixtures.py, and the plain model that each
stands for.

Packing is spelled out number by number from what the tools document, apart from the code under test:
  AutoAWQ     casper-hansen/AutoAWQ, awq/modules/linear/gemm.py and utils/packing_utils.py (AWQ_ORDER)
  GPTQ        AutoGPTQ, qlinear_cuda_old.py: zeros -= 1 before they are packed; GPTQModel's gptq_v2 without it
  modelopt    export/quant_utils.py, pack_int4_in_uint8
compressed-tensors is written by its own library.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LINEARS = ("_proj.weight",)


def rewrite(
    hub: Path,
    path: Path,
    config: Mapping[str, Any],
    encode: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]],
    *,
    chosen: Callable[[str], bool] = lambda name: name.endswith(LINEARS),
) -> Path:
    """`path` holds what `encode(base, weight)` makes of the chosen linears, beside `path`-plain with the float32 matrix
    that each stands for (encode's second)."""
    shutil.copytree(hub, path, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    plain = path.with_name(f"{path.name}-plain")
    shutil.copytree(hub, plain, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json"))
    tensors = {name: t for file in sorted(hub.glob("*.safetensors")) for name, t in load_file(file).items()}
    ours, theirs = dict(tensors), dict(tensors)
    for name in [name for name in tensors if chosen(name)]:
        base = name.removesuffix(".weight")
        made, theirs[name] = encode(base, tensors[name].float())
        del ours[name]
        ours |= {f"{base}.{kind}": t.contiguous().clone() for kind, t in made.items()}
    save_file(ours, path / "model.safetensors", metadata={"format": "pt"})
    save_file(theirs, plain / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((hub / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(stated | {"quantization_config": dict(config)}, indent=2))
    (plain / "config.json").write_text(json.dumps(stated | {"torch_dtype": "float32"}, indent=2))
    return path


def round_groups(
    weight: torch.Tensor, group: int, *, symmetric: bool, bits: int = 4, dtype: torch.dtype = torch.float16
) -> tuple[np.ndarray, torch.Tensor, np.ndarray]:
    """(q unsigned [O, I], scales [O, G] in `dtype`, z [O, G]): w ≈ (q - z)·s."""
    rows, columns = weight.shape
    grouped = weight.reshape(rows, -1, group)
    top = 2**bits - 1
    if symmetric:
        scales = (grouped.abs().amax(2) / (2 ** (bits - 1) - 1)).to(dtype)
        zeros = torch.full(scales.shape, 2.0 ** (bits - 1))
    else:
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scales = ((high - low) / top).to(dtype)
        zeros = (-low / scales.float()).round().clamp(1, top)
    q = ((grouped / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, top)
    return q.reshape(rows, columns).numpy().astype(np.int64), scales, zeros.numpy().astype(np.int64)


def matrix(q: np.ndarray, scales: torch.Tensor, zeros: np.ndarray, groups: np.ndarray) -> torch.Tensor:
    """float32 (q - z)·s, one column at a time."""
    whole = np.empty(q.shape, np.float32)
    for column, group in enumerate(groups):
        whole[:, column] = (q[:, column] - zeros[:, group]).astype(np.float32) * scales.float().numpy()[:, group]
    return torch.from_numpy(whole)


def pack(numbers: np.ndarray, bits: int = 4, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[R, n] unsigned → int32 [R, n·bits/32], along the last dimension."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    words = np.zeros((numbers.shape[0], numbers.shape[1] // per_word), np.uint32)
    for word in range(words.shape[1]):
        for place in range(per_word):
            words[:, word] |= numbers[:, word * per_word + order[place]].astype(np.uint32) << np.uint32(place * bits)
    return torch.from_numpy(words.view(np.int32).copy())


def awq(hub: Path, path: Path, *, group: int = 64, symmetric: bool = True, **changes: Any) -> Path:
    """group_size -1 in the config where `group` is 0."""

    def encode(base: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size = group or weight.shape[1]
        q, scales, zeros = round_groups(weight, size, symmetric=symmetric)
        made = {"qweight": pack(q.T, order=AWQ_ORDER), "qzeros": pack(zeros.T, order=AWQ_ORDER), "scales": scales.T}
        return made, matrix(q, scales, zeros, np.arange(weight.shape[1]) // size)

    config = {"quant_method": "awq", "bits": 4, "group_size": group or -1, "version": "gemm", "zero_point": True}
    return rewrite(hub, path, config | changes, encode)


def gptq(
    hub: Path,
    path: Path,
    *,
    bits: int = 4,
    group: int = 64,
    symmetric: bool = True,
    v2: bool = False,
    act_order: bool = False,
    zero_biases: bool = False,
    **changes: Any,
) -> Path:
    def encode(base: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        size = group or weight.shape[1]
        order = np.arange(weight.shape[1])
        if act_order:
            order = np.random.default_rng(len(base)).permutation(weight.shape[1])
        q, scales, zeros = round_groups(weight[:, order], size, symmetric=symmetric, bits=bits)
        q = q[:, np.argsort(order)]
        groups = np.argsort(order) // size
        made = {
            "qweight": pack(q, bits).T,
            "qzeros": pack(zeros.T - (0 if v2 else 1), bits),
            "scales": scales.T,
            "g_idx": torch.from_numpy(groups.astype(np.int32)),
        }
        if zero_biases:
            made["bias"] = torch.zeros(weight.shape[0], dtype=torch.float16)
        return made, matrix(q, scales, zeros, groups)

    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group or -1,
        "desc_act": act_order,
        "sym": symmetric,
        "checkpoint_format": "gptq_v2" if v2 else "gptq",
    }
    return rewrite(hub, path, config | changes, encode)


def modelopt(
    hub: Path, path: Path, algo: str, *, own_file: bool = True, shared: bool = True, cache: bool = False
) -> Path:
    """As modelopt's unified export; `shared`: q, k and v have one pre-scale, as it makes them."""
    generator = torch.Generator().manual_seed(5)
    vectors: dict[tuple[str, int], torch.Tensor] = {}

    def draw(base: str, columns: int) -> torch.Tensor:
        parent = base.rpartition(".")[0] if shared and base[-6] in "qkv" else base
        if (parent, columns) not in vectors:
            vectors[parent, columns] = (0.5 + torch.rand(columns, generator=generator)).bfloat16()
        return vectors[parent, columns]

    def encode(base: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        step = torch.tensor(0.01 if base[-6] in "qkv" else 0.02)
        if algo == "FP8":
            scale = weight.abs().max() / 448
            q = (weight / scale).to(torch.float8_e4m3fn)
            return {"weight": q, "weight_scale": scale, "input_scale": step}, q.float() * scale
        vector = draw(base, columns)
        scaled = weight / vector.float()
        if algo == "W8A8_SQ_PER_CHANNEL":
            scales = scaled.abs().amax(1) / 127
            q = (scaled / scales[:, None]).round().to(torch.int8)
            made = {"weight": q, "weight_scale": scales, "input_scale": step, "pre_quant_scale": vector}
            return made, q.float() * scales[:, None] * vector.float()
        grouped = scaled.reshape(rows, -1, 64)
        scales = grouped.abs().amax(2) / 7
        if "up_proj" in base:  # as many of modelopt's: those of a 16-bit maximum that 7 divides
            scales = scales.bfloat16().float()
        q = (grouped / scales[..., None]).round().clamp(-8, 7).reshape(rows, columns).to(torch.int32)
        packed = ((q[0::2] & 15) | ((q[1::2] & 15) << 4)).to(torch.uint8)
        # What a bfloat16 engine holds; where it does not, the product is rounded, not the scale.
        rounded = scales.bfloat16().float() if shared or base[-6] not in "qkv" else scales
        made = {"weight": packed, "weight_scale": scales, "pre_quant_scale": vector}
        return made, q.float() * rounded.repeat_interleave(64, 1) * vector.float()

    quantization: dict[str, Any] = {"quant_algo": algo, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    if algo == "W4A16_AWQ":
        quantization |= {"group_size": 64, "has_zero_point": False, "pre_quant_scale": True}
    stated = {key: value for key, value in quantization.items() if own_file or key in ("quant_algo", "exclude_modules")}
    rewrite(hub, path, {"quant_method": "modelopt", **stated}, encode)
    if own_file:
        text = json.dumps({"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": quantization})
        (path / "hf_quant_config.json").write_text(text)
    if cache:
        edit(path, _add_cache_scales)
    return path


def _add_cache_scales(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        layer = name.removesuffix("q_proj.weight")
        tensors[f"{layer}k_proj.k_scale"] = torch.tensor(0.25)
        tensors[f"{layer}v_proj.v_scale"] = torch.tensor(0.5)


def compressed(hub: Path, path: Path, scheme: Mapping[str, Any], format: str, **changes: Any) -> Path:
    """Compressed by the library of that name: scales by its own rules, then its compressor; the matrix is what its
    `decompress` gives."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    row = QuantizationScheme(targets=["Linear"], **scheme)
    compressor = BaseCompressor.load_from_registry(format)
    args = row.weights
    assert args is not None

    def encode(base: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        shaped = {
            "group": lambda: weight.reshape(rows, -1, args.group_size),
            "channel": lambda: weight.reshape(rows, 1, columns),
            "tensor": lambda: weight.reshape(1, 1, -1),
            "block": lambda: _blocks(weight),
        }[args.strategy]()
        low, high = shaped.amin(-1), shaped.amax(-1)
        scale, zero = calculate_qparams(low.to(torch.bfloat16), high.to(torch.bfloat16), args)
        if args.strategy == "tensor":
            scale, zero = scale.reshape(1), zero.reshape(1)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
        made = compressor.compress(dict(state), row)
        wide = {**made, "weight_scale": made["weight_scale"].float()}  # else it multiplies in the scales' own type
        whole = compressor.decompress(wide, row)["weight"]
        if row.input_activations is not None and not row.input_activations.dynamic:
            made["input_scale"] = torch.tensor([0.01 if base[-6] in "qkv" else 0.02])
        return {kind: t for kind, t in made.items() if t is not None}, whole

    config = {
        "quant_method": "compressed-tensors",
        "format": format,
        "quantization_status": "compressed",
        "config_groups": {"group_0": json.loads(row.model_dump_json())},
        "ignore": ["lm_head"],
    }
    return rewrite(hub, path, config | changes, encode)


def _blocks(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    return (
        weight.reshape(rows // 128, 128, columns // 128, 128).transpose(1, 2).reshape(rows // 128, columns // 128, -1)
    )


def edit(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def change_config(path: Path, **changes: Any) -> None:
    """Keys of quantization_config; None takes one out."""
    config = json.loads((path / "config.json").read_text())
    stated = config["quantization_config"] | changes
    config["quantization_config"] = {key: value for key, value in stated.items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
