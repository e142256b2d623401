"""Perplexity, KL and agreement against transformers' own logits."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.errors import QuantizationError
from pipeline.evaluation.quality import Quality, compare, cut_windows
from pipeline.network.spec import NetworkSpec
from pipeline.progress import SILENT
from tests import fixtures
from tests.evaluation.support import Altered, convert

SPEC = NetworkSpec(dtype="float32", max_seq_len=64, block_size=8)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CheckpointFolder]:
    folder = tmp_path_factory.mktemp("quality")
    source = fixtures.llama(folder / "hf", dtype="float32")
    return source, convert(source, folder / "engine")


TOKENS = torch.randint(0, 512, (70,), generator=torch.Generator().manual_seed(0)).tolist()


def measure(original: CheckpointFolder, other: object) -> Quality:
    windows = cut_windows(TOKENS, total=64, window=16, origin="text")
    return compare(original, other, original.architecture, SPEC, windows, SILENT)  # type: ignore[arg-type]


def test_a_checkpoint_against_itself_costs_nothing(built: tuple[Path, CheckpointFolder]) -> None:
    quality = measure(built[1], built[1])
    assert quality.kl == 0
    assert quality.top1 == quality.tokens == 4 * 15
    assert quality.layer_error == [0.0, 0.0, 0.0]


def test_figures_equal_those_of_transformers_logits(built: tuple[Path, CheckpointFolder]) -> None:
    path, engine = built
    name = "transformer.layers.1.mlp.proj.weight"
    quality = measure(engine, Altered(engine, {name: lambda w: (w * 8).round() / 8}))

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    windows = torch.tensor(TOKENS[:64]).reshape(4, 16)
    with torch.inference_mode():
        p = torch.log_softmax(model(windows).logits[:, :-1].double(), -1)
        weight = model.model.layers[1].mlp.down_proj.weight
        weight.copy_((weight * 8).round() / 8)
        q = torch.log_softmax(model(windows).logits[:, :-1].double(), -1)
    targets = windows[:, 1:, None]
    assert quality.perplexity_original == pytest.approx(float((-p.gather(-1, targets).mean()).exp()), rel=1e-4)
    assert quality.perplexity_quantized == pytest.approx(float((-q.gather(-1, targets).mean()).exp()), rel=1e-4)
    assert quality.kl / quality.tokens == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert quality.top1 == int((p.argmax(-1) == q.argmax(-1)).sum())
    assert quality.worst_layer == 1
    assert quality.layer_error[0] == 0.0


def test_logits_that_are_not_finite_do_not_pass_as_good(built: tuple[Path, CheckpointFolder]) -> None:
    engine = built[1]
    broken = measure(engine, Altered(engine, {"transformer.ln_f.weight": lambda w: w * math.nan}))
    assert math.isnan(broken.perplexity_quantized)
    assert broken.top1 < broken.tokens


def test_too_little_text_is_refused_by_name() -> None:
    with pytest.raises(QuantizationError, match=r"notes\.txt: 3 tokens.*window of 16"):
        cut_windows([1, 2, 3], total=64, window=16, origin="notes.txt")
