"""The settings of mixed precision: recipes, budgets, and how sensitivity is measured."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pipeline.config.section import FilePath, Positive, Ratio, Section
from pipeline.quantization.catalog import FORMATS, METHODS, GroupSize
from pipeline.quantization.options import Effort, Goal
from pipeline.quantization.selection import Override

Method = Literal[
    "awq", "awq_fp8", "gptq", "awq_gptq", "rtn", "rtn_clip", "fp8", "fp8_blocks", "int8", "smoothquant", "none"
]
Format = Literal["int4", "int4_fp8", "fp8", "fp8_blocks", "int8", "int8_sq"]


class RecipeRow(Section):
    """What becomes of some linears, whatever their role."""

    pattern: str = Field(
        min_length=1, description="Shell pattern of engine linears, e.g. transformer.layers.0.mlp.* or *.mlp.proj"
    )
    method: Method = Field(description="As stages.quantize.method; none leaves them as they are.")
    group_size: GroupSize | None = Field(
        default=None, description="Weights per scale of a grouped format; null: stages.quantize.group_size."
    )
    reason: str = Field(default="", description="Why; for people.")

    @field_validator("group_size")
    @classmethod
    def _refuse_idle(cls, size: GroupSize | None, info: ValidationInfo) -> GroupSize | None:
        method = info.data.get("method")  # None where it is none of them, which is told by itself
        if (
            size is not None
            and method is not None
            and not (method in METHODS and FORMATS[METHODS[method].format].grouped)
        ):
            raise PydanticCustomError(
                "no_groups", "method {method} has no groups", {"method": method, "hint": "leave group_size out"}
            )
        return size

    @property
    def override(self) -> Override:
        return Override(pattern=self.pattern, method=self.method, group_size=self.group_size)


class Recipe(Section):
    """Written as the name of a recipe file, as the word auto, or as a list of rows."""

    auto: bool = Field(
        default=False, description="Solve for stages.quantize.budget from measured sensitivity, before quantizing."
    )
    rows: tuple[RecipeRow, ...] = Field(
        default=(), description="The first row that names a linear decides; others go by method and include."
    )


def allow_short_forms(schema: dict[str, Any]) -> None:
    """In an editor's schema: a file's name, the word, the rows alone."""
    section = {key: schema.pop(key) for key in ("$ref", "allOf") if key in schema}
    rows = {"type": "array", "items": {"type": "object"}, "description": "rows"}
    schema["anyOf"] = [{"type": "string", "description": "auto, or a file of rows"}, rows, section]


class Budget(Section):
    """One of the three."""

    size_ratio: Annotated[Ratio, Field(le=1)] | None = Field(
        default=None, description="Size of the whole checkpoint over its size before, at most."
    )
    bits_per_weight: Ratio | None = Field(
        default=None, description="Bits per weight of the linears that include names, scales included, at most."
    )
    kl: Ratio | None = Field(
        default=None, description="Predicted mean KL divergence in nats per token, at most, at the smallest size."
    )

    @property
    def goal(self) -> Goal:
        kind, limit = next((kind, limit) for kind, limit in self if limit is not None)
        return Goal(kind=kind, limit=limit)

    @model_validator(mode="after")
    def _require_one(self) -> Self:
        if sum(limit is not None for _, limit in self) != 1:
            raise ValueError("must be one of size_ratio, bits_per_weight and kl")
        return self


class Sensitivity(Section):
    """How the sensitivity of layers to quantization is measured, by `trtseek sensitivity` and for recipe: auto."""

    file: FilePath | None = Field(
        default=None, description="sensitivity.json of an earlier measurement, to solve from; null: measure."
    )
    samples: Positive = Field(default=32, description="How many pieces of the calibration text.")
    length: Annotated[int, Field(ge=2, le=2**31 - 1)] = Field(default=128, description="Tokens per piece.")
    draws: Positive = Field(default=2, description="Tokens drawn at each position: more lower the estimate's noise.")
    formats: tuple[Format, ...] = Field(
        default=(),
        description="Formats to choose from beside 16 bits; empty: INT4 in every group size, INT8 weights, and FP8 in "
        "blocks where the target has it. Those whose inputs are rounded too are not offered to experts.",
    )
    search: bool = Field(
        default=False,
        description="Measure methods that search with their search, many times slower; else rounding stands in.",
    )

    @property
    def effort(self) -> Effort:
        return Effort(samples=self.samples, length=self.length, draws=self.draws)
