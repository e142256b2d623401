"""What each format costs a real model, against round-to-nearest INT4: python -m benchmarks.formats [TOKENS [rtn fp8 …]]

SmolLM2-135M (`make smollm2`), every linear of its layers, groups of 64; loss in nats per token over the original on
held-out text of the calibration's domain and of another, computed from the files that quantization wrote, inputs
rounded as declared.
"""

from __future__ import annotations

import argparse
import math
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bars import hold_best
from benchmarks.quantization_models import MODELS, other_domain
from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.config.settings import Calibration, Quantize
from pipeline.evaluation.comparison import Plan, compare_subjects
from pipeline.evaluation.subject import describe_subject
from pipeline.progress import make_reporter
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.workspace import FolderWorkspace

MODEL = Path("out/models/smollm2-135m")
FOLDER = Path("out/benchmarks/formats")
METHODS = ("rtn", "fp8", "fp8_blocks", "int8", "smoothquant")
FP8_BAR = 0.1  # of round-to-nearest INT4's loss
WINDOW = 256


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", nargs="?", type=int, default=8192, help="of each held-out text")
    parser.add_argument("methods", nargs="*", default=METHODS, help=f"else {' '.join(METHODS)}")
    options = parser.parse_args(arguments)
    return 0 if measure(options.tokens, options.methods) else 1


def measure(tokens: int, methods: Sequence[str]) -> bool:
    shutil.rmtree(FOLDER, ignore_errors=True)
    progress = make_reporter()
    original = _workspace("original")
    convert_checkpoint(CheckpointFolder.open(MODEL), original, dtype="float16", overflow="refuse", progress=progress)
    folders, seconds = [CheckpointFolder.open(original.path)], [0.0]
    for method in methods:
        settings = Quantize(
            method=method,  # type: ignore[arg-type]
            group_size=64,
            include=("mlp", "attention_input", "attention_output"),
            calibration=Calibration(samples=64, length=WINDOW),
        )
        workspace, start = _workspace(method), time.perf_counter()
        quantize_checkpoint(folders[0], workspace, settings=settings, progress=progress)
        seconds.append(time.perf_counter() - start)
        folders.append(CheckpointFolder.open(workspace.path))
    subjects = [describe_subject(folder, folder.path.name) for folder in folders]
    passed = True
    for domain, file in {"python": MODELS["smollm2"].heldout, "perl": other_domain()}.items():
        plan = Plan(files=[file], tokens=tokens, window=WINDOW, baseline=False)
        rows = compare_subjects(subjects, plan, progress).to_json()["checkpoints"]
        first = math.log(rows[0]["perplexity"])
        losses = {each.label: math.log(row["perplexity"]) - first for each, row in zip(subjects, rows, strict=True)}
        shares = {name: loss / losses["rtn"] for name, loss in losses.items() if "rtn" in losses}
        print(f"{domain}: loss of the original {first:.4f} nats per token over {rows[0]['tokens']} tokens")
        for name, row, took in zip(methods, rows[1:], seconds[1:], strict=True):
            share = f"{shares[name]:6.3f} of rtn" if name in shares else "rtn not measured"
            print(
                f"{name:12} {losses[name]:+.4f} nats  {share}  KL {row['mean_kl']:.5f}  "
                f"{row['top1_agreement']:.1%}  {row['bytes'] / 1e6:.1f} MB  {took:.0f} s",
                flush=True,
            )
        passed &= hold_best("fp8's share of rtn's loss", FP8_BAR, shares, ("rtn", "fp8"))
    return passed


def _workspace(name: str) -> FolderWorkspace:
    return FolderWorkspace(FOLDER / name, journal=FOLDER / f"{name}.journal")


if __name__ == "__main__":
    sys.exit(main())
