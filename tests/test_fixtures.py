"""transformers accepts the fixtures whole: nothing missing, nothing unexpected, logits that vary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import fixtures
from tests.whole_model import load_whole

CASES: list[tuple[Any, dict[str, Any]]] = [
    *[(fixtures.llama, {"rope": rope}) for rope in fixtures.LLAMA_ROPES],
    (fixtures.llama, {"attention_bias": True, "mlp_bias": True, "shards": 1}),
    (fixtures.llama, {"tie_word_embeddings": True, "head_dim": 64}),
    (fixtures.llama, fixtures.R1_DISTILL_LLAMA),
    (fixtures.qwen2, {}),
    (fixtures.qwen2, {"tie_word_embeddings": True}),
    (fixtures.deepseek_v2, fixtures.V2_LITE_SHAPES),
    (fixtures.deepseek_v3, {"mtp": False}),
    (fixtures.deepseek_v2, {}),
    (fixtures.deepseek_v2, {"rope": "default", "attention_bias": True}),
    (fixtures.deepseek_v2, {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}),
]


@pytest.mark.parametrize(("write", "options"), CASES)
def test_transformers_loads_fixture(write: Any, options: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    path = write(tmp_path / "m", **options)
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values()), info
    with torch.no_grad():
        logits = model(torch.arange(24)[None] * 7 % 512).logits[0]
    assert 0.3 < logits.std() < 30
    assert (logits[1:] - logits[:-1]).abs().mean() > 0.1


def test_transformers_parts_take_the_first_deepseek_with_experts(tmp_path: Path) -> None:
    """No class of its own; the state is loaded strictly."""
    with torch.no_grad():
        logits = load_whole(fixtures.deepseek_moe(tmp_path / "m"))(torch.arange(24)[None] * 7 % 512).logits[0]
    assert 0.3 < logits.std() < 30
    assert (logits[1:] - logits[:-1]).abs().mean() > 0.1


def test_tokenizer_round_trips(llama_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(llama_path)
    ids = tokenizer("def f(x):\n  return é")["input_ids"]
    assert ids[0] == 0
    assert tokenizer.decode(ids, skip_special_tokens=True) == "def f(x):\n  return é"


def test_an_mtp_layer_is_what_transformers_leaves_out(tmp_path: Path) -> None:
    """It knows of the layer, and takes nothing else of the checkpoint for unexpected."""
    from transformers import AutoModelForCausalLM

    path = fixtures.deepseek_v3(tmp_path / "m")
    _, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
    assert not info["missing_keys"]
    assert info["unexpected_keys"]
    assert all(name.startswith("model.layers.3.") for name in info["unexpected_keys"])


def test_fp8_weights_are_the_bfloat16_ones_rounded(tmp_path: Path) -> None:
    """Read by torch and multiplied out as a whole; what DeepSeek leaves in 16 bits is the same in both folders."""
    wide, narrow = (
        {name: t for file in path.glob("*.safetensors") for name, t in load_file(file).items()}
        for path in (fixtures.deepseek_v3(tmp_path / "wide"), fixtures.deepseek_v3(tmp_path / "narrow", fp8=True))
    )
    for name, tensor in wide.items():
        if f"{name}_scale_inv" not in narrow:
            assert torch.equal(narrow[name], tensor)
            continue
        rows, columns = tensor.shape
        scales = narrow[f"{name}_scale_inv"].repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        error = (narrow[name].float() * scales - tensor.float()).abs()
        assert (error <= tensor.float().abs() / 16 + scales * 2**-9).all(), name
    assert {name for name in wide if f"{name}_scale_inv" not in narrow and wide[name].ndim == 2} == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        *(f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2, 3)),
        *(f"model.layers.3.{name}.weight" for name in ("embed_tokens", "eh_proj", "shared_head.head")),
    }
