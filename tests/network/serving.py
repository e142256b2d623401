"""Runs a program over steps planned as a server would: prompts in chunks, single tokens and both at once, a batch that
changes, block tables scrambled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipeline.interpreter.interpreter import Interpreter
from pipeline.interpreter.numerics import Mode
from pipeline.interpreter.ranks import RankInterpreter
from pipeline.network.inputs import HIDDEN_STATES, HIDDEN_STATES_OUT
from pipeline.network.readback import Program
from pipeline.runtime.steps import Chunk, plan_step
from pipeline.sharding import Rank

# Tokens per sequence (in order of sequences; 0: not in this step), step by step.
STEPS: list[tuple[int, ...]] = [
    (13, 5, 0),  # two prompts begin
    (11, 9, 1),  # they go on, a third begins with one token
    (0, 1, 17),  # one pauses; decoding mixed with a prompt
    (1, 1, 1),  # everything decodes
    (1, 0, 1),
    (40, 1, 2),
    (1, 1, 1),
]


def lengths(steps: Sequence[tuple[int, ...]] = STEPS) -> list[int]:
    return [sum(column) for column in zip(*steps, strict=True)]


def prompts(vocab_size: int, steps: Sequence[tuple[int, ...]] = STEPS, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, vocab_size, length) for length in lengths(steps)]


def serve(
    *programs: Program,
    sequences: Sequence[np.ndarray],
    steps: Sequence[tuple[int, ...]] = STEPS,
    mode: Mode = "exact",
    block_size: int = 8,
    offsets: Sequence[int] = (0, 0, 0),
    taps: Sequence[str] = (),
    rank: Rank | None = None,
) -> list[dict[str, torch.Tensor]]:
    """For each sequence, its logits [length, V] and taps [length, …]. Several programs are slices of one model, each
    fed the hidden states of the one before; with `rank` the program is this process' part of a parallel model. offsets:
    added to a sequence's positions, not to its slots."""
    interpreters: list[Any] = [Interpreter(program, mode=mode) for program in programs]
    if rank is not None:
        interpreters = [RankInterpreter(interpreter, rank) for interpreter in interpreters]
    tables, num_blocks = _scatter([len(sequence) for sequence in sequences], block_size)
    pools = {
        spec.name: torch.zeros(num_blocks, *spec.shape[1:], dtype=_pool_type(spec.dtype, mode))
        for program in programs
        for spec in program.inputs
        if "_pool_" in spec.name
    }
    position = [0] * len(sequences)
    found: list[dict[str, list[torch.Tensor]]] = [{} for _ in sequences]
    for step in steps:
        members = [index for index, count in enumerate(step) if count]
        chunks = [
            Chunk(
                tokens=sequences[index][position[index] : position[index] + step[index]],
                start=position[index],
                block_table=tables[index],
                logits="all",
            )
            for index in members
        ]
        plan = plan_step(chunks, block_size=block_size, num_blocks=num_blocks)
        feeds = {name: torch.from_numpy(value) for name, value in plan.inputs.items()}
        rows = [feeds["pad_index"][place, : step[index]].long() for place, index in enumerate(members)]
        for own, index in zip(rows, members, strict=True):
            feeds["position_ids"][own] += offsets[index]
        results: dict[str, torch.Tensor] = {}
        for program, interpreter in zip(programs, interpreters, strict=True):
            wanted = {spec.name for spec in program.inputs} | ({"slot_ids"} if rank is not None else set())
            tensors = {**feeds, **pools, HIDDEN_STATES: results.get(HIDDEN_STATES_OUT)}
            known = [tap for tap in taps if tap in program.tensors]
            results |= interpreter.run({name: tensors[name] for name in wanted}, taps=known)
        for place, (own, index) in enumerate(zip(rows, members, strict=True)):
            owned = torch.from_numpy(plan.logit_owner[:, 0] == place)
            if "logits" in results:
                found[index].setdefault("logits", []).append(results["logits"][owned])
            for tap in taps:
                found[index].setdefault(tap, []).append(results[tap][own])
            position[index] += step[index]
    return [{name: torch.cat(parts) for name, parts in one.items()} for one in found]


def _scatter(lengths: Sequence[int], block_size: int) -> tuple[list[np.ndarray], int]:
    """A block table per sequence, over blocks in random order, and the number of blocks."""
    needed = [-(-length // block_size) for length in lengths]
    num_blocks = sum(needed) + 4
    blocks = np.random.default_rng(1).permutation(num_blocks - 1) + 1
    ends = np.cumsum(needed)
    return [blocks[end - count : end] for count, end in zip(needed, ends, strict=True)], num_blocks


def _pool_type(dtype: str, mode: Mode) -> torch.dtype:
    quantized = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
    held: torch.dtype = quantized.get(dtype) or (torch.float32 if mode == "exact" else getattr(torch, dtype))
    return held


def reference_logits(model: torch.nn.Module, sequence: np.ndarray, offset: int = 0) -> torch.Tensor:
    """[length, V] of transformers, the whole sequence at once."""
    ids = torch.from_numpy(sequence)[None]
    with torch.inference_mode():
        logits: torch.Tensor = model(ids, position_ids=torch.arange(len(sequence))[None] + offset).logits[0]
    return logits
