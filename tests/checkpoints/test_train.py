"""Training, from documents to a finished folder."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoints.balance import balance_loss
from checkpoints.corpus import TEXT, Corpus
from checkpoints.export import build_model, save_vocabulary
from checkpoints.models import DEEPSEEK_V2
from checkpoints.perplexity import Score, cut_windows, measure_unigram, shift_in
from checkpoints.tokenizer import SPECIAL_TOKENS, train_tokenizer
from checkpoints.train import draw_batches, encode_documents, make_checkpoint, round_weights, scale_rate

SMALL = replace(
    DEEPSEEK_V2,
    name="small",
    batch=1,
    shard_bytes=500_000,
    config={
        **DEEPSEEK_V2.config,
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
    },
)


@pytest.fixture
def corpus(monkeypatch: pytest.MonkeyPatch) -> Corpus:
    monkeypatch.setattr("checkpoints.card.read_notice", lambda: "notice")
    text = (TEXT / "calibration.txt").read_text(encoding="utf-8")
    pieces = [text[start : start + 3000] for start in range(0, 12_000, 3000)]
    return Corpus(
        training={"a": pieces[0], "b": pieces[1]}, calibration={"c": pieces[2]}, heldout={"d": pieces[3]}, version="1"
    )


def test_a_short_run_leaves_a_folder_that_computes_the_same(tmp_path: Path, corpus: Corpus) -> None:
    run = make_checkpoint(SMALL, corpus, 0.01, tmp_path / "small")
    assert run.steps >= 1
    assert len(list((tmp_path / "small").glob("*.safetensors"))) >= 2
    assert f"{run.score.perplexity:.1f}" in (tmp_path / "small" / "README.md").read_text(encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert model.dtype == torch.bfloat16
    assert list(tmp_path.iterdir()) == [tmp_path / "small"]


def test_a_saved_model_that_differs_is_refused(tmp_path: Path, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkpoints.train.round_weights", lambda model: None)
    with pytest.raises(ValueError, match="does not compute"):
        make_checkpoint(SMALL, corpus, 0.001, tmp_path / "small")
    assert not list(tmp_path.iterdir())


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(["some text"], 290)
    with pytest.raises(ValueError, match="a vocabulary of 300"):
        save_vocabulary(tokenizer, SMALL, tmp_path)


def test_building_a_model_leaves_the_recipe_alone() -> None:
    before = copy.deepcopy(SMALL.config)
    build_model(SMALL)
    assert before == SMALL.config


def test_rounding_leaves_the_rope_frequencies() -> None:
    model = build_model(SMALL)
    before = model.model.rotary_emb.inv_freq.clone()
    round_weights(model)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, before, rtol=0, atol=0)
    weight = model.lm_head.weight
    torch.testing.assert_close(weight, weight.to(torch.bfloat16).float(), rtol=0, atol=0)


def test_balance_loss_is_one_per_layer_for_an_even_load_and_more_for_a_skewed_one() -> None:
    experts, top_k = 16, 4
    rows = torch.arange(experts)
    even = torch.zeros(experts, experts)
    for step in range(top_k):
        even[rows, (rows + step) % experts] = 9.0
    assert balance_loss([even, even], DEEPSEEK_V2).item() == pytest.approx(2.0, rel=1e-5)
    skewed = torch.zeros(experts, experts)
    skewed[:, :top_k] = 9.0
    assert balance_loss([skewed], DEEPSEEK_V2).item() > 3.5


def test_learning_rate_warms_up_and_falls() -> None:
    assert scale_rate(0.0) < 0.02
    assert scale_rate(0.03) == pytest.approx(1.0)
    assert scale_rate(1.0) == pytest.approx(0.05)


def test_stream_ends_each_document_and_has_no_begin_tokens() -> None:
    tokenizer = train_tokenizer(["one two three"], 280)
    assert tokenizer.decode([*range(len(SPECIAL_TOKENS))], skip_special_tokens=True) == ""
    stream = encode_documents(tokenizer, {"a": "one", "b": "two"}).tolist()
    assert (stream.count(0), stream.count(1), stream[-1]) == (0, 2, 1)


def test_batches_repeat_under_one_seed() -> None:
    stream = torch.arange(2000)
    one = list(islice(draw_batches(stream, 2, seed=5), 9))
    other = list(islice(draw_batches(stream, 2, seed=5), 9))
    assert all(torch.equal(left, right) for left, right in zip(one, other, strict=True))
    assert not torch.equal(one[0], next(draw_batches(stream, 2, seed=6)))


def test_windows_and_scores() -> None:
    windows = cut_windows(torch.arange(10), 4)
    assert windows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert shift_in(windows, 9).tolist() == [[9, 0, 1, 2], [9, 4, 5, 6]]
    uniform = measure_unigram(torch.arange(8), windows, 8)
    score = Score(loss=uniform, tokens=8, size=3)
    assert score.perplexity == pytest.approx(8.0)
    assert score.bits_per_byte == pytest.approx(8.0)
