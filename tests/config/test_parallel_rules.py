"""Parallel sizes that a model cannot be shared out by, against sizes worked out from published shapes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pipeline.checkpoint.architecture import parse_architecture
from pipeline.checkpoint.layouts import layout_for
from pipeline.checkpoint.tensors import TensorInfo
from pipeline.config.case import Case
from pipeline.config.parallel_rules import PARALLEL_RULES
from tests.checkpoint.layouts.test_layout import V3
from tests.config.test_compatibility import CODER, V2_LITE, make_case

RTN, KEPT = {"stages.quantize.method": "rtn"}, {"stages.quantize.method": "none"}


def find(rule: str, case: Case) -> str | None:
    return {each.name: each for each in PARALLEL_RULES}[rule].find(case)


# rule, model, settings, parallel sizes that break it, parallel sizes that keep it, the message
CASES: list[tuple[str, Any, Any, Any, Any, str]] = [
    (
        "expert_divides_tensor",
        V2_LITE,
        KEPT,
        {"tensor": 4, "expert": 8},
        {"tensor": 8, "expert": 8},
        "expert parallel size 8 does not divide tensor parallel size 4: experts are spread over the tensor group; "
        "expert sizes that would work: 1, 2, 4",
    ),
    (
        "stages_have_layers",
        CODER,
        KEPT,
        {"pipeline": 33},
        {"pipeline": 5},
        "pipeline parallel size 33 is more than the model's 32 decoder layers",
    ),
    # 11008 = 2^8 x 43, 32256 = 2^9 x 63, 8 key/value heads
    (
        "ranks_are_even",
        CODER,
        KEPT,
        {"tensor": 3},
        {"tensor": 8},
        "tensor parallel size 3 does not divide the model's 32 attention heads (num_attention_heads); tensor sizes "
        "that would work: 1, 2, 4, 8",
    ),
    (
        "ranks_are_even",
        CODER,
        KEPT,
        {"tensor": 16},
        {"tensor": 4, "pipeline": 3},
        "tensor parallel size 16 does not divide the model's 8 key/value heads (num_key_value_heads); tensor sizes "
        "that would work: 1, 2, 4, 8",
    ),
    (
        "ranks_are_even",
        {**CODER, "vocab_size": 32022},
        KEPT,
        {"tensor": 4},
        {"tensor": 2},
        "tensor parallel size 4 does not divide the model's 32022 tokens (vocab_size); "
        "tensor sizes that would work: 1, 2",
    ),
    (
        "ranks_are_even",
        CODER,
        KEPT,
        {"tensor": 2, "expert": 2},
        {"tensor": 2},
        "expert parallel size 2 does not divide the model's 1 MLP per layer (no routed experts); expert sizes that "
        "would work: 1",
    ),
    (
        "ranks_are_even",
        {**V2_LITE, "n_routed_experts": 60, "n_group": 1},
        KEPT,
        {"tensor": 8, "expert": 8},
        {"tensor": 8, "expert": 4},
        "expert parallel size 8 does not divide the model's 60 routed experts (n_routed_experts); expert sizes that "
        "would work: 1, 2, 4",
    ),
    # One key/value head is no matter to MLA.
    (
        "ranks_are_even",
        {**V2_LITE, "num_key_value_heads": 1},
        KEPT,
        {"tensor": 3},
        {"tensor": 16},
        "16 attention heads",
    ),
    # 11008 = 43 x 256: cut in 4 it is 2752 = 43 x 64.
    (
        "nothing_is_cut",
        CODER,
        RTN,
        {"tensor": 4},
        {"tensor": 2},
        "tensor parallel size 4 does not divide the model's 86 groups of 128 inputs of transformer.layers.0.mlp.proj; "
        "tensor sizes that would work: 1, 2; group sizes that would work: 64, 32",
    ),
    (
        "nothing_is_cut",
        CODER,
        {**RTN, "stages.quantize.group_size": 64},
        {"tensor": 8},
        {"tensor": 4},
        "172 groups of 64 inputs of transformer.layers.0.mlp.proj; tensor sizes that would work: 1, 2, 4; "
        "group sizes that would work: 32",
    ),
    # 1408 = 11 x 128: experts may go to ranks whole, not in two.
    (
        "nothing_is_cut",
        V2_LITE,
        {**RTN, "stages.quantize.include": ("experts",)},
        {"tensor": 2},
        {"tensor": 2, "expert": 2},
        "tensor / expert parallel size 2 does not divide the model's 11 groups of 128 inputs of "
        "transformer.layers.1.mlp.experts.0.proj; tensor sizes that would work: 1; together: "
        "{tensor: 2, expert: 2}, {tensor: 4, expert: 4}, {tensor: 8, expert: 8}, {tensor: 16, expert: 16}; "
        "group sizes that would work: 64, 32",
    ),
]


@pytest.mark.parametrize(("rule", "model", "settings", "broken", "kept", "message"), CASES)
def test_parallel_sizes(rule: str, model: Any, settings: Any, broken: Any, kept: Any, message: str) -> None:
    found = find(rule, make_case({**settings, "target.parallel": broken}, model))
    assert found is not None and message in found
    for each in PARALLEL_RULES:
        assert each.find(make_case({**settings, "target.parallel": kept}, model)) is None


@pytest.mark.parametrize("asked", [{"tensor": 3}, {"tensor": 32, "expert": 2}, {"tensor": 64, "expert": 64}])
def test_sizes_that_would_work_do(asked: dict[str, int]) -> None:
    """Heads decide that `asked` does not work, and groups of 128 of the experts' 1408 columns which sizes do."""
    settings = {**RTN, "stages.quantize.include": ("experts",)}
    message = find("ranks_are_even", make_case({**settings, "target.parallel": asked}, V2_LITE))
    assert message is not None and "attention heads" in message
    alone = re.search(r"tensor sizes that would work: ([\d, ]+)", message)
    hinted = [{**asked, "tensor": int(size)} for size in alone[1].split(", ")] if alone else []
    hinted += [
        {"tensor": int(tensor), "expert": int(expert)}
        for tensor, expert in re.findall(r"\{tensor: (\d+), expert: (\d+)\}", message)
    ]
    assert hinted
    for sizes in hinted:
        case = make_case({**settings, "target.parallel": sizes}, V2_LITE)
        assert [rule.name for rule in PARALLEL_RULES if rule.find(case) is not None] == [], sizes


