"""The plugins' kernels on a GPU: against their references, against the card's own speed, against the unfused sequence.

    python -m benchmarks.kernels             # prints a table; 0 if all are right, 1 if one is not, 4 without a GPU
    python -m benchmarks.kernels --record    # and writes what passed into plugins/passed.json, to be committed

Kernels are compiled to PTX and started through the driver, as an engine does. Sizes are those of Llama-8B, V2-Lite and
V3 at decode and at prefill. The reference runs in fp32 on the same GPU; "unfused" is how much longer its operations
take, one after another, as torch starts them; "of floor" is the time that the bytes take at the speed of a copy, or
experts' products at that of torch's largest 16-bit one, whichever is longer, over the time taken. Of what exchanges
rows with other GPUs, the kernels alone are timed. Downloads nothing; minutes. Not yet run on hardware.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks import expert_inputs
from benchmarks.ceilings import measure_copies, measure_products, time_run
from benchmarks.loopback import clear_unwritten, count_rows, draw_tokens, keep_local, leave_out, loop_back
from pipeline.errors import TrtseekError
from plugins.carried import compile_carried
from plugins.compiler import SMS
from plugins.moe_experts.operation import MoeExperts
from plugins.operation import Exchange, Kernel, Operation, resolve
from plugins.passed import TABLE, digest_source
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
Start = Callable[[Operation, list[torch.Tensor], list[torch.Tensor]], None]


def draw_inputs(operation: Operation, spans: Sequence[tuple[int, int]], device: str) -> list[torch.Tensor]:
    """Random tensors of the operation's types and the sizes that a step of these sequences has."""
    from pipeline.runtime.steps import Chunk, plan_step

    if operation.EXCHANGES:
        return draw_tokens(operation, sum(count for _, count in spans), device)
    if isinstance(operation, MoeExperts):
        return expert_inputs.draw_experts(operation, sum(count for _, count in spans), device)
    attributes: dict[str, Any] = operation.attributes()
    size = attributes["block_size"]
    needed = [-(-(start + count) // size) for start, count in spans]
    blocks = sum(needed) + 1
    order, chunks = list(torch.randperm(blocks - 1, generator=torch.Generator().manual_seed(0)) + 1), []
    for (start, count), pages in zip(spans, needed, strict=True):
        table, order = [int(block) for block in order[:pages]], order[pages:]
        chunks.append(Chunk(tokens=[1] * count, start=start, block_table=table, logits="last"))
    planned = plan_step(chunks, block_size=size, num_blocks=blocks).inputs
    rows, longest = sum(count for _, count in spans), max(start + count for start, count in spans)
    generator = torch.Generator(device).manual_seed(1)
    made = []
    for (name, _), dtype in zip(operation.INPUTS, operation.input_types(), strict=False):
        if name in planned:
            made.append(torch.from_numpy(planned[name]).to(device))
            continue
        shape = _shapes(attributes, rows, longest, blocks)[name.removesuffix("?")]
        wide = torch.randn(shape, generator=generator, device=device)
        if name == "scales?":
            made.append(0.02 + 0.02 * wide.abs())
        elif dtype == "int8":
            made.append((40 * wide).round().clamp(-127, 127).to(torch.int8))
        else:
            scaled = wide * shape[-1] ** -0.5 if name == "query" else wide
            made.append(scaled.to(torch.float8_e4m3fn if dtype == "fp8" else getattr(torch, dtype)))
    return made


def _shapes(a: dict[str, Any], rows: int, positions: int, blocks: int) -> dict[str, tuple[int, ...]]:
    """Shapes of inputs that are no step's, by their name in the contract."""
    size, heads = a["block_size"], a["heads"]
    half = a.get("rotary_size", 0) // 2
    shapes: dict[str, tuple[int, ...]] = {"cos": (positions, half), "sin": (positions, half)}
    if "rank" in a:
        width = a["rank"] + a["rotary_size"]
        return shapes | {
            "q": (rows, heads * a.get("q_size", 0)),
            "absorbed": (heads, rows, a["rank"]),
            "content": (rows, a["rank"]),
            "compressed": (rows, width),
            "query": (rows, heads, width),
            "pool": (blocks, 1, size, width),
            "scales": (2,),
        }
    pool = (blocks, a["kv_heads"], size, a["head_size"])
    return shapes | {
        "qkv": (rows, (heads + 2 * a["kv_heads"]) * a["head_size"]),
        "query": (rows, heads, a["head_size"]),
        "k_pool": pool,
        "v_pool": pool,
        "scales": (2, a["kv_heads"]),
    }


def make_outputs(operation: Operation, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    shapes = [tuple(tensor.shape) for tensor in inputs]
    return [
        inputs[output.updates]
        if output.updates is not None
        else torch.zeros(resolve(output, shapes), dtype=getattr(torch, output.dtype), device=inputs[0].device)
        for output in operation.outputs()
    ]


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


def count_bytes(operation: Operation, inputs: list[torch.Tensor], spans: Sequence[tuple[int, int]]) -> int:
    """What must be read and written at least: every input and output once, of the pools only the step's own rows."""
    if operation.EXCHANGES:
        return count_rows(operation, inputs)
    if isinstance(operation, MoeExperts):
        return expert_inputs.count_bytes(operation, inputs)
    rows, cached = sum(count for _, count in spans), sum(start + count for start, count in spans)
    touched = rows if operation.updates() else cached
    total = 0
    for (name, _), tensor in zip(operation.INPUTS, inputs, strict=False):
        per_row = tensor[0].numel() * tensor.element_size() if len(tensor) else 0
        if name.endswith("pool"):
            total += touched * per_row // tensor.shape[2]
        elif name in ("cos", "sin"):
            total += rows * per_row
        else:
            total += tensor.numel() * tensor.element_size()
    results = [o for o in make_outputs(operation, inputs) if not any(o is tensor for tensor in inputs)]
    return total + sum(result.numel() * result.element_size() for result in results)


def record(kernels: Sequence[Kernel], sm: int, device: str, table: Path = TABLE) -> None:
    """Adds a row for each kernel's source, in place of an earlier one of this source, SM and device."""
    today = datetime.now(UTC).date().isoformat()
    new = {digest_source(kernel.module): kernel for kernel in kernels}
    runs = json.loads(table.read_text(encoding="utf-8"))["runs"]
    kept = [run for run in runs if (run["sm"], run["device"]) != (sm, device) or run["source"] not in new]
    kept += [{"source": source, "sm": sm, "device": device, "date": today} for source in sorted(new)]
    table.write_text(json.dumps({"runs": kept}, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write what passed into plugins/passed.json")
    options = parser.parse_args(arguments)
    try:
        return _run(options.record)
    except TrtseekError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _run(keep: bool) -> int:
    from pipeline.runtime.device import CudaDevice

    device = CudaDevice()
    sm = max((sm for sm in SMS if sm <= device.sm), default=device.sm)
    bandwidth, products = measure_copies(), measure_products()
    speeds = f"copies {bandwidth / 1e9:.0f} GB/s, products {products / 1e12:.0f} TFLOP/s"
    print(f"{device.name}, SM{device.sm}, kernels for SM{sm}; {speeds}")
    print(f"{'operation':<24}{'model':<24}{'step':<12}{'error/bound':>12}{'ms':>9}{'of floor':>9}{'unfused':>9}")
    wrong: set[str] = set()
    seen: list[Kernel] = []
    for model, operation, sms in list_subjects():
        if sm not in sms:
            continue
        operation = keep_local(operation)
        start, timed = _starter(operation, sm, loop_back), _starter(operation, sm, leave_out)
        for name, spans in STEPS.items():
            inputs = draw_inputs(operation, spans, "cuda")
            share = compare(operation, inputs, start)
            outputs = make_outputs(operation, inputs)
            start(operation, inputs, outputs)
            fused = time_run(lambda: timed(operation, inputs, outputs))  # noqa: B023 (run at once)
            unfused = time_run(lambda: operation.compute(*inputs))  # noqa: B023
            floor = count_bytes(operation, inputs, spans) / bandwidth
            if isinstance(operation, MoeExperts):
                floor = max(floor, expert_inputs.count_operations(operation, inputs) / products)
            print(
                f"{operation.NAME:<24}{model:<24}{name:<12}{share:>12.3f}{1e3 * fused:>9.3f}{floor / fused:>8.0%} "
                f"{unfused / fused:>7.1f}x",
                flush=True,
            )
            if not share <= 1:
                wrong.update(kernel.module for kernel in operation.kernels())
        seen += operation.kernels()
    if keep:
        record([kernel for kernel in seen if kernel.module not in wrong], sm, device.name)
    return 1 if wrong else 0


def _starter(operation: Operation, sm: int, exchange: Callable[[Exchange, Locate, int], None]) -> Start:
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


if __name__ == "__main__":
    sys.exit(main())
