"""Says what a run would do, stage by stage, and why; makes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pipeline.progress import format_amount
from pipeline.stages.change import explain_change
from pipeline.stages.fingerprint import Fingerprint, Fingerprinter
from pipeline.stages.store import NOT_FOUND

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipeline.config.schema import Config
    from pipeline.stages.artifact import Artifact
    from pipeline.stages.graph import Selection, Stage
    from pipeline.stages.store import Finding, Store

NOT_MADE = "not made yet"
# How the last run left a stage, of what it did not make.
LAST = {
    "failed": "the last run failed here",
    "stopped": "the last run was stopped here",
    "waiting": "waits for what the job makes elsewhere",
}
State = Literal["cached", "run", "undetermined", "skipped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StagePlan:
    """What would happen to one stage. `undetermined`: a large source was never read, the fingerprint is not known."""

    stage: str
    state: State
    reasons: list[str]
    fingerprint: str | None = None
    artifact: Artifact | None = None


def plan_stages(
    config: Config, stages: Sequence[Stage], selection: Selection, *, store: Store, previous: Mapping[str, Any]
) -> list[StagePlan]:
    """One StagePlan per stage. `previous` is the `stages` of the last run's run.json."""
    fingerprinter = Fingerprinter(config)
    plans: dict[str, StagePlan] = {}
    redone: set[str] = set()  # made again under the fingerprint they have, to bytes that may differ
    for index, stage in enumerate(stages):
        plan = _plan_stage(stage, fingerprinter, plans, redone, selection, store, previous)
        if plan.state == "run" and not stage.reproducible:
            redone.add(stage.name)
        if plan.state in ("run", "undetermined") and not selection.first <= index <= selection.last:
            before = index < selection.first
            why = "before --from, and not in the store: a run would stop here" if before else "after --until"
            plan = StagePlan(stage=stage.name, state="skipped", reasons=[why], fingerprint=plan.fingerprint)
        plans[stage.name] = plan
    return list(plans.values())


def _plan_stage(
    stage: Stage,
    fingerprinter: Fingerprinter,
    plans: Mapping[str, StagePlan],
    redone: set[str],
    selection: Selection,
    store: Store,
    previous: Mapping[str, Any],
) -> StagePlan:
    if not stage.applies(fingerprinter.config):
        return StagePlan(stage=stage.name, state="skipped", reasons=["the config has no use for it"])
    unread = fingerprinter.unread_bytes(stage)
    if unread:
        reason = f"{format_amount(unread, 'B')} of its source were never read; a run reads them first"
        return StagePlan(stage=stage.name, state="undetermined", reasons=[reason])
    waits = [name for name in stage.inputs if plans[name].state == "undetermined"]
    if waits:
        return StagePlan(stage=stage.name, state="undetermined", reasons=[f"depends on {waits[0]}"])
    found = fingerprinter.fingerprint(stage)
    finding = store.find(stage.name, found.digest, inputs=_contents(stage, plans))
    if stage.name in selection.forced:
        reasons = [stage.forced_by]
    elif finding.artifact is None:
        reasons = explain_run(stage.name, found, finding, previous)
        if steps := store.count_finished_steps(stage.name, found.digest):
            begun = [reason for reason in reasons if reason != NOT_MADE]
            reasons = [*begun, f"goes on after {steps} finished step{'s' if steps > 1 else ''} of a killed run"]
    elif remade := [name for name in stage.inputs if name in redone]:
        reasons = [f"{name} will be made again" for name in remade]
    else:
        return StagePlan(
            stage=stage.name, state="cached", reasons=[], fingerprint=found.digest, artifact=finding.artifact
        )
    return StagePlan(stage=stage.name, state="run", reasons=reasons, fingerprint=found.digest)


def explain_run(stage: str, found: Fingerprint, finding: Finding, previous: Mapping[str, Any]) -> list[str]:
    """Why the store has nothing to use under this fingerprint, seen from the last run of the same name."""
    if finding.reason != NOT_FOUND:
        return [finding.reason]
    last = previous.get(stage)
    if last is None or (last["state"] == "begun" and last["fingerprint"] == found.digest):
        return [NOT_MADE]
    if last["fingerprint"] != found.digest:
        return explain_change(last["record"], found.record)
    if last["state"] in LAST:
        return [LAST[last["state"]]]
    return ["no longer in the store"]


def _contents(stage: Stage, plans: Mapping[str, StagePlan]) -> dict[str, str]:
    artifacts = ((name, plans[name].artifact) for name in stage.inputs)
    return {name: artifact.content for name, artifact in artifacts if artifact is not None}
