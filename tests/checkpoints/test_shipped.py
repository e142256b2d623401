"""The shipped checkpoints: in the hub's form, complete, readable by transformers, and trained."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from checkpoints.corpus import ROOT, TEXT
from checkpoints.export import execution_options
from checkpoints.models import DEEPSEEK_V2, RECIPES, Recipe
from checkpoints.perplexity import cut_windows, measure_loss, measure_unigram

LARGEST_WEIGHTS = 12_000_000  # bytes
# Nats per token on the first windows of the held-out text, some way above what was measured.
LOSS_BOUNDS = {"deepseek-coder-tiny": 3.6, "deepseek-v2-tiny": 3.9}
UNIGRAM_MARGIN = 1.5
SAMPLE = 24  # windows

HUB_KEYS = {"architectures", "model_type", "rope_scaling", "rope_theta", "torch_dtype", "transformers_version"}
DEEPSEEK_V2_KEYS = {
    *("topk_method", "scoring_func", "moe_layer_freq", "ep_size", "aux_loss_alpha", "seq_aux", "norm_topk_prob"),
    *("first_k_dense_replace", "n_group", "topk_group", "routed_scaling_factor", "q_lora_rank", "kv_lora_rank"),
}
TRANSFORMERS_5_KEYS = {"rope_parameters", "dtype"}


@pytest.fixture(scope="module", params=sorted(RECIPES))
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return RECIPES[request.param]


@pytest.fixture(scope="module")
def folder(recipe: Recipe) -> Path:
    return ROOT / recipe.name


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def loaded(recipe: Recipe, folder: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **execution_options(recipe)
    )
    return model, report


def read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def read_shards(folder: Path) -> Iterator[tuple[str, str, list[int], str]]:
    """(shard, tensor, shape, type) of every stored tensor."""
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                view = tensors.get_slice(name)
                yield shard.name, name, view.get_shape(), view.get_dtype()


def test_config_is_the_hub_form(recipe: Recipe, folder: Path) -> None:
    config = read_json(folder / "config.json")
    expected = HUB_KEYS | (DEEPSEEK_V2_KEYS if recipe is DEEPSEEK_V2 else set())
    assert expected <= config.keys()
    assert not TRANSFORMERS_5_KEYS & config.keys()
    assert config == recipe.config


def test_shards_agree_with_the_index(folder: Path) -> None:
    index = read_json(folder / "model.safetensors.index.json")
    stored = list(read_shards(folder))
    assert {name: shard for shard, name, _, _ in stored} == index["weight_map"]
    assert 2 <= len(set(index["weight_map"].values())) <= 3
    assert {kind for *_, kind in stored} == {"BF16"}
    total = sum(2 * torch.Size(shape).numel() for _, _, shape, _ in stored)
    assert total == index["metadata"]["total_size"]
    assert sum(shard.stat().st_size for shard in folder.glob("*.safetensors")) <= LARGEST_WEIGHTS


def test_every_linear_divides_into_groups_of_128(folder: Path) -> None:
    matrices = {name: shape for _, name, shape, _ in read_shards(folder) if len(shape) == 2}
    assert not {name: shape for name, shape in matrices.items() if shape[1] % 128}


def test_expert_names_are_the_hub_ones(recipe: Recipe, folder: Path) -> None:
    names = {name for _, name, _, _ in read_shards(folder)}
    experts = {name for name in names if ".mlp.experts." in name}
    routed = range(1, 3) if recipe is DEEPSEEK_V2 else ()
    assert experts == {
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in routed
        for expert in range(16)
        for part in ("gate", "up", "down")
    }


def test_transformers_loads_every_tensor(loaded: tuple[PreTrainedModel, dict[str, Any]], recipe: Recipe) -> None:
    model, report = loaded
    assert [type(model).__name__] == recipe.config["architectures"]
    assert not any(report.values()), report
    assert model.config.rope_parameters["rope_theta"] == recipe.config["rope_theta"]
    assert model.config.rope_parameters["rope_type"] == ("yarn" if recipe is DEEPSEEK_V2 else "linear")


def test_experts_keep_their_order(loaded: tuple[PreTrainedModel, dict[str, Any]], recipe: Recipe, folder: Path) -> None:
    if recipe is not DEEPSEEK_V2:
        pytest.skip("no experts")
    name = "model.layers.2.mlp.experts.11.up_proj.weight"
    shard = read_json(folder / "model.safetensors.index.json")["weight_map"][name]
    with safe_open(folder / shard, "pt") as tensors:
        stored = tensors.get_tensor(name).float()
    fused = loaded[0].get_parameter("model.layers.2.mlp.experts.gate_up_proj")
    torch.testing.assert_close(fused[11, 128:], stored, rtol=0, atol=0)


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return x + 10\n", "naïve — 你好 🙂\t<tag>", "  two  spaces\n\n\nend "]
)
def test_tokenizer_returns_the_text(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id == 0
    assert tokenizer.eos_token_id == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_tokenizer_fits_the_model(tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> None:
    assert len(tokenizer) == recipe.vocab_size
    assert tokenizer.bos_token == "<｜begin▁of▁sentence｜>"  # noqa: RUF001
    assert tokenizer.model_max_length == recipe.context


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"{tokenizer.bos_token}Be brief.\n\nUser: Hello\n\nAssistant:"


def test_held_out_loss_is_far_below_a_unigram_model(
    loaded: tuple[PreTrainedModel, dict[str, Any]], tokenizer: PreTrainedTokenizerBase, recipe: Recipe
) -> None:
    def encode(part: str, size: int) -> torch.Tensor:
        text = (TEXT / f"{part}.txt").read_text(encoding="utf-8")[:size]
        return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    windows = cut_windows(encode("heldout", 40_000))[:SAMPLE]
    unigram = measure_unigram(encode("calibration", 400_000), windows, recipe.vocab_size)
    loss = measure_loss(loaded[0], windows, tokenizer.bos_token_id)
    assert loss < LOSS_BOUNDS[recipe.name] < unigram - UNIGRAM_MARGIN


def test_card_and_notice(folder: Path) -> None:
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert "held-out perplexity" in card
    assert "babbles" in card
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in (folder / "NOTICE").read_text(encoding="utf-8")
