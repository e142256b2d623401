"""The whole model again from all ranks of a TensorRT-LLM checkpoint: a TensorSource under the engine checkpoint's
names, which the network takes like any other. What ranks hold in common must be equal, padding must be zero."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.tensors import RawTensor, TensorInfo
from pipeline.evaluation.rank_contract import Expected, list_parts
from pipeline.evaluation.rank_joining import cut_padding, join, join_heads, join_same, pack_int4
from pipeline.evaluation.rank_layouts import Parts, undo_linear

if TYPE_CHECKING:
    import torch

    from pipeline.evaluation.rank_checkpoint import RankCheckpoint

LAYER = "transformer.layers."
QKV = "attention.qkv"
BY_INPUT = ("attention.dense", "mlp.proj", "mlp.shared_expert.proj")  # linears that are cut along their inputs
INT4 = ("W4A16_AWQ", "W4A8_AWQ", "W4A16_GPTQ")
# Of a linear cut by outputs, what has a row for each; by inputs, what has a column (or of a vector, an element).
ROWS = ("weight", "bias", "weights_scaling_factor", "per_channel_scale")
COLUMNS = {"weight": 2, "weights_scaling_factor": 2, "prequant_scaling_factor": 1}  # with their number of dimensions
# Both halves of a gated MLP as one: up_proj (the engine checkpoint's gate), then gate_proj (its fc).
HALVES = {"gate": ("fc", 0), "fc": ("fc", 1), "proj": ("proj", None)}


@dataclass(frozen=True, slots=True)
class Joined:
    """A tensor of the whole model, made when asked for."""

    info: TensorInfo
    make: Callable[[], torch.Tensor]


class JoinedRanks:
    """`tensors` have the engine checkpoint's names, shapes and types, INT4 packed as it packs; a quantized linear has a
    scale of its input wherever TensorRT-LLM's has one. Raises CheckpointError, on reading, for ranks that contradict
    each other. `sm`: of the GPU whose order processed weights are in. Holds one linear at a time."""

    def __init__(self, checkpoint: RankCheckpoint, sm: int) -> None:
        self.checkpoint, self.contract, self.sm = checkpoint, checkpoint.contract, sm
        self._last: tuple[str, Parts] = ("", {})

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: joined.info for name, joined in self._joined.items()}

    def read(self, name: str) -> RawTensor:
        return RawTensor.from_torch(self._joined[name].make())

    @cached_property
    def _joined(self) -> dict[str, Joined]:
        return {joined.info.name: joined for joined in self._list()}

    def _list(self) -> Iterator[Joined]:
        c, size = self.contract.config, self.contract.size("tp_size")
        count = self.contract.size("world_size")
        first, last = range(size if c["use_parallel_embedding"] else 1), range(count - size, count)
        yield self._vocabulary("transformer.vocab_embedding.weight", first)
        for layer in range(c["num_hidden_layers"]):
            yield from self._list_layer(layer)
        norm = "transformer.ln_f.weight"
        info = TensorInfo(norm, self.contract.dtype, (c["hidden_size"],))
        yield Joined(info, partial(self._read_same, norm, last))
        yield self._vocabulary("lm_head.weight", last)

    def _list_layer(self, layer: int) -> Iterator[Joined]:
        c = self.contract.config
        hidden, inner, head = c["hidden_size"], c["intermediate_size"], c["head_size"]
        width = c["num_attention_heads"] * head
        for name in ("input_layernorm.weight", "post_layernorm.weight"):
            yield self._plain(layer, name, self.contract.dtype, (hidden,))
        yield from self._list_linear(layer, QKV, width + 2 * c["num_key_value_heads"] * head, hidden)
        yield from self._list_linear(layer, "attention.dense", hidden, width)
        if c["quantization"].get("kv_cache_quant_algo"):
            yield self._plain(layer, "attention.kv_cache_scaling_factor", "F32", (1,))
        if self.contract.is_routed(layer):
            yield from self._list_experts(layer)
            return
        for name, rows, columns in (("fc", inner, hidden), ("gate", inner, hidden), ("proj", hidden, inner)):
            yield from self._list_linear(layer, f"mlp.{name}", rows, columns)

    def _list_experts(self, layer: int) -> Iterator[Joined]:
        c = self.contract.config
        moe, hidden = c["moe"], c["hidden_size"]
        yield self._plain(layer, "mlp.router.weight", "F32", (moe["num_experts"], hidden))
        modules: list[tuple[str, int | None, int]] = [
            ("mlp.shared_expert", None, moe["shared_expert_intermediate_size"]),
            *((f"mlp.experts.{expert}", expert, c["moe_intermediate_size"]) for expert in range(moe["num_experts"])),
        ]
        for module, expert, inner in modules:
            for part in HALVES:
                shape = (hidden, inner) if part == "proj" else (inner, hidden)
                yield from self._list_part(layer, f"{module}.{part}", expert, shape)

    def _list_part(self, layer: int, name: str, expert: int | None, shape: tuple[int, int]) -> Iterator[Joined]:
        """An expert's linear, or the shared expert's."""
        local, _ = self._find(layer)
        part = name.rpartition(".")[2]
        module = f"{LAYER}{local}.mlp" + ("" if expert is not None else f".shared_expert.{HALVES[part][0]}")
        row = self.contract.find_quantization(module)
        for kind, (dtype, sizes) in list_parts(row, self.contract.dtype, *shape).items():
            info = TensorInfo(f"{LAYER}{layer}.{name}.{kind}", dtype, sizes)
            yield Joined(info, partial(self._read_part, layer, part, expert, kind))

    def _list_linear(self, layer: int, name: str, rows: int, columns: int) -> Iterator[Joined]:
        local, ranks = self._find(layer)
        known = list_engine_parts(self._quantization(local, name), self.contract.dtype, rows, columns)
        if f"{LAYER}{local}.{name}.bias" in self.checkpoint.files[ranks[0]].tensors:
            known["bias"] = (self.contract.dtype, (rows,))
        for kind, (dtype, shape) in known.items():
            info = TensorInfo(f"{LAYER}{layer}.{name}.{kind}", dtype, shape)
            yield Joined(info, partial(self._read_linear, layer, name, kind))

    def _plain(self, layer: int, name: str, dtype: str, shape: tuple[int, ...]) -> Joined:
        """One that every rank of a stage holds whole."""
        local, ranks = self._find(layer)
        info = TensorInfo(f"{LAYER}{layer}.{name}", dtype, shape)
        return Joined(info, partial(self._read_same, f"{LAYER}{local}.{name}", ranks))

    def _vocabulary(self, name: str, ranks: Sequence[int]) -> Joined:
        rows, hidden = self.contract.config["vocab_size"], self.contract.config["hidden_size"]

        def make() -> torch.Tensor:
            whole = cut_padding(join([self.checkpoint.read(rank, name) for rank in ranks], 0), rows, name)
            if len(ranks) > 1:  # a copy
                self._release(ranks, [name])
            return whole

        return Joined(TensorInfo(name, self.contract.dtype, (rows, hidden)), make)

    def _read_same(self, name: str, ranks: Sequence[int]) -> torch.Tensor:
        return join_same([self.checkpoint.read(rank, name) for rank in ranks], name)

    def _read_linear(self, layer: int, name: str, kind: str) -> torch.Tensor:
        """One tensor of a linear; all are put together once, for those that are asked for next."""
        if self._last[0] != f"{layer}.{name}":
            self._last = f"{layer}.{name}", self._join_linear(layer, name)
        return self._last[1][kind]

    def _join_linear(self, layer: int, name: str) -> Parts:
        local, ranks = self._find(layer)
        row, prefix = self._quantization(local, name), f"{LAYER}{local}.{name}."
        held = []
        for rank in ranks:
            names = [each for each in self.checkpoint.files[rank].tensors if each.startswith(prefix)]
            parts = {each.removeprefix(prefix): self.checkpoint.read(rank, each) for each in names}
            held.append(undo_linear(row, parts, self.sm))
        whole = {kind: self._join_kind(name, kind, [parts[kind] for parts in held]) for kind in held[0]}
        if row.get("quant_algo") in INT4:
            whole["weight"] = pack_int4(whole["weight"])
        self._release(ranks, [f"{prefix}{kind}" for kind in whole])
        return whole

    def _join_kind(self, name: str, kind: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if name in BY_INPUT:
            return join(parts, -1) if COLUMNS.get(kind) == parts[0].ndim else join_same(parts, f"{name}.{kind}")
        if kind not in ROWS or parts[0].shape == (1,):
            return join_same(parts, f"{name}.{kind}")
        if name == QKV:
            c = self.contract.config
            return join_heads(parts, c["num_attention_heads"], c["num_key_value_heads"], f"{name}.{kind}")
        return join(parts, 0)

    def _read_part(self, layer: int, part: str, expert: int | None, kind: str) -> torch.Tensor:
        local, ranks = self._find(layer)
        fused, half = HALVES[part]
        each = 1
        if expert is None:
            name, holders, index = f"{LAYER}{local}.mlp.shared_expert.{fused}.{kind}", list(ranks), None
        else:
            ways = self.contract.size("moe_ep_size")
            each = self.contract.config["moe"]["num_experts"] // ways  # of a rank
            name, index = f"{LAYER}{local}.mlp.{fused}.{kind}", expert % each
            holders = [rank for rank in ranks if (rank - ranks[0]) % ways == expert // each]
        found = [self.checkpoint.read(rank, name) for rank in holders]
        if kind == "activation_scaling_factor":
            return join_same(found, name)
        if index is not None:
            found = [stack[index] for stack in found]
        if kind != "weight":
            return join_same(found, name)
        whole = join(found, -1) if half is None else join([weight.chunk(2)[half] for weight in found], 0)
        if index is None or index + 1 == each:
            whole = whole.clone()
            self._release(holders, [name])
        return whole

    def _release(self, ranks: Sequence[int], names: Sequence[str]) -> None:
        """Lets go of the tensors' resident pages, where ranks have them."""
        for rank in ranks:
            for name in names:
                if name in self.checkpoint.files[rank].tensors:
                    self.checkpoint.release(rank, name)

    def _quantization(self, local: int, name: str) -> Mapping[str, Any]:
        return self.contract.find_quantization(f"{LAYER}{local}.{name}")

    def _find(self, layer: int) -> tuple[int, range]:
        """A layer's number in its pipeline stage, and the ranks of that."""
        size = self.contract.size("tp_size")
        first = next(
            rank
            for rank in range(0, self.contract.size("world_size"), size)
            if layer in self.contract.list_layers(rank)
        )
        return layer - self.contract.list_layers(first).start, range(first, first + size)


def list_engine_parts(row: Mapping[str, Any], dtype: str, rows: int, columns: int) -> Expected:
    """The tensors of a linear in an engine checkpoint, in place of those that TensorRT-LLM stores otherwise."""
    algo = row.get("quant_algo")
    if algo == "W8A16":
        return {"weight": ("I8", (rows, columns)), "per_channel_scale": ("F32", (rows,))}
    if algo == "W4A16_GPTQ":
        parts = list_parts({**row, "quant_algo": "W4A16_AWQ"}, dtype, rows, columns)
        del parts["prequant_scaling_factor"]
        return parts
    return list_parts(row, dtype, rows, columns)