def test_every_rule_has_a_test() -> None:
    assert {rule.name for rule in PARALLEL_RULES} == {row[0] for row in CASES}


def test_the_blocks_of_a_source_are_not_cut_either() -> None:
    """V3 as it is shipped: 2048 columns of an expert are 16 blocks, and 192 x 128 of q_b_proj are 192."""
    architecture = parse_architecture(V3)
    tensors = {
        source: TensorInfo(source, "F8_E4M3", shape)
        for mapping in layout_for(architecture).layer_mappings(3, experts=1)
        if len(mapping.target_shape) == 2 and mapping.role != "router"
        for source, shape in zip(mapping.sources, mapping.source_shapes, strict=True)
    }

    def blocks(tensor: int) -> str | None:
        settings = {**KEPT, "target.gpu": "H200", "target.parallel": {"tensor": tensor}}
        case = make_case(settings, V3)
        return find("nothing_is_cut", Case(config=case.config, architecture=architecture, tensors=tensors))

    assert blocks(16) is None
    assert blocks(32) == (
        "tensor parallel size 32 does not divide the model's 16 whole FP8 blocks of 128 of "
        "transformer.layers.3.mlp.shared_expert.fc; tensor sizes that would work: 1, 2, 4, 8, 16"
    )


@pytest.mark.parametrize("backend", ["tensorrt_llm", "llmapi"])
def test_tensorrt_llm_repeats_heads_and_fills_the_vocabulary(backend: str) -> None:
    model = {**CODER, "vocab_size": 32022, "num_key_value_heads": 4}
    settings = {**KEPT, "target.parallel": {"tensor": 8}}
    assert find("ranks_are_even", make_case(settings, model)) is not None
    assert find("ranks_are_even", make_case({**settings, "target.backend": backend}, model)) is None
