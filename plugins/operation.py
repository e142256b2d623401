"""What a plugin is, apart from TensorRT and Triton: its contract as data, and its kernels' launches as a plan.

An operation is a frozen dataclass whose fields are its attributes. From them follow its inputs' types, its outputs, the
kernels that an engine must carry, and, given the shapes of a step, the launches. The same plan is what an engine starts
on a GPU and what the tests run in Triton's interpreter on the CPU. Nothing here imports torch, Triton or TensorRT.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from pipeline.errors import CompatibilityError

Shape = Sequence[int]
# Spelling of types in programs -> Triton's pointer to them.
POINTERS = {
    "float32": "*fp32",
    "float16": "*fp16",
    "bfloat16": "*bf16",
    "int32": "*i32",
    "int8": "*i8",
    "fp8": "*fp8e4nv",
}
BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "int8": 1, "fp8": 1}
SCRATCH_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Size:
    """The size of one dimension of one input, or a multiple of it."""

    input: int
    dim: int
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """`updates`: the input whose memory this output is; None for memory of its own."""

    shape: tuple[int | Size, ...]
    dtype: str
    updates: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One variant of a Triton kernel.

    parameters: (name, Triton's type) of what a launch passes, in the function's order. constants: the rest of the
    function's parameters, compiled in; a parameter `SM` is given the SM that is compiled for. warps: of 32 threads.
    stages: of loads under way in a loop.
    """

    module: str
    function: str
    parameters: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int
    stages: int = 2

    @property
    def plugin(self) -> str:
        """The folder of the plugin that it belongs to."""
        return self.module.split(".")[-2]


@dataclass(frozen=True, slots=True)
class Input:
    """A launch's argument: the memory of an input."""

    index: int


@dataclass(frozen=True, slots=True)
class Result:
    """A launch's argument: the memory of an output, from `offset` bytes on."""

    index: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Scratch:
    """A launch's argument: the operation's workspace, from `offset` bytes on."""

    offset: int


Memory = Input | Result | Scratch
Argument = Memory | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch of `kernel` over `grid` programs, with one argument per parameter, in order."""

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Work of the host between launches: rows go from every rank of a group to every other, and to itself.

    name: under which its bytes are counted. first, ranks: the group, ranks [first, first + ranks) of the world. source:
    rows for rank 0 of the group, then for rank 1, … target: rows from rank 0, from rank 1, … row_bytes: of one row.
    counts: [2, ranks] int32, how many rows go to each rank and come from each; None for one to each. The host reads
    them, and so waits for what was launched before. reverse: the second row of `counts` says what goes, the first what
    comes. most: rows that `target` has room for.
    """

    name: str
    first: int
    ranks: int
    source: Memory
    target: Memory
    row_bytes: int
    most: int
    counts: Memory | None = None
    reverse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Base of all operations. A subclass's fields are numbers, strings and booleans: its attributes.

    NAME: the plugin's name in engines, and the kind of its nodes in programs. VERSION: of its contract; an engine of
    another version is refused. LOWERING: the key under stages.build.lowering that chooses it. INPUTS: name and number
    of dimensions of each input, in order; "name?" is an input that not every set of attributes has, at the end.
    EXCHANGES: whether `launches` has an Exchange, so that no CUDA graph can hold it.

    Kernels take dense memory in the order of the shape, as TensorRT hands it out (its format LINEAR): they know sizes,
    and no strides. Who starts them from torch's tensors asks `check_dense` first; `compute` takes any strides.
    STORED: inputs that are weights, which the reference takes as they are stored, in exact mode too.
    """

    NAME: ClassVar[str]
    VERSION: ClassVar[str] = "1"
    LOWERING: ClassVar[str]
    INPUTS: ClassVar[tuple[tuple[str, int], ...]]
    EXCHANGES: ClassVar[bool] = False
    STORED: ClassVar[tuple[int, ...]] = ()

    def input_names(self) -> tuple[str, ...]:
        """The inputs that these attributes have."""
        return tuple(name.removesuffix("?") for name, _ in self.INPUTS[: len(self.input_types())])

    def input_types(self) -> tuple[str, ...]:
        """Type of each input, in programs' spelling."""
        raise NotImplementedError

    def outputs(self) -> tuple[Output, ...]:
        raise NotImplementedError

    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel that `launches` may name."""
        raise NotImplementedError

    def scratch_bytes(self, shapes: Sequence[Shape]) -> int:
        """Workspace for steps whose inputs are no larger than these."""
        return 0

    def launches(self, shapes: Sequence[Shape]) -> tuple[Launch | Exchange, ...]:
        """What runs, in order, for inputs of these shapes; nothing where there is nothing to do."""
        raise NotImplementedError

    def compute(self, *inputs: Any) -> tuple[Any, ...]:
        """The reference: torch tensors in, outputs out; an output that updates an input is that very tensor.

        Floats may come wider than `input_types` says (the interpreter's exact mode): the result is as wide as they."""
        raise NotImplementedError

    def check_dense(self, inputs: Sequence[Any]) -> None:
        """Raises CompatibilityError for a torch tensor that kernels would misread: a view with gaps, or transposed."""
        for name, tensor in zip(self.input_names(), inputs, strict=True):
            if not tensor.is_contiguous():
                raise CompatibilityError(
                    f"{self.NAME}: {name} {list(tensor.shape)} has strides {list(tensor.stride())}, and kernels read "
                    "dense memory",
                    hint="pass tensor.contiguous(), or for a pool that is updated the dense pool itself",
                )

    def without_rounding(self) -> Operation:
        """The operation that leaves its inputs as they are, where it rounds them to multiply them in fewer bits."""
        return self

    def with_wide_cache(self) -> Operation:
        """The operation over pools of the model's type, without their scales, its last input, where it has any."""
        return self

    def updates(self) -> tuple[int, ...]:
        """The inputs that are written to."""
        return tuple(output.updates for output in self.outputs() if output.updates is not None)

    def attributes(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps({"version": self.VERSION, **self.attributes()}, sort_keys=True)


def resolve(output: Output, shapes: Sequence[Shape]) -> tuple[int, ...]:
    """An output's shape for inputs of these shapes."""
    return tuple(shapes[s.input][s.dim] * s.times if isinstance(s, Size) else s for s in output.shape)


def bind(kernel: Kernel, grid: tuple[int, int, int], arguments: Mapping[str, Argument]) -> tuple[Launch, ...]:
    """The launch with arguments by name; none over an empty grid. A missing or unknown name is a mistake of the
    operation: KeyError."""
    names = [name for name, _ in kernel.parameters]
    if unknown := arguments.keys() - set(names):
        raise KeyError(f"{kernel.function} has no parameters {sorted(unknown)}")
    if 0 in grid:
        return ()
    return (Launch(kernel=kernel, grid=grid, arguments=tuple(arguments[name] for name in names)),)


def power_of_two(value: int) -> int:
    """The smallest power of two that holds `value`: sizes of Triton's tiles."""
    return 1 << max(value - 1, 0).bit_length()


def divide_up(value: int, by: int) -> int:
    return -(-value // by)
