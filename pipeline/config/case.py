"""What the compatibility rules look at: a config, the model it names, and numbers derived from both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING

from pipeline.checkpoint.foreign.holding import Held, Holding
from pipeline.checkpoint.foreign.marks import MARKS
from pipeline.quantization.catalog import METHODS, NONE
from pipeline.quantization.patterns import find_pattern
from pipeline.quantization.selection import HEAD_NAME, NEVER, Decision, fit

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.foreign.counting import HeldKinds
    from pipeline.checkpoint.layouts import Kind
    from pipeline.checkpoint.tensors import TensorInfo
    from pipeline.config.gpus import GPU
    from pipeline.config.schema import Build, Config, Parallel, Quantize
    from pipeline.engine.tensorrt_llm.ask import Ask

FP8_TYPES = ("F8_E4M3", "F8_E5M2")
# Kinds of RoPE whose long-context form is a fixed table. `dynamic` is not: its base grows with each sequence.
STATIC_ROPES = ("default", "linear", "yarn", "llama3")
NOTHING: Holding = MappingProxyType({})  # of a model that no other tool has quantized


@dataclass(frozen=True, kw_only=True)
class LinearKind:
    """A kind of weight matrix of the engine checkpoint: `count` of one role and shape, that differ in layer and expert.

    `name` is one of theirs, without `.weight`; `decision` is what becomes of them, `wanted` the group asked for.
    """

    name: str
    role: str
    out_features: int
    in_features: int
    count: int = 1
    decision: Decision | str = ""
    wanted: int = 0

    @property
    def group(self) -> int | None:
        """The inputs per scale that it gets; None where it stays as it is, or its format has no groups."""
        return self.decision.group if isinstance(self.decision, Decision) else None


@dataclass(frozen=True, kw_only=True)
class Case:
    """`tensors` are of the source checkpoint's headers the first of every kind and type, by name; `holding` says what
    becomes of the linears that another tool has quantized: CheckedHeaders."""

    config: Config
    architecture: Architecture
    tensors: Mapping[str, TensorInfo]
    holding: Holding = field(default_factory=dict)

    @property
    def gpu(self) -> GPU:
        return self.config.target.device

    @property
    def parallel(self) -> Parallel:
        return self.config.target.parallel

    @property
    def build(self) -> Build:
        return self.config.stages.build

    @property
    def quantize(self) -> Quantize:
        return self.config.stages.quantize

    @property
    def dtype(self) -> str:
        """The type of the engine's 16/32-bit weights."""
        return self.config.stages.convert.dtype or self.architecture.dtype

    @property
    def is_quantized(self) -> bool:
        return self.quantize.applies

    @property
    def formats(self) -> list[str]:
        """Of all that a linear may become, or is already: keys of FORMATS and FOREIGN_FORMATS, sorted."""
        methods = {METHODS[method].format for method in self.quantize.rules.methods}
        return sorted(methods | {held.format for held in self.held.values()})

    @cached_property
    def held(self) -> dict[str, Held]:
        """What holds linears of the source as another tool has quantized them, by their engine's names."""
        return {name: each for name, each in self.holding.items() if isinstance(each, Held)}

    @cached_property
    def held_kinds(self) -> HeldKinds:
        """The same, counted by kinds: for what asks how much they take."""
        from pipeline.checkpoint.foreign.counting import count_kinds
        from pipeline.checkpoint.layouts import list_kinds

        return count_kinds(list_kinds(self.architecture), self.held)

    @property
    def head_format(self) -> str | None:
        """Of lm_head; None in 16 bits."""
        if (held := self.held.get(f"{HEAD_NAME}.weight")) is not None:
            return held.format
        method = self.quantize.rules.head_method
        return METHODS[method].format if method != NONE else None

    @cached_property
    def foreign_mark(self) -> str | None:
        """A tensor that shows that another tool has quantized the model."""
        return next((name for name in self.tensors if name.endswith(MARKS)), None)

    @cached_property
    def converted_fp8(self) -> str | None:
        """The first FP8 tensor of DeepSeek's blocks if `convert` keeps them: nothing asks for another type."""
        if self.foreign_mark is not None or self.config.stages.convert.dtype is not None:
            return None
        return next((t.name for t in self.tensors.values() if t.dtype in FP8_TYPES), None)

    @property
    def kept_fp8(self) -> str | None:
        """The same if FP8 reaches the engine: quantization leaves none."""
        return None if self.is_quantized else self.converted_fp8

    @cached_property
    def context_limit(self) -> int:
        """The longest sequence that the model and a static RoPE table can hold."""
        return self.architecture.context_limit

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """The tensors with a quantizable role, whether the config includes it or not."""
        from pipeline.checkpoint.layouts import list_kinds

        return tuple(
            kind
            for kind in list_kinds(self.architecture)
            if kind.first.role not in NEVER and len(kind.first.target_shape) == 2
        )

    @cached_property
    def linears(self) -> tuple[LinearKind, ...]:
        """The linears of `kinds`."""
        return tuple(_describe(kind, kind.first.target, kind.count) for kind in self.kinds)

    @cached_property
    def ask(self) -> Ask:
        """What TensorRT-LLM would be asked to run."""
        from pipeline.config.tensorrt_llm_ask import make_ask

        return make_ask(self)

    @cached_property
    def chosen(self) -> tuple[LinearKind, ...]:
        """The linears that the rules leave; none where nothing is quantized."""
        rules = self.quantize.rules
        if not rules.methods:
            return ()
        return tuple(
            _describe(kind, first, count, fit(method, kind.first.target_shape, group_size), group_size)
            for kind in self.kinds
            for (method, group_size), (first, count) in rules.wishes(kind).items()
        )

    def matches(self, pattern: str) -> bool:
        """Whether a shell pattern names any linear."""
        find = find_pattern((pattern,))
        return any(find(name) is not None for kind in self.kinds for name in kind.names())


def _describe(kind: Kind, name: str, count: int, decision: Decision | str = "", wanted: int = 0) -> LinearKind:
    rows, columns = kind.first.target_shape
    return LinearKind(
        name=name.removesuffix(".weight"),
        role=kind.first.role,
        out_features=rows,
        in_features=columns,
        count=count,
        decision=decision,
        wanted=wanted,
    )
