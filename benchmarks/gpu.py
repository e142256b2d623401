"""What only a GPU can show, in one table: an engine against the interpreter, its steps timed; every plugin's kernels
against their references, the card's own speed and the unfused sequence (kernels.py); an engine of plugins, likewise.

    python -m benchmarks.gpu                          # converts and builds the shipped tiny DeepSeek-V2 for this GPU
    python -m benchmarks.gpu --run out/a100-int4      # takes the engine and the checkpoint of a run
    python -m benchmarks.gpu --save run.json          # keeps the kernels' rows, for `python -m benchmarks.passed`

Exit status: 0 if all hold, 1 if one does not, 4 without a GPU (the table then says what was not measured) or for an
engine that it cannot run. Takes under 10 minutes: kernels that have not begun after --minutes are not measured.
Downloads nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.engine_checks import BATCH, BLOCKS, CHUNK, LENGTH, ROWS, Subject, run_checks, subject_tables
from benchmarks.kernels import FAILED, OK, Row, list_rows, measure_kernels
from benchmarks.passed import save_run
from pipeline.engine.description import EngineDescription
from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.errors import CompatibilityError, TrtseekError
from pipeline.network.spec import Lowering, NetworkSpec
from pipeline.runtime.device import CudaDevice
from pipeline.runtime.runner import InterpreterRunner, Runner
from pipeline.runtime.steps import Chunk
from plugins.compiler import SMS, choose_sm

MODEL = Path(__file__).parents[1] / "checkpoints" / "deepseek-v2-tiny"
LIMITS = BuildLimits(
    max_seq_len=512,
    max_batch_size=BATCH,
    max_num_tokens=ROWS,
    generation=(Rectangle(batch=BATCH, length=512),),
    max_blocks=BLOCKS,
    max_chunk=CHUNK,
)
WARM, TIMED = 20, 100
NATIVE = Lowering()
PLUGINS = Lowering(rope_paged_kv="plugin", paged_attention="plugin", moe_experts="plugin")


def time_steps(runner: Runner, subject: Subject, batch: int, synchronize: Callable[[], None]) -> float:
    """Milliseconds of one generation step at 64 tokens of context, the smallest of many."""
    runner.allocate(BLOCKS)
    tables = subject_tables(subject, [65] * batch)
    chunks = [Chunk(tokens=[5], start=64, block_table=table) for table in tables]
    inputs = subject.plan(chunks)
    times = []
    for _ in range(WARM + TIMED):
        synchronize()
        start = time.perf_counter()
        runner.step(inputs)
        synchronize()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times[WARM:])


def prepare(folder: Path, backend: str, sm: int, lowering: Lowering = NATIVE) -> tuple[Path, Path]:
    """Converts the shipped checkpoint to fp16 and builds it → the folders of the engine and of the checkpoint."""
    from pipeline.checkpoint.convert import convert_checkpoint
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.engine.builder import build_engine
    from pipeline.workspace import FolderWorkspace

    checkpoint, engine = folder / "checkpoint", folder / "engine" / "model.engine"
    convert_checkpoint(CheckpointFolder.open(MODEL), FolderWorkspace(checkpoint), dtype="float16", overflow="refuse")
    build_engine(
        backend=backend,
        checkpoint=checkpoint,
        spec=NetworkSpec(
            dtype="float16", max_seq_len=LIMITS.max_seq_len, block_size=LIMITS.block_size, lowering=lowering
        ),
        limits=LIMITS,
        sm=sm,
        output=engine,
        log=folder / "build.log",
    )
    return engine.parent, checkpoint


def check_limits(description: EngineDescription) -> None:
    """Raises CompatibilityError for an engine too small for the checks."""
    limits = description.limits
    held = (limits.max_blocks, limits.context_batch, limits.max_num_tokens, limits.chunk, limits.max_seq_len)
    needed = (BLOCKS, BATCH, ROWS, CHUNK, LENGTH)
    if any(least > most for least, most in zip(needed, held, strict=True)):
        raise CompatibilityError(
            f"the engine takes {held} blocks, sequences and rows of a context step, rows of a chunk, tokens of a "
            f"sequence; the checks need {needed}",
            hint="leave out --run, and a small one is built",
        )


def load_subject(runner: Runner, description: EngineDescription, checkpoint: Path) -> Subject:
    """With the interpreter's runners beside it, over the network that was built."""
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.triton.backend.ranks import rebuild_program

    source = CheckpointFolder.open(checkpoint)
    program = rebuild_program(source, description.spec, description.network_digest)
    return Subject(
        runner=runner,
        exact=InterpreterRunner(program, mode="exact"),
        declared=InterpreterRunner(program, mode="declared"),
        block_size=description.limits.block_size,
        vocab=source.architecture.vocab_size,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run's folder, with build and quantize or convert in it")
    parser.add_argument("--backend", choices=("tensorrt_rtx", "tensorrt"), help="by default what builds for this GPU")
    parser.add_argument("--only", choices=("engine", "kernels"), help="leave out the other half")
    parser.add_argument("--save", type=Path, help="where the kernels' rows go, as JSON")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which no other kernel begins")
    options = parser.parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    try:
        device = CudaDevice()
        held = True
        if options.only != "kernels":
            held = _check_engine(options, device, "engine", NATIVE)
        if options.only != "engine":
            held = _check_kernels(device, deadline, options.save) and held
        if options.only != "kernels" and not options.run:  # last: a kernel that fails may take the GPU with it
            held = _check_engine(options, device, "engine of plugins", PLUGINS) and held
    except TrtseekError as error:
        print(error, file=sys.stderr)
        if not torch.cuda.is_available():
            for row, _ in list_rows(SMS[-1]):
                _row(row.name, row.describe(), "")
        return error.exit_code
    return 0 if held else 1


def _check_kernels(device: CudaDevice, deadline: float, save: Path | None) -> bool:
    """Of all operations that have kernels for this GPU."""
    sm = choose_sm(device.sm)
    rows: list[Row] = []
    try:
        for row in measure_kernels(sm, deadline):
            rows.append(row)
            _row(row.name, row.describe(), row.verdict)
    finally:  # also of a run that a kernel brings down
        if save is not None:
            save_run(save, rows, sm=sm, device=device.name)
    return all(row.verdict != FAILED for row in rows)


def _check_engine(options: argparse.Namespace, device: CudaDevice, title: str, lowering: Lowering) -> bool:
    """Of the run, or of an engine that is built for it, with this lowering."""
    from pipeline.engine.tensorrt_rtx import TARGETS

    backend = options.backend or ("tensorrt_rtx" if device.sm in TARGETS else "tensorrt")
    start = time.perf_counter()
    if options.run:
        checkpoint = next((p for n in ("quantize", "convert") if (p := options.run / n).exists()), options.run)
        return _run_checks(device, title, options.run / "build", checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        engine, checkpoint = prepare(Path(folder), backend, device.sm, lowering)
        _row(f"{title}, built", f"{time.perf_counter() - start:.1f} s")
        return _run_checks(device, title, engine, checkpoint)


def _run_checks(device: CudaDevice, title: str, engine: Path, checkpoint: Path) -> bool:
    from pipeline.engine.description import load_description
    from pipeline.runtime.engine_runner import EngineRunner

    description = load_description(engine)
    check_limits(description)
    print(
        f"{device.name}, SM{device.sm}; {description.backend} {description.backend_version}; torch {torch.__version__}"
    )
    start = time.perf_counter()
    runner = EngineRunner(engine / description.file, description, device=device)
    subject = load_subject(runner, description, checkpoint)
    _row(f"{title}, loaded", f"{time.perf_counter() - start:.1f} s, {runner.count_blocks(0.9)} blocks fit")
    held = True
    for name, holds, seen in run_checks(subject):
        _row(f"{title}, {name}", seen, OK if holds else FAILED)
        held = held and holds
    plain = EngineRunner(engine / description.file, description, device=device, graphs=False)
    for batch in (1, BATCH):
        times = [time_steps(r, subject, batch, torch.cuda.synchronize) for r in (runner, plain)]
        _row(f"{title}, step of batch {batch}", f"{times[0]:.3f} ms with graphs, {times[1]:.3f} ms without")
    return held


def _row(name: str, seen: str, verdict: str = OK) -> None:
    print(f"{name:<58} {verdict:<7} {seen}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
