"""Whether a new package serves, tried in a real server before it is committed. Changes no byte of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.stages.graph import StageContext

# What serving from the CPU takes: weights unpacked to 16 bits from 4 and their scales, and the models' processes.
MEMORY_PER_BYTE, MEMORY_BESIDE = 5, 2 << 30
LOG = "package.log"


def check_package(context: StageContext, folder: Path, checkpoint: Path) -> None:
    """Loads the package in `folder` and sends one request, as `stages.package.check` says. Raises ServerError."""
    from pipeline.progress import format_seconds
    from pipeline.triton.canary import check_package as load_and_ask
    from pipeline.triton.errors import ServerError
    from pipeline.triton.installation import find_installation

    wanted = context.config.stages.package.check
    if wanted == "never":
        return
    try:
        installation = find_installation()
    except ServerError as error:
        if wanted == "always":
            raise
        context.progress.note(f"not loaded in a server: {error.message}")
        return
    if wanted == "auto" and (reason := _find_shortage(checkpoint)):
        context.progress.note(f"not loaded in a server: {reason}")
        return
    context.progress.start("load in Triton, and ask", 1, "packages")
    result = load_and_ask(folder, log=context.config.run_folder / LOG, installation=installation)
    context.progress.advance(1)
    context.progress.note(
        f"loaded in Triton in {format_seconds(result.loaded)}, a request answered in {format_seconds(result.answered)}"
    )


def _find_shortage(checkpoint: Path) -> str | None:
    """Why serving from the CPU would not fit in memory, if it would not."""
    from pipeline.progress import format_amount
    from pipeline.triton.backend.loading import free_memory

    needed = MEMORY_BESIDE + MEMORY_PER_BYTE * sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    if needed <= (free := free_memory()):
        return None
    return f"it may need {format_amount(needed, 'B')} of memory, and {format_amount(free, 'B')} are free"
