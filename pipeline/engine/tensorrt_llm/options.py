"""trtllm-build's options as one table, from which both its arguments and the BuildConfig JSON are made.

Names, kinds and defaults: `trtllm-build --help`, BuildConfig and PluginConfig of TensorRT-LLM 1.2. Whatever decides
the engine is stated, defaults included: a default that changes between releases changes no engine here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.engine.tensorrt_llm.request import EngineRequest

# How a flag is written: with its value; alone, where it is true; with enable or disable.
Kind = Literal["value", "switch", "toggle"]
PLUGIN_CONFIG = "plugin_config"
DISABLED = "disable"
CHECKPOINT, OUTPUT = "--checkpoint_dir", "--output_dir"


@dataclass(frozen=True, slots=True)
class Option:
    """One option. `source`: the field of EngineRequest that it takes, or the value that it always has. `place`: where
    BuildConfig keeps it: itself, its plugin_config, or "command" where it is an argument alone. `shown`: how JSON
    spells the value, where it differs."""

    name: str
    place: Literal["build", "plugin", "command"]
    kind: Kind
    source: str | None = None
    always: Any = None
    shown: Callable[[Any], Any] | None = None

    def read(self, request: EngineRequest) -> Any:
        return self.always if self.source is None else getattr(request, self.source)

    def write(self, request: EngineRequest) -> list[str]:
        """Its arguments; none for a switch that is off, or what is left to trtllm-build."""
        value, flag = self.read(request), f"--{self.name}"
        if self.kind == "switch":
            return [flag] if value else []
        if self.kind == "toggle":
            return [flag, "enable" if value else DISABLED]
        return [] if value is None else [flag, str(value)]

    def show(self, request: EngineRequest) -> Any:
        """Its value in BuildConfig's JSON."""
        value = self.read(request)
        return self.shown(value) if self.shown else value


def _of(name: str, place: Literal["build", "plugin", "command"], kind: Kind = "value") -> Option:
    return Option(name, place, kind, source=name)


def _plugin(name: str) -> Option:
    return Option(name, "plugin", "value", source=name, shown=lambda value: None if value == DISABLED else value)


OPTIONS: tuple[Option, ...] = (
    _of("max_batch_size", "build"),
    _of("max_input_len", "build"),
    _of("max_seq_len", "build"),  # left out, it is max_position_embeddings times the RoPE factor
    _of("max_beam_width", "build"),
    _of("max_num_tokens", "build"),
    _of("opt_num_tokens", "build"),
    Option("kv_cache_type", "build", "value", always="paged", shown=str.upper),
    _of("gather_context_logits", "build", "switch"),
    _of("gather_generation_logits", "build", "switch"),
    _of("profiling_verbosity", "build"),
    _of("weight_streaming", "build", "switch"),
    _of("logits_dtype", "command"),  # into the model's config, not the build's
    _of("workers", "command"),
    _of("log_level", "command"),
    # In-flight batching wants these three: packed rows, and attention over a paged cache.
    Option("gpt_attention_plugin", "plugin", "value", always="auto"),
    Option("remove_input_padding", "plugin", "toggle", always=True),
    Option("context_fmha", "plugin", "toggle", always=True),
    Option("nccl_plugin", "plugin", "value", always="auto"),
    Option("moe_plugin", "plugin", "value", always="auto"),
    _plugin("gemm_plugin"),
    _plugin("gemm_swiglu_plugin"),
    _plugin("low_latency_gemm_plugin"),
    _plugin("low_latency_gemm_swiglu_plugin"),
    _plugin("gemm_allreduce_plugin"),
    _of("tokens_per_block", "plugin"),
    _of("use_paged_context_fmha", "plugin", "toggle"),
    _of("use_fp8_context_fmha", "plugin", "toggle"),
    _of("multiple_profiles", "plugin", "toggle"),
    _of("norm_quant_fusion", "plugin", "toggle"),
    _of("reduce_fusion", "plugin", "toggle"),
    _of("user_buffer", "plugin", "toggle"),
    _of("use_fused_mlp", "plugin", "toggle"),
)


def list_arguments(request: EngineRequest, checkpoint: str, output: str) -> list[str]:
    """What follows `trtllm-build` on its command line, to build `checkpoint` into `output`."""
    options: Sequence[str] = [text for option in OPTIONS for text in option.write(request)]
    return [CHECKPOINT, checkpoint, OUTPUT, output, *options]


def build_config(request: EngineRequest) -> dict[str, Any]:
    """The same as BuildConfig's JSON, for `trtllm-build --build_config`, and as the engine's config.json will state."""
    own = {option.name: option.show(request) for option in OPTIONS if option.place == "build"}
    plugins = {option.name: option.show(request) for option in OPTIONS if option.place == "plugin"}
    return {**own, PLUGIN_CONFIG: plugins}
