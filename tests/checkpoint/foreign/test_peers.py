"""What the tools themselves write and read: modelopt in its own environment, compressed-tensors by transformers."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.peer_environments import PEERS
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.evaluation.conversion_proof import prove_conversion
from pipeline.exports.formats import export_checkpoint
from pipeline.progress import SILENT
from tests import fixtures
from tests.checkpoint.foreign.cases import write
from tests.checkpoint.foreign.test_convert import convert
from tests.whole_model import load_whole

MODELOPT = PEERS.absolute() / "modelopt"
WRITE = """
import sys, torch
from transformers import AutoModelForCausalLM
import modelopt.torch.quantization as mtq
from modelopt.torch.export import export_hf_checkpoint
source, output, algo = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
ids = torch.arange(64)[None] * 7 % 512
mtq.quantize(model, getattr(mtq, algo), lambda m: [m(ids * k % 512) for k in range(1, 6)])
with torch.inference_mode():
    export_hf_checkpoint(model, export_dir=output)
"""


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(48)[None] * 11 % 512).logits.float()
    return found


@pytest.mark.slow
@pytest.mark.skipif(not (MODELOPT / ".ready").exists(), reason="benchmarks.quantization makes modelopt's environment")
@pytest.mark.parametrize(
    ("algo", "held", "error"),
    [
        ("INT4_AWQ_CFG", {"int4": 15}, 0.5),
        ("FP8_DEFAULT_CFG", {"fp8": 12, "fp8_rows": 3}, 0.15),
        ("INT8_SMOOTHQUANT_CFG", {"int8_sq": 15}, 0.05),
    ],
)
def test_what_modelopt_wrote(algo: str, held: dict[str, int], error: float, tmp_path: Path) -> None:
    hub, path = fixtures.llama(tmp_path / "hub", tokenizer=True), tmp_path / "quantized"
    run = subprocess.run(
        [str(MODELOPT / "bin/python"), "-c", WRITE, str(hub), str(path), algo], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-2000:]
    engine, report = convert(path, tmp_path / "engine")
    assert report.foreign is not None and report.foreign["held"] == held
    assert prove_conversion(CheckpointFolder.open(path), engine, SILENT).differing == {}
    export_checkpoint(engine, tmp_path / "wide", "hf", others="16bit")
    original = logits(load_whole(hub))
    apart = (logits(load_whole(tmp_path / "wide")) - original).norm() / original.norm()
    assert 0.001 < apart < error  # that of four bits on random weights; numbers in a wrong order are 1.4 apart


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compressed-int4", "compressed-int8-packed"])
def test_what_transformers_makes_of_compressed_tensors(name: str, tmp_path: Path) -> None:
    """Its own reader multiplies out in the scales' type, bfloat16; so much apart, and no more."""
    from transformers import AutoModelForCausalLM

    path = write(name, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    engine, _ = convert(path, tmp_path / "engine", foreign="dequantize")
    export_checkpoint(engine, tmp_path / "wide", "hf", others="16bit")
    expected = logits(theirs.eval())
    assert (logits(load_whole(tmp_path / "wide")) - expected).norm() / expected.norm() < 0.01
