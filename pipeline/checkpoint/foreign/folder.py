"""A checkpoint that another tool has quantized, as if it were one of Hugging Face's with the engine's own tensors.

Which tensors are whose is known from the headers. What they hold is read when it is asked for, one linear at a time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.foreign.cache import CacheScales, find_cache_scales
from pipeline.checkpoint.foreign.headers import Headers
from pipeline.checkpoint.foreign.holding import WAY_OUT, Held, hold, tell_widened
from pipeline.checkpoint.foreign.linear import PLAIN, ForeignLinear, dequantize
from pipeline.checkpoint.foreign.methods import READERS, find_settings
from pipeline.checkpoint.foreign.parts import list_parts
from pipeline.checkpoint.foreign.stacks import level_stacks
from pipeline.checkpoint.layouts import Mapping, layout_for
from pipeline.checkpoint.tensors import DTYPES, RawTensor, TensorInfo
from pipeline.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.architecture import Architecture
    from pipeline.checkpoint.folder import CheckpointFolder

ROLE = "foreign"  # of the mappings that `hold` makes


class ForeignFolder:
    """A TensorSource under Hugging Face's names, with what `convert` needs beyond. Raises CheckpointError for settings
    that are not read, and for tensors that contradict them.

    `tensors` has, at first, X.weight for each quantized linear, in the shape that it stands for; after `hold` the
    tensors of the format that holds it.
    """

    def __init__(self, folder: CheckpointFolder, method: str) -> None:
        self.folder, self.method = folder, method
        self.path: Path = folder.path
        self.config: dict[str, Any] = folder.config
        self.architecture: Architecture = folder.architecture
        settings, headers = find_settings(folder, method), Headers(folder)
        self.linears: dict[str, ForeignLinear] = {}
        for name in _list_matrices(folder):
            linear = READERS[method](settings, headers, name.removesuffix(".weight"))
            if linear is not None:
                self.linears[name] = linear
        if not self.linears:
            raise settings.fail("quant_method", f"is {method}, but no linear of {folder.path} is quantized")
        self.caches: dict[int, CacheScales] = find_cache_scales(headers, folder.architecture.num_layers)
        used = {name for linear in self.linears.values() for name in linear.tensors}
        used.update(name for cache in self.caches.values() for name in cache.tensors)
        self.idle = sorted(_find_idle_biases(folder, self.linears))
        used.update(self.idle)
        self.tensors: dict[str, TensorInfo] = {name: t for name, t in folder.tensors.items() if name not in used}
        for name, linear in self.linears.items():
            self.tensors[name] = TensorInfo(name, "I8", linear.shape)
        self.held: dict[str, Held] = {}
        self.widened: dict[str, str] = {}
        self.wide_inputs = 0
        self._made: dict[str, tuple[tuple[str, ...], Callable[[], torch.Tensor]]] = {}  # of which originals, and how

    def match(self) -> tuple[list[Mapping], list[str]]:
        """As Layout.match; mappings of quantized linears are as if these were not quantized."""
        present, unused = layout_for(self.architecture).match(self.tensors, str(self.path))
        return present, [*unused, *self.idle]

    def is_quantized(self, mapping: Mapping) -> bool:
        return any(name in self.linears for name in mapping.sources)

    def hold(self, mappings: Sequence[Mapping], dtype: str, *, exact: bool) -> list[Mapping]:
        """The mappings with those of quantized linears replaced by those of the tensors that hold them in a model of
        type `dtype` ("F16", …); `held` and `widened` say how, by the engine's names.

        Raises CheckpointError, if it is to be `exact`, where no format of ours holds a linear.
        """
        found: dict[str, Held | str] = {}
        for mapping in mappings:
            if self.is_quantized(mapping):
                linears = [self.linears[name] for name in mapping.sources if name in self.linears]
                whole = len(linears) == len(mapping.sources)
                found[mapping.target] = hold(linears, dtype) if whole else "is quantized in part only"
                for name in (name for linear in linears for name in linear.tensors):
                    self.folder.release(name)  # their scales were read; resident pages would add up
        level_stacks(mappings, found, self.linears)
        if exact and (problem := tell_widened(found)):
            raise CheckpointError(f"{self.path}: {problem}", hint=WAY_OUT)
        self.held = {name: each for name, each in found.items() if isinstance(each, Held)}
        self.widened = {name: each for name, each in found.items() if isinstance(each, str)}
        self.wide_inputs = sum(
            self.linears[mapping.sources[0]].inputs != PLAIN
            for mapping in mappings
            if mapping.target in self.held and not self.held[mapping.target].rounds
        )
        return [each for mapping in mappings for each in self._expand(mapping, dtype)]

    def _expand(self, mapping: Mapping, dtype: str) -> Iterator[Mapping]:
        if mapping.target in self.widened:
            for name, shape in zip(mapping.sources, mapping.source_shapes, strict=True):
                self.tensors[name] = TensorInfo(name, self._widened_type(name, dtype), shape)
        if mapping.target not in self.held:
            yield mapping
        else:
            yield from self._expand_held(mapping, dtype)
        if mapping.layer in self.caches and mapping.target.endswith("attention.dense.weight"):
            cache = self.caches[mapping.layer]
            self._made[cache.name] = cache.tensors, cache.read
            self.tensors[cache.name] = TensorInfo(cache.name, "F32", (1,))
            yield _map(mapping, cache.target, [(cache.name, (1,))])

    def _widened_type(self, name: str, dtype: str) -> str:
        return dtype if name in self.linears else self.folder.tensors[name].dtype

    def _expand_held(self, mapping: Mapping, dtype: str) -> Iterator[Mapping]:
        base = mapping.target.removesuffix(".weight")
        by_kind: dict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
        for name in mapping.sources:
            linear = self.linears[name]
            for part in list_parts(linear, self.held[mapping.target], dtype):
                if part.once and by_kind[part.kind]:
                    continue
                place = f"{linear.name}.{part.kind}"
                self._made[place] = linear.tensors, part.read
                self.tensors[place] = TensorInfo(place, part.dtype, part.shape)
                by_kind[part.kind].append((place, part.shape))
        for kind, sources in by_kind.items():
            yield _map(mapping, f"{base}.{kind}", sources)

    def read(self, name: str) -> RawTensor:
        """Over the file's own memory where it is as it was stored, else made."""
        import torch

        if name in self._made:
            return RawTensor.from_torch(self._made[name][1]().contiguous())
        if name in self.linears:
            dtype = getattr(torch, DTYPES[self.tensors[name].dtype][1])
            return RawTensor.from_torch(torch.cat([tile.to(dtype) for tile in dequantize(self.linears[name])]))
        return self.folder.read(name)

    def tiles(self, name: str) -> Iterator[torch.Tensor] | None:
        """The rows, float32, of a linear that is not held; None of any other tensor."""
        return dequantize(self.linears[name]) if name in self.linears and name not in self._made else None

    def release(self, name: str, begin: int = 0, end: int | None = None) -> None:
        for each in self._originals(name):
            self.folder.release(each) if each != name else self.folder.release(name, begin, end)

    def file_of(self, name: str) -> Path:
        return self.folder.file_of(self._originals(name)[0])

    def copy_companions(self, folder: Path) -> list[Path]:
        return self.folder.copy_companions(folder)

    def _originals(self, name: str) -> tuple[str, ...]:
        if name in self._made:
            return self._made[name][0]
        return self.linears[name].tensors if name in self.linears else (name,)

    def describe(self) -> dict[str, Any]:
        """For conversion.json, by the engine's names: how many linears each format holds; the largest relative change
        of float32 scales of INT4 that were rounded to the model's type; how many read inputs in 16 bits that the
        source rounds; and which are written in 16 bits, and why."""
        return {
            "method": self.method,
            "held": dict(sorted(Counter(each.format for each in self.held.values()).items())),
            "rounded_scales": self._rounded,
            "wide_inputs": self.wide_inputs,
            "widened": {name.removesuffix(".weight"): reason for name, reason in self.widened.items()},
        }

    def notes(self) -> Iterator[str]:
        """What of it a user must know."""
        if self.widened:
            name, reason = next(iter(self.widened.items()))
            yield f"{len(self.widened)} linears are written in 16 bits: {name.removesuffix('.weight')} {reason}"
        if self.wide_inputs:
            yield f"{self.wide_inputs} linears read inputs in 16 bits that {self.method} rounds to 8"
        if self._rounded:
            yield f"INT4 scales are rounded from float32 to the model's type, by {self._rounded:.2g} at most"

    @property
    def _rounded(self) -> float:
        return max((each.rounded for each in self.held.values()), default=0.0)


def _list_matrices(folder: CheckpointFolder) -> Iterator[str]:
    for mapping in layout_for(folder.architecture).mappings():
        if len(mapping.target_shape) == 2 and mapping.target.endswith(".weight"):
            yield from mapping.sources


def _find_idle_biases(folder: CheckpointFolder, linears: dict[str, ForeignLinear]) -> Iterator[str]:
    """Biases of zeros that some versions of AutoGPTQ write beside every linear; any other is the model's."""
    known = {name for mapping in layout_for(folder.architecture).mappings() for name in mapping.sources}
    for linear in linears.values():
        name = f"{linear.name}.bias"
        if name in folder.tensors and name not in known and not folder.read(name).to_torch().any():
            yield name


def _map(mapping: Mapping, target: str, sources: list[tuple[str, tuple[int, ...]]]) -> Mapping:
    shapes = tuple(shape for _, shape in sources)
    return replace(
        mapping,
        target=target,
        sources=tuple(name for name, _ in sources),
        source_shapes=shapes,
        target_shape=(sum(shape[0] for shape in shapes), *shapes[0][1:]),
        role=ROLE,
        keys=("",) * len(sources),
        cast=False,
    )
