"""The kinds of node: for each, the TensorRT layer class, its input slots and its attributes as JSON values.

A slot written "name?" may be unconnected (None), or absent at the end of the inputs. Attributes that are enumerations
are spelled as TensorRT's member in lower case ("sum", "upper_left"). What each kind computes is TensorRT's own
definition (developer guide, "Operators"); the remarks hold what is easily got wrong:

gather            mode "default": data taken along `axis` at indices of any shape; "element": as torch.gather; "nd":
                  as ONNX GatherND
shuffle           transpose by `first_transpose`, reshape, transpose by `second_transpose`; null transposes are the
                  identity; `reshape_dims` null with no second input means no reshape, with a second input the shape is
                  that input's value; -1 takes what is left; `zero_is_placeholder`: a 0 copies the size at the same
                  place after the first transpose
elementwise       operands of one rank, sizes of 1 broadcast; "div" truncates on integers, "floor_div" does not
cast              `to`: the type; float to integer truncates
matrix_multiply   `op0`/`op1` "none" or "transpose" of the last two dimensions; leading dimensions broadcast
rotary_embedding  data [B, heads, S, D], tables [positions, dim/2], position ids [B, S]; rotates the first `dim` of D:
                  even/odd pairs when `interleaved`, else the two halves
kv_cache_update   cache [blocks, heads, rows, D] is updated in place; with form "packed_nhd" update is [T, heads, D]:
                  rows update_lengths[b]:update_lengths[b+1] go to block b from row write_indices[b] on; with
                  "padded_bhnd" update is [blocks, heads, S, D]
attention         q [B, heads, Q, D], k and v [B, kv_heads, K, D] (query head i uses kv head i*kv_heads//heads), mask
                  [B or 1, heads or 1, Q, K]: bool (true: may attend) or added; the scores are not scaled; the two
                  TensorRT layers ATTENTION_INPUT and ATTENTION_OUTPUT are one node here, named after the attention;
                  `decomposable` only tells the builder that it need not find one kernel
dist_collective   every rank of `ranks` (numbers of the world, in order) runs it: "all_reduce" sums ("reduce") their
                  data, "all_gather" puts them below each other along dimension 0, "all_to_all" exchanges the entries of
                  dimension 0, as many as ranks. What it is, is in the layer's metadata: TensorRT gives back no more
                  than the number of ranks
dequantize        data * scale; with `block_shape`, one scale per block of that many elements of each dimension (scale's
                  rank is data's); else per `axis`, or one for all where the scale has no dimension
slice             along `axes` only (null: all): `start`, `size`, `stride` or, where connected, inputs 1 to 3
shape             int64
fill              "linspace" only: element i of a 1-D tensor is alpha + i*beta; a connected input overrides the
                  attribute (input 0 the shape, 1 alpha, a scalar, 2 beta, of one element)
one_hot           values [off, on]; the new dimension of `depth` elements is inserted at `axis`
topk              outputs: values, then int32 indices; sorted from the largest ("max")
a plugin          has its operation's name for its kind, and its attributes: see plugins/*/operation.py
reduce, softmax, topk   `axes` is a list of dimensions
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.errors import CompatibilityError

# TensorRT's DataType member -> the spelling used in programs
DTYPE_NAMES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "BOOL": "bool",
    "UINT8": "uint8",
    "FP8": "fp8",
    "INT4": "int4",
}
Reader = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """How one type of layer is read. `layer` is the TensorRT class that its object must be seen as."""

    layer: str
    inputs: tuple[str, ...]
    attributes: Mapping[str, Reader]


def dtype_name(dtype: Any) -> str:
    return DTYPE_NAMES[dtype.name]


def _enum(attribute: str) -> Reader:
    return lambda layer: str(getattr(layer, attribute).name).lower()


def _plain(attribute: str) -> Reader:
    return lambda layer: getattr(layer, attribute)


def _integers(attribute: str) -> Reader:
    """A Dims or tuple as a list; None where TensorRT has none (unset, or given by an input)."""

    def read(layer: Any) -> list[int] | None:
        value = getattr(layer, attribute)
        return None if value is None else [int(v) for v in value]

    return read


def _axes(layer: Any) -> list[int]:
    """A bit mask as a list of dimensions."""
    mask = int(layer.axes)
    return [dim for dim in range(mask.bit_length()) if mask >> dim & 1]


def _permutation(attribute: str) -> Reader:
    """TensorRT pads a permutation with the identity to eight entries: cut to the tensor's rank, null where it moves
    nothing."""

    def read(layer: Any) -> list[int] | None:
        rank = len((layer.get_input(0) if attribute == "first_transpose" else layer.get_output(0)).shape)
        order = [int(v) for v in getattr(layer, attribute)][:rank]
        return None if order == list(range(rank)) else order

    return read


def _reshape_dims(layer: Any) -> list[int] | None:
    # Asking TensorRT for dimensions that an input gives makes it warn.
    given = layer.num_inputs > 1 and layer.get_input(1) is not None
    return None if given or layer.reshape_dims is None else [int(size) for size in layer.reshape_dims]


def _block_shape(layer: Any) -> list[int] | None:
    """As set; where it is not, as TensorRT derives it from a scale of the data's rank."""
    try:
        return [int(v) for v in layer.block_shape]
    except RuntimeError:  # how the binding says that none was set
        data, scale = tuple(layer.get_input(0).shape), tuple(layer.get_input(1).shape)
        if len(data) != len(scale) or min(data, default=0) < 1:
            return None
        return [size // blocks for size, blocks in zip(data, scale, strict=True)]


def _collective(key: str) -> Reader:
    """Of what the writer put into the layer's metadata."""

    def read(layer: Any) -> Any:
        told = json.loads(layer.metadata) if layer.metadata.startswith("{") else {}
        if key not in told or len(told.get("ranks", ())) != layer.num_ranks:
            raise CompatibilityError(
                f"collective {layer.name} of {layer.num_ranks} ranks has the metadata {layer.metadata!r}, which do not "
                "say what it is",
                hint="write collectives through the graph writer only",
            )
        return told[key]

    return read


def _slice_axes(layer: Any) -> list[int] | None:
    return None if layer.axes is None else [int(axis) for axis in layer.axes]


# TensorRT's LayerType -> Kind. The node's kind is the member in lower case.
KINDS: dict[str, Kind] = {
    "ACTIVATION": Kind("IActivationLayer", ("data",), {"op": _enum("type")}),
    "CAST": Kind("ICastLayer", ("data",), {"to": lambda layer: dtype_name(layer.to_type)}),
    "CONCATENATION": Kind("IConcatenationLayer", ("data",), {"axis": _plain("axis")}),
    "DEQUANTIZE": Kind(
        "IDequantizeLayer",
        ("data", "scale", "zero_point?"),
        {"axis": _plain("axis"), "block_shape": _block_shape, "to": lambda layer: dtype_name(layer.to_type)},
    ),
    "DIST_COLLECTIVE": Kind(
        "IDistCollectiveLayer", ("data",), {key: _collective(key) for key in ("op", "reduce", "ranks")}
    ),
    "ELEMENTWISE": Kind("IElementWiseLayer", ("a", "b"), {"op": _enum("op")}),
    "FILL": Kind(
        "IFillLayer",
        ("shape?", "alpha?", "beta?"),
        {
            "op": _enum("operation"),
            "shape": _integers("shape"),
            "alpha": _plain("alpha"),
            "beta": _plain("beta"),
            "to": lambda layer: dtype_name(layer.to_type),
        },
    ),
    "GATHER": Kind(
        "IGatherLayer",
        ("data", "indices"),
        {"axis": _plain("axis"), "mode": _enum("mode"), "num_elementwise_dims": _plain("num_elementwise_dims")},
    ),
    "IDENTITY": Kind("IIdentityLayer", ("data",), {}),
    "KV_CACHE_UPDATE": Kind(
        "IKVCacheUpdateLayer",
        ("cache", "update", "write_indices", "update_lengths?"),
        {"form": _enum("update_form"), "mode": _enum("cache_mode")},
    ),
    "MATRIX_MULTIPLY": Kind("IMatrixMultiplyLayer", ("a", "b"), {"op0": _enum("op0"), "op1": _enum("op1")}),
    "ONE_HOT": Kind("IOneHotLayer", ("indices", "values", "depth"), {"axis": _plain("axis")}),
    # Its operation says what its inputs and attributes are.
    "PLUGIN_V3": Kind("IPluginV3Layer", (), {}),
    "QUANTIZE": Kind(
        "IQuantizeLayer",
        ("data", "scale", "zero_point?"),
        {"axis": _plain("axis"), "block_shape": _block_shape, "to": lambda layer: dtype_name(layer.to_type)},
    ),
    "REDUCE": Kind("IReduceLayer", ("data",), {"op": _enum("op"), "axes": _axes, "keep_dims": _plain("keep_dims")}),
    "ROTARY_EMBEDDING": Kind(
        "IRotaryEmbeddingLayer",
        ("data", "cos", "sin", "position_ids?"),
        {"interleaved": _plain("interleaved"), "dim": _plain("rotary_embedding_dim")},
    ),
    "SELECT": Kind("ISelectLayer", ("condition", "then", "else"), {}),
    "SHAPE": Kind("IShapeLayer", ("data",), {}),
    "SHUFFLE": Kind(
        "IShuffleLayer",
        ("data", "reshape_dims?"),
        {
            "first_transpose": _permutation("first_transpose"),
            "reshape_dims": _reshape_dims,
            "second_transpose": _permutation("second_transpose"),
            "zero_is_placeholder": _plain("zero_is_placeholder"),
        },
    ),
    "SLICE": Kind(
        "ISliceLayer",
        ("data", "start?", "size?", "stride?", "fill?", "axes?"),
        {
            "axes": _slice_axes,
            "start": _integers("start"),
            "size": _integers("shape"),
            "stride": _integers("stride"),
            "mode": _enum("mode"),
        },
    ),
    "SOFTMAX": Kind("ISoftMaxLayer", ("data",), {"axes": _axes}),
    "TOPK": Kind("ITopKLayer", ("data", "k?"), {"op": _enum("op"), "k": _plain("k"), "axes": _axes}),
    "UNARY": Kind("IUnaryLayer", ("data",), {"op": _enum("op")}),
    # ATTENTION_OUTPUT is the other half of this layer and no node of its own.
    "ATTENTION_INPUT": Kind(
        "IAttentionInputLayer",
        ("q", "k", "v", "mask?"),
        {
            "normalization": lambda layer: layer.attention.norm_op.name.lower(),
            "causal": lambda layer: layer.attention.causal_kind.name.lower(),
            "decomposable": lambda layer: layer.attention.decomposable,
            "query_form": lambda layer: layer.attention.query_form.name.lower(),
            "key_value_form": lambda layer: layer.attention.key_value_form.name.lower(),
        },
    ),
}
