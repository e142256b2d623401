"""What a linear that another tool has quantized stands for, number by number from the definition of its format: the
other side of the conversion's proof, apart from the readers of checkpoint/foreign, which hand the numbers on.

w = (q - z) * s * p in float32, in this order, with z the zero point and p the scale of the input, where there are any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.foreign.methods import find_method, find_settings
from pipeline.checkpoint.hub_weights import read_dense
from pipeline.checkpoint.layouts.scales import ACTIVATION_SCALES, find_format

if TYPE_CHECKING:
    import torch

    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.checkpoint.layouts import Mapping

AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble in which number n of eight stands


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignWeight:
    """float32: `numbers` [O, I] less their zero points; `scales`, of [O or 1, I or 1]; `prescale` [I]; `step`, in which
    the input is rounded. scale_type: of the stored scales."""

    numbers: torch.Tensor
    scales: torch.Tensor
    scale_type: torch.dtype
    prescale: torch.Tensor | None = None
    step: float | None = None

    def matrix(self, rounded: torch.dtype | None = None) -> torch.Tensor:
        """`rounded`: the type that scales are rounded to first, of those that are stored in float32."""
        import torch

        scales = self.scales
        if rounded is not None and self.scale_type == torch.float32:
            scales = scales.to(rounded).float()
        whole = self.numbers * scales
        return whole if self.prescale is None else whole * self.prescale


class ForeignWeights:
    """Those of a folder. Its headers have passed the readers' checks before."""

    def __init__(self, folder: CheckpointFolder, method: str) -> None:
        self.folder, self.method = folder, method
        self.settings: dict[str, Any] = dict(find_settings(folder, method).values)
        self._kinds: dict[str, set[str]] = defaultdict(set)
        for name in folder.tensors:
            base, _, kind = name.rpartition(".")
            self._kinds[base].add(kind)

    def find(self, weight: str) -> ForeignWeight | None:
        """Of the linear whose weight is called so; None where it is as it always was."""
        base = weight.removesuffix(".weight")
        return DECODERS[self.method](self, base) if self._kinds[base] & {"qweight", "weight_scale"} else None

    def count_bytes(self, weight: str) -> int:
        base = weight.removesuffix(".weight")
        return sum(self.folder.tensors[f"{base}.{kind}"].nbytes for kind in self._kinds[base])

    def has(self, base: str, kind: str) -> bool:
        return kind in self._kinds[base]

    def read(self, base: str, kind: str) -> torch.Tensor:
        return self.folder.read(f"{base}.{kind}").to_torch()

    def read_optional(self, base: str, kind: str) -> torch.Tensor | None:
        return self.read(base, kind).float() if self.has(base, kind) else None

    def read_step(self, base: str) -> float | None:
        return float(self.read(base, "input_scale")) if self.has(base, "input_scale") else None


def open_foreign(folder: CheckpointFolder) -> ForeignWeights | None:
    """None where no other tool has quantized the folder's weights."""
    method = find_method(folder)
    return ForeignWeights(folder, method) if method is not None else None


def compare_foreign(foreign: ForeignWeights, engine: CheckpointFolder, mapping: Mapping) -> dict[str, int] | None:
    """By the name of each of the source's weights, how many elements differ of what the engine's linear stands for; -1
    where its input is rounded in other steps. None where the source has not quantized it."""
    import torch

    weights = [foreign.find(name) for name in mapping.sources] if mapping.target.endswith(".weight") else []
    if not any(weights):
        return None
    base = mapping.target.removesuffix(".weight")
    stored = find_format(engine.tensors, base)
    dense = read_dense(engine, mapping)
    model = getattr(torch, engine.architecture.dtype)
    name = f"{base}.{ACTIVATION_SCALES}"
    step = float(engine.read(name).to_torch()) if name in engine.tensors else None
    differing = {}
    for source, weight, rows in zip(mapping.sources, weights, mapping.backward(dense), strict=True):
        if weight is None:
            expected = foreign.folder.read(source).to_torch().to(rows.dtype)
        elif stored is None:
            expected = weight.matrix().to(rows.dtype)
        else:
            expected = weight.matrix(model if stored == "int4" else None)
        differing[source] = int((expected != rows).sum())
        if weight is not None and step is not None and step != weight.step:
            differing[source] = -1
    return differing


