from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.runtime.generation import generate
from pipeline.runtime.runner import InterpreterRunner
from tests import fixtures
from tests.network import models

PROMPTS = [np.random.default_rng(n).integers(2, 512, n).tolist() for n in (5, 23, 41, 1)]
NEW = 24
WRITERS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "llama": (fixtures.llama, {}),
    "llama_llama3": (fixtures.llama, {"rope": "llama3", "attention_bias": True, "tie_word_embeddings": True}),
    "deepseek_moe": (fixtures.deepseek_moe, {"rope": "linear"}),
    "deepseek_v2": (fixtures.deepseek_v2, {}),
    "deepseek_v2_lite": (
        fixtures.deepseek_v2,
        {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
    ),
}


def generate_reference(model: Any, prompt: list[int], new: int) -> list[int]:
    """transformers' own greedy generation, one prompt at a time."""
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_generation_is_that_of_transformers_token_for_token(tmp_path: Path, name: str, dtype: str) -> None:
    """A batch of unequal prompts, prefilled in chunks beside others that already generate, past YaRN's original
    context, weights in the checkpoint's type."""
    write, options = WRITERS[name]
    model = models.load(write(tmp_path / name, dtype=dtype, **options))
    runner = InterpreterRunner(model.program(), mode="exact")
    tokens = generate(runner, PROMPTS, NEW, block_size=8, chunk_tokens=16)
    reference = model.reference()
    assert tokens == [generate_reference(reference, prompt, NEW) for prompt in PROMPTS]
    assert len({token for sequence in tokens for token in sequence}) > 12  # not one token over and over


@pytest.mark.parametrize("write", [fixtures.llama, fixtures.deepseek_v2])
def test_int4_generation_is_that_of_the_dequantized_weights(tmp_path: Path, write: Callable[..., Path]) -> None:
    pattern = r"mlp\.(gate|up|down)_proj|experts|o_proj"
    model = models.load_int4(write, tmp_path / "m", pattern=pattern, group=32, prescale="each", dtype="float16")
    runner = InterpreterRunner(model.program(), mode="exact")
    tokens = generate(runner, PROMPTS, NEW, block_size=8)
    reference = model.reference()
    assert tokens == [generate_reference(reference, prompt, NEW) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> InterpreterRunner:
    model = models.load(fixtures.llama(tmp_path_factory.mktemp("llama"), num_hidden_layers=1))
    return InterpreterRunner(model.program(), mode="exact")


@pytest.mark.parametrize("chunk_tokens", [1, 7, 512])
def test_chunks_and_company_change_no_token(runner: InterpreterRunner, chunk_tokens: int) -> None:
    alone = [generate(runner, [prompt], NEW, block_size=8)[0] for prompt in PROMPTS]
    assert generate(runner, PROMPTS, NEW, block_size=8, chunk_tokens=chunk_tokens) == alone


def test_an_end_token_ends_its_sequence_and_no_other(runner: InterpreterRunner) -> None:
    free = generate(runner, PROMPTS, NEW, block_size=8)
    end = free[1][3]
    stopped = generate(runner, PROMPTS, NEW, block_size=8, eos_token_ids={end})
    for sequence, whole in zip(stopped, free, strict=True):
        length = whole.index(end) + 1 if end in whole else NEW
        assert sequence == whole[:length]
    assert len(stopped[1]) <= 4


@pytest.mark.parametrize(("prompts", "new"), [([[1], []], 4), ([[1]], 0)])
def test_nothing_to_run_is_refused(runner: InterpreterRunner, prompts: list[list[int]], new: int) -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        generate(runner, prompts, new, block_size=8)


@pytest.mark.parametrize("write", [fixtures.llama, fixtures.deepseek_v2])
def test_weights_made_at_each_use_change_no_token(tmp_path: Path, write: Callable[..., Path]) -> None:
    pattern = r"mlp\.(gate|up|down)_proj|experts|o_proj"
    model = models.load_int4(write, tmp_path / "m", pattern=pattern, group=32, prescale="all", dtype="bfloat16")
    kept, made = (InterpreterRunner(model.program(), mode="exact", resident_bytes=budget) for budget in (None, 0))
    tokens = generate(kept, PROMPTS, 8, block_size=8)
    assert generate(made, PROMPTS, 8, block_size=8) == tokens
    assert made.interpreter.prepared_bytes < kept.interpreter.prepared_bytes / 2
