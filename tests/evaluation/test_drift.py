"""Long contexts: figures at each length against transformers run whole, and bounded steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.errors import CompatibilityError, QuantizationError
from pipeline.evaluation.comparison import Plan, compare_subjects
from pipeline.evaluation.drift import measure_drift
from pipeline.evaluation.measurement import plan_schedule
from pipeline.evaluation.schedule import TokenSequence
from pipeline.progress import SILENT
from tests import fixtures
from tests.evaluation.support import convert, subject

NAME = "transformer.layers.1.mlp.proj.weight"


def coarsen(w: torch.Tensor) -> torch.Tensor:
    return (w * 8).round() / 8


def test_drift_is_what_transformers_has_at_those_places(tmp_path: Path) -> None:
    path = fixtures.llama(tmp_path / "hf", dtype="float32", rope="yarn")
    engine = convert(path, tmp_path / "engine")
    tokens = torch.randint(2, 512, (255,), generator=torch.Generator().manual_seed(1)).tolist()
    subjects = [subject(engine), subject(engine, {NAME: coarsen})]
    found = measure_drift(subjects, tokens, (32, 128, 256), SILENT, origin="text", chunk=48)

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        p = torch.log_softmax(model(torch.tensor([[0, *tokens]])).logits[0].double(), -1)
        weight = model.model.layers[1].mlp.down_proj.weight
        weight.copy_(coarsen(weight))
        q = torch.log_softmax(model(torch.tensor([[0, *tokens]])).logits[0].double(), -1)
    kl, entropy = (p.exp() * (p - q)).sum(-1), -(q.exp() * q).sum(-1)
    for row, (first, last) in zip(found[1], ((0, 32), (32, 128), (128, 255)), strict=True):
        assert row["tokens"] == last - first
        assert row["kl"] == pytest.approx(float(kl[first:last].mean()), rel=1e-3)
        assert row["entropy"] == pytest.approx(float(entropy[first:last].mean()), rel=1e-4)
    assert [row["length"] for row in found[0]] == [32, 128, 256]
    assert all(row["kl"] == 0 for row in found[0])


def test_steps_are_bounded_by_what_attention_and_logits_take(tmp_path: Path) -> None:
    engine = convert(fixtures.llama(tmp_path / "hf"), tmp_path / "engine")
    long = [TokenSequence(tokens=(1,) * 32768)]
    schedule = plan_schedule(long, engine.architecture, block_size=64)
    sizes = [len(step.inputs["slot_ids"]) for step in schedule.steps]
    assert sum(sizes) == 32768
    assert max(sizes) * 32768 * engine.architecture.num_heads <= 1 << 26
    short = plan_schedule([TokenSequence(tokens=(1,) * 64)] * 20, engine.architecture, block_size=64)
    assert [len(step.pieces) for step in short.steps] == [8, 8, 4]


def test_too_little_text_and_too_long_a_context_are_refused(tmp_path: Path) -> None:
    source = fixtures.llama(tmp_path / "hf", tokenizer=True)
    engine = convert(source, tmp_path / "engine")
    (tmp_path / "t.txt").write_text("word " * 20)
    subjects = [subject(engine), subject(engine)]
    with pytest.raises(QuantizationError, match=r"t\.txt: 100 tokens.*one context of 256"):
        compare_subjects(subjects, Plan(files=[tmp_path / "t.txt"], tokens=64, window=32, lengths=(256,)), SILENT)
    with pytest.raises(CompatibilityError, match="context of 257 tokens is more than the model's 256"):
        compare_subjects(subjects, Plan(files=[tmp_path / "t.txt"], tokens=64, window=32, lengths=(257,)), SILENT)
