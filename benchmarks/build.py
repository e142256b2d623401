"""Building engines: time, peak memory, and `plan` against what the engine file states.

    python -m benchmarks.build              a 1.3B INT4 Llama (DeepSeek-Coder 1.3B's sizes), SM80, three profiles
    python -m benchmarks.build --latent     MLA at DeepSeek-V2-Lite's attention sizes, 3 layers, with 16 and 32 heads:
                                            no region of the workspace may grow as heads x K x latent

Weights are random, written straight into an engine checkpoint under out/benchmarks/. Takes minutes; needs no GPU.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.checkpoint.architecture import parse_architecture
from pipeline.engine.builder import build_engine
from pipeline.engine.description import EngineDescription
from pipeline.engine.engine_file import inspect_engine
from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.engine.memory import Design, MemoryPlan, plan_memory
from pipeline.network.spec import NetworkSpec
from pipeline.progress import format_amount, make_reporter
from pipeline.quantization.selection import Rules
from tests.engine.checkpoints import write_engine_checkpoint
from tests.fixtures import LLAMA_CONFIG, V2_CONFIG

FOLDER = Path("out/benchmarks/build")
BAR = 0.10  # plan against file
ROLES = ("experts", "shared_experts", "mlp", "attention_output")  # the config's default

# https://huggingface.co/deepseek-ai/deepseek-coder-1.3b-base
CODER_1B: dict[str, Any] = LLAMA_CONFIG | {
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "max_position_embeddings": 16384,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "torch_dtype": "float16",
    "vocab_size": 32256,
}
# https://huggingface.co/deepseek-ai/DeepSeek-V2-Lite, 3 of its 27 layers and 16 of its 64 experts
V2_LITE: dict[str, Any] = V2_CONFIG | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 16,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 3,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "float16",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
LIMITS = BuildLimits(
    max_seq_len=4096,
    max_batch_size=64,
    max_num_tokens=2048,
    generation=(Rectangle(batch=64, length=1024), Rectangle(batch=16, length=4096)),
    max_blocks=1025,
)


def run(
    name: str, config: dict[str, Any], roles: tuple[str, ...], group: int
) -> tuple[EngineDescription, MemoryPlan, Path]:
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    began = time.monotonic()
    checkpoint = write_engine_checkpoint(folder / "checkpoint", config, int4=roles, group=group)
    architecture = parse_architecture(config)
    print(f"{name}: {format_amount((checkpoint / 'model.safetensors').stat().st_size, 'B')} of weights "
          f"written in {time.monotonic() - began:.1f} s")  # fmt: skip
    engine = folder / "engine" / "model.engine"
    description = build_engine(
        backend="tensorrt_rtx",
        checkpoint=checkpoint,
        spec=NetworkSpec(dtype="float16", max_seq_len=LIMITS.max_seq_len, block_size=LIMITS.block_size),
        limits=LIMITS,
        sm=80,
        output=engine,
        log=folder / "build.log",
        progress=make_reporter(),
    )
    rules = Rules(method="rtn", include=roles, group_size=group)
    plan = plan_memory(Design(architecture, dtype="float16", rules=rules), LIMITS)
    shutil.rmtree(checkpoint)
    return description, plan, engine


def report(description: EngineDescription, plan: MemoryPlan) -> bool:
    """Prints time, memory and the plan against the file; whether every row is within the bar."""
    build = description.build
    print(f"  built for SM{description.sm} in {build.seconds:.1f} s, {len(description.profiles)} profiles")
    print(f"  peak memory {format_amount(build.peak_bytes, 'B')} resident, "
          f"{format_amount(build.peak_anonymous_bytes, 'B')} of it anonymous (sampled)")  # fmt: skip
    print(f"  engine {format_amount(description.nbytes, 'B')}")
    rows = [("weights", plan.weights_bytes, description.weights_bytes)]
    for (profile, workspace), stated in zip(plan.workspaces, description.profiles, strict=True):
        rows.append((f"workspace, {profile.name}", workspace.nbytes, stated.workspace_bytes))
    passed = True
    for what, planned, stated_bytes in rows:
        if not stated_bytes:
            raise SystemExit(f"the engine states no {what}")
        share = planned / stated_bytes
        passed = passed and abs(share - 1) <= BAR
        print(f"  {what:36} planned {planned:>13,}  stated {stated_bytes:>13,}  {100 * share:6.2f}%")
    return passed


def benchmark_llama() -> bool:
    description, plan, _ = run("llama-1.3b-int4", CODER_1B, (*ROLES, "attention_input"), 128)
    passed = report(description, plan)
    print(f"  plan within {BAR:.0%} of the engine file: {'yes' if passed else 'NO'}")
    return passed


def benchmark_latent() -> bool:
    """A copy of the latent for every head would show as a region of B x heads x K x latent."""
    passed = True
    largest: dict[int, list[int]] = {}
    for heads in (16, 32):
        config = V2_LITE | {"num_attention_heads": heads, "num_key_value_heads": heads}
        description, plan, engine = run(f"latent-{heads}-heads", config, ROLES, 64)
        passed = report(description, plan) and passed
        latent = parse_architecture(config).latent
        if latent is None:
            raise SystemExit("the configuration has no latent attention")
        largest[heads] = []
        for limit, profile in zip(LIMITS.profiles(), inspect_engine(engine).profiles, strict=True):
            b, k = limit.maximum["B"], limit.maximum["MB"] * LIMITS.block_size
            copied = 2 * b * heads * k * latent.latent_dim
            region = profile.graph.regions[0].nbytes
            largest[heads].append(region)
            passed = passed and region < copied / 2
            print(f"  largest region, {limit.name:20} {region:>13,}   heads x K x latent would be {copied:>13,}")
    grew = [b / a for a, b in zip(largest[16], largest[32], strict=True)]
    print("largest region with 32 heads over 16, by profile: " + ", ".join(f"{growth:.2f}" for growth in grew))
    # The context phase's scores, B x heads x Q x K, do grow with the heads; nothing of the generation phase does.
    passed = passed and all(growth == 1 for growth in grew[1:])
    print(f"no region grows as heads x K x latent: {'yes' if passed else 'NO'}")
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latent", action="store_true", help="MLA at DeepSeek-V2-Lite's attention sizes")
    arguments = parser.parse_args()
    return 0 if (benchmark_latent if arguments.latent else benchmark_llama)() else 1


if __name__ == "__main__":
    sys.exit(main())
