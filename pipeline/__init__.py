"""trtseek: from a Hugging Face DeepSeek checkpoint to a proven, packaged TensorRT engine."""

__version__ = "0.1.0"
