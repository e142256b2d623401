"""What parallel sizes must divide, and which sizes would."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pipeline.errors import CompatibilityError
from pipeline.sharding.ranks import Parallel, list_divisors

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture

Axis = Literal["tensor", "moe_tensor", "expert"]
# How a dimension is spread: over how many ranks, what messages call that, and the setting that decides it.
WAYS: dict[Axis, tuple[Callable[[Parallel], int], str, str]] = {
    "tensor": (lambda p: p.tensor, "tensor parallel size", "tensor"),
    "moe_tensor": (lambda p: p.moe_tensor, "tensor / expert parallel size", "tensor"),
    "expert": (lambda p: p.expert, "expert parallel size", "expert"),
}


@dataclass(frozen=True, slots=True)
class Division:
    """`count` things, called `what`, that are spread over the ranks of an axis and never cut."""

    axis: Axis
    count: int
    what: str

    @property
    def setting(self) -> str:
        """Of target.parallel: where to look."""
        return WAYS[self.axis][2]

    def ways(self, parallel: Parallel) -> int:
        return WAYS[self.axis][0](parallel)

    def holds(self, parallel: Parallel) -> bool:
        return self.count % self.ways(parallel) == 0

    def describe(self, parallel: Parallel) -> str:
        """What is wrong where it does not hold."""
        return f"{WAYS[self.axis][1]} {self.ways(parallel)} does not divide the model's {self.count} {self.what}"


def divisions(architecture: Architecture) -> list[Division]:
    """What an architecture's sizes ask of any Parallel. MLA's latent is one head that every rank holds."""
    a = architecture
    found = [Division("tensor", a.num_heads, "attention heads (num_attention_heads)")]
    if a.latent is None:
        found.append(Division("tensor", a.num_kv_heads, "key/value heads (num_key_value_heads)"))
    found.append(Division("tensor", a.vocab_size, "tokens (vocab_size)"))
    if not all(a.is_routed(layer) for layer in range(a.num_layers)):
        found.append(Division("tensor", a.intermediate_size, "MLP columns (intermediate_size)"))
    if a.experts is None:
        found.append(Division("expert", 1, "MLP per layer (no routed experts)"))
        return found
    width, shared = a.experts.intermediate_size, a.experts.num_shared
    if shared:
        found.append(
            Division("tensor", width * shared, "shared expert columns (moe_intermediate_size * n_shared_experts)")
        )
    found.append(Division("moe_tensor", width, "expert columns (moe_intermediate_size)"))
    found.append(Division("expert", a.experts.num_routed, "routed experts (n_routed_experts)"))
    return found


def find_undivided(parallel: Parallel, asked: Iterable[Division]) -> Division | None:
    """The first division that does not hold."""
    return next((division for division in asked if not division.holds(parallel)), None)


def working_sizes(parallel: Parallel, setting: str, asked: Sequence[Division]) -> list[int]:
    """The values of a setting, "tensor" or "expert", that divide all that is asked, the other settings as they are."""
    if setting == "tensor":
        sizes = [size for size in _tensor_sizes(asked) if size % parallel.expert == 0]
    else:
        sizes = list_divisors(parallel.tensor)
    return [size for size in sizes if find_undivided(replace(parallel, **{setting: size}), asked) is None]


def hint_at_sizes(parallel: Parallel, setting: str, asked: Sequence[Division]) -> str:
    """The values of one setting that would work; where those leave no more than one GPU, also pairs of both."""
    sizes = working_sizes(parallel, setting, asked)
    hint = f"{setting} sizes that would work: {', '.join(map(str, sizes))}"
    if not sizes:
        hint = f"no {setting} size works with the other parallel sizes"
    works = len(sizes) > (setting == "tensor" and 1 in sizes)  # with more than one GPU, or the tensor size as it is
    if works or not (pairs := _working_pairs(asked)):
        return hint
    return f"{hint}; together: {', '.join(f'{{tensor: {each.tensor}, expert: {each.expert}}}' for each in pairs)}"


def tell_undivided(parallel: Parallel, asked: Sequence[Division], also: Sequence[Division] = ()) -> str | None:
    """The first division that does not hold, and the sizes that would work; None where all hold. also: what those sizes
    must divide besides."""
    broken = find_undivided(parallel, asked)
    if broken is None:
        return None
    return f"{broken.describe(parallel)}; {hint_at_sizes(parallel, broken.setting, [*asked, *also])}"


def _tensor_sizes(asked: Sequence[Division]) -> range:
    """No more ranks than there are heads."""
    return range(1, 1 + min(division.count for division in asked if division.axis == "tensor"))


def _working_pairs(asked: Sequence[Division]) -> list[Parallel]:
    """Of each tensor size the smallest expert size that works with it."""
    found = []
    for tensor in _tensor_sizes(asked)[1:]:
        choices = (Parallel(tensor=tensor, expert=expert) for expert in list_divisors(tensor))
        found += [each for each in choices if find_undivided(each, asked) is None][:1]
    return found


def check_division(parallel: Parallel, asked: Sequence[Division]) -> None:
    """Raises CompatibilityError for the first division that does not hold, with the sizes that would work."""
    broken = find_undivided(parallel, asked)
    if broken is not None:
        raise CompatibilityError(broken.describe(parallel), hint=hint_at_sizes(parallel, broken.setting, asked))
