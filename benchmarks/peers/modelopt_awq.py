"""Runs in the peer's own environment: nvidia-modelopt's INT4_AWQ_CFG on given tokens, exported and read back to floats.

    python modelopt_awq.py MODEL TOKENS.json OUTPUT GROUP

OUTPUT gets `export` (what modelopt writes) and `floats` (a Hugging Face folder of what that says, in float32). Prints
seconds of quantizing and exporting, and the peak resident bytes until then. Never imports the project.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import side
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM

# As here: the head, routers and MLA's latent stay 16-bit.
KEPT = ("*lm_head*", "*mlp.gate.*", "*mlp.gate", "*kv_a_proj_with_mqa*", "*kv_b_proj*")


class Experts(torch.nn.Module):
    """The fused experts of transformers as linears: modelopt searches no scale for what is no linear, and cannot export
    fused INT4."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        self.act = fused.act_fn
        gate_up, down = fused.gate_up_proj.data, fused.down_proj.data
        half = gate_up.shape[1] // 2
        self.experts = torch.nn.ModuleList(
            torch.nn.ModuleDict({"gate_proj": linear(gu[:half]), "up_proj": linear(gu[half:]), "down_proj": linear(d)})
            for gu, d in zip(gate_up, down, strict=True)
        )

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        expert: Any
        for e, expert in enumerate(self.experts):
            tokens, place = (chosen == e).nonzero(as_tuple=True)
            rows = x[tokens]
            hidden = expert["down_proj"](self.act(expert["gate_proj"](rows)) * expert["up_proj"](rows))
            out.index_add_(0, tokens, (hidden * weights[tokens, place, None]).to(out.dtype))
        return out


def linear(weight: torch.Tensor) -> torch.nn.Linear:
    module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    module.weight.data = weight.clone()
    return module


def unfuse(model: torch.nn.Module) -> None:
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if hasattr(child, "gate_up_proj") and isinstance(child.gate_up_proj, torch.nn.Parameter):
                setattr(module, name, Experts(child))


@torch.no_grad()
def quantize(source: Path, tokens: torch.Tensor, group: int, output: Path) -> None:
    # In 16 bits a processor without AVX-512 takes many times as long, which says nothing of modelopt.
    dtype = "auto" if torch.cpu._is_avx512_supported() else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    unfuse(model)
    config = copy.deepcopy(mtq.INT4_AWQ_CFG)
    rows = config["quant_cfg"]
    if isinstance(rows, list):
        for row in rows:
            if row.get("quantizer_name") == "*weight_quantizer" and "block_sizes" in (row.get("cfg") or {}):
                row["cfg"]["block_sizes"][-1] = group
        rows += [{"quantizer_name": pattern, "enable": False} for pattern in KEPT]
    else:
        rows["*weight_quantizer"]["block_sizes"][-1] = group
        rows.update({pattern: {"enable": False} for pattern in KEPT})

    def forward(quantized: Any) -> None:
        for batch in torch.split(tokens, 8):
            quantized(batch)

    model = mtq.quantize(model, config, forward)
    model.config.architectures = model.config.architectures or [type(model).__name__]
    export_hf_checkpoint(model, export_dir=output)


def read_back(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """weight U8 [out/2, in]: row 2r in the low nibble, 2r + 1 in the high one, two's complement.

    w = q·scale·prescale.
    """
    floats = {}
    for name, value in stored.items():
        scale = stored.get(f"{name}_scale")
        if name.endswith(("_scale", "_scale_2")) or "_quantizer" in name:
            continue
        if scale is not None:
            pairs = torch.stack([value & 0xF, value >> 4], dim=1).to(torch.int8).reshape(-1, value.shape[1])
            q = torch.where(pairs > 7, pairs - 16, pairs).float()
            value = (q.view(*scale.shape, -1) * scale.float()[..., None]).view(q.shape)
            prescale = stored.get(f"{name.removesuffix('weight')}pre_quant_scale")
            value = value if prescale is None else value * prescale.float()
        floats[re.sub(r"mlp\.experts\.experts\.", "mlp.experts.", name)] = value
    return {n: t for n, t in floats.items() if not n.endswith("pre_quant_scale")}


if __name__ == "__main__":
    side.run(quantize, read_back)
