"""What a stage is, and the order of stages.

A stage is a pure function from input artifacts, source files and parameters to one output folder. A module per stage
exposes `STAGE`; it imports what is heavy inside `run`, because `plan` and a fully cached run only ask for fingerprints.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from pipeline.config.schema import Config
    from pipeline.progress import Progress
    from pipeline.stages.artifact import Artifact
    from pipeline.workspace import Workspace

NAMES = ("convert", "sensitivity", "quantize", "prove", "verify", "job", "build", "package")


@dataclass(frozen=True, kw_only=True, slots=True)
class StageContext:
    """What `run` is given. Everything that shapes the output is in `parameters`, `inputs` and `sources`: what is read
    from `config` beyond those is not in the fingerprint, and must not change a byte."""

    config: Config
    parameters: Mapping[str, Any]
    inputs: Mapping[str, Artifact]  # by stage name
    sources: Mapping[str, Sequence[Path]]  # by source name, as the stage declared them
    workspace: Workspace
    progress: Progress
    fingerprint: str


def _nothing(_: Config) -> dict[str, Any]:
    return {}


def _always(_: Config) -> bool:
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One step of the pipeline, as data.

    `version` goes up whenever the same inputs would come out as other bytes. `inputs` names earlier stages; those that
    do not apply to a config are left out of the context. `sources` names files and folders outside the store.
    `libraries` are distributions whose versions decide the bytes. `target` is what of the target does, None if nothing.
    `reproducible` is whether a second run gives the same bytes (an engine does not). `forced_by`: the option that makes
    it run again whatever there is.
    """

    name: str
    version: int
    run: Callable[[StageContext], None]
    inputs: tuple[str, ...] = ()
    sources: Callable[[Config], Mapping[str, Sequence[Path]]] = _nothing
    parameters: Callable[[Config], Mapping[str, Any]] = _nothing
    libraries: tuple[str, ...] = ()
    target: Callable[[Config], Any] | None = None
    applies: Callable[[Config], bool] = _always
    reproducible: bool = True
    forced_by: str = "--force"


def load_stages() -> tuple[Stage, ...]:
    """The stages of the pipeline, in order."""
    return tuple(importlib.import_module(f"pipeline.stages.{name}").STAGE for name in NAMES)


def check_order(stages: Sequence[Stage]) -> None:
    """Every stage reads only stages before it: ValueError otherwise, which is a mistake in the program."""
    seen: set[str] = set()
    for stage in stages:
        if unknown := set(stage.inputs) - seen:
            raise ValueError(f"stage {stage.name} reads {sorted(unknown)}, which do not come before it")
        seen.add(stage.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Which stages a run is about: places `first` to `last`, and the names of those to make again from nothing."""

    first: int
    last: int
    forced: frozenset[str]

    @staticmethod
    def of(
        stages: Sequence[Stage], *, start: str | None = None, until: str | None = None, force: Iterable[str] = ()
    ) -> Selection:
        """ConfigError for a name that is no stage, and for names that contradict each other."""
        forced = frozenset(force)
        first = pick_stage(start, stages) if start else 0
        last = pick_stage(until, stages) if until else len(stages) - 1
        if first > last:
            raise ConfigError(
                f"--from {start} comes after --until {until}",
                hint=f"the order is {', '.join(stage.name for stage in stages)}",
            )
        for name in sorted(forced):
            if not first <= (place := pick_stage(name, stages)) <= last:
                raise ConfigError(
                    f"{stages[place].forced_by}: {name} is outside of what --from and --until leave to run",
                    hint="drop one of the options",
                )
        return Selection(first=first, last=last, forced=forced)


def pick_stage(name: str, stages: Sequence[Stage]) -> int:
    """The place of the stage a user named; ConfigError with the nearest name."""
    names = [stage.name for stage in stages]
    if name not in names:
        near = difflib.get_close_matches(name, names, 1)
        raise ConfigError(
            f"there is no stage {name!r}",
            hint=(f"did you mean {near[0]}? " if near else "") + f"The stages are {', '.join(names)}",
        )
    return names.index(name)
