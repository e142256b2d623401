"""What becomes of every tensor of an engine checkpoint in another format: decided before a byte is written.

A format has an encoding for each way to store a linear that it can hold. A linear that it cannot is refused, or written
in the model's 16 bits where the user says so, with the reason; all of the hub's linears that are one in the engine
share that fate, since servers fuse them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pipeline.checkpoint.casting import FLOATS
from pipeline.checkpoint.hub_weights import read_dense
from pipeline.checkpoint.layouts import layout_for
from pipeline.checkpoint.layouts.scales import CACHE_SCALES, cache_scale
from pipeline.checkpoint.tensors import MODEL_DTYPES, RawTensor, TensorInfo
from pipeline.errors import CheckpointError, CompatibilityError
from pipeline.exports.linear import Numbers, Part, QuantizedLinear, find_linear

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.checkpoint.layouts import Mapping as TensorMapping

CACHE = "FP8"  # kv_cache_quant_algo of the caches whose scales other formats have
REFUSE, WIDEN = "refuse", "16bit"  # what to do with linears that a format cannot hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How a format stores linears of one of ours.

    `describe(linear, part, dtype)` declares a part's tensors, `encode(numbers, dtype)` makes them in the same order,
    `dtype` being the model's in safetensors' spelling; `refuse(linear)` says why one cannot be stored so exactly.
    """

    describe: Callable[[QuantizedLinear, Part, str], list[TensorInfo]]
    encode: Callable[[Numbers, str], list[torch.Tensor]]
    refuse: Callable[[QuantizedLinear], str | None] = lambda linear: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """How a hub's linear was stored in the engine checkpoint, and so is in the export. `static`: with a scale of its
    input."""

    format: str
    group: int | None
    static: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Tensors of the export that are made of one engine tensor; `sources`: what is read for it."""

    infos: list[TensorInfo]
    make: Callable[[], Iterator[RawTensor]]
    sources: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`kept`, `widened` and `plain`: the hub's linears, without ".weight", that stay quantized; that come in 16 bits,
    with the reason; that were in 16 bits. `caches`: the scales of a quantized KV cache that the export has too;
    `left_out`: engine tensors that it has not."""

    engine: CheckpointFolder
    dtype: str
    entries: list[Entry] = field(default_factory=list)
    kept: dict[str, Kept] = field(default_factory=dict)
    widened: dict[str, str] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)  # with their role
    caches: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def cache_algo(self) -> str | None:
        """Of the KV cache whose scales the export has."""
        return CACHE if self.caches else None

    @property
    def is_quantized(self) -> bool:
        """Whether the engine checkpoint is."""
        return self.engine.own is not None and self.engine.own.quantization is not None

    @property
    def wide_linears(self) -> list[str]:
        """The linears in 16 bits, as formats list those to leave alone: the router is none, to any reader."""
        named = [name for name, role in self.plain.items() if role not in ("router", "embedding")]
        return [name for name in (*named, *self.widened) if not name.endswith("embed_tokens")]


def plan_export(
    engine: CheckpointFolder,
    encodings: Mapping[str, Encoding],
    *,
    others: str,
    format: str,
    name_caches: Callable[[int], Sequence[str]] | None = None,
) -> Plan:
    """`others`: REFUSE or WIDEN. `name_caches`: what the format calls the scale of a layer's FP8 cache, if anything.

    Raises CheckpointError for a folder that is no engine checkpoint, CompatibilityError for linears that `format`
    cannot hold, unless they are to be widened.
    """
    own = engine.own
    if own is None:
        raise CheckpointError(
            f"{engine.path} is not an engine checkpoint", hint="export what the convert or quantize stage wrote"
        )
    plan = Plan(engine=engine, dtype=MODEL_DTYPES[own.dtype])
    unread = set(engine.tensors)
    for mapping in layout_for(engine.architecture).mappings():
        if mapping.target not in engine.tensors:
            if mapping.optional or mapping.role == "mtp":
                continue
            raise CheckpointError(
                f"the engine checkpoint lacks {mapping.target}",
                hint="convert again; the folder is damaged or incomplete",
            )
        linear = find_linear(engine, mapping)
        entry = _plan_plain(plan, mapping) if linear is None else _plan_linear(plan, linear, encodings, others, format)
        plan.entries.append(entry)
        unread.difference_update(entry.sources)
    if name_caches is not None and own.kv_cache == "fp8":
        for layer in range(engine.architecture.num_layers):
            if (name := cache_scale(layer)) in unread:
                plan.entries.append(_plan_cache(plan, name, name_caches(layer)))
        unread.difference_update(plan.caches)
    plan.left_out.extend(sorted(name for name in unread if name.endswith(CACHE_SCALES)))
    if unread.difference(plan.left_out):
        raise CheckpointError(
            f"{min(unread.difference(plan.left_out))} has no place in {engine.architecture.name}",
            hint="convert again; the folder is damaged or its config.json was changed",
        )
    return plan


