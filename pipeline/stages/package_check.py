"""Whether a new package serves, tried in a real server before it is committed. Changes no byte of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.stages.graph import StageContext
    from pipeline.triton.package import Rehearsal

LOG = "package.log"
REHEARSAL_MODE = "fast"


def check_package(context: StageContext, folder: Path, checkpoint: Path) -> None:
    """Loads the package in `folder` and sends one request, as `stages.package.check` says. Raises ServerError."""
    from pipeline.progress import format_seconds
    from pipeline.triton.canary import check_package as load_and_ask
    from pipeline.triton.errors import ServerError
    from pipeline.triton.installation import find_installation
    from pipeline.triton.package import Rehearsal

    wanted, flavour = context.config.stages.package.check, context.config.target.world.flavour
    if wanted == "never":
        return
    if flavour == "llmapi":
        context.progress.note("not loaded in a server: NVIDIA's Triton model of the LLM API is in its image alone")
        return
    try:
        installation = find_installation()
    except ServerError as error:
        if wanted == "always":
            raise
        context.progress.note(f"not loaded in a server: {error.message}")
        return
    # Of an engine of TensorRT-LLM's, all but the engine: our backend stands in for its own.
    rehearsal = Rehearsal(checkpoint=checkpoint, mode=REHEARSAL_MODE) if flavour == "tensorrtllm" else None
    if wanted == "auto" and (reason := _find_shortage(folder, rehearsal)):
        context.progress.note(f"not loaded in a server: {reason}")
        return
    context.progress.start("rehearse in Triton" if rehearsal else "load in Triton, and ask", 1, "packages")
    log = context.config.run_folder / LOG
    result = load_and_ask(folder, log=log, installation=installation, rehearsal=rehearsal)
    context.progress.advance(1)
    how = "rehearsed in Triton, the interpreter in the engine's place: loaded" if rehearsal else "loaded in Triton"
    context.progress.note(
        f"{how} in {format_seconds(result.loaded)}, a request answered in {format_seconds(result.answered)}"
    )


def _find_shortage(folder: Path, rehearsal: Rehearsal | None) -> str | None:
    """Why serving it here would not fit in memory, if it would not."""
    from pipeline.triton.footprint import estimate_memory
    from pipeline.triton.package import find_package
    from pipeline.triton.serving_memory import compare_with_free

    words, fits = compare_with_free(estimate_memory(find_package(folder), rehearsal))
    return None if fits else words
