"""What the plugins' kernels are held against: inputs of a step's sizes, and the bytes that they must move at least."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import expert_inputs
from benchmarks.loopback import count_rows, draw_tokens
from plugins.moe_experts.operation import MoeExperts
from plugins.operation import Operation, resolve
from plugins.paged_attention.operation import PagedAttention, PagedLatentAttention


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


def count_operations(operation: Operation, inputs: list[torch.Tensor], spans: Sequence[tuple[int, int]]) -> int:
    """Multiplications and additions of its matrix products; 0 where it has none."""
    if isinstance(operation, MoeExperts):
        return expert_inputs.count_operations(operation, inputs)
    if not isinstance(operation, PagedAttention | PagedLatentAttention):
        return 0
    sizes = operation.sizes()
    pairs = sum(count * start + count * (count + 1) // 2 for start, count in spans)  # a row sees keys up to its own
    return 2 * pairs * sizes.heads * (sizes.main + sizes.extra + sizes.value_size)


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
