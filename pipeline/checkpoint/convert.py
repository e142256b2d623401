"""From a Hugging Face folder to the engine checkpoint, as a stream: memory does not grow with tensors or files.

A target tensor is its sources' bytes one after the other, so each passes through one small buffer from the source's
mapping to the file. Weights in FP8 blocks stay so with their scales, unless a type is asked for: then they are
multiplied out on the way. What another tool has quantized stays as it is in those of our formats that hold it. A shard
is a step that a killed run need not repeat.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as AbstractMapping
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.block_scales import check_config, iterate_kept, iterate_tiles
from pipeline.checkpoint.casting import FLOATS, Caster, Losses
from pipeline.checkpoint.conversion_report import REPORT, ConversionReport, ShardLosses
from pipeline.checkpoint.engine_config import write_converted
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.foreign.config import write_held
from pipeline.checkpoint.foreign.folder import ForeignFolder
from pipeline.checkpoint.foreign.methods import find_method
from pipeline.checkpoint.layouts import Mapping
from pipeline.checkpoint.layouts.scales import BLOCK, FP8, INT8, source_scale
from pipeline.checkpoint.layouts.scales import ROLE as SCALES
from pipeline.checkpoint.safetensors_file import SafetensorsWriter
from pipeline.checkpoint.shard_index import CONFIG
from pipeline.checkpoint.shards import MAX_SHARD, METADATA, Shard, plan_shards, write_index
from pipeline.checkpoint.source import Source, open_source
from pipeline.checkpoint.tensors import DTYPES, SAFETENSORS_DTYPE, TensorInfo
from pipeline.errors import CheckpointError, ConfigError
from pipeline.progress import SILENT, Progress
from pipeline.workspace import Workspace

if TYPE_CHECKING:
    import numpy.typing as npt

EXACT = "exact"
LOSSES = "losses"  # folder of per-shard results in the workspace, gone when the conversion is whole


def convert_checkpoint(
    folder: CheckpointFolder,
    workspace: Workspace,
    *,
    dtype: str | None,
    overflow: str,
    foreign: str = EXACT,
    progress: Progress = SILENT,
    max_shard: int = MAX_SHARD,
) -> ConversionReport:
    """Writes the engine checkpoint into the workspace's folder and returns what `conversion.json` says.

    `dtype` is float16, bfloat16 or float32; None keeps FP8 blocks, and for the rest the type of most of its bytes.
    `overflow` is "refuse", which raises CheckpointError naming the worst tensor, or "clip". `foreign` says what becomes
    of linears that another tool has quantized to what no format of ours holds: "exact" raises CheckpointError,
    "dequantize" writes them in 16 bits and counts them. Also raises CheckpointError for tensors that are missing,
    misshapen, unknown, not finite, or of no type that is read; StoreError where the disk is too small.
    """
    _check_settings(folder, dtype, overflow, foreign)
    source, mappings, unused, target = open_source(folder, dtype, exact=foreign == EXACT)
    fp8 = any(mapping.role == SCALES for mapping in mappings)
    keeps_fp8 = fp8 and dtype is None
    if not keeps_fp8:
        mappings = [mapping for mapping in mappings if mapping.role != SCALES]
    types = {m.target: _target_type(source, m, target, keeps_fp8=keeps_fp8) for m in mappings}
    if workspace.is_done(REPORT):
        shutil.rmtree(workspace.path / LOSSES, ignore_errors=True)
        return ConversionReport.read(workspace.path / REPORT)
    if DTYPES[target][1] != source.architecture.dtype:
        progress.note(f"weights are written as {DTYPES[target][1]}; config.json says {source.architecture.dtype}")
    shards = plan_shards([TensorInfo(m.target, types[m.target], m.target_shape) for m in mappings], max_shard)
    workspace.require(sum(shard.nbytes for shard in shards if not workspace.is_done(shard.name)))
    job = _Job(source, mappings, types, clip=overflow == "clip", progress=progress)
    progress.start("weights", job.nbytes, "B")
    losses: ShardLosses = {}
    for shard in shards:
        losses |= job.run(shard, workspace)
    report = ConversionReport(
        dtype=DTYPES[target][1],
        tensors=len(mappings),
        source_bytes=job.nbytes,
        target_bytes=sum(shard.nbytes for shard in shards),
        casts=job.count_casts(),
        overflow={name: (each.overflow, each.largest) for name, each in losses.items() if each.overflow},
        underflow={name: each.underflow for name, each in losses.items() if each.underflow},
        unused=unused,
        shards=[shard.name for shard in shards],
        foreign=source.describe() if isinstance(source, ForeignFolder) else None,
    )
    path = workspace.path
    config = write_converted(folder, path, report.dtype, is_cast=bool(report.casts), has_fp8=fp8, keeps_fp8=keeps_fp8)
    if isinstance(source, ForeignFolder):
        write_held(source, config)
        for note in source.notes():
            progress.note(note)
    written = [write_index(path, shards), config, *folder.copy_companions(path)]
    report.write(path / REPORT)
    workspace.finish(REPORT, [*written, path / REPORT])
    shutil.rmtree(path / LOSSES)
    return report


class _OverflowFoundError(Exception):
    """The first tensor that does not fit: the shard is given up, the rest only looked at."""


class _Job:
    """The tensors of one conversion, in order, and the buffers they pass through."""

    def __init__(
        self,
        source: Source,
        mappings: Sequence[Mapping],
        types: AbstractMapping[str, str],
        *,
        clip: bool,
        progress: Progress,
    ) -> None:
        """`types`: the safetensors type of each target."""
        self.source, self.types, self.clip, self.progress = source, types, clip, progress
        self.mappings = {m.target: m for m in mappings}
        self.nbytes = sum(source.tensors[name].nbytes for m in mappings for name in m.sources)
        self.casters = {target: Caster(target, clip=clip) for target in set(types.values()) if target in FLOATS}

    def count_casts(self) -> dict[str, int]:
        """Source tensors per change of type."""
        pairs = (
            (self.source.tensors[s].dtype, self.types[m.target]) for m in self.mappings.values() for s in m.sources
        )
        return dict(sorted(Counter(f"{before} -> {after}" for before, after in pairs if before != after).items()))

    def run(self, shard: Shard, workspace: Workspace) -> ShardLosses:
        """Writes a shard, unless an earlier run did, and returns what its tensors lost."""
        record = workspace.path / LOSSES / f"{shard.name}.json"
        names = [info.name for info in shard.infos]
        if workspace.is_done(shard.name):
            self.progress.advance(sum(self.source.tensors[s].nbytes for n in names for s in self.mappings[n].sources))
            return {name: Losses(*values) for name, values in json.loads(record.read_text()).items()}
        losses: ShardLosses = {}
        path = workspace.path / shard.name
        try:
            with SafetensorsWriter(path, shard.infos, metadata=METADATA) as writer:
                for name in names:
                    self._pass(name, losses, writer)
        except _OverflowFoundError:
            self._refuse_overflow(losses)
        workspace.recognise(path, writer.digest)
        lossy = {name: (each.overflow, each.largest, each.underflow) for name, each in losses.items()}
        record.parent.mkdir(exist_ok=True)
        record.write_text(json.dumps(lossy))
        workspace.finish(shard.name, [path, record])
        return losses

    def _pass(self, name: str, losses: ShardLosses, writer: SafetensorsWriter | None) -> None:
        """One target tensor from its sources to the writer, or only past the checks where there is none."""
        lost = Losses()
        for part in self.mappings[name].sources:
            done, size = 0, DTYPES[self.source.tensors[part].dtype][0]
            for piece in self._pieces(part, self.types[name], lost):
                if writer is not None:
                    writer.write(piece)
                self.source.release(part, done, done + piece.size * size)
                self.progress.advance(piece.size * size)
                done += piece.size * size
        if lost != Losses():
            losses[name] = lost
        if lost.overflow and not self.clip and writer is not None:
            raise _OverflowFoundError

    def _pieces(self, part: str, target: str, lost: Losses) -> Iterator[npt.NDArray[Any]]:
        """The bytes of one source tensor in the target's type."""
        name = f"{self.source.file_of(part)}: {part}"
        if isinstance(self.source, ForeignFolder) and (tiles := self.source.tiles(part)) is not None:
            return self.casters[target].run_values(name, tiles, lost)
        raw = self.source.read(part)
        if target == INT8:
            return iter((raw.data,))
        if target == FP8:
            return iterate_kept(name, raw)
        if raw.dtype == FP8:
            tiles = iterate_tiles(name, raw, self.source.read(source_scale(part)))
            return self.casters[target].run_values(name, tiles, lost)
        return self.casters[target].run(name, raw, lost)

    def _refuse_overflow(self, losses: ShardLosses) -> None:
        """Looks at every remaining tensor, so that the message names the worst of all, and raises."""
        names = list(self.mappings)
        found = next(i for i, name in enumerate(names) if name in losses and losses[name].overflow)
        for name in names[found + 1 :]:
            self._pass(name, losses, None)
        worst = max(losses, key=lambda name: losses[name].largest)
        count = sum(1 for each in losses.values() if each.overflow)
        tensors = "1 tensor does" if count == 1 else f"{count} tensors do"
        values = "1 value" if losses[worst].overflow == 1 else f"{losses[worst].overflow} values"
        raise CheckpointError(
            f"{self.source.path}: {tensors} not fit {DTYPES[self.types[worst]][1]}; worst is "
            f"{' + '.join(self.mappings[worst].sources)} with {values} out of range, up to {losses[worst].largest:.6g}",
            hint="set stages.convert.dtype to bfloat16, or stages.convert.overflow to clip if saturating them is meant",
        )


