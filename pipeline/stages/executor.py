"""Runs the stages of a config that the store does not have."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from pipeline import digest
from pipeline.errors import PendingError, StoreError, TrtseekError
from pipeline.progress import SILENT, format_amount, format_seconds
from pipeline.stages.disk import explain_disk_errors
from pipeline.stages.fingerprint import Fingerprint, Fingerprinter
from pipeline.stages.graph import Selection, Stage, StageContext, check_order
from pipeline.stages.plan import StagePlan, explain_run, plan_stages
from pipeline.stages.run_folder import RunFolder
from pipeline.stages.store import NOT_FOUND, Partial, Store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pipeline.config.schema import Config
    from pipeline.progress import Reporter
    from pipeline.stages.artifact import Artifact
    from pipeline.stages.store import Finding


class NotShownError(StoreError):
    """The store has a stage's result, and the run folder takes no link to it."""


class Executor:
    """The stages of one config over one store. Options of `plan` and `run`:

    `start`: the stages before it are not run; StoreError where the store lacks one. `until`: the stages after it are
    left alone. `force`: these are made again from nothing, whatever the store has; a stage that reads them is made
    again only if they came out as other bytes.
    """

    def __init__(self, config: Config, stages: Sequence[Stage], progress: Reporter = SILENT) -> None:
        check_order(stages)
        self.config = config
        self.stages = stages
        self.progress = progress
        self.store = Store(config.store_folder)
        self.folder = RunFolder(config.run_folder, store=self.store.root)
        digest.set_digest_cache(self.store.digests)

    def plan(self, *, start: str | None = None, until: str | None = None, force: Iterable[str] = ()) -> list[StagePlan]:
        """What `run` would do and why. Makes nothing, and reads no large source that was not read before."""
        selection = Selection.of(self.stages, start=start, until=until, force=force)
        with explain_disk_errors(self.store.root, only_under=self.store.root):
            return plan_stages(self.config, self.stages, selection, store=self.store, previous=self.folder.read())

    def run(
        self, *, start: str | None = None, until: str | None = None, force: Iterable[str] = ()
    ) -> dict[str, Artifact]:
        """Makes what is missing; the artifacts by stage name. A stage's own TrtseekError passes through.

        Whenever it ends, by an error, Ctrl-C or a kill, the next run goes on at the last finished inner step.
        """
        selection = Selection.of(self.stages, start=start, until=until, force=force)
        failure = "failed"
        try:
            prints = self._fingerprint_all()
            failure = "not reached"  # what the run folder refuses is no stage's failure
            self._unlink_stale(selection, prints)
            failure = "failed"
            made = self._run(selection, prints)
        except BaseException as error:
            if isinstance(error, NotShownError):
                failure = "cached, but not shown"
            elif isinstance(error, PendingError):
                failure = error.outcome
            self.progress.end(failure if isinstance(error, Exception) else "stopped")
            raise
        self._check_shown(made)
        return made

    def _run(self, selection: Selection, prints: Mapping[str, Fingerprint]) -> dict[str, Artifact]:
        made: dict[str, Artifact] = {}
        for index, stage in enumerate(self.stages[: selection.last + 1]):
            if stage.name not in prints:
                continue
            inputs = {name: artifact for name, artifact in made.items() if name in stage.inputs}
            self.progress.begin(stage.name)
            job = _Job(self, stage, prints[stage.name], inputs, forced=stage.name in selection.forced)
            finding, artifact = job.reuse()
            if index < selection.first and artifact is None:
                start = self.stages[selection.first].name
                reason = finding.reason if finding.reason == NOT_FOUND else f"needed and not usable: {finding.reason}"
                raise StoreError(
                    f"{stage.name} is {reason}; --from {start} does not make it",
                    hint=f"run without --from, or with --from {stage.name}",
                )
            made[stage.name] = artifact or job.make()
        return made

    def _check_shown(self, made: Mapping[str, Artifact]) -> None:
        """Of two runs of one name at once, the folder shows the stages of the one that linked them last.

        Neither's where that one has not come so far yet.
        """
        for name, artifact in made.items():
            link = self.folder.path / name
            if not self.folder.shows(name, artifact.path):
                shown = "shows what another run made meanwhile" if link.exists() else "is taken away by another run"
                raise NotShownError(
                    f"{link} {shown}, of the same name and with other settings; this one's {name} is in "
                    f"{artifact.path}",
                    hint="run this again, or give each a name of its own: --set name=…",
                )

    def _fingerprint_all(self) -> dict[str, Fingerprint]:
        fingerprinter = Fingerprinter(self.config, self.progress)
        prints = {}
        with explain_disk_errors(self.store.root, only_under=self.store.root):
            for stage in self.stages:
                if stage.applies(self.config):
                    self.progress.begin(stage.name)
                    prints[stage.name] = fingerprinter.fingerprint(stage)
        return prints

    def _unlink_stale(self, selection: Selection, prints: Mapping[str, Fingerprint]) -> None:
        """Of the stages that the run is about; those after --until are left alone, with what they show."""
        for stage in self.stages[: selection.last + 1]:
            found = prints.get(stage.name)
            if found is None or not self.folder.shows(stage.name, self.store.place(stage.name, found.digest)):
                self.folder.unlink(stage.name)
            self.folder.unlink(f"{stage.name}.failed")


