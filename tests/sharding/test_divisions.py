"""What must divide, against sizes worked out by hand from the models' published shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.architecture import Architecture, parse_architecture
from pipeline.errors import CompatibilityError
from pipeline.sharding import Parallel, check_division, divisions, working_sizes
from tests import fixtures


@pytest.fixture
def architecture(tmp_path: Path) -> Any:
    def make(write: Any = fixtures.llama, **options: Any) -> Architecture:
        return parse_architecture(json.loads((write(tmp_path / "hf", **options) / "config.json").read_text()))

    return make


def _problem(architecture: Architecture, **sizes: int) -> CompatibilityError:
    with pytest.raises(CompatibilityError) as caught:
        check_division(Parallel(**sizes), divisions(architecture))
    return caught.value


def test_what_works_is_silent(architecture: Any) -> None:
    check_division(Parallel(tensor=2, pipeline=2), divisions(architecture()))
    check_division(Parallel(tensor=4, expert=2), divisions(architecture(fixtures.deepseek_v3)))


@pytest.mark.parametrize(
    ("options", "tensor", "message"),
    [
        ({}, 3, "does not divide the model's 4 attention heads (num_attention_heads)"),
        ({}, 4, "does not divide the model's 2 key/value heads (num_key_value_heads)"),
        ({"vocab_size": 511}, 2, "does not divide the model's 511 tokens (vocab_size)"),
        ({"intermediate_size": 255}, 2, "does not divide the model's 255 MLP columns (intermediate_size)"),
    ],
)
def test_a_llama_that_does_not_divide(architecture: Any, options: Any, tensor: int, message: str) -> None:
    error = _problem(architecture(**options), tensor=tensor)
    assert error.message == f"tensor parallel size {tensor} {message}"
    works = "1" if options else "1, 2"
    assert error.hint == f"tensor sizes that would work: {works}"


def test_the_latent_is_one_head_for_all(architecture: Any) -> None:
    check_division(Parallel(tensor=4), divisions(architecture(fixtures.deepseek_v2, num_key_value_heads=1)))


def test_experts_divide_by_number_and_by_columns(architecture: Any) -> None:
    v2 = architecture(fixtures.deepseek_v2, n_group=1, topk_group=1, n_routed_experts=6, moe_intermediate_size=66)
    error = _problem(v2, tensor=4, expert=4)
    assert error.message == "expert parallel size 4 does not divide the model's 6 routed experts (n_routed_experts)"
    # 66 columns divide over tensor / expert = 2 ranks, not over 4
    assert error.hint == "expert sizes that would work: 2"
    error = _problem(v2, tensor=4)
    assert error.message == (
        "tensor / expert parallel size 4 does not divide the model's 66 expert columns (moe_intermediate_size)"
    )
    assert error.hint == "tensor sizes that would work: 1, 2"


def test_experts_of_a_model_without(architecture: Any) -> None:
    error = _problem(architecture(), tensor=2, expert=2)
    assert "no routed experts" in error.message
    assert error.hint == "expert sizes that would work: 1"


def test_sizes_of_deepseek_v3(architecture: Any) -> None:
    shapes = {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "vocab_size": 129280,
    }
    v3 = parse_architecture({**fixtures.V3_CONFIG, **shapes})
    assert working_sizes(Parallel(), "tensor", divisions(v3)) == [1, 2, 4, 8, 16, 32, 64, 128]
    assert working_sizes(Parallel(tensor=8), "expert", divisions(v3)) == [1, 2, 4, 8]
    assert working_sizes(Parallel(tensor=32, expert=32), "tensor", divisions(v3)) == [32, 64, 128]


def test_where_one_size_alone_cannot_help_pairs_are_named(architecture: Any) -> None:
    v2 = architecture(fixtures.deepseek_v2)  # 4 heads, 6 experts
    error = _problem(v2, tensor=8, expert=8)
    assert error.hint == (
        "no tensor size works with the other parallel sizes; together: {tensor: 2, expert: 1}, {tensor: 4, expert: 1}"
    )
