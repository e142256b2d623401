"""Tiny engine checkpoints of every architecture and method that TensorRT-LLM's engine backend runs, and their ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.engine.tensorrt_llm.ranks import RankReport, write_ranks
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.sharding import Parallel
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.quantization.support import CalibrationSettings, Model, Settings

ALL = ("experts", "shared_experts", "mlp", "attention_output", "attention_input")
# Large enough for two ranks' groups of 64 and tiles of 64; four key/value heads, so that four ranks have one each.
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 259,  # two ranks pad it
}
MOE_SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 258,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
# method -> (method of quantize, KV cache), each with group 64 where it has groups.
METHODS: dict[str, tuple[str, str]] = {
    "plain": ("none", "none"),
    "awq": ("awq", "fp8"),
    "w4a8": ("awq_fp8", "none"),
    "gptq": ("gptq", "none"),
    "fp8": ("fp8", "fp8"),
    "smoothquant": ("smoothquant", "int8"),
    "int8": ("int8", "none"),
}


@dataclass(frozen=True)
class Text:
    """Calibration text, as long as the tiny models need."""

    path: Path

    @staticmethod
    def write(folder: Path) -> Text:
        path = folder / "calibration.txt"
        path.write_text("".join(f"def f{i}(x):\n    return {i * 7919 % 1000} * x\n" for i in range(400)))
        return Text(path)


def make_engine(
    folder: Path,
    architecture: str,
    method: str,
    *,
    dtype: str = "float16",
    settings: Mapping[str, Any] | None = None,
    **config: Any,
) -> CheckpointFolder:
    """An engine checkpoint in `folder`. `architecture`: a function of fixtures; `method`: a key of METHODS."""
    sizes = MOE_SIZES if architecture == "deepseek_moe" else SIZES
    hub = getattr(fixtures, architecture)(
        folder / "hub", **{"dtype": "float16", "tokenizer": True, "shards": 1, **sizes, **config}
    )
    source = Model.load(hub).write(folder / "engine", hub)
    name, cache = METHODS[method]
    if name == "none":
        return source
    text = Text.write(folder).path
    options = Settings(
        **{
            "method": name,
            "kv_cache": cache,
            "group_size": 64,
            "include": ALL,
            "calibration": CalibrationSettings(files=(text,), samples=4, length=32),
            **(settings or {}),
        }
    )
    quantize_checkpoint(source, FolderWorkspace(folder / "quantized", journal=folder / "journal"), settings=options)
    return CheckpointFolder.open(folder / "quantized")


def write(engine: CheckpointFolder, folder: Path, *, sm: int = 90, **parallel: int) -> RankReport:
    return write_ranks(
        engine, FolderWorkspace(folder, journal=folder.with_suffix(".journal")), parallel=Parallel(**parallel), sm=sm
    )
