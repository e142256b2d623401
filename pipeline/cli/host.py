"""What a run will take of this host, for `plan`."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli.tables import print_table, print_title
from pipeline.progress import format_amount, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.config.case import Case
    from pipeline.config.schema import Config
    from pipeline.triton.serving_memory import Part


def describe_host(case: Case) -> dict[str, Any]:
    """Disk, memory and time of the stages that write much, as if none was made, and the disk that is free; what serving
    takes of the memory."""
    from pipeline.stages.forecast import forecast, forecast_serving

    rows = forecast(
        case.config,
        case.architecture,
        case.tensors,
        dtype=case.dtype,
        fp8=case.converted_fp8 is not None,  # of the checkpoint, whatever the GPU has: that is checked elsewhere
        held=case.held_kinds,
    )
    parts = forecast_serving(case.config, case.architecture, rows, dtype=case.dtype)
    timed = {row.stage for row in rows if row.seconds is not None}
    return {
        "stages": [row.to_json() for row in rows],
        "disk_bytes": sum(row.disk_bytes for row in rows),
        "free_bytes": _free_bytes(case.config.output),
        "not_timed": [stage for stage in name_stages(case) if stage not in timed],
        "serving": None if parts is None else describe_serving(parts),
    }


def name_stages(case: Case) -> list[str]:
    """Those that a run has, in order."""
    from pipeline.stages.graph import load_stages

    return [stage.name for stage in load_stages() if stage.applies(case.config)]


def describe_serving(parts: Sequence[Part]) -> dict[str, Any]:
    """As `serve` says at its start."""
    from pipeline.triton.serving_memory import compare_with_free

    words, fits = compare_with_free(parts)
    return {
        "processes": sum(part.processes for part in parts),
        "memory_bytes": sum(part.nbytes for part in parts),
        "fits": fits,
        "words": words,
    }


def list_host_notes(config: Config) -> tuple[str, ...]:
    """What this host lacks to build for the config's target: another one may have it, so that it is no error here."""
    from pipeline.engine import tensorrt
    from pipeline.stages.versions import find_version

    backend, gpu = config.target.backend, config.target.device
    if config.target.world.foreign:
        return ()  # llmapi builds nothing; a tensorrt_llm engine that cannot be built here becomes a job for a host
    version = find_version(backend)
    if backend == "tensorrt_rtx":
        return () if version else ("this host cannot build: tensorrt-rtx is not installed (pip install tensorrt-rtx)",)
    lacks = []
    if version is None or int(version.split(".")[0]) < tensorrt.MINIMUM_VERSION:
        lacks.append(f"TensorRT {tensorrt.MINIMUM_VERSION} or later (pip install 'trtseek[tensorrt]')")
    if gpu.sm not in tensorrt.list_device_sms():
        lacks.append(f"a GPU of SM{gpu.sm}, as the {gpu.name} is")
    if not lacks:
        return ()
    return (
        f"backend tensorrt builds on the GPU that will serve, and this host has not {' nor '.join(lacks)}: run with "
        "--until verify here, or take backend: tensorrt_rtx",
    )


def _free_bytes(output: Path) -> int:
    """On the disk of the output folder, or of the folder it will be made in."""
    folder = output.absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def print_host(host: Mapping[str, Any]) -> None:
    print_title("estimates for this host: each stage's disk, memory, and time on two free cores")
    rows = []
    for row in host["stages"]:
        memory = "-" if row["memory_bytes"] is None else format_amount(row["memory_bytes"], "B")
        seconds = "-" if row["seconds"] is None else format_seconds(row["seconds"])
        rows.append((row["stage"], format_amount(row["disk_bytes"], "B"), memory, seconds))
    total = format_amount(host["disk_bytes"], "B")
    print_table([*rows, ("total", total, "", f"{format_amount(host['free_bytes'], 'B')} of disk are free")])
    if host["not_timed"]:
        stages = ", ".join(host["not_timed"])
        click.echo(f"  not estimated: the time of {stages}, which depends on more than bytes (texts, samples, gates)")
    if host["serving"] is not None:
        click.echo(f"  to serve the package here: {host['serving']['words']}")
    if host["disk_bytes"] > host["free_bytes"]:
        click.secho("  more than the disk has left: set `output:` to a larger one", fg="red", bold=True)
