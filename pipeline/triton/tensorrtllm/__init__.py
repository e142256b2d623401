"""Repositories of flavour `tensorrtllm`: engines of TensorRT-LLM 1.2, served by its own C++ backend in NVIDIA's
image."""
