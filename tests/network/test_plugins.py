"""Plugins in networks: both lowerings are one function, and one program whichever way the plugin went in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import BuildError, CompatibilityError
from pipeline.network.plugins import Plugins
from pipeline.network.skeleton import SkeletonNode, parse_skeleton
from pipeline.network.spec import Lowering, NetworkSpec
from plugins.rope_paged_kv.operation import RopePagedKv
from tests import fixtures
from tests.network import models
from tests.network.serving import prompts, serve

ALL = Lowering(rope_paged_kv="plugin", paged_attention="plugin")
ROPE, ATTENTION = Lowering(rope_paged_kv="plugin"), Lowering(paged_attention="plugin")
MODELS: dict[str, Callable[..., models.Model]] = {
    "llama": lambda path, dtype: models.load(fixtures.llama(path, dtype=dtype)),
    "qwen2": lambda path, dtype: models.load(fixtures.qwen2(path, dtype=dtype)),
    "v2": lambda path, dtype: models.load(fixtures.deepseek_v2(path, dtype=dtype)),
    "v3": lambda path, dtype: models.load(fixtures.deepseek_v3(path, dtype=dtype)),
}


@pytest.mark.parametrize(
    ("name", "dtype", "lowering"),
    [
        ("llama", "float16", ALL),
        ("llama", "float16", ATTENTION),
        ("v2", "float16", ALL),
        ("v2", "bfloat16", ROPE),
        ("qwen2", "float32", ALL),
        ("v3", "bfloat16", ALL),
    ],
)
def test_lowerings_agree(name: str, dtype: str, lowering: Lowering, tmp_path: Path) -> None:
    """Over chunks, single tokens and both at once. In the arithmetic of the declared types sums are added in another
    order, which may tip a router to another expert: most rows stay, and none is off without that."""
    model = MODELS[name](tmp_path / "hf", dtype)
    native, plugin = model.program(), model.program(lowering=lowering)
    sequences = prompts(model.architecture.vocab_size)
    for found, wanted in zip(*(serve(program, sequences=sequences) for program in (native, plugin)), strict=True):
        torch.testing.assert_close(found["logits"], wanted["logits"], rtol=0, atol=1e-5)
    declared = [serve(program, sequences=sequences, mode="declared") for program in (native, plugin)]
    for found, wanted in zip(*declared, strict=True):
        rows = (found["logits"] - wanted["logits"]).abs().amax(-1)
        assert rows.median() < 5e-2
        assert name in ("v2", "v3") or rows.max() < 5e-2


def test_a_program_says_what_its_plugins_compute(tmp_path: Path) -> None:
    model = MODELS["llama"](tmp_path / "hf", "float16")
    program = model.program(lowering=ALL)
    nodes = [node for node in program.nodes if node.kind == "rope_paged_kv"]
    assert [node.name for node in nodes] == [f"layers.{layer}.attention.rope_paged_kv" for layer in range(len(nodes))]
    assert len(nodes) == model.architecture.num_layers
    assert nodes[0].attributes["head_size"] == model.architecture.head_dim
    kinds = {node.kind for node in program.nodes}
    assert "paged_attention" in kinds and not kinds & {"kv_cache_update", "rotary_embedding", "attention"}
    assert not [node.name for node in program.nodes if node.name.startswith("mask.")]
    assert not [name for name in program.constants if "placeholder" in name]
    assert program.digest() == model.program(lowering=ALL).digest() != model.program().digest()
    json.dumps(program.dump())


def test_slices_hold_their_own_plugins(tmp_path: Path) -> None:
    model = MODELS["v2"](tmp_path / "hf", "float32")
    last = model.architecture.num_layers
    parts = [model.program(lowering=ALL, layers=(0, 1)), model.program(lowering=ALL, layers=(1, last))]
    sequences = prompts(model.architecture.vocab_size)
    whole = serve(model.program(), sequences=sequences)
    for found, wanted in zip(serve(*parts, sequences=sequences), whole, strict=True):
        torch.testing.assert_close(found["logits"], wanted["logits"], rtol=0, atol=1e-5)


class FakeTensorRT:
    """A network of TensorRT proper, as far as a plugin sees it: it takes plugins where they stand."""

    def __init__(self, answer: Any) -> None:
        self.answer, self.added = answer, []  # type: ignore[var-annotated]

    def add_plugin_v3(self, inputs: list[Any], shapes: list[Any], plugin: Any) -> Any:
        self.added.append((inputs, shapes, plugin.operation))
        return self.answer


def test_tensorrt_proper_adds_its_own_way() -> None:
    import tensorrt_rtx as trt  # whose plugin classes are TensorRT's

    operation = RopePagedKv(
        dtype="float16", heads=4, kv_heads=2, head_size=8, rotary_size=8, interleaved=True, scale=1.0, block_size=16,
        pool_dtype="float16",
    )  # fmt: skip
    network = FakeTensorRT("a layer")
    plugins = Plugins(trt, network)
    plugins.announce({"here": operation})
    assert plugins.add("here", operation, ["a", "b"]) == "a layer"
    assert network.added == [(["a", "b"], [], operation)]
    assert plugins.objects["here"].operation == operation
    with pytest.raises(BuildError, match="TensorRT refused plugin there"):
        Plugins(trt, FakeTensorRT(None)).add("there", operation, [])


def test_the_parsers_words_are_told() -> None:
    import tensorrt_rtx as trt

    node = SkeletonNode(
        name="x", op="nobody", domain="trtseek", version="1", inputs=(("float16", 2),), outputs=("float16",), fields=()
    )
    builder = trt.Builder(trt.Logger(trt.Logger.INTERNAL_ERROR))
    with pytest.raises(BuildError, match=r"parser refuses the plugins: .*not found"):
        parse_skeleton(trt, builder.create_network(0), [node])


def test_lowerings_are_written_and_read() -> None:
    spec = NetworkSpec(dtype="float16", max_seq_len=64, lowering=ALL)
    assert NetworkSpec.from_json(spec.to_json()) == spec
    assert NetworkSpec.from_json('{"dtype": "float16", "max_seq_len": 64}').lowering == Lowering()
    with pytest.raises(CompatibilityError, match="lowering 'fast' of rope_paged_kv is unknown"):
        Lowering(rope_paged_kv="fast")
    with pytest.raises(CompatibilityError, match="lowers moonwalk, which"):
        NetworkSpec.from_json('{"dtype": "float16", "max_seq_len": 64, "lowering": {"moonwalk": "native"}}')
