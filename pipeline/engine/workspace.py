"""How TensorRT-RTX places a step's intermediate tensors in memory, repeated.

The compiler gives each kernel's output a *region* that no other live tensor occupies, the largest tensors first. A
region is as large as its largest tensor, a workspace the sum of its regions. That can be read in any engine file
(myelin.py); kernels.py lists what a decoder's kernels read and write, and this module places it by the same rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipeline.engine.myelin import GRANULE

# Every GEMM may use this much for partial sums, whatever its size and target.
GEMM_SCRATCH = 8_192_000
_ALIGNMENT = 128


@dataclass(slots=True)
class Buffer:
    """A tensor in the workspace, from the kernel that writes it to the last that reads it."""

    name: str
    nbytes: int
    born: int
    dies: int


@dataclass(slots=True)
class Schedule:
    """Kernels in order, and the buffers between them."""

    buffers: list[Buffer] = field(default_factory=list)
    step: int = 0

    def kernel(self, *reads: Buffer, **writes: int) -> tuple[Buffer, ...]:
        """One kernel: reads buffers, writes new ones of the given names and bytes."""
        self.step += 1
        for buffer in reads:
            buffer.dies = self.step
        made = tuple(
            Buffer(name=name, nbytes=nbytes, born=self.step, dies=self.step) for name, nbytes in writes.items()
        )
        self.buffers += made
        return made

    def gemm(self, *reads: Buffer, **writes: int) -> tuple[Buffer, ...]:
        """A kernel that also has scratch memory."""
        return self.kernel(*reads, **writes, gemm_scratch=GEMM_SCRATCH)[:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """A planned workspace. `terms`: what each region is sized by, and its bytes, largest first."""

    nbytes: int
    terms: tuple[tuple[str, int], ...]


def place(buffers: Iterable[Buffer]) -> Workspace:
    """Regions for buffers: the largest first, each into the first region that is free while it lives."""
    regions: list[list[Buffer]] = []
    for buffer in sorted(buffers, key=lambda b: -b.nbytes):
        region = next((region for region in regions if _is_free(region, buffer)), None)
        if region is None:
            regions.append([buffer])
        else:
            region.append(buffer)
    terms = tuple((region[0].name, _align(region[0].nbytes, _ALIGNMENT)) for region in regions)
    return Workspace(nbytes=_align(sum(nbytes for _, nbytes in terms), GRANULE), terms=terms)


def _is_free(region: Sequence[Buffer], buffer: Buffer) -> bool:
    return all(buffer.dies < other.born or other.dies < buffer.born for other in region)


def _align(nbytes: int, granule: int) -> int:
    return -(-nbytes // granule) * granule
