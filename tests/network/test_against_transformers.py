"""The network, built by TensorRT's API and executed layer by layer, against transformers in float32, same weights.

Every logit of every position is compared, over steps that prefill in chunks, decode, and mix both (see serving.py).
What is left of the difference is the order of sums: 3e-6 at logits of about 1; the product promises 1e-4.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.errors import CheckpointError
from pipeline.network.spec import Lowering
from tests import fixtures
from tests.network import models
from tests.network.serving import STEPS, prompts, reference_logits, serve
from tests.whole_model import load_whole

TOLERANCE = 2e-5  # fp32 sums in another order, which is that of the processor's kernels: 1.02e-5 at most on AVX2
Write = Callable[[Path], models.Model]


def _llama(**options: object) -> Write:
    return lambda path: models.load(fixtures.llama(path, **options))  # type: ignore[arg-type]


def _v2(**options: object) -> Write:
    return lambda path: models.load(fixtures.deepseek_v2(path, **options))  # type: ignore[arg-type]


def _qwen2(**options: object) -> Write:
    return lambda path: models.load(fixtures.qwen2(path, **options))  # type: ignore[arg-type]


def _v3(**options: object) -> Write:
    return lambda path: models.load(fixtures.deepseek_v3(path, **options))  # type: ignore[arg-type]


def _moe(**options: object) -> Write:
    return lambda path: models.load(fixtures.deepseek_moe(path, **options))  # type: ignore[arg-type]


GREEDY = {"topk_method": "greedy", "n_group": 1, "topk_group": 1}
MODELS: dict[str, Write] = {
    **{f"llama-{rope}": _llama(rope=rope, dtype="float32") for rope in fixtures.LLAMA_ROPES},
    "llama-fp16": _llama(dtype="float16"),
    "llama-bf16": _llama(dtype="bfloat16"),
    "llama-biased-and-tied": _llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-one-kv-head-wide": _llama(num_key_value_heads=1, head_dim=64),
    "r1-distill-llama": _llama(**fixtures.R1_DISTILL_LLAMA),
    "qwen2": _qwen2(dtype="float32"),
    "qwen2-tied": _qwen2(tie_word_embeddings=True),
    "moe": _moe(dtype="float32"),
    "moe-bf16-linear-rope": _moe(rope="linear"),
    "moe-every-second-layer": _moe(num_hidden_layers=5, moe_layer_freq=2, num_key_value_heads=2),
    "moe-biased-and-tied": _moe(attention_bias=True, tie_word_embeddings=True, n_shared_experts=1),
    "v2": _v2(dtype="float32"),
    "v2-bf16": _v2(),
    "v2-default-rope": _v2(rope="default"),
    "v2-greedy-without-q-rank": _v2(q_lora_rank=None, **GREEDY),
    "v2-biased": _v2(attention_bias=True),
    "v2-one-expert-per-token": _v2(num_experts_per_tok=1, topk_group=1),
    "v2-dense": _v2(first_k_dense_replace=3),
    "v2-lite-shapes": _v2(**fixtures.V2_LITE_SHAPES),
    "v3": _v3(dtype="float32"),
    "v3-bf16": _v3(),
    "v3-default-rope-halves": _v3(rope="default", rope_interleave=False),
    "v3-without-q-rank": _v3(q_lora_rank=None),
    "v3-one-group": _v3(n_group=1, topk_group=1),
    "v3-not-normalized": _v3(norm_topk_prob=False, routed_scaling_factor=1.0),
    "v3-groups-of-two": _v3(n_group=8, topk_group=3, num_experts_per_tok=6),
}
QUANTIZED: dict[str, Callable[[Path], models.Model]] = {
    "llama-every-linear": lambda path: models.load_int4(
        fixtures.llama, path, pattern=r"layers.*_proj\.weight", group=32, prescale="all", dtype="float16"
    ),
    "llama-mlp-bf16-biased": lambda path: models.load_int4(
        fixtures.llama, path, pattern=r"mlp.*_proj\.weight", group=128, prescale="each", mlp_bias=True
    ),
    "qwen2-every-linear": lambda path: models.load_int4(
        fixtures.qwen2, path, pattern=r"layers.*_proj\.weight", group=64, prescale="all", dtype="float16"
    ),
    "moe-every-linear": lambda path: models.load_int4(
        fixtures.deepseek_moe, path, pattern=r"layers.*_proj\.weight", group=64, prescale="all", dtype="float16"
    ),
    **{
        f"v2-prescale-{prescale}": lambda path, prescale=prescale: models.load_int4(  # type: ignore[misc]
            fixtures.deepseek_v2,
            path,
            pattern=r"mlp.*_proj\.weight|o_proj|q_a_proj|q_b_proj|kv_a_proj",
            group=64,
            prescale=prescale,
            dtype="float16",
        )
        for prescale in ("none", "each", "all")
    },
    "v3": lambda path: models.load_int4(
        fixtures.deepseek_v3,
        path,
        pattern=r"mlp.*_proj\.weight|o_proj|q_a_proj|q_b_proj",
        group=64,
        prescale="each",
    ),
}


# Widths that 128 does not divide, below and above it, and one that it does.
FP8: dict[str, dict[str, object]] = {
    "v3": {},
    "v3-ragged": {"hidden_size": 192, "intermediate_size": 320, "kv_lora_rank": 160, "moe_intermediate_size": 160},
    "v3-whole": {
        "hidden_size": 256, "kv_lora_rank": 128, "q_lora_rank": 128, "moe_intermediate_size": 128, "v_head_dim": 32,
        "num_attention_heads": 8, "num_key_value_heads": 8,
    },
}  # fmt: skip


def _largest_difference(
    model: models.Model, moe: str = "dense", offsets: tuple[int, ...] = (0, 0, 0)
) -> tuple[float, float]:
    """Of the logits, in exact mode; and the spread of the reference, without which a difference means nothing."""
    reference, sequences = model.reference(), prompts(model.architecture.vocab_size)
    found = serve(model.program(moe=moe), sequences=sequences, offsets=offsets)
    expected = [reference_logits(reference, s, offset) for s, offset in zip(sequences, offsets, strict=True)]
    pairs = zip(found, expected, strict=True)
    return max((one["logits"] - e).abs().max().item() for one, e in pairs), expected[0].std().item()


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    difference, spread = _largest_difference(MODELS[name](tmp_path / "hf"))
    assert difference < TOLERANCE
    assert spread > 0.5


@pytest.mark.parametrize("moe", ["dense", "gather"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_int4_logits_are_those_of_transformers_on_dequantized_weights(name: str, moe: str, tmp_path: Path) -> None:
    difference, spread = _largest_difference(QUANTIZED[name](tmp_path / "hf"), moe)
    assert difference < TOLERANCE
    assert spread > 0.5


@pytest.mark.parametrize("moe", ["dense", "gather"])
@pytest.mark.parametrize("name", FP8)
def test_fp8_blocks_give_the_logits_of_their_products(name: str, moe: str, tmp_path: Path) -> None:
    model = models.load_fp8(fixtures.deepseek_v3, tmp_path / "hf", **FP8[name])
    difference, spread = _largest_difference(model, moe)
    assert difference < TOLERANCE
    assert spread > 0.5


@pytest.mark.parametrize("name", ["moe", "v2", "v3"])
def test_gathered_experts_give_the_same_logits(name: str, tmp_path: Path) -> None:
    assert _largest_difference(MODELS[name](tmp_path / "hf"), "gather")[0] < TOLERANCE


@pytest.mark.parametrize("name", ["llama-yarn", "llama-linear", "llama-llama3", "moe-bf16-linear-rope", "v2", "v3"])
def test_positions_far_beyond_the_original_context(name: str, tmp_path: Path) -> None:
    """Positions are apart from slots: each sequence's are moved by its own offset, past the 64 of the original."""
    assert _largest_difference(MODELS[name](tmp_path / "hf"), offsets=(180, 0, 97))[0] < TOLERANCE