def _spread(words: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 [R, n] -> float32 [R, n * 32 / bits], unsigned: number k of a word is at place k, or places[k]."""
    import torch

    wide = words.long() & 0xFFFFFFFF
    places = places or tuple(range(32 // bits))
    return torch.stack([(wide >> (bits * place)) % 2**bits for place in places], -1).flatten(1).float()


def _awq(source: ForeignWeights, base: str) -> ForeignWeight:
    q = _spread(source.read(base, "qweight"), 4, AWQ_NIBBLES)
    z = _spread(source.read(base, "qzeros"), 4, AWQ_NIBBLES)
    scales = source.read(base, "scales")
    size = len(q) // len(z)
    return ForeignWeight(
        numbers=(q - z.repeat_interleave(size, 0)).T,
        scales=scales.float().repeat_interleave(size, 0).T,
        scale_type=scales.dtype,
    )


def _gptq(source: ForeignWeights, base: str) -> ForeignWeight:
    import torch

    bits = int(source.settings["bits"])
    q = _spread(source.read(base, "qweight").T, bits).T
    z = _spread(source.read(base, "qzeros"), bits)
    if source.settings.get("checkpoint_format") != "gptq_v2":
        z = z + 1
    scales = source.read(base, "scales")
    size = len(q) // len(z)
    groups = source.read(base, "g_idx").long() if source.has(base, "g_idx") else torch.arange(len(q)) // size
    return ForeignWeight(numbers=(q - z[groups]).T, scales=scales.float()[groups].T, scale_type=scales.dtype)


def _packed(source: ForeignWeights, base: str) -> ForeignWeight:
    """compressed-tensors' pack-quantized."""
    import torch

    rows, columns = source.read(base, "weight_shape").tolist()
    words, scales = source.read(base, "weight_packed"), source.read(base, "weight_scale")
    bits = 4 if words.shape[1] == -(-columns // 8) else 8
    numbers = _spread(words, bits)[:, :columns] - 2 ** (bits - 1)
    groups = torch.arange(columns) // (columns // scales.shape[1])
    if source.has(base, "weight_g_idx"):
        groups = source.read(base, "weight_g_idx").long()
    if source.has(base, "weight_zero_point"):
        zeros = _spread(source.read(base, "weight_zero_point").T, bits).T[:rows] - 2 ** (bits - 1)
        numbers = numbers - zeros[:, groups]
    return ForeignWeight(numbers=numbers, scales=scales.float()[:, groups], scale_type=scales.dtype)


def _compressed_tensors(source: ForeignWeights, base: str) -> ForeignWeight:
    if source.has(base, "weight_packed"):
        return _packed(source, base)
    numbers, scales = source.read(base, "weight").float(), source.read(base, "weight_scale")
    rows, columns = numbers.shape
    wide = scales.float().reshape(-1, scales.shape[-1] if scales.ndim > 1 else 1)
    if 1 < wide.shape[0] < rows:  # blocks of 128 x 128
        wide = wide.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    elif wide.shape[1] > 1:
        wide = wide.repeat_interleave(columns // wide.shape[1], 1)
    return ForeignWeight(numbers=numbers, scales=wide, scale_type=scales.dtype, step=source.read_step(base))


def _modelopt(source: ForeignWeights, base: str) -> ForeignWeight:
    import torch

    weight, scales = source.read(base, "weight"), source.read(base, "weight_scale")
    wide = scales.float()
    if weight.dtype == torch.uint8:
        nibbles = torch.stack([weight % 16, weight // 16], 1).flatten(0, 1).float()
        numbers = torch.where(nibbles > 7, nibbles - 16, nibbles)
        wide = wide.repeat_interleave(numbers.shape[1] // wide.shape[1], 1)
    else:
        numbers, wide = weight.float(), wide.reshape(-1, 1)
    return ForeignWeight(
        numbers=numbers,
        scales=wide,
        scale_type=scales.dtype,
        prescale=source.read_optional(base, "pre_quant_scale"),
        step=source.read_step(base),
    )


DECODERS: dict[str, Callable[[ForeignWeights, str], ForeignWeight]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
}
