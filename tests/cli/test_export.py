"""`trtseek export` brings a converted checkpoint back, and refuses what it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from pipeline.cli.export import command
from pipeline.errors import CheckpointError
from tests.evaluation.support import convert


def load(folder: Path) -> dict[str, list[int]]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: t.view(torch.uint8).tolist() for file in files for name, t in load_file(file).items()}


def test_a_converted_checkpoint_comes_back(deepseek_v2_path: Path, tmp_path: Path) -> None:
    convert(deepseek_v2_path, tmp_path / "engine", "bfloat16")
    result = CliRunner().invoke(command, [str(tmp_path / "engine"), str(tmp_path / "back")], catch_exceptions=False)
    assert result.exit_code == 0
    assert load(tmp_path / "back") == load(deepseek_v2_path)
    assert (tmp_path / "back/config.json").read_bytes() == (deepseek_v2_path / "config.json").read_bytes()


def test_what_is_there_is_not_written_over(llama_path: Path, tmp_path: Path) -> None:
    convert(llama_path, tmp_path / "engine", "bfloat16")
    (tmp_path / "back").mkdir()
    with pytest.raises(CheckpointError, match="exists already"):
        CliRunner().invoke(command, [str(tmp_path / "engine"), str(tmp_path / "back")], catch_exceptions=False)
