"""The formats by name, and the one function that exports."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import CheckpointError, CompatibilityError, ConfigError
from pipeline.exports import awq, compressed_tensors, hf, modelopt
from pipeline.exports.folder import new_folder, write_folder
from pipeline.exports.plan import REFUSE, WIDEN, Encoding, Plan, plan_export
from pipeline.exports.zero_points import check_group_size, choose_zero_points, quantize_draft
from pipeline.progress import SILENT

if TYPE_CHECKING:
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.config.settings import Quantize
    from pipeline.progress import Progress

REPORT = "export.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderFormat:
    """A format of safetensors folders. `describe` gives config.json's quantization_config, `files` further JSON files;
    `widens`: linears that it has no place for are in 16 bits by its nature, not by a wish. `name_caches`: of
    plan_export."""

    encodings: Callable[[CheckpointFolder], Mapping[str, Encoding]]
    describe: Callable[[Plan], dict[str, Any] | None]
    files: Callable[[Plan], Mapping[str, Mapping[str, Any]]] = lambda plan: {}
    widens: bool = False
    name_caches: Callable[[int], Sequence[str]] | None = None


FOLDERS: Mapping[str, FolderFormat] = {
    "hf": FolderFormat(encodings=lambda engine: hf.ENCODINGS, describe=hf.describe, widens=True),
    "awq": FolderFormat(encodings=awq.make_encodings, describe=awq.describe),
    "compressed_tensors": FolderFormat(
        encodings=lambda engine: compressed_tensors.ENCODINGS, describe=compressed_tensors.describe
    ),
    "modelopt": FolderFormat(
        encodings=lambda engine: modelopt.ENCODINGS,
        describe=modelopt.describe,
        files=modelopt.list_files,
        name_caches=modelopt.name_cache_scales,
    ),
}
GGUF = "gguf"
NAMES = (*FOLDERS, GGUF)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """export.json: how many linears are quantized, by format, and which came in 16 bits instead, with the reason.

    `left_out`: engine tensors that the format has no place for. `remarks`: what its readers do differently."""

    format: str
    quantized: dict[str, int]
    widened: dict[str, str]
    left_out: list[str]
    remarks: list[str]

    @property
    def notes(self) -> list[str]:
        """A line for each thing a user must know."""
        notes = [
            f"{count} linears in 16 bits: {reason}" for reason, count in Counter(self.widened.values()).most_common()
        ]
        if count := self.quantized.get("int4_zeros"):
            notes.append(f"{count} linears quantized anew, with zero points, which no engine has; nothing was proved")
        if self.left_out:
            notes.append(f"{len(self.left_out)} tensors left out, {self.left_out[0]} among them")
        return [*notes, *self.remarks]


def export_checkpoint(
    engine: CheckpointFolder,
    output: Path,
    format: str = "hf",
    *,
    others: str = REFUSE,
    asymmetric: Quantize | None = None,
    locate: Callable[[str], str] = str,
    progress: Progress = SILENT,
) -> ExportReport:
    """Writes an engine checkpoint into the new folder `output`, which appears whole or not at all.

    `others`: what to do with linears that the format cannot hold exactly, "refuse" or "16bit". `asymmetric`: AWQ only,
    of an unquantized checkpoint: quantize it so, with zero points; `locate`: how messages name a key of its config.
    Raises CheckpointError, CompatibilityError, naming the linear, ConfigError for what goes with no such format, and
    what quantizing raises.
    """
    _check(format, others, asymmetric)
    zeros = choose_zero_points(asymmetric, locate) if asymmetric is not None else None
    if output.resolve().is_relative_to(engine.path.resolve()):
        raise CheckpointError(f"{output} is within {engine.path}, which is exported", hint="name a folder beside it")
    if format == GGUF:
        from pipeline.exports.gguf_file import write_gguf

        with new_folder(output) as folder:
            plan, remarks = write_gguf(engine, folder, others=others, progress=progress)
            return _report(plan, format, folder, remarks)
    row = FOLDERS[format]
    others = WIDEN if row.widens else others
    if zeros is not None and others == REFUSE:
        check_group_size(engine, zeros, locate)
    with (
        new_folder(output) as folder,
        quantize_draft(engine, folder, zeros, progress) if zeros else nullcontext(engine) as stored,
    ):
        plan = plan_export(stored, row.encodings(stored), others=others, format=format, name_caches=row.name_caches)
        if not plan.kept and not row.widens:
            raise CompatibilityError(
                f"{engine.path} has no linear that {format} could hold",
                hint="export what the quantize stage wrote, or choose --format hf for 16-bit weights",
            )
        write_folder(plan, folder, row.describe(plan), row.files(plan), progress)
        return _report(plan, format, folder)


def _check(format: str, others: str, asymmetric: Quantize | None) -> None:
    if format not in NAMES:
        raise ConfigError(f"{format!r} is no export format", hint=f"formats: {', '.join(NAMES)}")
    if others not in (REFUSE, WIDEN):
        raise ConfigError(f"others: {others!r} is neither {REFUSE} nor {WIDEN}")
    if asymmetric is not None and format != "awq":
        raise ConfigError(f"{format} is written without zero points", hint="--asymmetric goes with --format awq")


def _report(plan: Plan, format: str, folder: Path, remarks: Sequence[str] = ()) -> ExportReport:
    report = ExportReport(
        format=format,
        quantized=dict(Counter(kept.format for kept in plan.kept.values())),
        widened=plan.widened,
        left_out=plan.left_out,
        remarks=list(remarks),
    )
    document = asdict(report)
    (folder / REPORT).write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return report
