"""What is known ahead of the GPU memory of TensorRT-LLM's backends, for `plan`: weights, and what they leave the cache.

Their activations and workspace are only known to trtllm-build and the runtime, which give the KV cache a share of what
is left (`stages.package.kv_cache_free_gpu_mem_fraction`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.memory import describe_memory, name_gpus
from pipeline.cli.tables import format_bytes, print_table, print_title

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.config.case import Case


def describe_foreign_memory(case: Case) -> dict[str, Any]:
    """Bytes of weights and of a token's cache, and how many tokens the rest would hold if nothing else were there; of
    several GPUs, those of the one with the heaviest layers."""
    own = describe_memory(case)
    per_token = own["kv_bytes_per_token"]
    build, package = case.build, case.config.stages.package
    left = own["gpu_bytes"] - own["weights_bytes"] - own["reserve_bytes"]
    tokens = max(0, int(left * package.kv_cache_free_gpu_mem_fraction) // per_token)
    if package.max_tokens_in_paged_kv_cache is not None:
        tokens = min(tokens, package.max_tokens_in_paged_kv_cache)
    kept = ("gpu", "gpus", "parallel", "gpu_bytes", "weights_bytes", "reserve_bytes")
    lengths = {fit["length"] for fit in own["largest"]}
    return {
        **{key: own[key] for key in kept},
        "kv_bytes_per_token": per_token,
        "pool_tokens": tokens,
        "pool_bytes": tokens * per_token,
        "fits": tokens >= build.max_seq_len,
        "largest": [{"length": n, "batch": min(tokens // n, build.max_batch_size)} for n in sorted(lengths)],
    }


def print_foreign_memory(memory: Mapping[str, Any]) -> None:
    print_title(f"memory of {name_gpus(memory)}, {format_bytes(memory['gpu_bytes'])}")
    tokens = f"{memory['pool_tokens']} tokens of {format_bytes(memory['kv_bytes_per_token'])}, at most"
    print_table(
        [
            ("weights", format_bytes(memory["weights_bytes"]), ""),
            ("KV cache", format_bytes(memory["pool_bytes"]), tokens),
            ("kept for CUDA", format_bytes(memory["reserve_bytes"]), "assumed, not measured"),
        ]
    )
    click.echo("  activations and workspace are TensorRT-LLM's own, and not counted: the cache gets less")
    if not memory["fits"]:
        click.secho("  does not fit: lower max_seq_len, or take a larger GPU or more of them", fg="red", bold=True)
    print_title("sequences of a length at once, at most")
    print_table([(f"{fit['length']} tokens", f"x {fit['batch']}") for fit in memory["largest"]])
