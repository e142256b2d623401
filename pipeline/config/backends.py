"""What each `target.backend` is, as one row: the Triton repository it is served from, and the world it lives in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRow:
    """flavour: of the model repository. world: what runs the model, and gives: what it has, for `plan`. foreign:
    TensorRT-LLM writes the network, not trtseek, so that what shapes trtseek's own (OWN_SETTINGS) has no meaning."""

    flavour: str
    world: str
    gives: tuple[str, ...] = ()
    foreign: bool = False


OWN = "trtseek's own network, proved on the CPU and compiled by TensorRT"
OWN_GIVES = (
    "the network that is built is the one that was proved",
    "latent attention (MLA) and INT4 experts in an engine",
    "serving on a machine without a GPU, by the interpreter",
)
BACKENDS = {
    "tensorrt_rtx": BackendRow(flavour="trtseek", world=f"{OWN}-RTX, on any x86-64 host", gives=OWN_GIVES),
    "tensorrt": BackendRow(flavour="trtseek", world=f"{OWN} 11, on the GPU itself", gives=OWN_GIVES),
    "tensorrt_llm": BackendRow(
        flavour="tensorrtllm",
        world="the TensorRT engines of TensorRT-LLM 1.2.1, the last stable release that builds them",
        gives=("TensorRT-LLM's kernels and C++ executor, of a release that is not developed on",),
        foreign=True,
    ),
    "llmapi": BackendRow(
        flavour="llmapi",
        world="TensorRT-LLM's PyTorch backend (LLM API), from 1.3 on the only one: it loads Hugging Face checkpoints",
        gives=(
            "no engine to be built",
            "what TensorRT-LLM is developed on, DeepSeek-V3 included",
        ),
        foreign=True,
    ),
}

# Under stages.build: what shapes the network that trtseek writes, and its engine.
OWN_SETTINGS = ("generation", "max_blocks", "moe", "lowering", "weights")

# Format of the linears (catalog.FORMATS) -> that of the Hugging Face checkpoint (`trtseek export --format`) in which
# TensorRT-LLM's PyTorch backend reads it.
LLMAPI_EXPORTS = {"int4": "modelopt", "fp8": "modelopt", "fp8_blocks": "hf"}
# … and of those that only others' checkpoints bring.
FOREIGN_LLMAPI_EXPORTS = {"fp8_rows": "modelopt"}
