"""Which linears are quantized, in which groups, and why the others are not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.errors import CompatibilityError
from pipeline.quantization.selection import GROUP_SIZES, NEVER, QUANTIZABLE, compile_patterns, pick_group

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pipeline.checkpoint.layouts import Mapping as TensorMapping
    from pipeline.checkpoint.tensors import TensorInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A linear to quantize: `name` without ".weight", `shape` (out, in), `group` input features per scale."""

    name: str
    role: str
    layer: int
    expert: int | None
    shape: tuple[int, int]
    group: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The linears to quantize, by name, in checkpoint order; the others with the reason; patterns that met nothing."""

    linears: Mapping[str, Linear]
    kept: Mapping[str, str]
    idle_patterns: tuple[str, ...]

    def smaller_groups(self, wanted: int) -> dict[str, int]:
        """Linears that `wanted` does not divide, with the group they got instead."""
        return {name: linear.group for name, linear in self.linears.items() if linear.group != wanted}


def choose_linears(
    mappings: Iterable[TensorMapping],
    tensors: Mapping[str, TensorInfo],
    *,
    include: Sequence[str],
    exclude: Sequence[str],
    group_size: int,
) -> Selection:
    """Applies the rules to an engine checkpoint's weight matrices, `mappings` telling each one's role.

    `include` names roles, `exclude` shell patterns of engine tensor names. Raises CompatibilityError for a role that
    cannot be quantized, and where nothing is left to quantize.
    """
    for role in include:
        if role not in QUANTIZABLE:
            reason = "is never quantized" if role in NEVER else "is not a role"
            raise CompatibilityError(
                f"stages.quantize.include: {role} {reason}", hint=f"quantizable roles: {', '.join(QUANTIZABLE)}"
            )
    linears: dict[str, Linear] = {}
    kept: dict[str, str] = {}
    excludes = {pattern: compile_patterns([pattern]) for pattern in exclude}
    idle = set(exclude)
    for mapping in mappings:
        info = tensors.get(mapping.target)
        if info is None or len(info.shape) != 2 or not mapping.target.endswith(".weight"):
            continue
        name = mapping.target.removesuffix(".weight")
        matches = [pattern for pattern, names in excludes.items() if names(info.name)]
        idle.difference_update(matches)
        rows, columns = info.shape
        group = pick_group(info.shape, group_size)
        if mapping.role not in include:
            kept[name] = f"role {mapping.role} {'is never quantized' if mapping.role in NEVER else 'is not included'}"
        elif matches:
            kept[name] = f"excluded by {matches[0]}"
        elif rows % 2:
            kept[name] = f"its {rows} output features do not pack in pairs"
        elif group is None:
            sizes = ", ".join(str(size) for size in GROUP_SIZES if size <= group_size)
            kept[name] = f"no group of {sizes} divides its {columns} input features"
        elif mapping.layer is None:
            kept[name] = "belongs to no decoder layer"
        else:
            linears[name] = Linear(
                name=name,
                role=mapping.role,
                layer=mapping.layer,
                expert=mapping.expert,
                shape=(rows, columns),
                group=group,
            )
    if not linears:
        raise CompatibilityError(
            f"no linear is left to quantize out of {len(kept)}",
            hint="see stages.quantize include, exclude and group_size; method: none leaves everything 16-bit",
        )
    return Selection(linears=linears, kept=kept, idle_patterns=tuple(sorted(idle)))
