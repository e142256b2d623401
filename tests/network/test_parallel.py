"""Networks of several ranks, one process each, against the network of one: the same logits on every rank.

What is left of the difference is the order of sums: the bound is that of test_against_transformers.py. Linears that
round their inputs are compared without that, as verify does: next to the middle between two steps the order decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.network.program import Program
from pipeline.network.spec import Lowering
from pipeline.network.widening import widen_inputs
from pipeline.sharding import Parallel
from tests import fixtures
from tests.network import formats, models
from tests.network.ranks import Ranks
from tests.network.serving import prompts, serve

TOLERANCE = 1e-5
TP2, TP4, PP2 = Parallel(tensor=2), Parallel(tensor=4), Parallel(pipeline=2)
EP2, EP4, TP2_EP2 = Parallel(2, expert=2), Parallel(4, expert=4), Parallel(4, expert=2)
TP2_PP2 = Parallel(tensor=2, pipeline=2)
DENSE, ROUTED = (TP2, TP4, PP2, TP2_PP2), (TP2, TP4, PP2, EP2, EP4, TP2_EP2)
PLUGINS = Lowering(rope_paged_kv="plugin", paged_attention="plugin")
LINEARS = r"layers.*(q|k|v|o|gate|up|down|q_b)_proj\.weight"
SMALL: dict[str, Any] = {"num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_key_value_heads": 4, **SMALL}
# Each of four ranks gets whole groups of 32 of every input, of two ranks whole blocks.
GROUPS: dict[str, Any] = {"moe_intermediate_size": 128, "num_hidden_layers": 2}
BLOCKS: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "n_routed_experts": 8,
    "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "num_hidden_layers": 2,
}  # fmt: skip

Case = tuple[Callable[[Path], models.Model], Sequence[Parallel], dict[str, Any]]


def _case(write: Callable[..., Path], parallels: Sequence[Parallel], /, **options: Any) -> Case:
    network = {key: options.pop(key) for key in ("moe", "lowering") if key in options}
    return lambda path: models.load(write(path, **{**SMALL, **options})), parallels, network


def _stored(write: Callable[..., Path], kind: str, parallels: Sequence[Parallel], /, **options: Any) -> Case:
    return lambda path: formats.load(write, path, {LINEARS: kind}, **{**SMALL, **options}), parallels, {}


CASES: dict[str, Case] = {
    "llama": _case(fixtures.llama, DENSE, dtype="float32", **HEADS),
    "llama-biased-and-tied": _case(
        fixtures.llama, (TP4, TP2_PP2), attention_bias=True, mlp_bias=True, tie_word_embeddings=True, **HEADS
    ),
    "llama-plugins": _case(fixtures.llama, (TP4, PP2), lowering=PLUGINS, **HEADS),
    "llama-head": (
        lambda path: formats.load(fixtures.llama, path, {"lm_head": "int8", LINEARS: "int4"}, **HEADS),
        (TP4, TP2_PP2),
        {},
    ),
    "v2-head": (lambda path: formats.load(fixtures.deepseek_v2, path, {"lm_head": "int4"}, **SMALL), (TP2,), {}),
    "llama-int4": _stored(fixtures.llama, "int4", (TP2, TP4), **HEADS),
    "llama-fp8": _stored(fixtures.llama, "fp8", (TP2, TP4), **HEADS),
    "qwen2": _case(fixtures.qwen2, (TP2, TP4, PP2), **HEADS),
    "moe": _case(fixtures.deepseek_moe, (TP2, EP4, TP2_EP2)),
    "v2": _case(fixtures.deepseek_v2, ROUTED, dtype="float32"),
    "v2-biased": _case(fixtures.deepseek_v2, (TP2,), attention_bias=True),
    "v2-gather": _case(fixtures.deepseek_v2, (TP2_EP2,), moe="gather"),
    "v2-one-expert": _case(fixtures.deepseek_v2, (EP4,), num_experts_per_tok=1, topk_group=1),
    "v2-plugins": _case(fixtures.deepseek_v2, (TP4, EP2), lowering=PLUGINS),
    "v2-int8_sq": _stored(fixtures.deepseek_v2, "int8_sq", (TP2_EP2,)),
    "v3": _case(fixtures.deepseek_v3, (*ROUTED, Parallel(2, 2, 2)), dtype="float32"),
    "v3-int4": _stored(fixtures.deepseek_v3, "int4", (TP4, EP2, TP2_EP2), moe_intermediate_size=128),
    "v3-int8": _stored(fixtures.deepseek_v3, "int8", (EP2,)),
    "v3-fp8": _stored(fixtures.deepseek_v3, "fp8", (TP2_EP2,)),
    "v3-blocks": (lambda path: models.load_fp8(fixtures.deepseek_v3, path, **BLOCKS), (TP2, EP2), {}),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(4, tmp_path_factory.mktemp("ranks")) as started:
        yield started


def _programs(model: models.Model, parallel: Parallel, **options: Any) -> list[Program]:
    return [widen_inputs(model.program(rank=rank, **options)) for rank in parallel.ranks]


def _difference(found: list[dict[str, torch.Tensor]], whole: list[dict[str, torch.Tensor]], name: str) -> float:
    return max(float((one[name] - other[name]).abs().max()) for one, other in zip(found, whole, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_logits_of_all_ranks_are_those_of_one(case: str, ranks: Ranks, tmp_path: Path) -> None:
    write, parallels, options = CASES[case]
    model = write(tmp_path / "hf")
    sequences = prompts(model.architecture.vocab_size)
    (program,) = _programs(model, Parallel(), **options)
    whole = serve(program, sequences=sequences)
    assert min(one["logits"].std() for one in whole) > 0.5
    for parallel in parallels:
        answers = ranks.serve(parallel, _programs(model, parallel, **options), sequences=sequences)
        for rank, found in zip(parallel.ranks, answers, strict=True):
            if rank.pipeline < parallel.pipeline - 1:
                assert found == [{}] * len(whole)
            else:
                assert _difference(found, whole, "logits") < TOLERANCE


def test_every_layer_is_the_same_on_every_rank(ranks: Ranks, tmp_path: Path) -> None:
    model = CASES["v3"][0](tmp_path / "hf")
    sequences, taps = prompts(model.architecture.vocab_size), ["layers.0.output", "layers.1.output"]
    whole = serve(model.program(), sequences=sequences, taps=taps)
    for found in ranks.serve(TP2_EP2, _programs(model, TP2_EP2), sequences=sequences, taps=taps):
        for tap in taps:
            assert _difference(found, whole, tap) < TOLERANCE


def test_ranks_agree_to_the_last_bit(ranks: Ranks, tmp_path: Path) -> None:
    """Whatever picks a token from them picks the same on each."""
    model = CASES["v2"][0](tmp_path / "hf")
    first, *others = ranks.serve(EP4, _programs(model, EP4), sequences=prompts(model.architecture.vocab_size))
    assert all(_difference(other, first, "logits") == 0 for other in others)


def test_declared_types_stay_near(ranks: Ranks, tmp_path: Path) -> None:
    """Parts of a sum are rounded too, on their way to other ranks: hardly more than what is rounded anyway."""
    model = models.load(fixtures.deepseek_v3(tmp_path / "hf", dtype="float16", **SMALL))
    sequences = prompts(model.architecture.vocab_size)
    exact, declared = (serve(model.program(), sequences=sequences, mode=mode) for mode in ("exact", "declared"))
    (found, *_) = ranks.serve(TP2_EP2, _programs(model, TP2_EP2), sequences=sequences, mode="declared")

    def error(results: list[dict[str, torch.Tensor]]) -> float:
        rows = [
            (one["logits"] - other["logits"]).square().mean(1).sqrt() for one, other in zip(results, exact, strict=True)
        ]
        return float(torch.cat(rows).median())

    assert 0 < error(found) < 1.5 * error(declared)


def test_a_wrong_slice_shows(ranks: Ranks, tmp_path: Path) -> None:
    """The comparison can fail: one rank has another's experts."""
    model = CASES["v2"][0](tmp_path / "hf")
    sequences = prompts(model.architecture.vocab_size)
    whole, programs = serve(model.program(), sequences=sequences), _programs(model, EP2)
    name = "layers.1.mlp.experts.fc.weight"
    programs[1].constants[name] = programs[0].constants[name]  # type: ignore[index]
    assert _difference(ranks.serve(EP2, programs, sequences=sequences)[0], whole, "logits") > 100 * TOLERANCE
