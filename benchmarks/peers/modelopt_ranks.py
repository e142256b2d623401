"""Runs in modelopt's environment: exports a tiny Llama for TensorRT-LLM by `export_tensorrt_llm_checkpoint`.

    modelopt_ranks.py HF_FOLDER METHOD TENSOR_PARALLEL OUTPUT

METHOD: plain, fp8, awq, w4a8 or smoothquant.
"""

from __future__ import annotations

import json
import sys

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_tensorrt_llm_checkpoint
from transformers import AutoModelForCausalLM

CONFIGS = {
    "fp8": "FP8_DEFAULT_CFG",
    "awq": "INT4_AWQ_CFG",
    "w4a8": "W4A8_AWQ_BETA_CFG",
    "smoothquant": "INT8_SMOOTHQUANT_CFG",
}


def main(folder: str, method: str, size: str, output: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(2, 250, (4, 64), generator=generator)
    if method in CONFIGS:
        mtq.quantize(model, getattr(mtq, CONFIGS[method]), forward_loop=lambda quantized: quantized(text))
    export_tensorrt_llm_checkpoint(
        model.half(), "llama", torch.float16, export_dir=output, inference_tensor_parallel=int(size)
    )
    print(json.dumps({"output": output}))


if __name__ == "__main__":
    main(*sys.argv[1:])
