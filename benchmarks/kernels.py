"""The plugins' kernels on a GPU: against their references, against the card's own speed, against the unfused sequence.

`python -m benchmarks.gpu` runs it. Kernels are compiled to PTX and started through the driver, as an engine does. Sizes
are those of Llama-8B, V2-Lite and V3 at decode and at prefill. The reference runs in fp32 on the same GPU; "unfused" is
how much longer its operations take, one after another, as torch starts them; "of floor" is the time that the bytes take
at the speed of a copy, or experts' products at that of torch's largest 16-bit one, whichever is longer, over the time
taken. Times are medians with the L2 cache emptied before each run. Of what exchanges rows with other GPUs, the kernels
alone are timed. Not yet run on hardware.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from benchmarks import expert_inputs
from benchmarks.ceilings import measure_copies, measure_products, time_run
from benchmarks.kernel_inputs import count_bytes, draw_inputs, make_outputs
from benchmarks.loopback import clear_unwritten, keep_local, leave_out, loop_back
from plugins.carried import compile_carried
from plugins.moe_experts.operation import MoeExperts
from plugins.operation import Exchange, Operation
from plugins.passed import digest_source
from plugins.resources import list_subjects
from plugins.tensorrt_plugin import Locate, run_launches

# (tokens in the cache, new tokens) of each sequence.
STEPS: dict[str, list[tuple[int, int]]] = {
    "decode 1": [(1023, 1)],
    "decode 32": [(1023, 1)] * 32,
    "decode 256": [(1023, 1)] * 256,
    "prefill": [(0, 1024), (512, 512)],
}
# Largest difference from the fp32 reference, of values of about 1: a rounding to the type, and of probabilities.
BOUNDS = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-4}
OK, FAILED = "ok", "FAILED"
LARGE = ("decode 256", "prefill")
DECODE = ("decode 1", "decode 32", "decode 256")
# Operation, a part of the model's name, steps -> the least share of the floor's speed, and the least of unfused.
BARS: tuple[tuple[str, str, tuple[str, ...], float, float], ...] = (
    ("rope_paged_kv", "", LARGE, 0.8, 0.0),
    ("rope_paged_kv", "", DECODE, 0.0, 2.0),
    ("rope_paged_latent", "", LARGE, 0.8, 0.0),
    ("rope_paged_latent", "", DECODE, 0.0, 2.0),
    ("paged_latent_attention", "", ("decode 32", "decode 256"), 0.6, 0.0),
    ("moe_experts", "int4", DECODE, 0.6, 0.0),
    ("moe_dispatch", "", LARGE, 0.7, 0.0),
    ("moe_combine", "", LARGE, 0.7, 0.0),
)
Start = Callable[[Operation, list[torch.Tensor], list[torch.Tensor]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One operation at the sizes of a model and a step. sources: digests of its kernels' modules. error: the largest
    difference from the reference over the bound, at most 1 is right; None where it was not measured. seconds: of a run;
    of_floor, unfused: see above."""

    operation: str
    model: str
    step: str
    sources: tuple[str, ...]
    error: float | None = None
    seconds: float = 0.0
    of_floor: float = 0.0
    unfused: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.operation}, {self.model}, {self.step}"

    @property
    def verdict(self) -> str:
        return "" if self.error is None else OK if self.is_right else FAILED

    @property
    def is_right(self) -> bool:
        return self.error is not None and self.error <= 1

    def describe(self) -> str:
        if self.error is None:
            return "not measured"
        seen = f"{self.error:.3f} of the bound, {1e3 * self.seconds:.3f} ms, {self.of_floor:.0%} of floor, "
        return seen + f"{self.unfused:.1f} x unfused" + "".join(f"; below {bar}" for bar in self.list_missed())

    def list_missed(self) -> list[str]:
        """The bars that it does not reach: of an H200."""
        missed = []
        for operation, model, steps, floor, unfused in BARS:
            if operation == self.operation and model in self.model and self.step in steps:
                missed += [f"{floor:.0%} of floor"] if self.of_floor < floor else []
                missed += [f"{unfused:.0f} x"] if self.unfused < unfused else []
        return missed


