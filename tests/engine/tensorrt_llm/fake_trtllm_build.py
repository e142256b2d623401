"""Stands in for `trtllm-build` of 1.2.1 on a machine that has none, and is as strict: it parses the flags that the real
one has, checks its checkpoint's tensors, makes BuildConfig and PretrainedConfig as the real one does, and writes what
it writes. Only the engines' bytes are made up. FAKE_FAILURE makes it fail as the real one fails.

The flags, choices and the way from arguments to config.json: tensorrt_llm/commands/build.py and plugin/plugin.py.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
from importlib.metadata import version
from pathlib import Path

DTYPES = ["auto", "float16", "float32", "bfloat16", "int32"]
PLUGINS = {
    "bert_attention_plugin": (DTYPES, "auto"),
    "gpt_attention_plugin": (DTYPES, "auto"),
    "gemm_plugin": ([*DTYPES, "fp8", "nvfp4"], None),
    "gemm_swiglu_plugin": (["fp8"], None),
    "fp8_rowwise_gemm_plugin": (DTYPES, None),
    "lora_plugin": (DTYPES, None),
    "moe_plugin": (DTYPES, "auto"),
    "mamba_conv1d_plugin": (DTYPES, "auto"),
    "nccl_plugin": (DTYPES, "auto"),
    "low_latency_gemm_plugin": (["fp8"], None),
    "low_latency_gemm_swiglu_plugin": (["fp8"], None),
    "gemm_allreduce_plugin": (["float16", "bfloat16"], None),
}
FEATURES = {
    "dora_plugin": False,
    "context_fmha": True,
    "bert_context_fmha_fp32_acc": False,
    "remove_input_padding": True,
    "use_paged_context_fmha": True,
    "use_fp8_context_fmha": True,
    "fuse_fp4_quant": False,
    "multiple_profiles": False,
    "paged_state": True,
    "streamingllm": False,
    "norm_quant_fusion": False,
    "reduce_fusion": False,
    "user_buffer": False,
    "use_fused_mlp": True,
    "pp_reduce_scatter": False,
}
# trtllm-build's own flags that take a value, their type and default; those that stand alone.
VALUES = {
    "checkpoint_dir": (str, None),
    "model_config": (str, None),
    "build_config": (str, None),
    "model_cls_file": (str, None),
    "model_cls_name": (str, None),
    "output_dir": (str, "engine_outputs"),
    "max_batch_size": (int, 2048),
    "max_input_len": (int, 1024),
    "max_seq_len": (int, None),
    "max_beam_width": (int, 1),
    "max_num_tokens": (int, 8192),
    "opt_num_tokens": (int, None),
    "max_encoder_input_len": (int, 1024),
    "max_prompt_embedding_table_size": (int, 0),
    "kv_cache_type": (str, None),
    "paged_kv_cache": (str, None),
    "input_timing_cache": (str, None),
    "output_timing_cache": (str, "model.cache"),
    "workers": (int, 1),
    "visualize_network": (str, None),
    "lora_dir": (str, None),
    "lora_ckpt_source": (str, "hf"),
    "lora_target_modules": (str, None),
    "max_lora_rank": (int, 64),
    "speculative_decoding_mode": (str, None),
    "max_draft_len": (int, 0),
}
SWITCHES = (
    "strip_plan",
    "weight_sparsity",
    "weight_streaming",
    "fast_build",
    "enable_debug_output",
    "dry_run",
    "monitor_memory",
    "gather_context_logits",
    "gather_generation_logits",
    "gather_all_token_logits",
)
CHOICES = {
    "profiling_verbosity": (["layer_names_only", "detailed", "none"], "layer_names_only"),
    "log_level": (["internal_error", "error", "warning", "info", "verbose", "debug", "trace"], "info"),
    "logits_dtype": (["float16", "float32"], None),
}
FLAGS = {*VALUES, *SWITCHES, *CHOICES, *PLUGINS, *FEATURES, "tokens_per_block"}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trtllm-build", allow_abbrev=False)
    for name, (kind, default) in VALUES.items():
        parser.add_argument(f"--{name}", type=kind, default=default)
    for name in SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    for name, (choices, default) in CHOICES.items():
        parser.add_argument(f"--{name}", choices=choices, default=default)
    for name, (choices, default) in PLUGINS.items():
        parser.add_argument(f"--{name}", choices=[*choices, "disable"], default=default or "disable")
    for name, default in FEATURES.items():
        parser.add_argument(f"--{name}", choices=["enable", "disable"], default="enable" if default else "disable")
    parser.add_argument("--tokens_per_block", type=int, default=32)
    return parser


def describe_build(args: argparse.Namespace) -> dict[str, object]:
    """build_config of config.json."""
    plugins = {name: None if getattr(args, name) == "disable" else getattr(args, name) for name in PLUGINS}
    features = {name: getattr(args, name) == "enable" for name in FEATURES}
    batch = args.max_batch_size * args.max_beam_width
    return {
        "max_input_len": args.max_input_len,
        "max_seq_len": args.max_seq_len,
        "opt_batch_size": 8,
        "max_batch_size": args.max_batch_size,
        "max_beam_width": args.max_beam_width,
        "max_num_tokens": min(args.max_num_tokens, args.max_batch_size * args.max_seq_len),
        "opt_num_tokens": args.opt_num_tokens or min(batch, args.max_num_tokens),
        "max_prompt_embedding_table_size": 0,
        "kv_cache_type": (args.kv_cache_type or "paged").upper(),
        "gather_context_logits": args.gather_context_logits,
        "gather_generation_logits": args.gather_generation_logits,
        "strongly_typed": True,
        "profiling_verbosity": args.profiling_verbosity,
        "weight_streaming": args.weight_streaming,
        "output_timing_cache": args.output_timing_cache,
        "plugin_config": {
            "dtype": "float16",
            **plugins,
            **features,
            "paged_kv_cache": True,
            "tokens_per_block": args.tokens_per_block,
        },
    }


def check_tensors(folder: Path, config: dict[str, object], rank: int) -> None:
    """As PretrainedModel.load: what is required and not provided is an error."""
    path = folder / f"rank{rank}.safetensors"
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    mapping = config["mapping"]
    stage = rank // mapping["tp_size"]
    required = {"transformer.layers.0.attention.qkv.weight", "transformer.layers.0.mlp.fc.weight"}
    required |= {"transformer.vocab_embedding.weight"} if stage == 0 else set()
    required |= {"transformer.ln_f.weight", "lm_head.weight"} if stage == mapping["pp_size"] - 1 else set()
    if config["quantization"]["quant_algo"] == "FP8":
        required |= {"transformer.layers.0.mlp.fc.weights_scaling_factor"}
    if missing := required - header.keys():
        raise RuntimeError(f"Required but not provided tensors:{missing}")


def log(text: str, source: str = "TRT-LLM", level: str = "I") -> None:
    print(f"[11/30/2026-02:00:00] [{source}] [{level}] {text}", flush=True)


def main() -> None:
    print(f"[TensorRT-LLM] TensorRT-LLM version: {version('tensorrt_llm')}", flush=True)
    args = make_parser().parse_args()
    folder, output = Path(args.checkpoint_dir), Path(args.output_dir)
    config = json.loads((folder / "config.json").read_text())
    if args.max_seq_len is None:
        args.max_seq_len = int(config["max_position_embeddings"] * (config["rotary_scaling"] or {}).get("factor", 1))
        log("max_seq_len is not specified, using deduced value")
    output.mkdir(exist_ok=True)
    if args.logits_dtype:
        config["logits_dtype"] = args.logits_dtype
    for rank in range(config["mapping"]["world_size"]):
        check_tensors(folder, config, rank)
        log("Total optimization profiles added: 1")
        log("Build TensorRT engine Unnamed Network 0")
        if os.environ.get("FAKE_FAILURE") == "engine":
            log("Error Code 2: OutOfMemory (Requested size was 123 bytes.)", "TRT", "E")
            raise AssertionError("Engine building failed, please check the error log.")
        if os.environ.get("FAKE_FAILURE") == "hang":
            os.kill(os.getpid(), 19)
        log("Engine generation completed in 15.4544 seconds.", "TRT")
        Path(args.output_timing_cache).write_bytes(b"timing")
        if rank == 0:
            # What to_dict adds to what was read; `rank` is dropped.
            known = {"residual_mlp": False, "runtime_defaults": None, "tie_word_embeddings": False}
            mapping = {**config["mapping"], "gpus_per_node": 8, "moe_cluster_size": 1}
            written = {**known, **config, "mapping": mapping}
            document = {
                "version": os.environ.get("FAKE_WRITES", version("tensorrt_llm")),
                "pretrained_config": written,
                "build_config": describe_build(args),
            }
            (output / "config.json").write_text(json.dumps(document, indent=4))
        log(f"Serializing engine to {output}/rank{rank}.engine...")
        (output / f"rank{rank}.engine").write_bytes(f"engine of rank {rank}".encode() * 1000)
        log("Engine serialized. Total time: 00:00:19")
    log("Total time of building all engines: 00:00:47")


if __name__ == "__main__":
    sys.exit(main())
