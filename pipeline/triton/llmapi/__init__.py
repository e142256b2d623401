"""Packages of flavour `llmapi`: a Hugging Face checkpoint for TensorRT-LLM's PyTorch backend (1.3 and later)."""
