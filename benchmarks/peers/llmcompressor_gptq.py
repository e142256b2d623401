"""Runs in the peer's own environment: llm-compressor's GPTQ on given tokens, written and read back to floats.

    python llmcompressor_gptq.py MODEL TOKENS.json OUTPUT GROUP

OUTPUT gets `export` (compressed-tensors, pack-quantized) and `floats` (a Hugging Face folder of what that says, in
float32). Symmetric groups, everything else as the library has it by default: static activation order, 1% damping,
layers one after the other on the already quantized ones' output. Prints seconds and peak resident bytes. Never imports
the project.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import side
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from transformers import AutoModelForCausalLM

# As here: the head, routers and MLA's latent stay 16-bit.
KEPT = ["lm_head", r"re:.*mlp\.gate$", "re:.*kv_a_proj_with_mqa$", "re:.*kv_b_proj$"]
NIBBLES = torch.arange(8) * 4


def quantize(source: Path, tokens: torch.Tensor, group: int, output: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    weights = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=group, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    rows = tokens.tolist()
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    recipe = GPTQModifier(config_groups={"group_0": scheme}, ignore=KEPT)
    oneshot(
        model=model,
        dataset=data,
        recipe=recipe,
        max_seq_length=tokens.shape[1],
        num_calibration_samples=len(rows),
        shuffle_calibration_samples=False,
    )
    model.save_pretrained(output, save_compressed=True)


def read_back(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """weight_packed I32 [out, in/8]: eight values, the first in the low nibble, each 8 more than it says."""
    floats = {}
    for name, value in stored.items():
        base, _, kind = name.rpartition(".weight_")
        if base and kind == "packed":
            rows, columns = stored[f"{base}.weight_shape"].tolist()
            q = ((value[..., None] >> NIBBLES.to(value.dtype)) & 0xF).reshape(rows, -1)[:, :columns].float() - 8
            scales = stored[f"{base}.weight_scale"].float()
            if f"{base}.weight_g_idx" in stored:
                raise SystemExit(f"{base} has its groups in another order")
            floats[f"{base}.weight"] = (q.view(*scales.shape, -1) * scales[..., None]).view(rows, columns)
        elif not base:
            floats[name] = value
    return floats


if __name__ == "__main__":
    side.run(quantize, read_back)
