"""Folding without rounding must not change what a layer computes; a scale that is not compensated must."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipeline.checkpoint.layouts import layout_for
from pipeline.errors import QuantizationError
from pipeline.quantization.folding import Adjustments, realise
from pipeline.quantization.rules import choose_linears
from pipeline.quantization.scale_groups import ResolvedFold, ScaleGroup, scale_groups
from pipeline.quantization.selection import QUANTIZABLE, Rules
from tests import fixtures
from tests.quantization.support import MemorySource, Model

MODELS = {
    "llama grouped queries": lambda path: fixtures.llama(path, dtype="float32"),
    "llama without grouped queries": lambda path: fixtures.llama(path, dtype="float32", num_key_value_heads=4),
    "llama with biases": lambda path: fixtures.llama(
        path, dtype="float32", num_key_value_heads=4, attention_bias=True, mlp_bias=True
    ),
    "deepseek_v2": lambda path: fixtures.deepseek_v2(path, dtype="float32"),
    "deepseek_v2 without q_lora": lambda path: fixtures.deepseek_v2(path, dtype="float32", q_lora_rank=None),
}


def find_groups(model: Model, layer: int, exclude: tuple[str, ...] = ()) -> list[ScaleGroup]:
    rules = Rules(method="awq", include=[role for role in QUANTIZABLE if role != "head"], exclude=exclude)
    selection = choose_linears(layout_for(model.architecture).mappings(), model.source.tensors, rules)
    present = {name.removesuffix(".weight") for name in model.source.tensors}
    return scale_groups(model.architecture, layer, present, selection.linears.keys())


def adjust(model: Model, groups: list[ScaleGroup], dtype: torch.dtype) -> Adjustments:
    """A random scale between 1/4 and 4 for every group."""
    adjustments, generator = Adjustments(dtype), torch.Generator().manual_seed(1)
    for group in groups:
        columns = model.source.tensors[f"{group.linears[0]}.weight"].shape[1]
        wanted = 4 ** (2 * torch.rand(columns, generator=generator) - 1)
        scale = realise(wanted, group.fold, model.source, dtype)
        assert scale is not None
        adjustments.add(group, scale, model.source)
    return adjustments


def apply(model: Model, adjustments: Adjustments) -> dict[str, torch.Tensor]:
    """The layer's tensors, unrounded, each kept vector multiplied back into its own columns (y = W (x · vector))."""
    values = {name: adjustments.apply(name, value.float()) for name, value in model.source.values.items()}
    for name, vector in adjustments.vectors.items():
        values[f"{name}.weight"] = values[f"{name}.weight"] * vector.float()
    return values


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layer", [0, 1])
def test_folding_leaves_the_function_unchanged(tmp_path: Path, name: str, layer: int) -> None:
    model = Model.load(MODELS[name](tmp_path / "m"))
    groups = find_groups(model, layer)
    hidden = torch.randn(2, 24, model.architecture.hidden_size, generator=torch.Generator().manual_seed(0))
    adjustments = adjust(model, groups, torch.float32)
    values = apply(model, adjustments)
    changed = [n for n in values if not torch.equal(values[n], model.source.values[n].float())]
    expected = model.run_layer(layer, model.source.values, hidden)
    found = model.run_layer(layer, values, hidden)
    assert len(changed) >= 4
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("layer", [0, 1])
def test_each_fold_matters(tmp_path: Path, name: str, layer: int) -> None:
    """Without its producer's part, any group's scale shows in the output: the test above can fail."""
    model = Model.load(MODELS[name](tmp_path / "m"))
    hidden = torch.randn(2, 24, model.architecture.hidden_size, generator=torch.Generator().manual_seed(0))
    expected = model.run_layer(layer, model.source.values, hidden)
    for group in find_groups(model, layer):
        if group.expert is not None and group.expert > 0:
            continue
        adjustments = adjust(model, [group], torch.float32)
        producer = [n for n in model.source.values if group.fold and n.startswith(f"{group.fold.producer}.")]
        assert all(adjustments.touches(n) for n in producer)
        values = apply(model, adjustments)
        broken = {**values, **{n: model.source.values[n] for n in producer}}
        if group.fold is None:
            broken = {n: adjustments.apply(n, value.float()) for n, value in model.source.values.items()}
        assert (model.run_layer(layer, broken, hidden) - expected).abs().max() > 1e-3 * expected.abs().max()


