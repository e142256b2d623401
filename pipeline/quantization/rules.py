"""Which linears are quantized, in which groups, and why the others are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.errors import CompatibilityError
from pipeline.quantization.catalog import FLOAT32, FORMATS, METHODS, NONE
from pipeline.quantization.patterns import find_pattern
from pipeline.quantization.selection import HEAD, HEAD_NAME, NEVER, QUANTIZABLE, Rules

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pipeline.checkpoint.layouts import Mapping as TensorMapping
    from pipeline.checkpoint.tensors import TensorInfo

# Weight-only and without text; blocks of FP8 would be dequantized into a workspace larger than what they save.
HEAD_METHODS = ("int8", "rtn")
HEAD_HINT = (
    "leave the head 16-bit, or, where it has weights of its own, give it a row of its own: "
    "recipe: {rows: [{pattern: lm_head, method: int8}]}, or rtn"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A linear to quantize: `name` without ".weight", `layer` None of the head, `shape` (out, in), `method` a key of
    METHODS, `group` input features per scale in a grouped format, `wanted` those asked for where they are more."""

    name: str
    role: str
    layer: int | None
    expert: int | None
    shape: tuple[int, int]
    method: str
    group: int | None
    wanted: int | None = None

    @property
    def format(self) -> str:
        """A key of FORMATS."""
        return METHODS[self.method].format

    @property
    def group_size(self) -> int:
        """The group, of a linear in a grouped format."""
        if self.group is None:
            raise ValueError(f"{self.name} is stored as {self.format}, without groups")
        return self.group

    @property
    def nbytes(self) -> int:
        """In the engine checkpoint, at most: with its scales, and the scale of its inputs that may be beside them."""
        return FORMATS[self.format].nbytes(self.shape, self.group) + self.shape[1] * FLOAT32


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The linears to quantize, by name, in checkpoint order; the others with the reason; patterns that met nothing."""

    linears: Mapping[str, Linear]
    kept: Mapping[str, str]
    idle_patterns: tuple[str, ...]

    @property
    def smaller_groups(self) -> dict[str, int]:
        """Linears with a smaller group than was asked for of each, since that does not divide its input."""
        return {name: x.group_size for name, x in self.linears.items() if x.wanted is not None}

    def describe_smaller(self) -> list[str]:
        """A line per size that was asked for and does not divide."""
        fits: dict[int, list[int]] = {}
        for linear in self.linears.values():
            if linear.wanted is not None:
                fits.setdefault(linear.wanted, []).append(linear.group_size)
        lines = []
        for wanted, sizes in sorted(fits.items(), reverse=True):
            which, whose = ("1 linear gets", "its") if len(sizes) == 1 else (f"{len(sizes)} linears get", "their")
            given = ", ".join(map(str, sorted(set(sizes), reverse=True)))
            lines.append(f"{which} groups of {given}: {wanted} does not divide {whose} input")
        return lines


def choose_linears(mappings: Iterable[TensorMapping], tensors: Mapping[str, TensorInfo], rules: Rules) -> Selection:
    """Applies the rules to an engine checkpoint's weight matrices, `mappings` telling each one's role.

    Raises CompatibilityError for a role that cannot be quantized, a method that this version or the head does not have,
    and where nothing is left to quantize.
    """
    for role in rules.include:
        if role not in QUANTIZABLE:
            reason = "is never quantized" if role in NEVER else "is not a role"
            raise CompatibilityError(
                f"stages.quantize.include: {role} {reason}", hint=f"quantizable roles: {', '.join(QUANTIZABLE)}"
            )
    if rules.method not in (NONE, *METHODS):
        raise CompatibilityError(
            f"stages.quantize.method: {rules.method} is not available", hint=f"methods: {', '.join(sorted(METHODS))}"
        )
    mappings = list(mappings)
    if problem := find_unfit_head(rules, tied=all(mapping.role != HEAD for mapping in mappings)):
        raise CompatibilityError(f"stages.quantize: {problem}", hint=HEAD_HINT)
    linears: dict[str, Linear] = {}
    kept: dict[str, str] = {}
    patterns = {pattern: find_pattern((pattern,)) for pattern in (*rules.exclude, *(r.pattern for r in rules.recipe))}
    idle = set(patterns)
    for mapping in mappings:
        info = tensors.get(mapping.target)
        if info is None or len(info.shape) != 2 or not mapping.target.endswith(".weight"):
            continue
        name = mapping.target.removesuffix(".weight")
        idle.difference_update([pattern for pattern in idle if patterns[pattern](name) is not None])
        decision = rules.decide(name, mapping.role, info.shape)
        if isinstance(decision, str):
            kept[name] = decision
        else:
            rows, columns = info.shape
            linears[name] = Linear(
                name=name,
                role=mapping.role,
                layer=mapping.layer,
                expert=mapping.expert,
                shape=(rows, columns),
                method=decision.method,
                group=decision.group,
                wanted=decision.wanted if decision.is_smaller else None,
            )
    if not linears:
        raise CompatibilityError(
            f"no linear is left to quantize out of {len(kept)}",
            hint="see stages.quantize include, exclude and group_size; method: none leaves everything 16-bit",
        )
    return Selection(linears=linears, kept=kept, idle_patterns=tuple(sorted(idle)))


def find_unfit_head(rules: Rules, *, tied: bool) -> str | None:
    """Why the head cannot become what the rules ask for."""
    method = rules.head_method
    if method == NONE:
        return None
    if tied:
        return f"{HEAD_NAME} is the embedding of this model (tie_word_embeddings), which is never quantized"
    if method in HEAD_METHODS:
        return None
    why = "what it reads is not measured" if METHODS[method].measures else "each step would dequantize it whole"
    return f"{HEAD_NAME} does not become {METHODS[method].format} by method {method}: {why}"
