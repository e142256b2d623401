"""The ranks of a parallel model, by the convention of TensorRT-LLM, vLLM and SGLang.

There are tensor x pipeline ranks, numbered pipeline stage by pipeline stage. `expert` divides `tensor`: a layer's
experts are spread over `expert` ranks of the tensor group, and each expert's columns over tensor / expert of them
(moe_tp x moe_ep = tp). EP2 is {tensor: 2, expert: 2}, TP2 x EP2 is {tensor: 4, expert: 2}.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.errors import CompatibilityError

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Parallel:
    """Sizes, all 1 or more. Raises CompatibilityError where `expert` does not divide `tensor`."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        if min(self.tensor, self.pipeline, self.expert) < 1:
            raise CompatibilityError(f"parallel sizes {self} must be positive", hint="see target.parallel")
        if self.tensor % self.expert:
            raise CompatibilityError(
                f"expert parallel size {self.expert} does not divide tensor parallel size {self.tensor}: experts are "
                "spread over ranks of the tensor group",
                hint=f"expert sizes that would work: {', '.join(map(str, list_divisors(self.tensor)))}; two-way expert "
                "parallelism alone is tensor: 2, expert: 2",
            )

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline

    @property
    def moe_tensor(self) -> int:
        """Over how many ranks each expert's columns are spread."""
        return self.tensor // self.expert

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(Rank(self, index) for index in range(self.world))


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the ranks of `parallel`. Raises CompatibilityError for an index that there is not."""

    parallel: Parallel = Parallel()
    index: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.parallel.world:
            raise CompatibilityError(
                f"rank {self.index} is none of {self.parallel.world}", hint="ranks count from 0: pipeline by tensor"
            )

    @property
    def pipeline(self) -> int:
        return self.index // self.parallel.tensor

    @property
    def tensor(self) -> int:
        return self.index % self.parallel.tensor

    @property
    def moe_expert(self) -> int:
        """Its place among the ranks that share out a layer's experts."""
        return self.tensor % self.parallel.expert

    @property
    def moe_tensor(self) -> int:
        """Its place among the ranks that share out one expert's columns."""
        return self.tensor // self.parallel.expert

    @property
    def tensor_group(self) -> tuple[int, ...]:
        """The ranks of its pipeline stage, itself among them, in order of `tensor`."""
        first = self.pipeline * self.parallel.tensor
        return tuple(range(first, first + self.parallel.tensor))

    @property
    def expert_group(self) -> tuple[int, ...]:
        """The ranks that together have all experts, of the columns that this one has, in order of `moe_expert`."""
        first = self.index - self.moe_expert
        return tuple(range(first, first + self.parallel.expert))


def layers(architecture: Architecture, rank: Rank) -> tuple[int, int]:
    """The decoder layers [first, last) of a rank's pipeline stage; where they do not come out even, the first stages
    have one more."""
    stages = rank.parallel.pipeline
    size, more = divmod(architecture.num_layers, stages)
    if not size:
        raise CompatibilityError(
            f"pipeline parallel size {stages} is more than the model's {architecture.num_layers} decoder layers",
            hint=f"pipeline sizes that would work: 1 to {architecture.num_layers}",
        )
    first = rank.pipeline * size + min(rank.pipeline, more)
    return first, first + size + (rank.pipeline < more)


def experts(architecture: Architecture, rank: Rank) -> range:
    """The routed experts of a rank; none of a model without. Their number must divide (see divisions)."""
    count = architecture.experts.num_routed if architecture.experts is not None else 0
    size = count // rank.parallel.expert
    return range(rank.moe_expert * size, (rank.moe_expert + 1) * size)


def list_divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
