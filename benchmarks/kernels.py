"""The plugins' kernels on a GPU: against their references, against the card's own speed, against the unfused sequence.

`python -m benchmarks.gpu` runs it. Kernels are compiled to PTX and started through the driver, as an engine does. Sizes
are those of Llama-8B, V2-Lite and V3 at decode and at prefill; whatever else a config may ask the kernels for is held
against the reference, and not timed (plugins/subjects.py). The reference runs in fp32 on the same GPU; "unfused" is
how much longer its operations take, one after another, as torch starts them; "of bandwidth" is the time that the bytes
take at the speed of a copy over the time taken, and "of floor" the same of the products at the speed of torch's largest
16-bit one, where that is longer. Times are medians with the L2 cache emptied before each run. Of what exchanges rows
with other GPUs, the kernels alone are timed. Not yet run on hardware.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from functools import partial

import torch

from benchmarks.ceilings import measure_copies, measure_products, time_run
from benchmarks.isolation import LostError, describe_error, stream
from benchmarks.kernel_inputs import count_bytes, count_operations, draw_inputs, make_outputs
from benchmarks.kernel_rows import STEPS, Row, list_rows
from benchmarks.loopback import clear_unwritten, keep_local, leave_out, loop_back
from plugins.carried import Carried, compile_carried
from plugins.operation import Exchange, Operation
from plugins.tensorrt_plugin import Locate, run_launches

# Largest difference from the fp32 reference, of values of about 1: a rounding to the type, and of probabilities.
BOUNDS = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-4}
Start = Callable[[Operation, list[torch.Tensor], list[torch.Tensor]], None]
DEVICE = "cuda"
PATIENCE = 75.0  # seconds of one row, and of all that comes before the first, after which its process is ended
BARREN = 3  # processes in a row that end without a result, after which no other is started


def compare(operation: Operation, inputs: list[torch.Tensor], start: Start) -> float:
    """The largest difference from the reference, over the bound: at most 1 is right."""
    own = [tensor if i in operation.STORED else tensor.clone() for i, tensor in enumerate(inputs)]
    # Where numbers are rounded to few bits on the way, the reference must round them in the same places.
    rounds = operation != operation.without_rounding()
    narrow = () if rounds else (torch.float16, torch.bfloat16)
    widened = [
        tensor if i in operation.STORED else tensor.float() if tensor.dtype in narrow else tensor.clone()
        for i, tensor in enumerate(inputs)
    ]
    outputs = make_outputs(operation, own)
    start(operation, own, outputs)
    clear_unwritten(operation, outputs)
    # … and where sums of fp32 in another order come to lie on the other side of a tie, a number is a step of E4M3 off.
    dtype = operation.attributes()["dtype"]
    bound, worst = max(BOUNDS[dtype], BOUNDS["float16"]) if rounds else BOUNDS[dtype], 0.0
    for output, found, wanted in zip(operation.outputs(), outputs, operation.compute(*widened), strict=True):
        apart = (found.float() - wanted.float()).abs()
        # A step of a quantized pool's type: the kernel rounds fp32 products of other order. Counts are right or wrong.
        allowed = {"int8": 1.0, "fp8": 32.0, "int32": 0.5}.get(
            output.dtype, bound * max(1.0, float(wanted.abs().max()))
        )
        worst = max(worst, float(apart.nan_to_num(nan=torch.inf).max()) / allowed)
    return worst


def measure_kernels(sm: int, deadline: float, until: float) -> Iterator[Row]:
    """All rows, in a process of their own, and after one that is lost in another. Those that have not begun at
    `deadline`, of time.monotonic(), come without measures; at `until` the one that is under way is cut off."""
    left, barren = list_rows(sm), 0
    carried = compile_all([operation for _, operation in left], sm)
    while left and barren < BARREN and time.monotonic() < deadline:
        barren += 1
        try:
            for row in stream(measure_rows, (left, carried, deadline), patience=PATIENCE, until=until):
                left, barren = left[1:], 0
                yield row
        except LostError as lost:
            for row, _ in left[:1]:  # none where it was lost after the last
                yield replace(row, failure=str(lost))
            left = left[1:]
    yield from (row for row, _ in left)


def compile_all(operations: Sequence[Operation], sm: int) -> dict[Operation, Carried | str]:
    """The kernels of each, or why they do not compile: on all processors, since one would take minutes."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        compiling = {
            operation: pool.submit(compile_carried, operation, [sm]) for operation in dict.fromkeys(operations)
        }
        return {operation: _await(future) for operation, future in compiling.items()}


def _await(future: Future[Carried]) -> Carried | str:
    try:
        return future.result()
    except Exception as error:  # of the compiler, or of a process that died
        return describe_error(error)


def measure_rows(
    rows: Sequence[tuple[Row, Operation]], carried: Mapping[Operation, Carried | str], deadline: float
) -> Iterator[Row]:
    """In order, up to one that the GPU's context is lost with. See measure_kernels."""
    bandwidth, products = measure_copies(), measure_products()
    starters: dict[Operation, tuple[Start, Start]] = {}
    for row, operation in rows:
        compiled = carried[operation]
        if time.monotonic() > deadline or isinstance(compiled, str):
            yield replace(row, failure=compiled) if isinstance(compiled, str) else row
            continue
        if operation not in starters:
            starters.clear()  # one operation's workspace at a time
            starters[operation] = _make_starter(compiled, loop_back), _make_starter(compiled, leave_out)
        try:
            yield _measure(row, keep_local(operation), *starters[operation], bandwidth, products)
        except Exception as error:
            yield replace(row, failure=describe_error(error))
            if not _is_alive():
                return


def _measure(row: Row, operation: Operation, start: Start, timed: Start, bandwidth: float, products: float) -> Row:
    """bandwidth: bytes per second. products: multiplications and additions per second."""
    spans = STEPS[row.step]
    inputs = draw_inputs(operation, spans, DEVICE)
    error = compare(operation, inputs, start)
    if not row.timed:
        return replace(row, error=error)
    outputs = make_outputs(operation, inputs)
    start(operation, inputs, outputs)
    fused = time_run(partial(timed, operation, inputs, outputs))
    unfused = time_run(partial(operation.compute, *inputs))
    moved = count_bytes(operation, inputs, spans) / bandwidth
    computed = count_operations(operation, inputs, spans) / products
    return replace(
        row,
        error=error,
        seconds=fused,
        of_bandwidth=moved / fused,
        of_floor=max(moved, computed) / fused,
        unfused=unfused / fused,
    )


def _is_alive() -> bool:
    """Whether the GPU takes work after an error; an access to what is not its own ends its context."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _make_starter(carried: Carried, exchange: Callable[[Exchange, Locate, int], None]) -> Start:
    scratch = torch.empty(1, dtype=torch.uint8, device=DEVICE)

    def start(op: Operation, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        nonlocal scratch
        op.check_dense(inputs)
        shapes = [tuple(tensor.shape) for tensor in inputs]
        if (needed := op.scratch_bytes(shapes)) > len(scratch):
            scratch = torch.empty(needed, dtype=torch.uint8, device=DEVICE)
        addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in (inputs, outputs)]
        stream = int(torch.cuda.current_stream().cuda_stream)
        run_launches(op, carried, shapes, addresses[0], addresses[1], scratch.data_ptr(), stream, exchange)

    return start
