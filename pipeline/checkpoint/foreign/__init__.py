"""Checkpoints that other tools have quantized: what their tensors mean, and which of our formats hold it."""
