"""Qwen2: the R1-Distill-Qwen models. Llama's rows; what differs is that q, k and v alone have a bias, and always.

model.layers.3.self_attn.{q,k,v}_proj.bias [1536], [256], [256] (R1-Distill-Qwen-1.5B)
  -> transformer.layers.3.attention.qkv.bias [2048], TensorRT-LLM's QWenForCausalLM has the same names
"""

from pipeline.checkpoint.layouts.llama import ROWS, UNUSED, list_dimensions

__all__ = ["ROWS", "UNUSED", "list_dimensions"]
