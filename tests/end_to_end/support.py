"""Runs `trtseek` as a user does: a process of its own, on a config file, over a random DeepSeek-V2 of a megabyte."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.passes import LOWERINGS

TRTSEEK = str(Path(sys.executable).with_name("trtseek"))
TEXT = "A tensor is an array of numbers; a stage reads tensors and writes tensors. def f(x): return x + 1\n"


@dataclass(frozen=True)
class Project:
    """A folder with a model, text, a config and, once it has run, an output."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "tiny.yaml"

    @property
    def run(self) -> Path:
        return self.folder / "out" / "tiny"

    def trtseek(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([TRTSEEK, *arguments], cwd=self.folder, capture_output=True, text=True, timeout=240)

    def artifact(self, stage: str) -> dict[str, object]:
        record: dict[str, object] = json.loads((self.run / stage / "artifact.json").read_text())
        return record

    def digests(self, stage: str) -> dict[str, str]:
        files = self.artifact(stage)["files"]
        assert isinstance(files, dict)
        return {name: str(entry) for name, entry in sorted(_without_times(files).items())}


def _without_times(files: dict[str, dict[str, object]]) -> dict[str, object]:
    return {name: {key: value for key, value in entry.items() if "mtime" not in key} for name, entry in files.items()}


def write_project(folder: Path, model: Path) -> Project:
    """Settings small enough that a run takes seconds; quality gates are loose, as random weights have no quality."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(TEXT * 40, encoding="utf-8")
    (folder / "heldout.txt").write_text(TEXT[::-1] * 10, encoding="utf-8")
    config = {
        "name": "tiny",
        "model": {"path": str(model)},
        "target": {"gpu": "A100-80GB"},
        "stages": {
            "convert": {"dtype": "float16"},
            "quantize": {"calibration": {"files": ["text.txt"], "samples": 8, "length": 48}},
            "verify": {
                "prompts": ["def f(x):", "A tensor is"],
                "heldout": {"files": ["heldout.txt"], "tokens": 256, "window": 64},
                "gates": {"perplexity_ratio": None, "top1_agreement": None, "mean_kl": 1.0},
            },
            "build": {
                "block_size": 16,
                "max_seq_len": 128,
                "max_batch_size": 2,
                "max_num_tokens": 64,
                "lowering": dict.fromkeys(LOWERINGS, "native"),  # whatever has passed on a GPU by then
            },
            "package": {"check": "never"},  # tests/serving loads packages in a server
        },
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return Project(folder)