@pytest.mark.parametrize("name", ["llama-linear", "v2", "v3"])
def test_every_layer_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    model = MODELS[name](tmp_path / "hf")
    reference, sequences = model.reference(), prompts(model.architecture.vocab_size)
    outputs: list[torch.Tensor] = []
    for layer in reference.model.layers:
        layer.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    taps = [f"layers.{layer}.output" for layer in range(model.architecture.num_layers)]
    for found, sequence in zip(serve(model.program(), sequences=sequences, taps=taps), sequences, strict=True):
        outputs.clear()
        reference_logits(reference, sequence)
        assert len(outputs) == len(taps)
        for tap, expected in zip(taps, outputs, strict=True):
            assert (found[tap] - expected[0]).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama-linear", "v2", "v3"])
@pytest.mark.parametrize("cuts", [(0, 1, 3), (0, 2, 3), (0, 1, 2, 3)])
def test_slices_in_a_row_are_the_whole(name: str, cuts: tuple[int, ...], tmp_path: Path) -> None:
    model = MODELS[name](tmp_path / "hf")
    sequences = prompts(model.architecture.vocab_size)
    slices = [model.program(layers=pair) for pair in pairwise(cuts)]
    whole = serve(model.program(), sequences=sequences)
    for found, expected in zip(serve(*slices, sequences=sequences), whole, strict=True):
        assert torch.equal(found["logits"], expected["logits"])


