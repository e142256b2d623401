"""A rank's slices against plain torch slicing of the hub's own (dequantized) weights, for every format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.checkpoint.layouts.scales import SIGNATURES
from pipeline.checkpoint.tensors import RawTensor, TensorSource
from pipeline.errors import CheckpointError, CompatibilityError
from pipeline.sharding import Parallel, Rank, experts, layers, slice_source
from pipeline.sharding.spreading import FORMATS, GROUPED
from tests import fixtures
from tests.network import formats, models

# How the hub's linears divide, by the end of their names: dimension, and whether over the ranks of an expert's columns.
ROWS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
COLUMNS = ("o_proj", "down_proj")
LINEAR = r"layers.*(q|k|v|o|gate|up|down|q_b)_proj\.weight"

SHAPES: dict[str, Any] = {"num_key_value_heads": 4, "num_hidden_layers": 2}
# Every part of these is whole blocks of 128 on two ranks.
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "num_hidden_layers": 2,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "num_hidden_layers": 2,
    "intermediate_size": 512,
}
LLAMA = [Parallel(tensor=2), Parallel(tensor=4), Parallel(pipeline=2)]
ROUTED = [Parallel(tensor=4), Parallel(tensor=2, expert=2), Parallel(tensor=4, pipeline=2, expert=2)]


def _store(write: Callable[..., Path], kind: str, sizes: dict[str, Any]) -> Callable[[Path], models.Model]:
    return lambda path: formats.load(write, path, {LINEAR: kind}, **sizes)


CASES: dict[str, tuple[Callable[[Path], models.Model], list[Parallel]]] = {
    "llama": (lambda path: models.load(fixtures.llama(path, attention_bias=True, mlp_bias=True, **SHAPES)), LLAMA),
    "llama-tied": (lambda path: models.load(fixtures.llama(path, tie_word_embeddings=True, **SHAPES)), LLAMA),
    "qwen2": (lambda path: models.load(fixtures.qwen2(path, **SHAPES)), LLAMA),
    "v2": (lambda path: models.load(fixtures.deepseek_v2(path, attention_bias=True, num_hidden_layers=2)), ROUTED),
    "v2-lite": (lambda path: models.load(fixtures.deepseek_v2(path, q_lora_rank=None)), ROUTED),
    "v3": (lambda path: models.load(fixtures.deepseek_v3(path)), ROUTED),
    "v3-blocks": (
        lambda path: models.load_fp8(fixtures.deepseek_v3, path, dtype="float32", **WIDE),
        [Parallel(tensor=2), Parallel(tensor=2, pipeline=2, expert=2)],
    ),
    **{f"llama-{kind}": (_store(fixtures.llama, kind, SHAPES), LLAMA) for kind in formats.STORE},
    **{f"v3-{kind}": (_store(fixtures.deepseek_v3, kind, EXPERTS), ROUTED) for kind in formats.STORE},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], models.Model]:
    made: dict[str, models.Model] = {}

    def make(name: str) -> models.Model:
        if name not in made:
            made[name] = CASES[name][0](tmp_path_factory.mktemp(name) / "hf")
        return made[name]

    return make


def _hub(model: models.Model) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(model.path.glob("*.safetensors")):
        tensors |= load_file(file)
    return {name: t for name, t in tensors.items() if not models._is_beyond(name, model.architecture)}


def _expect(model: models.Model, rank: Rank) -> dict[str, torch.Tensor]:
    """The rank's weights and biases under the engine's names, q, k and v fused, cut by torch from the hub's."""
    first, last = layers(model.architecture, rank)
    p, found = rank.parallel, {}
    for name, tensor in _hub(model).items():
        parts = name.split(".")
        place = int(parts[2]) if parts[1] == "layers" else None
        outer = {"embed_tokens": rank.pipeline == 0, "norm": rank.pipeline == p.pipeline - 1}
        outer["lm_head"] = outer["norm"]
        if model.architecture.tie_word_embeddings:
            outer["embed_tokens"] |= outer["norm"]
        is_expert = ".experts." in name
        if place is None:
            if not outer[parts[-2]]:
                continue
        elif not first <= place < last or (is_expert and int(parts[5]) not in experts(model.architecture, rank)):
            continue
        ways, at = (p.tensor // p.expert, rank.moe_tensor) if is_expert else (p.tensor, rank.tensor)
        if parts[-2] in ROWS:
            tensor = tensor.chunk(ways, 0)[at]
        elif parts[-2] in COLUMNS and tensor.ndim == 2:
            tensor = tensor.chunk(ways, 1)[at]
        found[models.engine_name(name)] = tensor
    for name in [name for name in found if ".attention.q_proj." in name and model.architecture.latent is None]:
        heads = [found.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        found[name.replace("q_proj", "qkv")] = torch.cat(heads)
    return found


def _dequantize(source: TensorSource, base: str) -> torch.Tensor:
    """The matrix that a linear's tensors stand for, as one function of its input."""
    raw = {name.removeprefix(f"{base}."): source.read(name).to_torch() for name in _parts(source, base)}
    weight = raw["weight"]
    if set(raw) <= {"weight", "bias", "e_score_correction_bias"}:
        return weight
    if "weights_block_scaling_factor" in raw:
        scales = raw["weights_block_scaling_factor"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return weight.float() * scales[: weight.shape[0], : weight.shape[1]]
    scales = raw["weights_scaling_factor" if "weights_scaling_factor" in raw else "per_channel_scale"]
    if scales.ndim == 2:  # INT4
        wide = weight.view(torch.uint8).int()
        nibbles = torch.stack([wide & 15, wide >> 4], 1).reshape(-1, weight.shape[1])
        weight = torch.where(nibbles > 7, nibbles - 16, nibbles)
        scales = scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
    elif len(scales) > 1:
        scales = scales[:, None]
    return weight.float() * scales * raw.get("prequant_scaling_factor", torch.ones(1)).float()


def _parts(source: TensorSource, base: str) -> list[str]:
    return [name for name in source.tensors if name.rpartition(".")[0] == base]


@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_the_hubs_weights_cut_by_torch(case: str, model: Any) -> None:
    made = model(case)
    for rank in (rank for parallel in CASES[case][1] for rank in parallel.ranks):
        source = slice_source(made.source, made.architecture, rank)
        expected = _expect(made, rank)
        names = {name for name in source.tensors if name.endswith((".weight", ".bias", "correction_bias"))}
        assert names == set(expected)
        for name, tensor in expected.items():
            base, _, kind = name.rpartition(".")
            found = _dequantize(source, base) if kind == "weight" else source.read(name).to_torch()
            torch.testing.assert_close(found.float(), tensor.float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", ["llama", "v3-int4", "v3-blocks"])
def test_headers_say_what_is_read(case: str, model: Any) -> None:
    made = model(case)
    source = slice_source(made.source, made.architecture, Rank(Parallel(tensor=2, expert=1 + ("v3" in case)), 1))
    for name, info in source.tensors.items():
        raw = source.read(name)
        assert (info.name, info.dtype, info.shape, info.nbytes) == (name, raw.dtype, raw.shape, raw.data.size)


def test_the_ranks_together_are_the_whole(model: Any) -> None:
    """Byte for byte where nothing is fused or replicated: the rows of INT4 and of their scales, one below the other."""
    made = model("v3-int4")
    ranks = [slice_source(made.source, made.architecture, rank) for rank in Parallel(tensor=4).ranks]
    for kind in ("weight", "weights_scaling_factor"):
        name = f"transformer.layers.0.mlp.fc.{kind}"
        assert torch.equal(torch.cat([r.read(name).to_torch() for r in ranks]), made.source.read(name).to_torch())
        name = f"transformer.layers.0.mlp.proj.{kind}"
        assert torch.equal(torch.cat([r.read(name).to_torch() for r in ranks], 1), made.source.read(name).to_torch())


def test_rows_are_not_copied(model: Any) -> None:
    made = model("v3")
    source = slice_source(made.source, made.architecture, Rank(Parallel(tensor=2), 1))
    name = "transformer.layers.0.mlp.fc.weight"
    whole, part = made.source.read(name).data, source.read(name).data
    assert part.ctypes.data == whole.ctypes.data + whole.size // 2


def test_scales_of_inputs_and_of_the_cache_are_every_ranks(model: Any) -> None:
    made = model("llama-int8_sq")
    name = "transformer.layers.1.attention.kv_cache_scaling_factor"
    raw = {**made.source.raw, name: RawTensor.from_torch(torch.tensor([0.25]))}
    source = slice_source(models.MemorySource(raw), made.architecture, Rank(Parallel(tensor=2), 1))
    for kept in (name, "transformer.layers.1.mlp.proj.activation_scaling_factor"):
        assert torch.equal(source.read(kept).to_torch(), raw[kept].to_torch())


def test_one_rank_has_the_source_itself(model: Any) -> None:
    made = model("llama")
    assert slice_source(made.source, made.architecture, Rank()) is made.source


def test_layers_of_multi_token_prediction_are_left_out(model: Any) -> None:
    made = model("v3")
    extra = {"transformer.mtp_layers.0.enorm.weight": RawTensor.from_torch(torch.ones(128, dtype=torch.bfloat16))}
    source = slice_source(models.MemorySource({**made.source.raw, **extra}), made.architecture, Rank(Parallel(2), 1))
    assert not extra.keys() & source.tensors.keys()


@pytest.mark.parametrize(
    ("kind", "options", "tensor", "message", "works"),
    [
        ("int4", {"intermediate_size": 192}, 4, "6 groups of 32 inputs of transformer.layers.0.mlp.proj", "1, 2"),
        ("int4", {"intermediate_size": 224}, 2, "7 groups of 32 inputs of transformer.layers.0.mlp.proj", "1"),
    ],
)
def test_groups_are_never_cut(kind: str, options: Any, tensor: int, message: str, works: str, tmp_path: Path) -> None:
    made = formats.load(fixtures.llama, tmp_path / "hf", {LINEAR: kind}, **SHAPES, **options)
    with pytest.raises(CompatibilityError) as caught:
        slice_source(made.source, made.architecture, Rank(Parallel(tensor=tensor), 0))
    assert caught.value.message == f"tensor parallel size {tensor} does not divide the model's {message}"
    assert caught.value.hint == f"tensor sizes that would work: {works}"


def test_blocks_are_never_cut(model: Any) -> None:
    made = model("v3-blocks")
    with pytest.raises(CompatibilityError) as caught:
        slice_source(made.source, made.architecture, Rank(Parallel(tensor=4), 3))
    assert "whole FP8 blocks of 128 of transformer.layers.0" in caught.value.message
    assert caught.value.hint == "tensor sizes that would work: 1, 2"


def test_pairs_of_rows_are_never_cut(tmp_path: Path) -> None:
    made = formats.load(
        fixtures.llama, tmp_path / "hf", {r"gate_proj|up_proj": "int4"}, **SHAPES, intermediate_size=250
    )
    with pytest.raises(CompatibilityError, match=r"125 packed pairs of rows of transformer\.layers\.0\.mlp\.fc"):
        slice_source(made.source, made.architecture, Rank(Parallel(tensor=2), 0))


def test_a_tensor_that_does_not_fit_is_refused_before_it_is_cut(model: Any) -> None:
    made = model("llama")
    wide = replace(made.architecture, vocab_size=256)
    with pytest.raises(CheckpointError, match=r"vocab_embedding\.weight has shape \[512, 128\], .* says \[256, 128\]"):
        slice_source(made.source, wide, Rank(Parallel(tensor=2), 0))
    name = "transformer.layers.0.mlp.fc.zeros"
    odd = models.MemorySource({**made.source.raw, name: RawTensor.from_torch(torch.zeros(2))})
    with pytest.raises(CheckpointError, match=r"mlp\.fc\.zeros .* cannot be divided"):
        slice_source(odd, made.architecture, Rank(Parallel(tensor=2), 0))


def test_every_format_of_a_checkpoint_has_a_rule() -> None:
    for_export = {"int4_zeros"}
    assert FORMATS.keys() - {None} == {name for *_, name in SIGNATURES} - for_export
    assert {"int4", "int4_fp8"} == GROUPED