def list_rows(sm: int) -> list[tuple[Row, Operation]]:
    """Every row that kernels for this SM have, not yet measured."""
    return [
        (Row(operation=operation.NAME, model=model, step=step, sources=_name_sources(operation)), operation)
        for model, operation, sms in list_subjects()
        if sm in sms
        for step in STEPS
    ]


def _name_sources(operation: Operation) -> tuple[str, ...]:
    return tuple(sorted({digest_source(kernel.module) for kernel in operation.kernels()}))


def compare(operation: Operation, inputs: list[torch.Tensor], start: Start) -> float:
    """The largest difference from the reference, over the bound: at most 1 is right."""
    own = [tensor if i in operation.STORED else tensor.clone() for i, tensor in enumerate(inputs)]
    # Where numbers are rounded to few bits on the way, the reference must round them in the same places.
    narrow = (torch.float16, torch.bfloat16) if operation == operation.without_rounding() else ()
    widened = [
        tensor if i in operation.STORED else tensor.float() if tensor.dtype in narrow else tensor.clone()
        for i, tensor in enumerate(inputs)
    ]
    outputs = make_outputs(operation, own)
    start(operation, own, outputs)
    clear_unwritten(operation, outputs)
    bound, worst = BOUNDS[operation.attributes()["dtype"]], 0.0
    for output, found, wanted in zip(operation.outputs(), outputs, operation.compute(*widened), strict=True):
        apart = (found.float() - wanted.float()).abs()
        # A step of a quantized pool's type: the kernel rounds fp32 products of other order. Counts are right or wrong.
        allowed = {"int8": 1.0, "fp8": 32.0, "int32": 0.5}.get(
            output.dtype, bound * max(1.0, float(wanted.abs().max()))
        )
        worst = max(worst, float(apart.max()) / allowed)
    return worst


def measure_kernels(sm: int, deadline: float) -> Iterator[Row]:
    """All rows; those that have not begun at `deadline`, of time.monotonic(), come without measures."""
    bandwidth, products = measure_copies(), measure_products()
    starters: dict[Operation, tuple[Start, Start]] = {}
    for row, distributed in list_rows(sm):
        operation = keep_local(distributed)
        if time.monotonic() > deadline:
            yield row
            continue
        if operation not in starters:
            starters.clear()  # one operation's workspace at a time
            starters[operation] = _make_starter(operation, sm, loop_back), _make_starter(operation, sm, leave_out)
        start, timed = starters[operation]
        inputs = draw_inputs(operation, STEPS[row.step], "cuda")
        error = compare(operation, inputs, start)
        outputs = make_outputs(operation, inputs)
        start(operation, inputs, outputs)
        fused = time_run(partial(timed, operation, inputs, outputs))
        unfused = time_run(partial(operation.compute, *inputs))
        floor = count_bytes(operation, inputs, STEPS[row.step]) / bandwidth
        if isinstance(operation, MoeExperts):
            floor = max(floor, expert_inputs.count_operations(operation, inputs) / products)
        yield replace(row, error=error, seconds=fused, of_floor=floor / fused, unfused=unfused / fused)


def _make_starter(operation: Operation, sm: int, exchange: Callable[[Exchange, Locate, int], None]) -> Start:
    carried = compile_carried(operation, [sm])
    scratch = torch.empty(1, dtype=torch.uint8, device="cuda")

    def start(op: Operation, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        nonlocal scratch
        shapes = [tuple(tensor.shape) for tensor in inputs]
        if (needed := op.scratch_bytes(shapes)) > len(scratch):
            scratch = torch.empty(needed, dtype=torch.uint8, device="cuda")
        addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in (inputs, outputs)]
        stream = int(torch.cuda.current_stream().cuda_stream)
        run_launches(op, carried, shapes, addresses[0], addresses[1], scratch.data_ptr(), stream, exchange)

    return start