def _plan_plain(plan: Plan, mapping: TensorMapping) -> Entry:
    """Floats as they are: rows of a row-major matrix are a run of its bytes."""
    info = plan.engine.tensors[mapping.target]
    if info.dtype not in FLOATS or info.shape != mapping.target_shape:
        raise CheckpointError(
            f"{info.name} is {info.dtype}{list(info.shape)}; without scales it must be plain floats "
            f"{list(mapping.target_shape)}",
            hint="convert again; the folder is damaged or its config.json was changed",
        )
    named = list(zip(mapping.sources, mapping.source_shapes, strict=True))
    infos = [TensorInfo(name, info.dtype, shape) for name, shape in named]
    if len(mapping.target_shape) == 2:
        plan.plain.update((name.removesuffix(".weight"), mapping.role) for name, _ in named)

    def make() -> Iterator[RawTensor]:
        data, start = plan.engine.read(mapping.target).data, 0
        for each in infos:
            yield RawTensor(each.dtype, each.shape, data[start : start + each.nbytes])
            start += each.nbytes

    return Entry(infos=infos, make=make, sources=[mapping.target])


def _plan_linear(
    plan: Plan, linear: QuantizedLinear, encodings: Mapping[str, Encoding], others: str, format: str
) -> Entry:
    encoding = encodings.get(linear.format)
    reason = f"{format} has no place for {linear.format}" if encoding is None else encoding.refuse(linear)
    if encoding is None or reason is not None:
        if others == REFUSE:
            raise CompatibilityError(
                f"{' and '.join(part.name for part in linear.parts)} cannot be exported as {format}: {reason}",
                hint="--others 16bit writes such linears in 16 bits; or export another format, or quantize otherwise",
            )
        plan.widened.update((part.name, str(reason)) for part in linear.parts)
        return _plan_widened(plan, linear)
    kept = Kept(format=linear.format, group=linear.group, static=linear.is_static)
    plan.kept.update((part.name, kept) for part in linear.parts)
    infos = [info for part in linear.parts for info in encoding.describe(linear, part, plan.dtype)]

    def make() -> Iterator[RawTensor]:
        numbers = linear.read()
        for part in linear.parts:
            for tensor in encoding.encode(numbers.cut(part.rows), plan.dtype):
                yield RawTensor.from_torch(tensor)

    return Entry(infos=infos, make=make, sources=linear.tensors)


def _plan_widened(plan: Plan, linear: QuantizedLinear) -> Entry:
    """What the numbers stand for, the pre-quantization scale multiplied in, rounded to the model's type."""
    infos = [TensorInfo(f"{part.name}.weight", plan.dtype, part.shape) for part in linear.parts]

    def make() -> Iterator[RawTensor]:
        whole = widen(read_dense(plan.engine, linear.mapping), plan.dtype, linear.base)
        for part in linear.parts:
            yield RawTensor.from_torch(whole[part.rows])

    return Entry(infos=infos, make=make, sources=linear.tensors)


def _plan_cache(plan: Plan, name: str, names: Sequence[str]) -> Entry:
    """The one scale of keys and values under each of `names`, as a scalar."""
    info = plan.engine.tensors[name]
    if (info.dtype, info.shape) != ("F32", (1,)):
        raise CheckpointError(
            f"{name} is {info.dtype}{list(info.shape)}, and not F32[1]",
            hint="quantize again; the folder is damaged",
        )
    plan.caches.append(name)

    def make() -> Iterator[RawTensor]:
        data = plan.engine.read(name).data
        for _ in names:
            yield RawTensor(info.dtype, (), data)

    return Entry(infos=[TensorInfo(each, info.dtype, ()) for each in names], make=make, sources=[name])


def widen(weight: torch.Tensor, dtype: str, name: str) -> torch.Tensor:
    """float32 in the model's type. Raises CheckpointError where that overflows."""
    import torch

    from pipeline.checkpoint.tensors import DTYPES

    result = weight.to(getattr(torch, DTYPES[dtype][1]))
    if not torch.isfinite(result).all():
        raise CheckpointError(
            f"{name}.weight does not fit {DTYPES[dtype][1]} once it is dequantized",
            hint="convert to bfloat16 (stages.convert.dtype) and quantize again",
        )
    return result
