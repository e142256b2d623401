"""What a config starts from, checked before any work: the source checkpoint's headers, and the texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.nearby import ABSENT, explain_absence, find_near
from pipeline.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.checked_headers import CheckedHeaders
    from pipeline.config.case import Case
    from pipeline.config.schema import Config

BEGIN = 1 << 16  # bytes
TEXT = "name a file of text, UTF-8"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedSource:
    """`case`: the config and what the headers say. `notes`: what a user must know about a combination that works,
    `host_notes` among them: what this host lacks."""

    headers: CheckedHeaders
    case: Case
    notes: tuple[str, ...]
    host_notes: tuple[str, ...]


def check_source(config: Config, *, keep: bool = True) -> CheckedSource:
    """Refuses what cannot be, without reading a weight (ConfigError, CheckpointError, CompatibilityError); of linears
    that are quantized already it reads the scales, zero points and order of inputs.

    `keep` notes in the store what passed.
    """
    from pipeline.checkpoint.checked_headers import remember
    from pipeline.cli.host import list_host_notes
    from pipeline.config.case import Case
    from pipeline.config.compatibility import check_compatibility

    _check_model(config)
    headers = config.read_headers()
    notes = check_compatibility(config, headers.architecture, headers.tensors, headers.holding)
    _check_texts(config)
    _check_sensitivity(config, headers.architecture)
    if keep:
        remember(config.model.path, config.headers_folder, headers)
    host_notes = list_host_notes(config)
    case = Case(config=config, architecture=headers.architecture, tensors=headers.tensors, holding=headers.holding)
    return CheckedSource(headers=headers, case=case, notes=(*notes, *host_notes), host_notes=host_notes)


def _check_model(config: Config) -> None:
    path = config.model.path
    if path.is_dir():
        return
    key = config.locate("model.path")
    if path.exists():
        raise CheckpointError(
            f"{key}: {path} is a file; the model is the folder it is in", hint=f"set model.path: {path.parent}"
        )
    what = explain_absence(path) if path.is_symlink() else "there is no such folder"
    raise CheckpointError(f"{key}: {path}: {what}", hint=_suggest_path(path, folders=True))


def _check_texts(config: Config) -> None:
    """The text files that the stages will read are there, and are text; tasks are tasks."""
    check_calibration(config, config.model.path)
    from pipeline.evaluation.windows import require_plain

    verify, measured = config.stages.verify, config.stages.quantize.sensitivity.file
    texts = {"stages.verify.heldout.files": verify.heldout.files, "stages.verify.tasks": verify.tasks}
    if measured is not None:
        texts["stages.quantize.sensitivity.file"] = (measured,)
    _check_files(config, texts)
    require_plain(verify.heldout.files, setting=config.locate("stages.verify.heldout.files"))
    if verify.tasks:
        from pipeline.evaluation.tasks import read_tasks

        read_tasks(verify.tasks, setting="stages.verify.tasks")


def _check_sensitivity(config: Config, architecture: Architecture) -> None:
    """What recipe: auto will solve from is a measurement of this model."""
    quantize = config.stages.quantize
    if quantize.sensitivity.file is None or not quantize.recipe.auto:
        return
    from pipeline.quantization.sensitivity_file import read_sensitivity

    try:
        read_sensitivity(quantize.sensitivity.file, architecture, quantize.rules)
    except ConfigError as error:
        key = config.locate("stages.quantize.sensitivity.file")
        raise ConfigError(f"{key}: {error.message}", hint=error.hint) from error


def check_calibration(config: Config, model: Path) -> None:
    """The calibration text that quantizing will read is there, once, and is text (ConfigError), which begins as its
    format does, and may be enough; where it is transcripts, the folder `model` has a template that takes them
    (QuantizationError)."""
    quantize = config.stages.quantize
    if not quantize.measures:
        return
    from pipeline.quantization.chat import ChatTemplate
    from pipeline.quantization.documents import Documents
    from pipeline.quantization.text import require_bytes

    calibration, key = quantize.calibration, "stages.quantize.calibration.files"
    _check_files(config, {key: [file.path for file in calibration.files]})
    template = ChatTemplate(model, quick=True)
    sources = [Documents(file, template) for file in calibration.files]
    places: dict[tuple[Path, str], int] = {}
    for i, source in enumerate(sources):
        first = places.setdefault((source.path.resolve(), source.key), i)  # of other keys it is other text
        if first != i:
            here, there = (config.locate(f"{key}.{at}") for at in (i, first))
            raise ConfigError(
                f"{here}: {source.path} would count twice: it is {there}",
                hint="leave one out; to take more of a file than of the others, give it a weight",
            )
        if source.format == "chat":
            template.check()
        source.check()
    # A recipe that is solved may give every linear a method that only rounds.
    if quantize.rules.measures or quantize.kv_cache != "none":
        require_bytes(sources, samples=calibration.samples, length=calibration.length)
    if quantize.recipe.auto and quantize.sensitivity.file is None:
        require_bytes(sources, samples=quantize.sensitivity.samples, length=quantize.sensitivity.length)


def _check_files(config: Config, texts: Mapping[str, Sequence[Path]]) -> None:
    for key, files in texts.items():
        for file in files:
            if file.is_file():
                if problem := _find_problem(file):
                    raise ConfigError(f"{config.locate(key)}: {problem}", hint=TEXT)
                continue
            what = explain_absence(file)
            hint = _suggest_path(file, folders=False) if what == ABSENT else TEXT
            raise ConfigError(f"{config.locate(key)}: {file}: {what}", hint=hint)


def _find_problem(file: Path) -> str | None:
    """What shows at a file's beginning: a text may be of gigabytes, and the stage that reads it is hours away."""
    from pipeline.checkpoint.text_faults import find_fault

    return find_fault(file, BEGIN) if file.stat().st_size else f"{file} is empty"


def _suggest_path(path: Path, *, folders: bool) -> str:
    """Where it was looked for, and the nearest name that is there."""
    looked = ""
    if not path.is_absolute():
        looked = f"looked for in {path.cwd()}: paths are relative to the current folder, only extends: to its file's"
    parent = next(folder for folder in path.parents if folder.is_dir())
    near = find_near(path.relative_to(parent).parts[0], parent, folders=folders)
    question = f"did you mean {parent / near}?" if near else ""
    return "\n".join(filter(None, (question, looked))) or f"{parent} holds nothing of a similar name"
