"""What the tests of calibration text share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from pipeline.quantization import text
from pipeline.quantization.calibration_files import CalibrationFile


def sample(
    tokenizer: Path, *files: Path | CalibrationFile, samples: int = 4, length: int = 8, **options: Any
) -> torch.Tensor:
    values: dict[str, Any] = {"seed": 0, "vocab_size": 512, **options}
    return text.sample_tokens(tokenizer, files, samples=samples, length=length, **values)


def decode(tokenizer: Path, ids: torch.Tensor) -> str:
    vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
    letters = {index: letter for letter, index in vocabulary.items()}
    return "".join(letters[i] for i in ids.tolist()).replace("Ġ", " ").replace("Ċ", "\n")


def write_lines(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


CHATS = [
    [{"role": "user", "content": f"question {i}?"}, {"role": "assistant", "content": f"answer {i * 7}."}]
    for i in range(40)
]


PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def ask(**answer: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": "why?"}, answer]


def set_template(folder: Path, template: str) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