def test_how_a_prompt_is_cut_does_not_matter(tmp_path: Path) -> None:
    model = MODELS["v2"](tmp_path / "hf")
    program, sequences = model.program(), prompts(model.architecture.vocab_size)
    once = [tuple(sum(column) for column in zip(*STEPS, strict=True))]
    for one, other in zip(
        serve(program, sequences=sequences), serve(program, sequences=sequences, steps=once), strict=True
    ):
        assert (one["logits"] - other["logits"]).abs().max() < TOLERANCE


def test_a_wrong_weight_shows(tmp_path: Path) -> None:
    """The comparison can fail: gate and up exchanged in one expert of one layer."""
    model = MODELS["v2"](tmp_path / "hf")
    base = "transformer.layers.2.mlp.experts.5."
    raw = model.source.raw
    raw[f"{base}fc.weight"], raw[f"{base}gate.weight"] = raw[f"{base}gate.weight"], raw[f"{base}fc.weight"]
    assert _largest_difference(model)[0] > 100 * TOLERANCE


def test_declared_types_stay_near(tmp_path: Path) -> None:
    """fp16 has 11 significant bits: some layers' rounding, of logits of about 1, stays below a fiftieth."""
    model = MODELS["llama-fp16"](tmp_path / "hf")
    sequences = prompts(model.architecture.vocab_size)
    reference = model.reference()
    for found, sequence in zip(serve(model.program(), sequences=sequences, mode="declared"), sequences, strict=True):
        difference = np.abs((found["logits"] - reference_logits(reference, sequence)).numpy()).max()
        assert 1e-5 < difference < 0.02


def test_a_sliding_window_that_is_not_used_hides_nothing(tmp_path: Path) -> None:
    """Qwen2's config.json states one beside use_sliding_window: false. What says true is refused when it is read: later
    layers of transformers then see the window alone."""
    window = {"sliding_window": 8, "max_window_layers": 1, "num_hidden_layers": 2}
    model = models.load(fixtures.qwen2(tmp_path / "unused", dtype="float32", **window))
    sequences = prompts(model.architecture.vocab_size)
    plugins = Lowering(rope_paged_kv="plugin", paged_attention="plugin")
    wanted = [reference_logits(model.reference(), sequence) for sequence in sequences]
    for lowering in (Lowering(), plugins):
        for found, logits in zip(serve(model.program(lowering=lowering), sequences=sequences), wanted, strict=True):
            assert (found["logits"] - logits).abs().max() < TOLERANCE
    used = fixtures.qwen2(tmp_path / "used", dtype="float32", use_sliding_window=True, **window)
    assert (reference_logits(load_whole(used), sequences[0]) - wanted[0]).abs().max() > 1e-3
    with pytest.raises(CheckpointError, match=r"use_sliding_window is True; .* attend to the last sliding_window"):
        models.load(used)
