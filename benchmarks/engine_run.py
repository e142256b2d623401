"""A small engine on a GPU against the interpreter, and its steps timed. `python -m benchmarks.gpu` runs it."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.engine_checks import BATCH, BLOCKS, CHECKS, CHUNK, LENGTH, ROWS, Subject, run_checks, subject_tables
from benchmarks.isolation import describe_error
from pipeline.engine.description import EngineDescription
from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.errors import CompatibilityError
from pipeline.network.spec import Lowering, NetworkSpec
from pipeline.runtime.device import CudaDevice
from pipeline.runtime.runner import InterpreterRunner, Runner
from pipeline.runtime.steps import Chunk

MODEL = Path(__file__).parents[1] / "checkpoints" / "deepseek-v2-tiny"
LIMITS = BuildLimits(
    max_seq_len=512,
    max_batch_size=BATCH,
    max_num_tokens=ROWS,
    generation=(Rectangle(batch=BATCH, length=512),),
    max_blocks=BLOCKS,
    max_chunk=CHUNK,
)
BATCHES = (1, BATCH)  # whose generation steps are timed
WARM, TIMED = 20, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """What is measured: the engine and checkpoint of `run`, or else one that is built with this lowering, by `backend`
    or by what builds for this GPU."""

    title: str
    lowering: Lowering
    run: Path | None
    backend: str | None

    def list_rows(self) -> list[str]:
        """Names of the rows, in order."""
        names = ("built", "loaded", *CHECKS, *(f"step of batch {batch}" for batch in BATCHES))
        return [f"{self.title}, {name}" for name in names]

    def measure(self) -> Iterator[tuple[bool, str]]:
        """Whether each row holds, and what was seen. Raises where there is nothing to go on with."""
        from pipeline.engine.description import load_description
        from pipeline.engine.tensorrt_rtx import TARGETS
        from pipeline.runtime.engine_runner import EngineRunner

        device, start = CudaDevice(), time.perf_counter()
        with ExitStack() as stack:
            if self.run:
                engine = self.run / "build"
                checkpoint = next((p for n in ("quantize", "convert") if (p := self.run / n).exists()), self.run)
            else:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                backend = self.backend or ("tensorrt_rtx" if device.sm in TARGETS else "tensorrt")
                engine, checkpoint = prepare(folder, backend, device.sm, self.lowering)
            description = load_description(engine)
            check_limits(description)
            built = "" if self.run else f"{time.perf_counter() - start:.1f} s, "
            yield True, f"{built}{description.backend} {description.backend_version}, torch {torch.__version__}"

            start, file = time.perf_counter(), engine / description.file
            runner = EngineRunner(file, description, device=device)
            subject = load_subject(runner, description, checkpoint)
            yield True, f"{time.perf_counter() - start:.1f} s, {runner.count_blocks(0.9)} blocks fit"
            yield from ((holds, seen) for _, holds, seen in run_checks(subject))
            plain = EngineRunner(file, description, device=device, graphs=False)
            for batch in BATCHES:
                try:
                    times = [time_steps(r, subject, batch, torch.cuda.synchronize) for r in (runner, plain)]
                    yield True, f"{times[0]:.3f} ms with graphs, {times[1]:.3f} ms without"
                except Exception as error:
                    yield False, describe_error(error)


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


def prepare(folder: Path, backend: str, sm: int, lowering: Lowering) -> tuple[Path, Path]:
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
