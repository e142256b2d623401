"""Mixed precision on SmolLM2-135M: does the sensitivity estimate order layers rightly, and what is a recipe worth?

    python -m benchmarks.recipes check     # the estimate against the true KL of units quantized alone
    python -m benchmarks.recipes loss      # round-to-nearest, and --method, uniform and by a recipe of the same size

Both start from `make smollm2` and what `trtseek engine smollm2-int4.yaml --until convert` makes of it. Losses are nats
per token over the original on held-out text of the calibration's domain and of another, measured on what was written,
read back through transformers' layers; sizes are those of the folders' tensors. `loss` solves from
out/smollm2-int4/sensitivity.json (`trtseek sensitivity`).
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.quantization_models import MODELS, other_domain
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.hub_weights import hf_layer_state
from pipeline.checkpoint.reference import build_hf_layer, build_hf_rotary, causal_mask
from pipeline.checkpoint.tensors import TensorSource
from pipeline.config.load import load_config
from pipeline.config.recipe import Recipe, RecipeRow
from pipeline.config.settings import Quantize
from pipeline.quantization.calibration import EMBEDDING, sample_pieces
from pipeline.quantization.gradients import Head, LayerRunner
from pipeline.quantization.options import Candidate, Effort, Goal
from pipeline.quantization.overlay import lay_over
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.quantization.recipe import solve
from pipeline.quantization.sensitivity import measure_sensitivity
from pipeline.quantization.shard import model_dtype
from pipeline.quantization.units import list_units
from pipeline.workspace import FolderWorkspace

CONFIG = "smollm2-int4"
LENGTH, BATCH = 256, 8


def run_layers(source: CheckpointFolder, weights: TensorSource, hidden: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Hidden states [N, T, H] through the layers from `first` on, whose weights are `weights`."""
    rotary, mask = build_hf_rotary(source.config), causal_mask(hidden.shape[1], torch.float32)
    for layer in range(first, source.architecture.num_layers):
        state = hf_layer_state(weights, source.architecture, layer)
        runner = LayerRunner(build_hf_layer(source.config, layer, state, torch.float32), rotary, mask)
        with torch.no_grad():
            hidden = torch.cat([runner.run(part) for part in torch.split(hidden, BATCH)])
    return hidden