def _check_settings(source: CheckpointFolder, dtype: str | None, overflow: str, foreign: str) -> None:
    if dtype is not None and SAFETENSORS_DTYPE.get(dtype) not in FLOATS:
        raise ConfigError(f"convert: dtype {dtype!r} is not one of {', '.join(DTYPES[name][1] for name in FLOATS)}")
    if overflow not in ("refuse", "clip"):
        raise ConfigError(f"convert: overflow {overflow!r} is neither refuse nor clip")
    if foreign not in (EXACT, "dequantize"):
        raise ConfigError(f"convert: foreign {foreign!r} is neither exact nor dequantize")
    if source.own is not None:
        raise CheckpointError(f"{source.path} is an engine checkpoint already", hint="model.path must name a HF folder")
    if find_method(source) is None:
        check_config(source.config, str(source.path / CONFIG))


def _target_type(source: Source, mapping: Mapping, target: str, *, keeps_fp8: bool) -> str:
    """The type that a mapping's target is written in. Raises CheckpointError for FP8 that cannot be kept."""
    stored = {source.tensors[name].dtype for name in mapping.sources}
    if len(stored) == 1 and not mapping.cast:
        return stored.pop()
    if FP8 not in stored or not keeps_fp8:
        return target
    # One below the other, weights must fill whole blocks for their scales to stay one below the other too.
    if any(shape[0] % BLOCK for shape in mapping.source_shapes[:-1]):
        raise CheckpointError(
            f"{source.path}: {' + '.join(mapping.sources)} cannot become one weight in FP8 blocks: their rows "
            f"{[shape[0] for shape in mapping.source_shapes]} are not multiples of {BLOCK}",
            hint="set stages.convert.dtype: bfloat16, which multiplies the blocks out",
        )
    return FP8
