"""An architecture's rows, expanded over its layers and experts, and held against a checkpoint's headers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from collections.abc import Mapping as AbstractMapping
from dataclasses import replace
from functools import cached_property
from itertools import chain

from pipeline.checkpoint.architecture import Architecture
from pipeline.checkpoint.layouts import deepseek, deepseek_v2, deepseek_v3, llama, qwen2
from pipeline.checkpoint.layouts.rows import DENSE, EXPERT, MODEL, ROUTED, Dimension, Mapping, Row
from pipeline.checkpoint.layouts.scales import FP8, scale_mapping
from pipeline.checkpoint.tensors import TensorInfo
from pipeline.errors import CheckpointError

Shape = tuple[int, ...]

# HF class -> the module with its ROWS, UNUSED and list_dimensions.
LAYOUTS = {
    "LlamaForCausalLM": llama,
    "Qwen2ForCausalLM": qwen2,
    "DeepseekForCausalLM": deepseek,
    "DeepseekV2ForCausalLM": deepseek_v2,
    "DeepseekV3ForCausalLM": deepseek_v3,
}


class Layout:
    """The two-way name layout of one model."""

    def __init__(
        self,
        architecture: Architecture,
        rows: tuple[Row, ...],
        dimensions: AbstractMapping[str, Dimension],
        unused: tuple[str, ...],
    ) -> None:
        self.architecture = architecture
        flags = list_flags(architecture)
        chosen = [row for row in rows if not row.when or row.when in flags]
        if architecture.experts is None:  # a DeepSeek of dense layers only, which has no sizes for the rest
            chosen = [row for row in chosen if row.where not in (ROUTED, EXPERT)]
        self._rows = [row for row in chosen if not row.mtp]
        self._mtp_rows = [row for row in chosen if row.mtp]
        self._shapes = {row.target: _shape_row(row, dimensions) for row in chosen}
        self._unused = [re.compile(pattern) for pattern in unused]

    def mappings(self) -> list[Mapping]:
        """Every tensor of the model: the embedding, then layer by layer (experts in order), then the head, at last the
        layers for multi-token prediction."""
        return self._mappings

    def layer_mappings(self, layer: int, *, experts: int | None = None) -> list[Mapping]:
        """The tensors of one decoder layer, without expanding the others; of the first `experts` only, where given."""
        return list(self._expand_layer(_split_rows(self._rows)[1], layer, experts))

    def outer_mappings(self) -> list[Mapping]:
        """The tensors around the layers: embedding, final norm, head."""
        before, _, after = _split_rows(self._rows)
        return [self._expand(row, None, None) for row in (*before, *after)]

    def mtp_mappings(self) -> list[Mapping]:
        """The layers for multi-token prediction, their `layer` None: no stage counts them among the decoder's. A
        checkpoint may lack them altogether, so that all are optional."""
        first, count = self.architecture.num_layers, self.architecture.mtp_layers
        return [
            replace(mapping, layer=None, optional=True)
            for index in range(count)
            for mapping in self._expand_layer(self._mtp_rows, first + index)
        ]

    def match(self, tensors: AbstractMapping[str, TensorInfo], origin: str) -> tuple[list[Mapping], list[str]]:
        """The mappings whose sources `tensors` has, and the names of tensors known to be of no use. A weight in FP8
        blocks is followed by the mapping of its scales.

        Raises CheckpointError for a missing tensor, a shape that contradicts config.json (with both shapes and the
        keys), or a tensor that no row reads; `origin` names the checkpoint in messages.
        """
        present: list[Mapping] = []
        read: set[str] = set()
        for mapping in self._iterate():
            missing = [name for name in mapping.sources if name not in tensors]
            if mapping.optional and len(missing) == len(mapping.sources):
                continue
            if missing:
                raise self._refuse_missing(missing[0], mapping, origin)
            expected = [mapping]
            if any(tensors[name].dtype == FP8 for name in mapping.sources):
                expected.append(self._expect_scales(mapping, tensors, origin))
            for each in expected:
                for name, wanted, keys in zip(each.sources, each.source_shapes, each.keys, strict=True):
                    if tensors[name].shape != wanted:
                        raise _refuse_shape(tensors[name], wanted, keys, origin)
                read.update(each.sources)
            present += expected
        self._require_whole_mtp(tensors, origin)
        return present, self._list_unused(tensors.keys() - read, origin)

    def _expect_scales(self, mapping: Mapping, tensors: AbstractMapping[str, TensorInfo], origin: str) -> Mapping:
        """The mapping of a weight's scales by block, once they are known to be there and of their type."""
        scales = scale_mapping(mapping)
        for name, weight in zip(scales.sources, mapping.sources, strict=True):
            if name not in tensors or tensors[weight].dtype != FP8 or tensors[name].dtype != "F32":
                found = tensors[name].dtype if name in tensors else "missing"
                raise CheckpointError(
                    f"{origin}: {weight} is {tensors[weight].dtype} and {name} is {found}; FP8 is read with F32 scales",
                    hint="take the model's whole FP8 repository, or its 16-bit weights",
                )
        return scales

    def _require_whole_mtp(self, tensors: AbstractMapping[str, TensorInfo], origin: str) -> None:
        """Many copies of a model leave its MTP layers out; half of one is damage."""
        optional = {row.target for row in self._mtp_rows if row.optional}
        for index in range(self.architecture.mtp_layers):
            layer = [
                mapping
                for row in self._mtp_rows
                for mapping in self._expand_layer([row], self.architecture.num_layers + index)
                if row.target not in optional
            ]
            absent = [mapping for mapping in layer if mapping.sources[0] not in tensors]
            if absent and len(absent) < len(layer):
                raise self._refuse_missing(absent[0].sources[0], absent[0], origin)

    def _refuse_missing(self, name: str, mapping: Mapping, origin: str) -> CheckpointError:
        return CheckpointError(
            f"{origin}: {name} is missing; {self.architecture.name} as config.json describes it has one",
            hint=f"compare with config.json: {_list_keys(mapping)}",
        )

    def _list_unused(self, names: Iterable[str], origin: str) -> list[str]:
        unused = sorted(names)
        unknown = [name for name in unused if not any(pattern.fullmatch(name) for pattern in self._unused)]
        if unknown:
            raise CheckpointError(
                f"{origin}: {len(unknown)} tensors have no place in {self.architecture.name} as config.json describes "
                f"it, {unknown[0]} among them",
                hint="leaving weights out would change the model: check config.json's layer and expert counts, "
                "tie_word_embeddings, attention_bias and mlp_bias",
            )
        return unused

    @cached_property
    def _mappings(self) -> list[Mapping]:
        return list(self._iterate())

    def _iterate(self) -> Iterator[Mapping]:
        """One by one: a config.json may speak of millions of tensors that no checkpoint has."""
        before, layers, after = _split_rows(self._rows)
        yield from (self._expand(row, None, None) for row in before)
        yield from chain.from_iterable(
            self._expand_layer(layers, layer) for layer in range(self.architecture.num_layers)
        )
        yield from (self._expand(row, None, None) for row in after)
        yield from self.mtp_mappings()

    def _expand_layer(self, rows: list[Row], layer: int, experts: int | None = None) -> Iterator[Mapping]:
        routed = self.architecture.is_routed(layer)
        for row in rows:
            if row.where != EXPERT and row.where != (DENSE if routed else ROUTED):
                yield self._expand(row, layer, None)
        if routed and self.architecture.experts is not None:
            for expert in range(self.architecture.experts.num_routed if experts is None else experts):
                for row in rows:
                    if row.where == EXPERT:
                        yield self._expand(row, layer, expert)

    def _expand(self, row: Row, layer: int | None, expert: int | None) -> Mapping:
        source_shapes, target_shape, keys = self._shapes[row.target]
        beyond = layer - self.architecture.num_layers if row.mtp and layer is not None else None
        return Mapping(
            target=row.target.format(l=layer, e=expert, m=beyond),
            sources=tuple(source.format(l=layer, e=expert) for source in row.sources),
            source_shapes=source_shapes,
            target_shape=target_shape,
            role=row.role,
            layer=layer,
            expert=expert,
            optional=row.optional,
            keys=keys,
            cast=row.cast,
        )


