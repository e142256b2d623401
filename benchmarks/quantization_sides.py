"""The two sides of `benchmarks.quantization`: this project's way to quantize a model, and a peer's on the same tokens.

Each runs in a process of its own, which says how long it took and how much it held.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import peer_environments
from benchmarks.quantization_models import FOLDER, Model
from pipeline.progress import format_amount

WORKER = """
import sys, time
from pathlib import Path
import torch
from benchmarks.peak import read_peak
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.reference import build_hf_rotary
from pipeline.config.settings import Calibration, Quantize
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.workspace import FolderWorkspace

source, target, method, text = sys.argv[1:5]
group, samples, length = map(int, sys.argv[5:8])
calibration = Calibration(files=({"path": Path(text)},), samples=samples, length=length)
settings = Quantize(group_size=group, include=tuple(sys.argv[8].split(",")), calibration=calibration)
settings = settings.model_copy(update={"method": method})  # with zero points, too, which no config may ask for
checkpoint = CheckpointFolder.open(Path(source))
build_hf_rotary(checkpoint.config)  # imports transformers' modules before the clock starts, as the peers' scripts do
begin, processor = time.perf_counter(), time.process_time()
quantize_checkpoint(checkpoint, FolderWorkspace(Path(target)), settings=settings)
seconds, processor = time.perf_counter() - begin, time.process_time() - processor
print(seconds, processor, read_peak())
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one side wrote, in wall and processor seconds, at which peak of resident bytes (mapped files included)."""

    output: Path
    seconds: float
    processor: float
    peak: int

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s, {self.processor:.0f} s of processor, peak {format_amount(self.peak, 'B')}"


def quantize(model: Model, method: str) -> Run:
    """This project's way: convert (not timed: the peers read the model as it is), then quantize in a process."""
    engine, output = convert(model), FOLDER / model.name / method
    shutil.rmtree(output, ignore_errors=True)
    arguments = [str(engine), str(output), method, str(model.calibration), str(model.group), str(model.samples)]
    return run_worker(arguments, model, output)


def run_worker(arguments: Sequence[str], model: Model, output: Path) -> Run:
    command = [sys.executable, "-c", WORKER, *arguments, str(model.length), ",".join(model.include)]
    seconds, processor, peak = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return Run(output=output, seconds=float(seconds), processor=float(processor), peak=int(peak))


def convert(model: Model) -> Path:
    from pipeline.checkpoint.convert import convert_checkpoint
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.workspace import FolderWorkspace

    output = FOLDER / model.name / "engine"
    if not (output / "conversion.json").exists():
        shutil.rmtree(output, ignore_errors=True)
        source = CheckpointFolder.open(model.prepare())
        convert_checkpoint(source, FolderWorkspace(output), dtype=model.dtype, overflow="refuse")
    return output


def quantize_by_peer(model: Model, peer: str) -> Run:
    """The peer's, on the very tokens that this project calibrates on."""
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.quantization.calibration import tokenizer_file
    from pipeline.quantization.text import sample_tokens

    source = CheckpointFolder.open(model.prepare())
    bos = source.config.get("bos_token_id")
    tokens = sample_tokens(
        tokenizer_file(source),
        model.calibration_files(),
        samples=model.samples,
        length=model.length,
        seed=0,
        vocab_size=source.architecture.vocab_size,
        bos=bos if isinstance(bos, int) else None,
    )
    output = FOLDER / model.name / peer
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    token_file = output / "tokens.json"
    token_file.write_text(json.dumps(tokens.tolist()))
    arguments = [str(source.path), str(token_file), str(output), str(model.group)]
    found = peer_environments.run(peer, arguments, output / "log.txt")
    floats = output / "floats"
    # The peer's own config says how it quantized; what is read back has nothing of that any more.
    config = {**json.loads((source.path / "config.json").read_text()), "torch_dtype": "float32"}
    (floats / "config.json").write_text(json.dumps(config))
    shutil.copyfile(source.path / "tokenizer.json", floats / "tokenizer.json")
    return Run(output=floats, **found)


def export_awq(engine: Path) -> Path:
    """AutoAWQ's folder of what has zero points, which no network of ours computes: read back in 16 bits."""
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.exports.formats import export_checkpoint

    output = engine.with_name(f"{engine.name}-export")
    shutil.rmtree(output, ignore_errors=True)
    export_checkpoint(CheckpointFolder.open(engine), output, "awq")
    return output
