"""Sensitivity: the estimate against the KL divergence that a unit quantized alone really makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.hub_weights import hf_outer_state
from pipeline.checkpoint.reference import build_hf_norm
from pipeline.quantization import sensitivity
from pipeline.quantization.int4 import round_trip
from pipeline.quantization.options import Candidate, Effort, list_candidates
from pipeline.quantization.selection import Rules
from pipeline.quantization.sensitivity import measure_sensitivity
from pipeline.quantization.text import sample_tokens
from pipeline.quantization.units import list_units
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.quantization.support import CalibrationSettings, Model, Settings, watch_pages

ALL = ("experts", "shared_experts", "mlp", "attention_output", "attention_input")
EFFORT = Effort(samples=12, length=32, draws=4)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "calibration.txt"
    path.write_text("".join(f"def f{i}(x):\n    return {i * 7919 % 1000} * x\n" for i in range(400)))
    return path


def settings(text: Path, **options: Any) -> Settings:
    options = {"method": "rtn", "group_size": 64, "include": ALL, **options}
    return Settings(calibration=CalibrationSettings(files=(text,)), **options)


def measure(source: CheckpointFolder, path: Path, text: Path, names: str, **options: Any) -> dict[str, Any]:
    return measure_sensitivity(
        source,
        FolderWorkspace(path, journal=path.with_suffix(".journal")),
        settings=settings(text, **options),
        candidates=[Candidate.parse(name) for name in names.split()],
        effort=EFFORT,
    )


def log_probabilities(model: Model, values: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Of the whole model, layer by layer."""
    hidden = values["transformer.vocab_embedding.weight"][tokens].float()
    for layer in range(model.architecture.num_layers):
        hidden = model.run_layer(layer, values, hidden)
    outer = hf_outer_state(model.source, model.architecture)
    normed = build_hf_norm(model.config, outer["model.norm.weight"].float())(hidden)
    return torch.log_softmax(normed @ outer["lm_head.weight"].float().T, -1)


def rank(values: list[float]) -> torch.Tensor:
    return torch.tensor(values).argsort().argsort().double()


@pytest.mark.parametrize("family", ["llama", "deepseek_v2"])
def test_the_estimate_is_the_true_divergence(
    tmp_path: Path, llama_path: Path, deepseek_v2_path: Path, text: Path, family: str
) -> None:
    """Both by rounding to INT4 in groups of 32. Their experts' choices do not flip the order of units."""
    hub = {"llama": llama_path, "deepseek_v2": deepseek_v2_path}[family]
    model = Model.load(hub)
    source = model.write(tmp_path / "engine", hub)
    found = measure(source, tmp_path / "out", text, "rtn/32", group_size=32)
    tokens = sample_tokens(
        hub / "tokenizer.json", [text], samples=12, length=32, seed=0, vocab_size=model.architecture.vocab_size, bos=0
    )
    base = model.source.values
    expected = log_probabilities(model, base, tokens)
    truth, estimate = [], []
    rules = settings(text, group_size=32).rules
    for unit in list_units(model.architecture, model.source.tensors, rules):
        rounded = {
            f"{linear.name}.weight": round_trip(
                base[f"{linear.name}.weight"], 32, scale_dtype=base[f"{linear.name}.weight"].dtype
            )
            for linear in unit.linears
        }
        got = log_probabilities(model, {**base, **rounded}, tokens)
        truth.append(float((expected.exp() * (expected - got)).sum(-1).mean()))
        row = next(r for r in found["units"] if (r["layer"], r["unit"]) == (unit.layer, unit.place))
        estimate.append(row["candidates"]["rtn/32"]["kl"])
    assert len(found["units"]) == len(truth) >= 12
    agreement = float(torch.corrcoef(torch.stack([rank(truth), rank(estimate)]))[0, 1])
    assert agreement > 0.85
    assert sum(estimate) == pytest.approx(sum(truth), rel=0.5)


def test_the_layer_s_error_and_sizes(tmp_path: Path, llama_path: Path, text: Path) -> None:
    model = Model.load(llama_path)
    found = measure(model.write(tmp_path / "engine", llama_path), tmp_path / "out", text, "rtn/64 rtn/128 int8")
    name = "transformer.layers.1.attention.dense.weight"
    tokens = sample_tokens(llama_path / "tokenizer.json", [text], samples=12, length=32, seed=0, vocab_size=512, bos=0)
    hidden = model.source.values["transformer.vocab_embedding.weight"][tokens].float()
    hidden = model.run_layer(0, model.source.values, hidden)
    right = model.run_layer(1, model.source.values, hidden)
    values = {**model.source.values, name: round_trip(model.source.values[name], 64, scale_dtype=torch.bfloat16)}
    error = float((model.run_layer(1, values, hidden) - right).norm() / (right - hidden).norm())
    unit = next(u for u in found["units"] if (u["layer"], u["unit"]) == (1, "attention.dense"))
    assert unit["candidates"]["rtn/64"]["error"] == pytest.approx(error, rel=1e-3)
    weights = 128 * 128
    assert (unit["weights"], unit["bytes"], unit["role"]) == (weights, 2 * weights, "attention_output")
    sizes = {form: figures["bytes"] for form, figures in unit["candidates"].items()}
    assert sizes == {
        "rtn/64": weights // 2 + 4 * weights // 64,
        "rtn/128": weights // 2 + 4 * weights // 128,
        "int8": weights + 4 * 128,
    }
    # Layer 1 as a whole is worse than each of its units, and 8 bits are better than 4.
    parts = [u["candidates"] for u in found["units"] if u["layer"] == 1]
    assert found["layers"][1]["error"] > max(part["rtn/64"]["error"] for part in parts)
    assert all(part["int8"]["kl"] < part["rtn/64"]["kl"] / 10 for part in parts)