def log_probabilities(head: Head, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(head.logits(hidden), -1)


def embed(source: CheckpointFolder, tokens: torch.Tensor) -> torch.Tensor:
    return source.read(EMBEDDING).to_torch()[tokens].float()


def score(folder: CheckpointFolder, tokens: torch.Tensor) -> float:
    """Mean negative log-likelihood of the text, nats per token."""
    hidden, head = run_layers(folder, folder, embed(folder, tokens)), Head(folder)
    total = 0.0
    for states, ids in zip(hidden, tokens, strict=True):
        log_p = log_probabilities(head, states[:-1])
        total -= float(log_p.gather(-1, ids[1:, None]).double().sum())
    return total / (tokens.shape[0] * (tokens.shape[1] - 1))


def rank_correlation(a: list[float], b: list[float]) -> float:
    ranks = torch.stack([torch.tensor(values).argsort().argsort().double() for values in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def check(source: CheckpointFolder, settings: Quantize, units: int, samples: int) -> None:
    """Spearman's correlation of estimate and truth over `units` units drawn at random, of each layer's output error and
    truth beside it."""
    effort = Effort(samples=samples, length=128, draws=2)
    candidate = Candidate(method="rtn", group_size=settings.group_size)
    with tempfile.TemporaryDirectory() as folder:
        found = measure_sensitivity(
            source, FolderWorkspace(Path(folder)), settings=settings, candidates=[candidate], effort=effort
        )
    measured = {(row["layer"], row["unit"]): row["candidates"][candidate.name] for row in found["units"]}
    c = settings.calibration
    tokens = sample_pieces(source, c.files, samples=samples, length=effort.length, seed=c.seed)
    head, states = Head(source), [embed(source, tokens)]
    for layer in range(source.architecture.num_layers):
        states.append(_step(source, source, states[-1], layer))
    expected = log_probabilities(head, states[-1])
    drawn = list_units(source.architecture, source.tensors, settings.rules)
    drawn = random.Random(0).sample(drawn, min(units, len(drawn)))
    truth, estimate, errors = [], [], []
    for unit in drawn:
        overlay = lay_over(
            source,
            unit.layer,
            unit.treat(candidate) or {},
            None,
            dtype=model_dtype(source.config["trtseek"]["dtype"]),
            clip=False,
            unrouted=settings.unrouted_experts,
        )
        hidden = run_layers(source, source, _step(source, overlay, states[unit.layer], unit.layer), unit.layer + 1)
        true = float((expected.exp() * (expected - log_probabilities(head, hidden))).sum(-1).mean())
        figures = measured[unit.layer, unit.place]
        truth.append(true)
        estimate.append(figures["kl"])
        errors.append(figures["error"])
        print(f"{unit.name:24} true {true:.2e} estimate {figures['kl']:.2e} error {figures['error']:.3f}", flush=True)
    print(
        f"rank correlation over {len(truth)} units: estimate {rank_correlation(truth, estimate):.3f}, "
        f"output error {rank_correlation(truth, errors):.3f}; "
        f"the estimates' sum is {sum(estimate) / sum(truth):.2f} of the true"
    )


def _step(source: CheckpointFolder, weights: TensorSource, hidden: torch.Tensor, layer: int) -> torch.Tensor:
    state = hf_layer_state(weights, source.architecture, layer)
    module = build_hf_layer(source.config, layer, state, torch.float32)
    runner = LayerRunner(module, build_hf_rotary(source.config), causal_mask(hidden.shape[1], torch.float32))
    with torch.no_grad():
        return torch.cat([runner.run(part) for part in torch.split(hidden, BATCH)])


def loss(
    source: CheckpointFolder, settings: Quantize, found: Mapping[str, Any], methods: list[str], pieces: int
) -> None:
    """Each method uniform, then by the recipe that takes no more bytes; shares of the first method's loss."""
    texts = {
        name: sample_pieces(source, [file], samples=pieces, length=LENGTH, seed=1)
        for name, file in {"python": MODELS["smollm2"].heldout, "perl": other_domain()}.items()
    }
    original = [score(source, tokens) for tokens in texts.values()]
    base: list[float] = []

    def report(name: str, ratio: float, scores: list[float]) -> None:
        over = [found - first for found, first in zip(scores, original, strict=True)]
        base[:] = base or over
        figures = (f"{t} {loss:+.4f}, {loss / of:.2f}" for t, loss, of in zip(texts, over, base, strict=True))
        print(f"{name}: {'; '.join(figures)}; ratio {ratio:.4f}", flush=True)

    print("original:", *(f"{t} {nats:.4f}" for t, nats in zip(texts, original, strict=True)), flush=True)
    for method in methods:
        uniform = settings.model_copy(update={"method": method, "recipe": Recipe()})
        size, scores = _quantize_and_score(source, uniform, texts.values())
        report(method, size, scores)
        recipe = solve(found, method, Goal(kind="size_ratio", limit=size), formats=("int4", "int8"))
        rows = tuple(RecipeRow.model_validate({**asdict(row.override), "reason": row.reason}) for row in recipe.rows)
        mixed = uniform.model_copy(update={"recipe": Recipe(rows=rows)})
        size, scores = _quantize_and_score(source, mixed, texts.values())
        report(f"{method}, recipe {dict(recipe.counts)}, predicted KL {recipe.kl:.3f}", size, scores)


def _quantize_and_score(
    source: CheckpointFolder, settings: Quantize, texts: Iterable[torch.Tensor]
) -> tuple[float, list[float]]:
    with tempfile.TemporaryDirectory(dir="out") as folder:
        report = quantize_checkpoint(source, FolderWorkspace(Path(folder)), settings=settings)
        written = CheckpointFolder.open(Path(folder))
        return report.ratio, [score(written, tokens) for tokens in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("check", "loss"))
    parser.add_argument("--method", nargs="*", default=["rtn"])
    parser.add_argument("--units", type=int, default=24)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--pieces", type=int, default=32)
    parser.add_argument("--calibration", type=int, default=64, help="samples of the methods that `loss` compares")
    parser.add_argument("--sensitivity", type=Path, default=Path("out/smollm2-int4/sensitivity.json"))
    parser.add_argument("--checkpoint", type=Path, default=Path("out/smollm2-int4/convert"))
    arguments = parser.parse_args()
    settings = load_config(CONFIG).stages.quantize
    source = CheckpointFolder.open(arguments.checkpoint)
    if arguments.part == "check":
        check(source, settings, arguments.units, arguments.samples)
        return
    calibration = replace_samples(settings, arguments.calibration)
    loss(source, calibration, json.loads(arguments.sensitivity.read_text()), arguments.method, arguments.pieces)


def replace_samples(settings: Quantize, samples: int) -> Quantize:
    """Fewer calibration samples: what is compared is formats."""
    return settings.model_copy(update={"calibration": settings.calibration.model_copy(update={"samples": samples})})


if __name__ == "__main__":
    main()