def folds(model: Model, layer: int, exclude: tuple[str, ...] = ()) -> dict[str, str | None]:
    prefix = f"transformer.layers.{layer}."
    return {
        group.name.removeprefix(prefix): group.fold.producer.removeprefix(prefix) if group.fold else None
        for group in find_groups(model, layer, exclude)
        if group.expert in (None, 3)
    }


def test_where_scales_go(llama_path: Path, deepseek_v2_path: Path, deepseek_v2_lite_path: Path) -> None:
    llama, v2, lite = (Model.load(path) for path in (llama_path, deepseek_v2_path, deepseek_v2_lite_path))
    assert folds(llama, 0) == {
        "attention.qkv": "input_layernorm",
        "attention.dense": None,  # several query heads read each row of V
        "mlp.fc": "post_layernorm",
        "mlp.proj": "mlp.gate",
    }
    assert folds(v2, 1) == {
        "attention.q_a_proj": None,  # kv_a reads the same norm
        "attention.q_b_proj": "attention.q_a_layernorm",
        "attention.dense": "attention.kv_b_proj",
        "mlp.experts.*.fc": None,  # so does the router
        "mlp.experts.3.proj": "mlp.experts.3.gate",
        "mlp.shared_expert.fc": None,
        "mlp.shared_expert.proj": "mlp.shared_expert.gate",
    }
    assert folds(lite, 0) == {
        "attention.q_proj": None,
        "attention.dense": "attention.kv_b_proj",
        "mlp.fc": "post_layernorm",
        "mlp.proj": "mlp.gate",
    }


def test_a_group_with_a_16bit_member_is_not_folded_into_its_norm(llama_path: Path) -> None:
    model = Model.load(llama_path)
    found = folds(model, 0, exclude=("*.mlp.gate",))
    assert found["mlp.fc"] is None
    assert found["mlp.proj"] == "mlp.gate"  # its rows have one reader, quantized or not


def test_an_excluded_member_leaves_the_function_unchanged(tmp_path: Path) -> None:
    model = Model.load(MODELS["deepseek_v2"](tmp_path / "m"))
    groups = find_groups(model, 1, exclude=("*.experts.2.*", "*.shared_expert.gate"))
    hidden = torch.randn(2, 24, 128, generator=torch.Generator().manual_seed(0))
    values = apply(model, adjust(model, groups, torch.float32))
    expected = model.run_layer(1, model.source.values, hidden)
    assert (model.run_layer(1, values, hidden) - expected).abs().max() < 2e-5 * expected.abs().max()
    assert torch.equal(
        values["transformer.layers.1.mlp.experts.2.fc.weight"],
        model.source.values["transformer.layers.1.mlp.experts.2.fc.weight"],
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_of_norm_and_vector_is_compensated(llama_path: Path, dtype: torch.dtype) -> None:
    """The columns are scaled by what the rounded norm or vector really divides by: their product stays exact."""
    model = Model.load(llama_path)
    model.source.values = {name: value.to(dtype) for name, value in model.source.values.items()}
    groups = {group.name: group for group in find_groups(model, 0)}
    adjustments = adjust(model, list(groups.values()), dtype)
    norm = "transformer.layers.0.post_layernorm.weight"
    folded = adjustments.apply_16bit(norm, model.source.read(norm)).to_torch()
    assert folded.dtype == dtype
    fc = "transformer.layers.0.mlp.fc.weight"
    product = adjustments.apply(fc, model.source.values[fc]) * folded.float()
    torch.testing.assert_close(product, model.source.values[fc].float() * model.source.values[norm].float())
    dense = "transformer.layers.0.attention.dense"
    product = adjustments.apply(f"{dense}.weight", model.source.values[f"{dense}.weight"])
    product = product * adjustments.vectors[dense].float()
    torch.testing.assert_close(product, model.source.values[f"{dense}.weight"].float())


def test_what_would_overflow_is_not_offered() -> None:
    values = {"n.weight": torch.tensor([6e4, 1.0]).half(), "m.weight": torch.tensor([[6e4, 1.0], [1.0, 1.0]]).half()}
    source, scale = MemorySource(values), torch.tensor([0.5, 2.0])
    for producer in ("n", "m"):
        fold = ResolvedFold(producer=producer, rows=slice(None))
        assert realise(scale, fold, source, torch.float16) is None
        assert realise(scale, fold, source, torch.bfloat16) is not None
    group = ScaleGroup(name="x", linears=("x",), seen_at="", fold=fold)
    adjustments = Adjustments(torch.float16)
    adjustments.add(group, scale, source)
    with pytest.raises(QuantizationError, match=r"m\.weight overflows"):
        adjustments.apply_16bit("m.weight", source.read("m.weight"))
