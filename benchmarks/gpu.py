"""What only a GPU can show, in one table: an engine against the interpreter, its steps timed (engine_run.py); every
plugin's kernels against their references, in all variants that a config can ask for, and at models' sizes against the
card's own speed and the unfused sequence (kernels.py); an engine of plugins, likewise.

    python -m benchmarks.gpu                          # converts and builds the shipped tiny DeepSeek-V2 for this GPU
    python -m benchmarks.gpu --run out/a100-int4      # takes the engine and the checkpoint of a run
    python -m benchmarks.gpu --save run.json          # keeps the kernels' rows, for `python -m benchmarks.passed`

Exit status: 0 if all hold, on an H200 the bars too, 1 if one does not, 4 without a GPU: the table then says what was
not measured. Takes under 10 minutes: no part and no row begins after --minutes, and what is under way 100 s later
is cut off. Parts run in processes of their own: what fails, hangs or takes the GPU's context with it is a row, not the
end. No downloads.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.engine_run import EngineRun
from benchmarks.isolation import LostError, stream
from benchmarks.kernel_rows import FAILED, OK, SLOW, Row, list_rows
from benchmarks.kernels import measure_kernels
from benchmarks.passed import save_run
from pipeline.errors import TrtseekError
from pipeline.network.spec import Lowering
from pipeline.runtime.device import CudaDevice
from plugins.compiler import SMS, choose_sm

PLUGINS = Lowering(rope_paged_kv="plugin", paged_attention="plugin", moe_experts="plugin")
PATIENCE = 150.0  # seconds of an engine's row: the longest builds it
GRACE = 100.0  # seconds after --minutes, in which what has begun may end


def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="a run's folder, with build and quantize or convert in it")
    parser.add_argument("--backend", choices=("tensorrt_rtx", "tensorrt"), help="by default what builds for this GPU")
    parser.add_argument("--only", choices=("engine", "kernels"), help="leave out the other half")
    parser.add_argument("--save", type=Path, help="where the kernels' rows go, as JSON")
    parser.add_argument("--minutes", type=float, default=8.0, help="after which nothing else begins")
    options = parser.parse_args(arguments)
    deadline = began + 60 * options.minutes
    native, plugins = (
        EngineRun(title=title, lowering=lowering, run=options.run, backend=options.backend)
        for title, lowering in (("engine", Lowering()), ("engine of plugins", PLUGINS))
    )
    engines = [] if options.only == "kernels" else [native] if options.run else [native, plugins]
    try:
        device = CudaDevice()
    except TrtseekError as error:
        print(error, file=sys.stderr)
        kernels = [] if options.only == "engine" else [row.name for row, _ in list_rows(SMS[-1])]
        for name in (*(name for engine in engines for name in engine.list_rows()), *kernels):
            _print(name, "", "not measured")
        return error.exit_code
    print(f"{device.name}, SM{device.sm}, torch {torch.__version__}", flush=True)
    verdicts: list[str] = []
    for engine in engines[:1]:
        verdicts += _check_engine(engine, deadline)
    if options.only != "engine":
        verdicts += _check_kernels(device, deadline, options.save)
    for engine in engines[1:]:
        verdicts += _check_engine(engine, deadline)
    return 1 if FAILED in verdicts or SLOW in verdicts else 0


def _check_kernels(device: CudaDevice, deadline: float, save: Path | None) -> Iterator[str]:
    """Of all operations that have kernels for this GPU → each row's verdict. Saved row by row."""
    sm = choose_sm(device.sm)
    rows: list[Row] = []
    for row in measure_kernels(sm, deadline, deadline + GRACE):
        rows.append(row)
        verdict = row.judge(device.name)
        _print(row.name, verdict, row.describe())
        if save is not None:
            save_run(save, rows, sm=sm, device=device.name)
        yield verdict


def _check_engine(engine: EngineRun, deadline: float) -> Iterator[str]:
    """Each row's verdict. One that is lost takes those after it along, which are not measured."""
    left = engine.list_rows()
    try:
        if time.monotonic() < deadline:
            for holds, seen in stream(engine.measure, (), patience=PATIENCE, until=deadline + GRACE):
                verdict = OK if holds else FAILED
                _print(left.pop(0), verdict, seen)
                yield verdict
    except LostError as lost:
        if left:
            _print(left.pop(0), FAILED, str(lost))
        yield FAILED
    for name in left:
        _print(name, "", "not measured")


def _print(name: str, verdict: str, seen: str) -> None:
    print(f"{name:<58} {verdict:<7} {seen}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
