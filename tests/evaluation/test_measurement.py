"""Every figure against transformers' own logits and hidden states, in one chunk and in many, in memory and on disk."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.evaluation import activations, forward
from pipeline.evaluation.measurement import LayerTally, Measure, _keep_peaks, find_peaks, measure
from pipeline.evaluation.network_findings import find_worst
from pipeline.evaluation.schedule import TokenSequence
from pipeline.evaluation.scores import Scores, Tally
from pipeline.progress import SILENT
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.evaluation.support import convert, subject
from tests.quantization.support import CalibrationSettings, Settings

TOKENS = torch.randint(0, 512, (64,), generator=torch.Generator().manual_seed(0)).tolist()
WINDOWS = [TokenSequence(tokens=tuple(TOKENS[i : i + 16])) for i in range(0, 64, 16)]
Edit = Callable[[torch.Tensor], torch.Tensor]


def coarsen(w: torch.Tensor) -> torch.Tensor:
    return (w * 8).round() / 8


NAME = "transformer.layers.1.mlp.proj.weight"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CheckpointFolder]:
    folder = tmp_path_factory.mktemp("quality")
    source = fixtures.llama(folder / "hf", dtype="float32")
    return source, convert(source, folder / "engine")


def run(engine: CheckpointFolder, *edits: dict[str, Edit], chunk: int | None = None) -> list[Measure]:
    subjects = [subject(engine), *(subject(engine, edit) for edit in edits)]
    return measure(subjects, WINDOWS, SILENT, block_size=8, chunk=chunk, edges=(4, 16))


@pytest.fixture(scope="module")
def coarse(built: tuple[Path, CheckpointFolder]) -> list[Measure]:
    return run(built[1], {NAME: coarsen}, {NAME: lambda w: w})


def test_a_quantized_caches_cost_is_seen_however_text_is_cut(tmp_path: Path) -> None:
    """Its own chunk, too, is read from the cache."""
    built = convert(fixtures.deepseek_v2(tmp_path / "hf", tokenizer=True, num_hidden_layers=2), tmp_path / "engine")
    (tmp_path / "text.txt").write_text("a quick brown fox jumps over 13 lazy dogs\n" * 90)
    calibration = CalibrationSettings(files=(tmp_path / "text.txt",), samples=4, length=16)
    settings = Settings(method="int8", kv_cache="fp8", calibration=calibration)
    quantize_checkpoint(built, FolderWorkspace(tmp_path / "out"), settings=settings)
    described = subject(CheckpointFolder.open(tmp_path / "out"))
    assert (described.kv_cache, subject(built).kv_cache) == ("fp8", "model")
    wide = dataclasses.replace(described, kv_cache="model")
    found = [measure([wide, described], WINDOWS, SILENT, block_size=8, chunk=chunk)[1] for chunk in (None, 5)]
    assert found[0].tally.mean("kl") > 1e-6 and min(found[0].layers.error) > 1e-3
    assert found[1].tally.mean("kl") == pytest.approx(found[0].tally.mean("kl"), rel=1e-4)


def _keep(outputs: list[torch.Tensor], _module: object, _inputs: object, output: torch.Tensor) -> None:
    outputs.append(output)


@pytest.fixture(scope="module")
def expected(built: tuple[Path, CheckpointFolder]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Of the original and the coarse model: log-probabilities [4, 15, V]; hidden states after layers [L, 4, 16, H]."""
    model = AutoModelForCausalLM.from_pretrained(built[0], dtype=torch.float32, attn_implementation="eager").eval()
    windows = torch.tensor(TOKENS).reshape(4, 16)
    logs, states = [], []
    for edit in (lambda w: w, coarsen):
        outputs: list[torch.Tensor] = []
        keep = partial(_keep, outputs)
        hooks = [layer.register_forward_hook(keep) for layer in model.model.layers]
        with torch.inference_mode():
            weight = model.model.layers[1].mlp.down_proj.weight
            weight.copy_(edit(weight))
            logs.append(torch.log_softmax(model(windows).logits[:, :-1].double(), -1))
        states.append(torch.stack([o[0] if isinstance(o, tuple) else o for o in outputs]).double())
        for hook in hooks:
            hook.remove()
    return logs, states


def test_a_checkpoint_against_itself_costs_nothing(coarse: list[Measure]) -> None:
    for same in (coarse[0], coarse[2]):
        assert same.tally.mean("kl") == same.tally.max_kl == 0
        assert same.tally.mean("top1") == same.tally.mean("top5") == 1
        assert same.tally.tokens == 4 * 15
        assert same.layers.error == [0.0, 0.0, 0.0]


def test_figures_equal_those_of_transformers_logits(coarse, expected) -> None:  # type: ignore[no-untyped-def]
    (p, q), _ = expected
    targets = torch.tensor(TOKENS).reshape(4, 16)[:, 1:, None]
    kl = (p.exp() * (p - q)).sum(-1)
    original, quantized = coarse[0].tally, coarse[1].tally
    assert original.perplexity == pytest.approx(float((-p.gather(-1, targets).mean()).exp()), rel=1e-4)
    assert quantized.perplexity == pytest.approx(float((-q.gather(-1, targets).mean()).exp()), rel=1e-4)
    assert original.mean("entropy") == pytest.approx(float(-(p.exp() * p).sum(-1).mean()), rel=1e-4)
    assert quantized.mean("entropy") == pytest.approx(float(-(q.exp() * q).sum(-1).mean()), rel=1e-4)
    assert quantized.mean("kl") == pytest.approx(float(kl.mean()), rel=1e-3)
    assert quantized.max_kl == pytest.approx(float(kl.max()), rel=1e-3)
    assert quantized.mean("top1") == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    kept = [
        len(set(a) & set(b)) / 5
        for a, b in zip(
            p.topk(5).indices.reshape(-1, 5).tolist(), q.topk(5).indices.reshape(-1, 5).tolist(), strict=True
        )
    ]
    assert quantized.mean("top5") == pytest.approx(sum(kept) / len(kept))


