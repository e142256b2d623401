"""What a stage's fingerprint is made of, and how it differs from another's: the whole chain before it, cause first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.stages.change import explain_change
from pipeline.stages.fingerprint import Fingerprinter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.config.schema import Config
    from pipeline.stages.graph import Stage

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A stage of a config. `fingerprint` is None, and sources' digests in `record` too, while `unread` bytes of sources
    were never read."""

    stage: str
    fingerprint: str | None
    record: Record
    unread: int


def explain_stages(config: Config, stages: Sequence[Stage], last: str) -> dict[str, Explanation]:
    """The stages of a config up to `last`, without those it has no use for. Reads no large source that is not known."""
    fingerprinter = Fingerprinter(config)
    found: dict[str, Explanation] = {}
    for stage in stages:
        if stage.applies(config):
            unread = fingerprinter.unread_bytes(stage)
            waits = any(found[name].fingerprint is None for name in stage.inputs if name in found)
            if unread or waits:
                record, digest = fingerprinter.outline(stage), None
            else:
                known = fingerprinter.fingerprint(stage)
                record, digest = known.record, known.digest
            found[stage.name] = Explanation(stage=stage.name, fingerprint=digest, record=record, unread=unread)
        if stage.name == last:
            break
    return found


def compare(stage: str, old: Mapping[str, Record], new: Mapping[str, Record]) -> list[tuple[str, str]]:
    """(stage, what changed) for a stage and all that it reads, causes first; `old` and `new` are records by stage.

    That an input changed is not said where the input's own changes are.
    """
    told: dict[str, list[str]] = {}
    _compare(stage, old, new, told)
    return [(name, line) for name, lines in told.items() for line in lines]


def _compare(stage: str, old: Mapping[str, Record], new: Mapping[str, Record], told: dict[str, list[str]]) -> None:
    if stage in told or stage not in new or stage not in old:
        return
    before, after = old[stage], new[stage]
    for name in sorted({*before["inputs"], *after["inputs"]}):
        _compare(name, old, new, told)
    known = {f"{name} changed" for name in told}
    # An input whose source was not read has no fingerprint to compare: that is no change.
    known |= {f"no longer reads {name}" for name in before["inputs"] if name in new}
    told[stage] = [line for line in explain_change(before, after) if line not in known]
