"""The shipped checkpoints in INT4, as networks, and the tokens of the text that they were not trained on."""

from __future__ import annotations

from pathlib import Path

from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.config.settings import Quantize
from pipeline.network.program import Program
from pipeline.network.spec import NetworkSpec
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.workspace import FolderWorkspace
from tests.network.models import read_program

CHECKPOINTS = Path(__file__).parents[2] / "checkpoints"
NAMES = ("deepseek-v2-tiny", "deepseek-coder-tiny")


def quantize_trained(name: str, folder: Path, *, block_size: int) -> Program:
    """`folder`: for the checkpoints on the way."""
    source = CheckpointFolder.open(CHECKPOINTS / name)
    convert_checkpoint(source, FolderWorkspace(folder / "fp16"), dtype="float16", overflow="refuse")
    converted = CheckpointFolder.open(folder / "fp16")
    quantize_checkpoint(converted, FolderWorkspace(folder / "int4"), settings=Quantize(method="rtn"))
    checkpoint = CheckpointFolder.open(folder / "int4")
    spec = NetworkSpec(dtype="float16", block_size=block_size, max_seq_len=1024)
    program = read_program(spec, checkpoint.architecture, checkpoint)
    assert any(spec.dtype == "int4" for spec in program.constant_specs.values())
    return program


def read_held_out(name: str, count: int) -> list[int]:
    """The first tokens of the held-out text."""
    from tokenizers import Tokenizer

    text = (CHECKPOINTS / "text" / "heldout.txt").read_text(encoding="utf-8")[:20_000]
    return Tokenizer.from_file(str(CHECKPOINTS / name / "tokenizer.json")).encode(text).ids[:count]
