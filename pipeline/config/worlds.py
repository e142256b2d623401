"""Which world a config lives in (its backend's), and what each other one would change: for `plan`.

The same config is held against the rules of every other backend, without what has no meaning there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipeline.config.backends import BACKENDS, OWN_SETTINGS, BackendRow
from pipeline.config.case import Case
from pipeline.config.compatibility import ALL_RULES
from pipeline.config.lowerings import choose_lowerings
from pipeline.errors import TrtseekError

if TYPE_CHECKING:
    from pipeline.checkpoint.foreign.holding import Holding
    from pipeline.config.schema import Config

# Sections and settings that only one backend reads.
OWNED = {("stages", "build", "tensorrt_llm"): "tensorrt_llm", ("stages", "package", "tensorrt_llm"): "tensorrt_llm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A backend as the config's, or instead. reasons: why it cannot be; loses: settings without a meaning there, and
    what becomes of them; gains: what it has that the config's own has not."""

    backend: str
    row: BackendRow
    reasons: tuple[str, ...] = ()
    loses: tuple[str, ...] = ()
    gains: tuple[str, ...] = ()


def list_other_worlds(case: Case) -> tuple[World, ...]:
    """One for each other backend; of trtseek's own two, the one that the config is not of is left out where the GPU is
    none of its."""
    target = case.config.target
    return tuple(
        _look(case, backend)
        for backend, row in BACKENDS.items()
        if backend != target.backend and (row.foreign or backend in target.device.backends)
    )


def _look(own: Case, backend: str) -> World:
    row, config = BACKENDS[backend], own.config
    dropped = list(_list_dropped(backend, config))
    case = replace(own, config=_move(config, backend, dropped, own.holding))
    try:
        reasons = tuple(problem for rule in ALL_RULES if (problem := rule.find(case)))
    except TrtseekError as error:  # sizes that no rank of its could have
        reasons = (error.message,)
    loses = [".".join(path) for path in dropped]
    gains = tuple(text for text in row.gives if text not in config.target.world.gives)
    return World(backend=backend, row=row, reasons=reasons, loses=tuple(loses), gains=gains)


def _list_dropped(backend: str, config: Config) -> Iterator[tuple[str, ...]]:
    """The settings that the config changes and this backend does not read; lowerings that were chosen are not its
    own."""
    if BACKENDS[backend].foreign:
        build = config.stages.build
        changed = [key for key in OWN_SETTINGS if build.changes(key) and (key != "lowering" or _said_lowerings(config))]
        yield from (("stages", "build", key) for key in changed)
    for path, owner in OWNED.items():
        if owner != backend:
            section: Any = config
            for key in path:
                section = getattr(section, key)
            yield from ((*path, key) for key in type(section).model_fields if section.changes(key))


def _move(config: Config, backend: str, dropped: list[tuple[str, ...]], holding: Holding) -> Config:
    """The config as it would be with that backend."""
    values = config.model_dump(mode="json")
    values["stages"]["build"]["lowering"] = _said_lowerings(config)
    values["target"]["backend"] = backend
    values["stages"]["package"]["flavour"] = None
    for *above, key in dropped:
        section = values
        for name in above:
            section = section[name]
        del section[key]
    return choose_lowerings(type(config).model_validate(values, strict=False), holding)


def _said_lowerings(config: Config) -> dict[str, str]:
    return config.stages.build.lowering.model_dump(exclude_unset=True)