def test_buckets_hold_their_own_positions(coarse, expected) -> None:  # type: ignore[no-untyped-def]
    (p, q), _ = expected
    kl = (p.exp() * (p - q)).sum(-1)
    first, rest = coarse[1].tally.buckets()
    assert [(b["first"], b["last"], b["tokens"]) for b in (first, rest)] == [(0, 4, 16), (4, 16, 44)]
    assert first["kl"] == pytest.approx(float(kl[:, :4].mean()), rel=1e-3)
    assert rest["kl"] == pytest.approx(float(kl[:, 4:].mean()), rel=1e-3)


def test_layers_equal_those_of_transformers(coarse, expected) -> None:  # type: ignore[no-untyped-def]
    _, (ours, theirs) = expected
    layers = coarse[1].layers.to_json()
    for layer in (1, 2):
        error = (theirs[layer] - ours[layer]).norm() / ours[layer].norm()
        cosine = torch.cosine_similarity(ours[layer], theirs[layer], dim=-1).mean()
        assert layers[layer]["error"] == pytest.approx(float(error), rel=1e-3)
        assert layers[layer]["cosine"] == pytest.approx(float(cosine), rel=1e-5)
    assert find_worst(coarse[1].layers.error) == 1
    assert layers[0]["error"] == 0.0


def test_the_lens_on_the_last_layer_reads_the_logits(coarse, expected) -> None:  # type: ignore[no-untyped-def]
    (p, q), _ = expected
    kl = (p.exp() * (p - q)).sum(-1)
    lens = coarse[1].layers.to_json()
    # It looks at every fourth of 64 positions, last ones of windows among them, so near is all that can be asked.
    assert lens[2]["kl"] == pytest.approx(float(kl.mean()), rel=0.3)
    assert lens[0]["kl"] == 0 < lens[1]["kl"]
    assert [layer["lens_positions"] for layer in lens] == [16] * 3


def test_peaks_are_of_whichever_checkpoint_is_furthest(coarse: list[Measure]) -> None:
    original, edited, same = coarse
    assert find_peaks([original, same], 4) == []
    found = find_peaks([edited, same], 4)
    assert found == find_peaks([same, edited], 4)
    assert (len(found), found[0].kl) == (4, edited.tally.max_kl)
    assert [peak.kl for peak in found] == sorted((peak.kl for peak in found), reverse=True)
    assert {peak.label for peak in found} == {"edited"}
    assert find_peaks([edited], 2) == found[:2]
    worse = dataclasses.replace(
        edited,
        label="worse",
        peaks={
            found[1].sequence: dataclasses.replace(found[1], label="worse", kl=math.nan),
            found[0].sequence: dataclasses.replace(found[0], label="worse", kl=found[0].kl / 2),
        },
    )
    labels = [(peak.sequence, peak.label) for peak in find_peaks([edited, worse], 2)]
    assert labels == [(found[1].sequence, "worse"), (found[0].sequence, "edited")]


def test_a_peak_that_is_no_number_is_not_lost_in_later_steps() -> None:
    found = Measure("a", Tally((1,)), LayerTally.of(0))
    for start, kl in ((0, [math.nan, 0.1]), (2, [0.2, 0.1])):
        scores = Scores(
            **dict.fromkeys(("nll", "entropy", "top1", "top5", "top1_in_top5"), torch.zeros(2)), kl=torch.tensor(kl)
        )
        _keep_peaks(found, scores, torch.zeros(2, dtype=torch.int64), torch.arange(start, start + 2))
    assert found.peaks[0].place == 0 and math.isnan(found.peaks[0].kl)


def test_peaks_are_the_worst_positions_of_each_window(coarse, expected) -> None:  # type: ignore[no-untyped-def]
    (p, q), _ = expected
    kl = (p.exp() * (p - q)).sum(-1)
    peaks = find_peaks([coarse[1]], 3)
    assert [peak.place for peak in peaks] == [int(kl[peak.sequence].argmax()) for peak in peaks]
    assert [peak.sequence for peak in peaks] == kl.amax(-1).argsort(descending=True)[:3].tolist()


def test_chunks_and_files_change_nothing(built, coarse, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    made = []

    class OnDisk(activations.Activations):
        def __init__(self, rows, width, *, folder=None):  # type: ignore[no-untyped-def]
            super().__init__(rows, width, folder=folder, limit=0)
            made.append(self)

        def close(self) -> None:
            assert self.on_disk
            super().close()

    monkeypatch.setattr(forward, "Activations", OnDisk)
    chunked = run(built[1], {NAME: coarsen}, chunk=5)
    assert len(made) == 2
    for ours, theirs in zip(chunked, coarse, strict=False):
        assert ours.tally.mean("nll") == pytest.approx(theirs.tally.mean("nll"), abs=1e-9)
        assert ours.tally.mean("kl") == pytest.approx(theirs.tally.mean("kl"), abs=1e-9)


def test_logits_that_are_not_finite_do_not_pass_as_good(built: tuple[Path, CheckpointFolder]) -> None:
    broken = run(built[1], {"transformer.ln_f.weight": lambda w: w * math.nan})[1].tally
    assert math.isnan(broken.perplexity)
    assert math.isnan(broken.max_kl)
    assert broken.mean("top1") == broken.mean("top5") == 0
