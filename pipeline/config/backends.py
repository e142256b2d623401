"""What each `target.backend` is, as one row: the Triton repository it is served from, and the world it lives in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRow:
    """flavour: of the model repository. world: what runs the model, for `plan`. foreign: TensorRT-LLM writes the
    network, not trtseek, so that what shapes trtseek's own network (OWN_SETTINGS) has no meaning."""

    flavour: str
    world: str
    foreign: bool = False


OWN = "trtseek's own network, proved on the CPU and compiled by TensorRT"
BACKENDS = {
    "tensorrt_rtx": BackendRow(flavour="trtseek", world=f"{OWN}-RTX, on any x86-64 host"),
    "tensorrt": BackendRow(flavour="trtseek", world=f"{OWN} 11, on the GPU itself"),
    "tensorrt_llm": BackendRow(
        flavour="tensorrtllm",
        world="the TensorRT engines of TensorRT-LLM 1.2.1, the last stable release that builds them",
        foreign=True,
    ),
    "llmapi": BackendRow(
        flavour="llmapi",
        world="TensorRT-LLM's PyTorch backend (LLM API), from 1.3 on the only one: it loads Hugging Face checkpoints",
        foreign=True,
    ),
}

# Under stages.build: what shapes the network that trtseek writes, and its engine.
OWN_SETTINGS = ("generation", "max_blocks", "moe", "lowering", "weights")

# Format of the linears (selection.FORMATS) -> that of the Hugging Face checkpoint (`trtseek export --format`) in which
# TensorRT-LLM's PyTorch backend reads it.
LLMAPI_EXPORTS = {"int4": "modelopt", "fp8": "modelopt", "fp8_blocks": "hf"}
