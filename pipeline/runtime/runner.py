"""What executes steps: a runner holds the weights and the block pools, and computes one step's logits.

The executor above sees only this: the interpreter on a CPU, an engine on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from pipeline.errors import CompatibilityError
from pipeline.network import inputs as ports

if TYPE_CHECKING:
    import torch

    from pipeline.interpreter.numerics import Mode
    from pipeline.network.program import Program
    from pipeline.sharding import Rank

Inputs = Mapping[str, npt.NDArray[Any]]
Blocks = dict[str, "torch.Tensor"]


def as_bytes(pool: torch.Tensor) -> torch.Tensor:
    """The same memory, FP8 as bytes: torch cannot move it otherwise."""
    import torch

    return pool.view(torch.uint8) if pool.is_floating_point() and pool.itemsize == 1 else pool


class Pools(Protocol):
    """Block ids run from 0 to the number allocated; block 0 is padding and belongs to no sequence."""

    def allocate(self, blocks: int) -> None:
        """Makes every pool anew with this many blocks, all zero: a pool must stay finite, since masked rows still
        multiply (0 * NaN)."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies blocks (from, to) in every pool; all are read before any is written."""

    def read_blocks(self, blocks: Sequence[int]) -> Blocks:
        """The content of blocks on the host, by pool: [len(blocks), heads, block_size, width], FP8 as bytes."""

    def write_blocks(self, blocks: Sequence[int], content: Blocks) -> None:
        """Puts back what `read_blocks` gave, into these blocks."""

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        """After logits that are not finite: nothing of them may stay in the pools."""


class Runner(Pools, Protocol):
    """Of a whole model."""

    def step(self, inputs: Inputs) -> torch.Tensor:
        """One step: the int32 arrays of `steps.plan_step` → logits [N, V] float32 on the runner's device. The pools
        are updated in place."""


class RankRunner(Pools, Protocol):
    """Of one rank of a parallel model."""

    def step(self, inputs: Inputs) -> torch.Tensor | None:
        """As Runner.step, of all ranks together; None where the rank is of an earlier pipeline stage."""


class InterpreterPools:
    """The block pools of a network's program on the CPU."""

    def __init__(
        self, program: Program, *, mode: Mode, optimize: bool = True, resident_bytes: int | None = None
    ) -> None:
        from pipeline.interpreter.interpreter import Interpreter

        outputs = {spec.name for spec in program.outputs}
        self.interpreter = Interpreter(program, mode=mode, optimize=optimize, resident_bytes=resident_bytes)
        self._pool_specs = [spec for spec in program.inputs if spec.name + ports.POOL_OUTPUT_SUFFIX in outputs]
        self.pools: Blocks = {}
        self._movable: Blocks = {}  # the same memory, of types that torch can move

    def allocate(self, blocks: int) -> None:
        import torch

        if blocks < 2:
            raise CompatibilityError(f"{blocks} blocks: block 0 is padding, so at least 2 are needed")
        self.pools, self._movable = {}, {}  # the old ones go before the new ones come
        for spec in self._pool_specs:
            held = self.interpreter.numerics.held(spec.dtype)
            self.pools[spec.name] = torch.zeros((blocks, *spec.shape[1:]), dtype=held)
        self._movable = {name: as_bytes(pool) for name, pool in self.pools.items()}

    def feed(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """A step's inputs and the pools, as the interpreter takes them."""
        import torch

        return {**{name: torch.from_numpy(array) for name, array in inputs.items()}, **self.pools}

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = [a for a, _ in pairs], [b for _, b in pairs]
        for pool in self._movable.values():
            pool[targets] = pool[sources]

    def read_blocks(self, blocks: Sequence[int]) -> Blocks:
        return {name: pool[list(blocks)] for name, pool in self._movable.items()}

    def write_blocks(self, blocks: Sequence[int], content: Blocks) -> None:
        for name, pool in self._movable.items():
            pool[list(blocks)] = content[name]

    def zero_blocks(self, blocks: Sequence[int]) -> None:
        for pool in self._movable.values():
            pool[list(blocks)] = 0


class InterpreterRunner(InterpreterPools):
    """Steps of a whole network's program on the CPU. `mode` and the options are `interpreter.Interpreter`'s."""

    def __init__(
        self, program: Program, *, mode: Mode, optimize: bool = True, resident_bytes: int | None = None
    ) -> None:
        outputs = {spec.name for spec in program.outputs}
        if ports.LOGITS not in outputs:
            raise CompatibilityError(
                f"a network with the outputs {', '.join(sorted(outputs))} gives no logits",
                hint="a slice of layers is run with the interpreter itself",
            )
        super().__init__(program, mode=mode, optimize=optimize, resident_bytes=resident_bytes)

    def step(self, inputs: Inputs) -> torch.Tensor:
        return self.run(inputs)[ports.LOGITS]

    def run(self, inputs: Inputs, *, taps: Sequence[str] = ()) -> dict[str, torch.Tensor]:
        """A step with everything it makes: the outputs, and any other tensors by name."""
        return self.interpreter.run(self.feed(inputs), taps=taps)


class RankInterpreterRunner(InterpreterPools):
    """The same of one rank's program (RankRunner), in a process that has joined the others (interpreter.ranks)."""

    def __init__(self, program: Program, rank: Rank, *, mode: Mode, resident_bytes: int | None = None) -> None:
        from pipeline.interpreter.ranks import RankInterpreter

        super().__init__(program, mode=mode, resident_bytes=resident_bytes)
        self._rank = RankInterpreter(self.interpreter, rank)

    def step(self, inputs: Inputs) -> torch.Tensor | None:
        return self._rank.run(self.feed(inputs)).get(ports.LOGITS)
