"""Steps for operations to work on: ragged batches over scattered blocks, and the tensors around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st

from pipeline.runtime.steps import Chunk, plan_step

# The same examples at every run, whatever the machine does beside it. Each takes a good part of a second.
EXAMPLES = settings(max_examples=15, derandomize=True, deadline=None, database=None)
PLACES = ("slot_ids", "unpad_index", "pad_index", "block_tables")


@dataclass(frozen=True)
class Step:
    """inputs: of the network, as tensors. blocks: of a pool that holds the step. rows: of the step."""

    inputs: dict[str, torch.Tensor]
    blocks: int
    rows: int
    generator: torch.Generator

    def places(self) -> list[torch.Tensor]:
        return [self.inputs[name] for name in PLACES]

    def draw(self, *shape: int, dtype: str = "float32") -> torch.Tensor:
        """Normal numbers; of a pool's quantized type, numbers of its whole range."""
        wide = torch.randn(shape, generator=self.generator)
        if dtype == "int8":
            return (wide * 40).round().clamp(-127, 127).to(torch.int8)
        return wide.to(torch.float8_e4m3fn if dtype == "fp8" else getattr(torch, dtype))

    def scales(self, *shape: int) -> torch.Tensor:
        return 0.01 + 0.05 * torch.rand(shape, generator=self.generator)


def make_step(spans: Sequence[tuple[int, int]], block_size: int, seed: int = 0) -> Step:
    """One sequence for each (tokens in the cache, new tokens); none at all is a step without rows."""
    if not spans:
        full = make_step([(0, 1)], block_size, seed)
        return Step({name: tensor[:0] for name, tensor in full.inputs.items()}, full.blocks, 0, full.generator)
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(start + count) // block_size) for start, count in spans]
    blocks = sum(needed) + 2
    order = (torch.randperm(blocks - 1, generator=generator) + 1).tolist()
    chunks = []
    for (start, count), size in zip(spans, needed, strict=True):
        table, order = order[:size], order[size:]
        chunks.append(Chunk(tokens=[1] * count, start=start, block_table=table, logits="last"))
    planned = plan_step(chunks, block_size=block_size, num_blocks=blocks).inputs
    inputs = {name: torch.from_numpy(value) for name, value in planned.items()}
    return Step(inputs, blocks, sum(count for _, count in spans), generator)


LAYOUTS = st.sampled_from(["dense", "gaps", "turned"])


def lay_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """A copy: dense, every other element of its last dimension's memory, or with the memory of its dimensions turned
    around."""
    if layout == "dense":
        return tensor.clone()
    shape = list(tensor.shape)
    if layout == "gaps":
        made = torch.zeros([*shape[:-1], 2 * shape[-1]], dtype=tensor.dtype)[..., ::2]
    else:
        made = torch.zeros(shape[::-1], dtype=tensor.dtype).permute(*range(len(shape))[::-1])
    return made.copy_(tensor)


@st.composite
def spans(draw: Any, *, longest: int = 40) -> list[tuple[int, int]]:
    """Sequences of a step: fresh prompts, chunks in the middle, single tokens; or no sequence."""
    one = st.tuples(st.integers(0, longest), st.one_of(st.just(1), st.integers(1, 9)))
    found: list[tuple[int, int]] = draw(st.lists(one, max_size=4))
    return found
