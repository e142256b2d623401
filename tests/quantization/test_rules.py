"""Which linears are chosen, and the reason given for each of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.checkpoint.layouts import layout_for
from pipeline.errors import CompatibilityError
from pipeline.quantization.rules import Selection, choose_linears
from pipeline.quantization.selection import Override
from tests import fixtures
from tests.quantization.support import Model, Settings


def choose(path: Path, **settings: object) -> Selection:
    model, s = Model.load(path), Settings(**settings)  # type: ignore[arg-type]
    return choose_linears(layout_for(model.architecture).mappings(), model.source.tensors, s.rules)


def test_defaults_of_a_routed_model(deepseek_v2_path: Path) -> None:
    selection = choose(deepseek_v2_path)
    layer = {name.removeprefix("transformer.layers.1.") for name, x in selection.linears.items() if x.layer == 1}
    expected = {f"mlp.experts.{e}.{part}" for e in range(16) for part in ("fc", "gate", "proj")}
    expected |= {f"mlp.shared_expert.{part}" for part in ("fc", "gate", "proj")}
    assert layer == expected | {"attention.dense"}
    assert {name for name, x in selection.linears.items() if x.layer == 0} == {
        f"transformer.layers.0.{name}" for name in ("mlp.fc", "mlp.gate", "mlp.proj", "attention.dense")
    }
    assert selection.linears["transformer.layers.2.mlp.experts.7.proj"].expert == 7
    kept = selection.kept
    assert kept["transformer.layers.1.mlp.router"] == "role router is never quantized"
    assert kept["transformer.layers.1.attention.kv_b_proj"] == "role attention_latent is never quantized"
    assert kept["transformer.layers.1.attention.q_b_proj"] == "role attention_input is not included"
    assert kept["lm_head"] == "role head is not included"
    assert kept["transformer.vocab_embedding"] == "role embedding is never quantized"


def test_every_matrix_is_chosen_or_explained(deepseek_v2_lite_path: Path) -> None:
    tensors = Model.load(deepseek_v2_lite_path).source.tensors
    selection = choose(deepseek_v2_lite_path)
    matrices = {name.removesuffix(".weight") for name, info in tensors.items() if len(info.shape) == 2}
    assert selection.linears.keys() | selection.kept.keys() == matrices
    assert not selection.linears.keys() & selection.kept.keys()


def test_groups_that_do_not_divide(tmp_path: Path) -> None:
    """hidden 192 takes groups of 64, intermediate 160 of 32, 96 heads' worth of columns 32; 80 takes none."""
    path = fixtures.llama(
        tmp_path / "a", hidden_size=192, intermediate_size=160, num_attention_heads=4, num_hidden_layers=1, head_dim=20
    )
    selection = choose(path)
    groups = {name.split(".", 3)[-1]: linear.group for name, linear in selection.linears.items()}
    assert groups == {"mlp.fc": 64, "mlp.gate": 64, "mlp.proj": 32}
    assert selection.smaller_groups == {f"transformer.layers.0.{name}": g for name, g in groups.items()}
    dense = "transformer.layers.0.attention.dense"
    assert selection.kept[dense] == "no group of 128, 64, 32 divides its 80 input features"
    assert selection.describe_smaller() == ["3 linears get groups of 64, 32: 128 does not divide their input"]
    assert not choose(path, group_size=32).smaller_groups


def test_groups_are_smaller_than_what_a_recipes_row_asked_for(tmp_path: Path) -> None:
    """hidden 192 takes the 64 that its rows ask for; intermediate 160 takes neither 128 nor 64."""
    path = fixtures.llama(
        tmp_path / "a", hidden_size=192, intermediate_size=160, num_attention_heads=4, num_hidden_layers=2, head_dim=20
    )
    layers = tuple(f"transformer.layers.{i}" for i in range(2))
    recipe = (*row(f"{layers[0]}.*", "rtn", 64), *row("*.fc", "rtn", 32), *row("*.gate", "int8"))
    selection = choose(path, method="rtn", recipe=recipe)
    assert selection.smaller_groups == {f"{layer}.mlp.proj": 32 for layer in layers}
    assert selection.describe_smaller() == [
        "1 linear gets groups of 32: 128 does not divide its input",
        "1 linear gets groups of 32: 64 does not divide its input",
    ]


def test_exclude_patterns(llama_path: Path) -> None:
    selection = choose(llama_path, exclude=("transformer.layers.0.*", "*.mlp.gate", "*.weigth"))
    assert {linear.layer for linear in selection.linears.values()} == {1, 2}
    assert selection.kept["transformer.layers.1.mlp.gate"] == "excluded by *.mlp.gate"
    assert selection.idle_patterns == ("*.weigth",)


@pytest.mark.parametrize("role", ["router", "attention_latent", "embedding", "norm", "no_such_role"])
def test_roles_that_cannot_be_included(llama_path: Path, role: str) -> None:
    with pytest.raises(CompatibilityError, match=role):
        choose(llama_path, include=("mlp", role))


def test_nothing_left(llama_path: Path) -> None:
    with pytest.raises(CompatibilityError, match="no linear is left"):
        choose(llama_path, exclude=("*",))


def row(pattern: str, method: str, group_size: int | None = None) -> tuple[Override, ...]:
    return (Override(pattern=pattern, method=method, group_size=group_size),)


@pytest.mark.parametrize(
    ("settings", "method", "group"),
    [
        ({"recipe": row("lm_head", "int8")}, "int8", None),
        ({"recipe": row("*head", "rtn", 64)}, "rtn", 64),
        ({"method": "none", "recipe": row("lm_head.weight", "int8")}, "int8", None),
        ({"method": "rtn", "include": ("head",)}, "rtn", 128),
        ({"method": "awq", "include": ("mlp", "head"), "recipe": row("lm_head", "int8")}, "int8", None),
    ],
)
def test_the_head_is_quantized_where_it_is_named(
    llama_path: Path, settings: dict[str, object], method: str, group: int | None
) -> None:
    head = choose(llama_path, **settings).linears["lm_head"]
    assert (head.layer, head.role, head.method, head.group) == (None, "head", method, group)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "role head is not included"),
        ({"recipe": row("*", "int8")}, "role head is not included"),  # a star is for the layers
        ({"method": "int8", "include": ("mlp", "head"), "exclude": ("lm_*",)}, "excluded by lm_*"),
        (
            {"method": "rtn", "include": ("mlp", "head"), "recipe": row("lm_head", "none")},
            "left as it is by the recipe's lm_head",
        ),
    ],
)
def test_the_head_stays_16_bit_otherwise(llama_path: Path, settings: dict[str, object], reason: str) -> None:
    assert choose(llama_path, **settings).kept["lm_head"] == reason


@pytest.mark.parametrize("method", ["awq", "gptq", "rtn_clip", "smoothquant", "fp8", "fp8_blocks"])
def test_methods_that_the_head_has_not(llama_path: Path, method: str) -> None:
    with pytest.raises(CompatibilityError, match=f"lm_head does not become .* by method {method}") as error:
        choose(llama_path, recipe=row("lm_head", method))
    assert "{pattern: lm_head, method: int8}" in str(error.value.hint)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    path = fixtures.llama(tmp_path / "a", tie_word_embeddings=True)
    with pytest.raises(CompatibilityError, match="lm_head is the embedding of this model"):
        choose(path, recipe=row("lm_head", "int8"))
    assert "lm_head" not in choose(path).kept
