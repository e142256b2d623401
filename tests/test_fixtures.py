"""transformers accepts the fixtures whole: nothing missing, nothing unexpected, logits that vary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import fixtures

CASES: list[tuple[Any, dict[str, Any]]] = [
    *[(fixtures.llama, {"rope": rope}) for rope in fixtures.LLAMA_ROPES],
    (fixtures.llama, {"attention_bias": True, "mlp_bias": True, "shards": 1}),
    (fixtures.llama, {"tie_word_embeddings": True, "head_dim": 64}),
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


def test_tokenizer_round_trips(llama_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(llama_path)
    ids = tokenizer("def f(x):\n  return é")["input_ids"]
    assert ids[0] == 0
    assert tokenizer.decode(ids, skip_special_tokens=True) == "def f(x):\n  return é"