def _shape_row(row: Row, dims: AbstractMapping[str, Dimension]) -> tuple[tuple[Shape, ...], Shape, tuple[str, ...]]:
    """Shapes of the sources and the target, and per source the keys of config.json behind its shape."""
    tail = (dims[row.columns].size,) if row.columns else ()
    keys = tuple(f"{dims[r].keys} by {dims[row.columns].keys}" if tail else dims[r].keys for r in row.rows)
    return tuple((dims[r].size, *tail) for r in row.rows), (sum(dims[r].size for r in row.rows), *tail), keys


def _refuse_shape(info: TensorInfo, wanted: Shape, keys: str, origin: str) -> CheckpointError:
    return CheckpointError(
        f"{origin}: {info.name} has shape {list(info.shape)}, config.json asks for {list(wanted)} ({keys})",
        hint="config.json and the weights are of two models, or one of them is damaged",
    )


def layout_for(architecture: Architecture) -> Layout:
    """The layout of an architecture. Raises CheckpointError where there is none."""
    module = LAYOUTS.get(architecture.name)
    if module is None:
        raise CheckpointError(
            f"architecture {architecture.name} has no weight layout", hint=f"supported: {', '.join(LAYOUTS)}"
        )
    unused = module.UNUSED
    if architecture.tie_word_embeddings:
        unused = (*unused, r"lm_head\.weight")  # a copy of the embedding, which transformers overwrites too
    return Layout(architecture, module.ROWS, module.list_dimensions(architecture), unused)


def list_flags(a: Architecture) -> frozenset[str]:
    """The conditions that rows may ask for in `when`."""
    lora = a.latent is not None and a.latent.q_lora_rank is not None
    flags = {
        "untied": not a.tie_word_embeddings,
        "attention_bias": a.attention_bias,
        "qkv_bias": a.qkv_bias,
        "mlp_bias": a.mlp_bias,
        "q_lora": lora,
        "q_lora_bias": lora and a.attention_bias,
        "q_full": not lora,
    }
    return frozenset(name for name, is_set in flags.items() if is_set)


def _list_keys(mapping: Mapping) -> str:
    if mapping.role == "mtp":
        return "num_nextn_predict_layers, num_hidden_layers, n_routed_experts"
    if mapping.layer is None:
        return "architectures, tie_word_embeddings"
    experts = "n_routed_experts, " if mapping.expert is not None else ""
    return f"{experts}num_hidden_layers, first_k_dense_replace, q_lora_rank, attention_bias, mlp_bias"


def _split_rows(rows: list[Row]) -> tuple[list[Row], list[Row], list[Row]]:
    """Rows before, of and after the decoder layers, in the order they were written in."""
    layer_rows = [i for i, row in enumerate(rows) if row.where != MODEL]
    first, last = layer_rows[0], layer_rows[-1]
    return rows[:first], rows[first : last + 1], rows[last + 1 :]
