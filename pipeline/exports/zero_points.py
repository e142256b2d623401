"""INT4 with zero points, which no engine has: made for an export alone, by the methods of the quantize stage."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.errors import ConfigError
from pipeline.quantization.catalog import NONE, WITH_ZEROS
from pipeline.quantization.selection import HEAD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.config.settings import Quantize
    from pipeline.progress import Progress

DRAFT = "draft"


def choose_zero_points(settings: Quantize, locate: Callable[[str], str] = str) -> Quantize:
    """A config's `stages.quantize` with the asymmetric variants of its methods. `locate`: how messages name a key.

    Raises ConfigError for methods that have none, a recipe that is yet to be solved for, and a quantized head."""
    wishes = {"method": settings.method} | {
        f"recipe.rows.{i}.method": row.method for i, row in enumerate(settings.recipe.rows)
    }
    unfit: dict[str, str] = {key: method for key, method in wishes.items() if method not in (NONE, *WITH_ZEROS)}
    if settings.recipe.auto:
        unfit = {"recipe": "auto"}
    elif set(wishes.values()) == {NONE}:
        unfit = {"method": NONE}
    if unfit:
        raise ConfigError(
            "\n".join(
                f"{locate(f'stages.quantize.{key}')}: {what} has no variant with zero points"
                for key, what in unfit.items()
            ),
            hint=f"methods that have: {', '.join(WITH_ZEROS)}",
        )
    if settings.rules.head_method != NONE:
        key = "stages.quantize.include" if HEAD in settings.include else "stages.quantize.recipe"
        raise ConfigError(
            f"{locate(key)}: lm_head would have zero points, and readers of the format take an output head of 16 bits",
            hint=f"leave {HEAD} out of include, and lm_head out of recipe",
        )
    rows = tuple(row.model_copy(update={"method": WITH_ZEROS.get(row.method, NONE)}) for row in settings.recipe.rows)
    return settings.model_copy(
        update={
            "method": WITH_ZEROS.get(settings.method, NONE),
            "recipe": settings.recipe.model_copy(update={"rows": rows}),
            "kv_cache": "none",
        }
    )


def check_group_size(engine: CheckpointFolder, settings: Quantize, locate: Callable[[str], str] = str) -> None:
    """Raises ConfigError where linears would have groups of several sizes, before hours of work: the format has one."""
    from pipeline.checkpoint.layouts import layout_for
    from pipeline.quantization.rules import choose_linears

    chosen = choose_linears(layout_for(engine.architecture).mappings(), engine.tensors, settings.rules).linears
    sizes = {linear.group: name for name, linear in chosen.items()}
    if len(sizes) > 1:
        found = ", ".join(f"{size} ({name})" for size, name in sorted(sizes.items(), key=str))
        raise ConfigError(
            f"{locate('stages.quantize.group_size')}: groups would be of several sizes: {found}; the format has one",
            hint="set stages.quantize.group_size to the smallest, or export with --others 16bit",
        )


@contextmanager
def quantize_draft(
    engine: CheckpointFolder, folder: Path, settings: Quantize, progress: Progress
) -> Iterator[CheckpointFolder]:
    """`engine` quantized into a folder within `folder`, which is gone afterwards. Raises what quantizing raises."""
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.quantization.quantize import quantize_checkpoint
    from pipeline.workspace import FolderWorkspace

    draft = folder / DRAFT
    try:
        quantize_checkpoint(engine, FolderWorkspace(draft), settings=settings, progress=progress)
        yield CheckpointFolder.open(draft)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
