"""The runner of a built TensorRT engine: bound buffers, KV pools updated in place, a CUDA graph per generation batch.

What touches CUDA is in device.py, what touches TensorRT in loaded_engine.py. Not yet run on hardware.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.engine.description import EngineDescription, TensorDescription
from pipeline.errors import CompatibilityError
from pipeline.network import inputs as ports
from pipeline.runtime.buffers import StepBuffers
from pipeline.runtime.device import CudaDevice, Device
from pipeline.runtime.launches import Launches
from pipeline.runtime.loaded_engine import LoadedEngine
from pipeline.runtime.profiles import (
    GENERATION,
    StepProfile,
    choose_profile,
    measure,
    pad_generation,
    read_profiles,
    round_batch,
    round_width,
    split_rows,
)
from pipeline.runtime.runner import Blocks, Inputs

if TYPE_CHECKING:
    import torch


class EngineRunner:
    """engine: the file; description: its engine.json. trt, device: the TensorRT module and the GPU, by default those
    that the description names and torch's current one. weights_fraction, communicator: see LoadedEngine. graphs:
    whether generation steps run as CUDA graphs. Of a tensor parallel model, one rank's: every rank has the logits.

    Raises CompatibilityError where the engine cannot run here, with the reason.
    """

    def __init__(
        self,
        engine: Path,
        description: EngineDescription,
        *,
        trt: Any = None,
        device: Device | None = None,
        weights_fraction: float = 1.0,
        communicator: int | None = None,
        graphs: bool = True,
    ) -> None:
        outputs = {tensor.name: tensor for tensor in description.outputs}
        if ports.LOGITS not in outputs:
            raise CompatibilityError(
                f"{description.file}, with the outputs {', '.join(sorted(outputs))}, gives no logits",
                hint="only engines of whole networks are served",
            )
        if device is None:
            device = CudaDevice()
        if trt is None:
            from pipeline.engine.backends import find_backend

            trt = find_backend(description.backend).load()
        self.description, self.device = description, device
        self.profiles = read_profiles(description.profiles)
        self._pool_specs = [t for t in description.inputs if t.name + ports.POOL_OUTPUT_SUFFIX in outputs]
        self._vocabulary = outputs[ports.LOGITS].shape[-1]
        self._graphs = graphs
        self._loaded = LoadedEngine(
            engine, description, trt, device, weights_fraction=weights_fraction, communicator=communicator
        )
        self._num_blocks = 0
        self._buffers: dict[int, StepBuffers] = {}
        self._launches: Launches | None = None
        self.pools: Blocks = {}

    @property
    def block_bytes(self) -> int:
        """Of one block in all pools."""
        import torch

        return sum(math.prod(spec.shape[1:]) * int(getattr(torch, _held(spec)).itemsize) for spec in self._pool_specs)

    def count_blocks(self, fraction: float) -> int:
        """Blocks that fit into this share of the memory that is free now, at most as many as the engine takes. Raises
        CompatibilityError where they do not hold one sequence of the greatest length."""
        limits = self.description.limits
        free, total = self.device.memory()
        blocks = min(int(free * fraction) // self.block_bytes, limits.max_blocks)
        needed = limits.table_width(limits.max_seq_len) + 1
        if blocks < needed:
            raise CompatibilityError(
                f"{fraction:.0%} of the {free} bytes that are free of {total} on {self.device.name} hold {blocks} KV "
                f"blocks of {self.block_bytes} bytes, and one sequence of {limits.max_seq_len} tokens needs {needed}",
                hint="end what else runs on the GPU, raise kv_cache_free_gpu_mem_fraction, or build for shorter ones",
            )
        return blocks

    def allocate(self, blocks: int) -> None:
        most = self.description.limits.max_blocks
        if not 2 <= blocks <= most:
            raise CompatibilityError(
                f"{blocks} blocks: block 0 is padding, so at least 2 are needed, and the engine takes up to {most}"
            )
        if blocks == self._num_blocks:  # addresses stay, and with them contexts and graphs
            with self.device.scope():
                for pool in self.pools.values():
                    pool.zero_()
            return
        self._num_blocks, self._launches, self.pools, self._buffers = 0, None, {}, {}
        self.device.release()
        for spec in self._pool_specs:
            what = f"{spec.name}, one of {len(self._pool_specs)} pools of {blocks} KV blocks,"
            self.pools[spec.name] = self.device.allocate((blocks, *spec.shape[1:]), _held(spec), what)
        rows = max(profile.most["N"] for profile in self.profiles)
        self._logits = self.device.allocate((rows, self._vocabulary), "float32", "room for logits")
        for profile in self.profiles:
            sizes = {**profile.most, "NB": blocks}
            self._buffers[profile.index] = StepBuffers(self.device, sizes, f"room for the inputs of {profile.name}")
        outputs = {ports.LOGITS: self._logits}
        for name, pool in self.pools.items():  # an update and its pool share one address
            outputs |= {name: pool, name + ports.POOL_OUTPUT_SUFFIX: pool}
        self._launches = Launches(
            self._loaded,
            self.device,
            self.profiles,
            {index: {**buffers.tensors, **outputs} for index, buffers in self._buffers.items()},
            {name: tuple(pool.shape) for name, pool in self.pools.items()},
            capture=self._graphs and self._loaded.capturable and not self._loaded.captures_itself,
        )
        self._num_blocks = blocks

    def step(self, inputs: Inputs) -> torch.Tensor:
        import torch

        sizes = measure(inputs)
        if sizes["NB"] != self._num_blocks:
            raise CompatibilityError(
                f"a step over {sizes['NB']} blocks, and {self._num_blocks} are allocated",
                hint="allocate first, and plan steps over as many",
            )
        profile = choose_profile(self.profiles, sizes)
        parts = [self._run(profile, sizes, part) for part in split_rows(inputs, profile.most["N"])]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
        with self.device.scope():
            for pool in self.pools.values():
                pool[targets] = pool[sources]

    def read_blocks(self, blocks: Sequence[int]) -> Blocks:
        with self.device.scope():
            return {name: pool[list(blocks)].cpu() for name, pool in self.pools.items()}

    def write_blocks(self, blocks: Sequence[int], content: Blocks) -> None:
        with self.device.scope():
            for name, pool in self.pools.items():
                pool[list(blocks)] = content[name].to(pool.device)

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        with self.device.scope():
            for pool in self.pools.values():
                pool[list(blocks)] = 0

    def _run(self, profile: StepProfile, sizes: Mapping[str, int], inputs: Inputs) -> torch.Tensor:
        assert self._launches is not None  # blocks are allocated
        rows = len(inputs["logit_rows"])
        if profile.phase == GENERATION:
            batch = round_batch(sizes["B"], profile.most["B"], self.description.limits.block_size)
            inputs = pad_generation(inputs, batch=batch, width=round_width(sizes["MB"], profile.most["MB"]))
        with self.device.scope():
            self._launches.run(profile.index, self._buffers[profile.index].upload(inputs))
            return self._logits[:rows].clone()  # the next step writes to the same place


def _held(pool: TensorDescription) -> str:
    """torch's type of a pool's memory, FP8 as bytes: only the engine reads it, and torch cannot move it otherwise."""
    return "uint8" if pool.dtype == "fp8" else pool.dtype
