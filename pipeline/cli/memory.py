"""Whether an engine fits its GPU, for `plan`: computed from the checkpoint's headers and the config's limits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.tables import format_bytes, print_table, print_title

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeline.config.case import Case


def describe_memory(case: Case) -> dict[str, Any]:
    """Bytes of weights, workspace, KV cache and the rest against the GPU's, and the largest batch for each length. Of
    several GPUs, those of the one with the heaviest layers."""
    from pipeline.engine.fit import fit_batches
    from pipeline.engine.memory import RESERVE_BYTES, Design, plan_memory
    from pipeline.network.spec import Lowering

    config, build = case.config, case.build
    limits, cache = build.limits(), case.quantize.kv_cache
    parallel = case.parallel.sizes
    design = Design(
        case.architecture,
        dtype=case.dtype,
        rules=case.quantize.rules,
        fp8=case.kept_fp8 is not None,
        held=case.held_kinds,
        moe=build.moe,
        lowering=Lowering(**build.lowering.model_dump()),
        kv_cache="model" if cache == "none" else cache,
        parallel=parallel,
    )
    plan = plan_memory(design, limits)
    gpu_bytes = config.target.device.memory_bytes
    fits = fit_batches(design, limits, gpu_bytes=gpu_bytes)
    return {
        "gpu": config.target.gpu,
        "gpus": parallel.world,
        "parallel": config.target.parallel.model_dump(),
        "gpu_bytes": gpu_bytes,
        "weights_bytes": plan.weights_bytes,
        "workspace_bytes": plan.workspace_bytes,
        "profiles": [
            {"profile": profile.name, "workspace_bytes": workspace.nbytes} for profile, workspace in plan.workspaces
        ],
        "kv_bytes_per_token": plan.kv_bytes_per_token,
        "pool_tokens": (limits.max_blocks - 1) * limits.block_size,  # one block is for padding
        "pool_bytes": plan.pool_bytes,
        "io_bytes": plan.io_bytes,
        "reserve_bytes": RESERVE_BYTES,
        "total_bytes": plan.total_bytes,
        "fits": plan.total_bytes <= gpu_bytes,
        "largest": [{"length": fit.length, "batch": fit.batch} for fit in fits],
    }


def print_memory(memory: Mapping[str, Any]) -> None:
    print_title(f"memory of {name_gpus(memory)}, {format_bytes(memory['gpu_bytes'])}")
    largest_profile = max(memory["profiles"], key=lambda profile: int(profile["workspace_bytes"]))["profile"]
    per_token = format_bytes(memory["kv_bytes_per_token"])
    rows = [
        ("weights", memory["weights_bytes"], ""),
        ("workspace", memory["workspace_bytes"], f"of the profile {largest_profile}"),
        ("KV cache", memory["pool_bytes"], f"{memory['pool_tokens']} tokens of {per_token}"),
        ("step inputs and logits", memory["io_bytes"], ""),
        ("kept for CUDA", memory["reserve_bytes"], "assumed, not measured"),
        ("total", memory["total_bytes"], f"{100 * memory['total_bytes'] / memory['gpu_bytes']:.1f}% of the GPU"),
    ]
    print_table([(name, format_bytes(nbytes), note) for name, nbytes, note in rows])
    if not memory["fits"]:
        click.secho("  does not fit: lower the limits under stages.build, or take a larger GPU", fg="red", bold=True)
    if memory["gpus"] > 1:
        click.echo("  buffers of the exchange between GPUs are not counted")
    print_title("largest batch that fits, in an engine built for that length")
    print_table(
        [(f"{fit['length']} tokens", f"x {fit['batch']}" if fit["batch"] else "-") for fit in memory["largest"]]
    )


def name_gpus(memory: Mapping[str, Any]) -> str:
    if memory["gpus"] == 1:
        return f"one {memory['gpu']}"
    sizes = ", ".join(f"{name} {size}" for name, size in memory["parallel"].items() if size > 1)
    return f"each of {memory['gpus']} {memory['gpu']} ({sizes})"