class Items:
    """A Progress that keeps of every item how much was to be done and was."""

    def __init__(self) -> None:
        self.items: list[tuple[str, float, float]] = []

    def start(self, item: str, total: float, unit: str) -> None:
        self.items.append((item, total, 0))

    def advance(self, amount: float) -> None:
        item, total, done = self.items[-1]
        self.items[-1] = item, total, done + amount

    def note(self, message: str) -> None: ...


def test_progress_tells_of_all_that_is_done(tmp_path: Path, llama_path: Path, text: Path) -> None:
    source, progress = Model.load(llama_path).write(tmp_path / "engine", llama_path), Items()
    measure_sensitivity(
        source,
        FolderWorkspace(tmp_path / "out", journal=tmp_path / "journal"),
        settings=settings(text),
        candidates=[Candidate.parse("rtn/64")],
        effort=EFFORT,
        progress=progress,
    )
    assert all(done == total > 0 for _, total, done in progress.items), progress.items
    assert progress.items[0][0] == f"tokenizing {text.name}"
    passes = {item: done for item, _, done in progress.items if item.startswith("gradients")}
    everything = EFFORT.samples * EFFORT.draws
    assert passes == dict.fromkeys(
        ("gradients of the logits", "gradients of layer 2", "gradients of layer 1"), everything
    )


def test_a_killed_run_goes_on(tmp_path: Path, llama_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Model.load(llama_path).write(tmp_path / "engine", llama_path)
    whole = measure(source, tmp_path / "whole", text, "rtn/64")
    layers: list[int] = []
    true_compare = sensitivity._Run._compare

    def compare(self: Any, layer: int, *rest: Any) -> Any:
        layers.append(layer)
        if len(layers) == 7:  # within layer 1, of 3
            raise KeyboardInterrupt
        return true_compare(self, layer, *rest)

    monkeypatch.setattr(sensitivity._Run, "_compare", compare)
    with pytest.raises(KeyboardInterrupt):
        measure(source, tmp_path / "out", text, "rtn/64")
    assert layers == [2] * 5 + [1] * 2
    layers.clear()
    layers.extend([-1] * 100)
    assert measure(source, tmp_path / "out", text, "rtn/64") == whole
    assert layers[100:] == [1] * 5 + [0] * 5
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == ["sensitivity.json"]
    assert (tmp_path / "out/sensitivity.json").read_bytes() == (tmp_path / "whole/sensitivity.json").read_bytes()
    assert json.loads((tmp_path / "out/sensitivity.json").read_text()) == whole


def test_memory_holds_one_layer(tmp_path: Path, llama_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' decoder layers alive at one time: the one at hand."""
    import weakref

    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = []
    true_init = modeling_llama.LlamaDecoderLayer.__init__

    def init(self: Any, *rest: Any) -> None:
        true_init(self, *rest)
        alive.add(self)
        most.append(len(alive))

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "__init__", init)
    measure(Model.load(llama_path).write(tmp_path / "engine", llama_path), tmp_path / "out", text, "rtn/64")
    assert max(most) <= 2


def test_no_layer_s_pages_stay(tmp_path: Path, llama_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Model.load(llama_path).write(tmp_path / "engine", llama_path)
    held = watch_pages(monkeypatch)
    measure(source, tmp_path / "measured", text, "gptq/64 rtn/64")
    assert not {name for name in held if name.startswith("transformer.layers.")}


def test_the_cost_is_linear_in_layers(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted in batches through transformers' decoder layers: two layers more are the same work more each time."""
    runs = 0
    true_forward = modeling_llama.LlamaDecoderLayer.forward

    def forward(*arguments: Any, **options: Any) -> Any:
        nonlocal runs
        runs += 1
        return true_forward(*arguments, **options)

    monkeypatch.setattr(modeling_llama.LlamaDecoderLayer, "forward", forward)
    counts = {}
    for layers in (2, 4, 6):
        runs, hub = 0, fixtures.llama(tmp_path / f"hf-{layers}", tokenizer=True, num_hidden_layers=layers)
        measure(Model.load(hub).write(tmp_path / f"engine-{layers}", hub), tmp_path / f"{layers}", text, "rtn/64")
        counts[layers] = runs
    assert counts[6] - counts[4] == counts[4] - counts[2] > 0


def test_candidates() -> None:
    rules = Rules(method="awq", include=ALL, group_size=64)
    names = [candidate.name for candidate in list_candidates(rules, ("int4", "int8"), search=True)]
    assert names == ["awq/64", "awq/128", "awq/32", "int8"]
    names = [candidate.name for candidate in list_candidates(rules, ("int8", "fp8_blocks"), search=False)]
    assert names == ["rtn/64", "int8", "fp8_blocks"]
    assert Candidate.parse("rtn/64") == Candidate(method="rtn", group_size=64)


def test_one_sample_does_not_decide() -> None:
    """Twelve samples of 1 to 12: the median is 6, and 10,000 counts for 48."""
    values = torch.arange(1.0, 13.0)
    assert sensitivity._average(values) == 6.5
    values[11] = 10_000
    assert sensitivity._average(values) == pytest.approx((66 + 48) / 12)
