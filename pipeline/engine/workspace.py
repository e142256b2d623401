"""How TensorRT-RTX places a step's intermediate tensors in memory, repeated.

The compiler gives each kernel's output a *region* that no other live tensor occupies, the largest tensors first. A
region is as large as its largest tensor, a workspace the sum of its regions. That can be read in any engine file
(myelin.py); kernels.py lists what a decoder's kernels read and write, and this module places it by the same rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pipeline.engine.myelin import GRANULE

# Every GEMM may use this much for partial sums, whatever its size and target.
GEMM_SCRATCH = 8_192_000
# And GEMMs beside a plugin's experts this much each, which shows where nothing else is large.
SIDE_SCRATCH = 2_048_000
_ALIGNMENT = 128


@dataclass(slots=True)
class Buffer:
    """A tensor in the workspace, from the kernel that writes it to the last that reads it. `stream`: (fork, stream) of
    its kernel where several streams run at once: then nothing is known about the order between them."""

    name: str
    nbytes: int
    born: int
    dies: int
    stream: tuple[int, int] | None = None

    @property
    def life(self) -> int:
        """A bit for each step at which it is alive."""
        return (1 << (self.dies + 1)) - (1 << self.born)


@dataclass(slots=True)
class Schedule:
    """Kernels in order, and the buffers between them."""

    buffers: list[Buffer] = field(default_factory=list)
    step: int = 0
    single: bool = False  # everything on one stream
    _forks: int = 0
    _stream: tuple[int, int] | None = None

    def kernel(self, *reads: Buffer, **writes: int) -> tuple[Buffer, ...]:
        """One kernel: reads buffers, writes new ones of the given names and bytes."""
        self.step += 1
        for buffer in reads:
            buffer.dies = self.step
        made = tuple(
            Buffer(name=name, nbytes=nbytes, born=self.step, dies=self.step, stream=self._stream)
            for name, nbytes in writes.items()
        )
        self.buffers += made
        return made

    def gemm(self, *reads: Buffer, **writes: int) -> tuple[Buffer, ...]:
        """A kernel that also has scratch memory."""
        return self.kernel(*reads, **writes, gemm_scratch=GEMM_SCRATCH)[:-1]

    def fork(self) -> None:
        """The kernels from here to the join run on several streams; the first of them begins."""
        if self.single:
            return
        self._forks += 1
        self._stream = (self._forks, 0)

    def next_stream(self) -> None:
        """The kernels from here on run on another stream of the fork; without one, on the only stream there is."""
        if self._stream:
            self._stream = (self._stream[0], self._stream[1] + 1)

    def join(self) -> None:
        self._stream = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """A planned workspace. `terms`: what each region is sized by, and its bytes, largest first."""

    nbytes: int
    terms: tuple[tuple[str, int], ...]


@dataclass(slots=True)
class _Region:
    name: str
    nbytes: int
    life: int = 0  # a bit for each step at which something in it is alive
    born: int = 0  # … at which something in it is made
    beside: int = 0  # … of the streams that run beside those of its buffers

    def is_free(self, life: int, born: int, beside: int) -> bool:
        """For a buffer: bits of when it is alive, when it is made, and of the streams beside it."""
        return not (life & self.life or born & self.beside or beside & self.born)

    def take(self, buffer: Buffer, beside: int) -> None:
        self.life |= buffer.life
        self.born |= 1 << buffer.born
        self.beside |= beside


def place(buffers: Iterable[Buffer]) -> Workspace:
    """Regions for buffers: the largest first (of equals the last made), each into the first that is free meanwhile."""
    buffers = sorted(buffers, key=lambda b: (-b.nbytes, -b.born))
    beside = _steps_beside(buffers)
    regions: list[_Region] = []
    for buffer in buffers:
        others, life, born = beside.get(buffer.stream, 0), buffer.life, 1 << buffer.born
        region = next((region for region in regions if region.is_free(life, born, others)), None)
        if region is None:
            region = _Region(name=buffer.name, nbytes=align(buffer.nbytes, _ALIGNMENT))
            regions.append(region)
        region.take(buffer, others)
    terms = tuple((region.name, region.nbytes) for region in regions)
    return Workspace(nbytes=align(sum(nbytes for _, nbytes in terms), GRANULE), terms=terms)


def _steps_beside(buffers: Iterable[Buffer]) -> dict[tuple[int, int] | None, int]:
    """For each stream of each fork, the steps of the other streams of that fork."""
    steps: dict[tuple[int, int], int] = {}
    for buffer in buffers:
        if buffer.stream:
            steps[buffer.stream] = steps.get(buffer.stream, 0) | 1 << buffer.born
    forks: dict[int, int] = {}
    for (fork, _), taken in steps.items():
        forks[fork] = forks.get(fork, 0) | taken
    return {stream: forks[stream[0]] & ~taken for stream, taken in steps.items()}


def align(nbytes: int, granule: int) -> int:
    return -(-nbytes // granule) * granule
