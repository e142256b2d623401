"""Plugins in networks: both lowerings are one function, and one program whichever way the plugin went in."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import BuildError, CompatibilityError
from pipeline.network.plugins import Plugins
from pipeline.network.skeleton import SkeletonNode, parse_skeleton
from pipeline.network.spec import Lowering, NetworkSpec
from pipeline.network.widening import widen_inputs
from plugins.rope_paged_kv.operation import RopePagedKv
from tests import fixtures
from tests.network import formats, models
from tests.network.serving import prompts, serve

ALL = Lowering(rope_paged_kv="plugin", paged_attention="plugin")
ROPE, ATTENTION = Lowering(rope_paged_kv="plugin"), Lowering(paged_attention="plugin")
EXPERTS = Lowering(moe_experts="plugin")
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
        ("v2", "float16", EXPERTS),
        ("v3", "bfloat16", replace(ALL, moe_experts="plugin")),
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


def load_fp8(path: Path) -> models.Model:
    """Gate and up projections of experts in FP8, which read one input in one step; down projections in INT4."""
    kinds = {r"experts.*(gate|up)_proj": "fp8", r"experts.*down_proj": "int4"}
    model = formats.load(fixtures.deepseek_v3, path, kinds)
    for name in [name for name in model.source.raw if name.endswith(f".gate.{formats.STEP}")]:
        model.source.raw[name] = model.source.raw[name.replace(".gate.", ".fc.")]
    return model


def load_int4(write: Callable[..., Path], prescale: str, pattern: str = "experts") -> Callable[[Path], models.Model]:
    return lambda path: models.load_int4(
        write, path, pattern=pattern, group=32, prescale=prescale, dtype="float16", num_hidden_layers=2
    )


STORED: dict[str, tuple[Callable[[Path], models.Model], tuple[str, str, str]]] = {
    "int4": (load_int4(fixtures.deepseek_v2, "all"), ("int4", "int4", "shared")),
    "int4-each": (load_int4(fixtures.deepseek_v2, "each", r"experts.*down"), ("plain", "int4", "each")),
    "fp8_blocks": (lambda path: models.load_fp8(fixtures.deepseek_v3, path), ("fp8_blocks", "fp8_blocks", "")),
    "fp8": (load_fp8, ("fp8", "int4", "shared")),
}


@pytest.mark.parametrize("stored", STORED)
def test_experts_agree_in_every_format(stored: str, tmp_path: Path) -> None:
    """Rounded inputs apart, as verify does: FP8's are a question of the last bit."""
    load, described = STORED[stored]
    model = load(tmp_path / "hf")
    plugin = model.program(lowering=EXPERTS)
    experts = [node for node in plugin.nodes if node.kind == "moe_experts"]
    routed = [layer for layer in range(model.architecture.num_layers) if model.architecture.is_routed(layer)]
    assert [node.name for node in experts] == [f"layers.{layer}.mlp.experts.moe_experts" for layer in routed]
    names = ("up_storage", "down_storage", "prescale")
    assert {tuple(node.attributes[name] for name in names) for node in experts} == {described}
    sequences = prompts(model.architecture.vocab_size)
    both = (serve(widen_inputs(program), sequences=sequences) for program in (model.program(), plugin))
    for found, wanted in zip(*both, strict=True):
        torch.testing.assert_close(found["logits"], wanted["logits"], rtol=0, atol=1e-5)
    if stored == "fp8":
        rounded, whole = (serve(program, sequences=sequences)[0] for program in (plugin, widen_inputs(plugin)))
        assert 1e-4 < (rounded["logits"] - whole["logits"]).abs().max() < 1


def test_experts_without_a_kernel_are_refused(tmp_path: Path) -> None:
    model = formats.load(fixtures.deepseek_v2, tmp_path / "int8", {"experts": "int8"})
    with pytest.raises(CompatibilityError, match=r"experts\.0\.fc is int8, for which plugin moe_experts has no kernel"):
        model.program(lowering=EXPERTS)
    model = load_int4(fixtures.deepseek_v2, "each")(tmp_path / "each")
    with pytest.raises(
        CompatibilityError, match=r"have several prequant_scaling_factors, plugin moe_experts takes one"
    ):
        model.program(lowering=EXPERTS)


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