class _Job:
    """One stage of one run."""

    def __init__(
        self, run: Executor, stage: Stage, found: Fingerprint, inputs: Mapping[str, Artifact], *, forced: bool
    ) -> None:
        self.stage, self.found, self.inputs, self.forced = stage, found, inputs, forced
        self.config, self.store, self.folder, self.progress = run.config, run.store, run.folder, run.progress
        self.contents = {name: artifact.content for name, artifact in inputs.items()}

    def find(self) -> Finding:
        """What the store has to use; nothing where the stage is forced."""
        finding = self.store.find(self.stage.name, self.found.digest, inputs=self.contents)
        return finding.without(self.stage.forced_by) if self.forced else finding

    def reuse(self) -> tuple[Finding, Artifact | None]:
        """Links what the store has, if it has it: held until the link shows it to be in use."""
        if self.forced or not self.store.has(self.stage.name, self.found.digest):
            return self.find(), None
        with self._lock(self.stage.name, self.found.digest, shared=True):
            finding = self.find()
            return finding, self._show(finding.artifact) if finding.artifact else None

    def _show(self, artifact: Artifact) -> Artifact:
        try:
            self.folder.link(self.stage.name, artifact.path)
        except StoreError as error:
            raise NotShownError(f"{error.message}; {self.stage.name} is in {artifact.path}", hint=error.hint) from error
        try:
            self._record("cached", artifact.seconds)
        except StoreError as error:  # a folder that is for reading only by now shows all the same what it should
            self.progress.note(f"not recorded as cached: {error.message}")
        self.progress.end(f"cached, {format_amount(artifact.nbytes, 'B')}")
        return artifact

    def make(self) -> Artifact:
        self.store.prepare()
        with contextlib.ExitStack() as locks:
            for name, artifact in self.inputs.items():
                locks.enter_context(self._lock(name, artifact.fingerprint, shared=True))
            locks.enter_context(self._lock(self.stage.name, self.found.digest, shared=False))
            self._check_inputs()
            finding = self.find()  # whoever held the lock may have made it meanwhile
            if finding.artifact is not None:
                return self._show(finding.artifact)
            for reason in explain_run(self.stage.name, self.found, finding, self.folder.read()):
                self.progress.note(f"runs: {reason}")
            return self._make_locked()

    def _lock(self, stage: str, fingerprint: str, *, shared: bool) -> contextlib.AbstractContextManager[None]:
        def say(who: str) -> None:
            self.progress.note(f"waits for {who}, which is working on {stage} of the same settings")

        return self.store.lock(stage, fingerprint, shared=shared, on_wait=say)

    def _make_locked(self) -> Artifact:
        partial = self.store.open_partial(self.stage.name, self.found.digest, inputs=self.contents, fresh=self.forced)
        if steps := partial.finished_steps:
            self.progress.note(f"goes on after {len(steps)} finished steps, the last of them {steps[-1]!r}")
        for artifact in self.inputs.values():
            for name, file in artifact.files.items():
                partial.recognise(artifact.path / name, file.digest)
        began = time.monotonic()
        self._record("begun", 0.0)  # what a kill leaves: the partial result is this run's to go on with
        try:
            self._work(partial)
            artifact = self.store.commit(
                partial,
                stage=self.stage.name,
                fingerprint=self.found.digest,
                record=self.found.record,
                inputs=self.contents,
                versions={name: version or "absent" for name, version in self.found.record["libraries"].items()},
            )
        except BaseException as error:
            # What went wrong is what the user must see, not that the note about it could not be written either.
            with contextlib.suppress(StoreError):
                self._record(_name_outcome(error), time.monotonic() - began)
                if isinstance(error, TrtseekError) and not isinstance(error, PendingError):
                    self.folder.link(f"{self.stage.name}.failed", partial.path)
            raise
        self.folder.link(self.stage.name, artifact.path)
        self._record("made", artifact.seconds)
        self.progress.end(f"made in {format_seconds(artifact.seconds)}, {format_amount(artifact.nbytes, 'B')}")
        return artifact

    def _work(self, partial: Partial) -> None:
        context = StageContext(
            config=self.config,
            parameters=self.found.record["parameters"],
            inputs=self.inputs,
            sources=self.stage.sources(self.config),
            workspace=partial,
            progress=self.progress,
            fingerprint=self.found.digest,
        )
        with explain_disk_errors(partial.path, needed=lambda: partial.needed, only_under=self.store.root):
            self.stage.run(context)

    def _check_inputs(self) -> None:
        for name, artifact in self.inputs.items():
            finding = self.store.find(name, artifact.fingerprint)
            if finding.artifact is None or finding.artifact.content != artifact.content:
                raise StoreError(
                    f"{artifact.path} was replaced or damaged while this run was about to read it",
                    hint="another run is at work on the same store; run again",
                )

    def _record(self, state: str, seconds: float) -> None:
        stages = self.folder.read()
        entry = {
            "state": state,
            "fingerprint": self.found.digest,
            "seconds": round(seconds, 3),
            "record": self.found.record,
        }
        if stages.get(self.stage.name) != entry:
            self.folder.write(self.config.name, {**stages, self.stage.name: entry})


def _name_outcome(error: BaseException) -> str:
    if isinstance(error, TrtseekError):
        return error.outcome
    return "failed" if isinstance(error, Exception) else "stopped"
