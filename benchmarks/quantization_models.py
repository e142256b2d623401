"""What `benchmarks.quantization` quantizes, and the texts that it judges by."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path("out/benchmarks/quantization")
TEXT = Path("checkpoints/text")
PERL = Path("usr/share/perl/5.36.0/pod")
# Prose of Perl's manual, without its histories of releases, which are lists.
PAGES = ("perlintro", "perlstyle", "perlsyn", "perlsub", "perlref", "perlmod", "perlobj", "perlperf", "perlsec")
EVERY_LINEAR = ("experts", "shared_experts", "mlp", "attention_output", "attention_input")


@dataclass(frozen=True, kw_only=True)
class Model:
    """`prepare` makes the Hugging Face folder where it is missing and names it; `tokens` are scored in each text."""

    name: str
    prepare: Callable[[], Path]
    group: int
    dtype: str | None = None
    include: tuple[str, ...] = EVERY_LINEAR
    samples: int = 128
    length: int = 256
    tokens: int = 8192
    calibration: Path = TEXT / "calibration.txt"
    heldout: Path = TEXT / "heldout.txt"

    def calibration_files(self) -> Any:
        from pipeline.quantization.calibration_files import name_file

        return [name_file(self.calibration)]


def _smollm2() -> Path:
    folder = Path("out/models/smollm2-135m")
    if not (folder / "config.json").exists():
        raise SystemExit("there is no SmolLM2 yet: make smollm2")
    return folder


def _llama() -> Path:
    """254M random weights under SmolLM2's shapes of text: its tokenizer, cut to no vocabulary but the model's own."""
    folder = FOLDER / "models" / "llama-250m"
    if not (folder / "model.safetensors").exists():
        from safetensors.torch import save_file

        from benchmarks import int4, interpreter

        folder.mkdir(parents=True, exist_ok=True)
        model = interpreter.build_model(int4.CONFIG)
        state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **int4.CONFIG}))
        shutil.copyfile("checkpoints/deepseek-coder-tiny/tokenizer.json", folder / "tokenizer.json")
    return folder


MODELS = {
    "smollm2": Model(name="smollm2", prepare=_smollm2, group=64, dtype="float16"),
    "llama-250m": Model(name="llama-250m", prepare=_llama, group=128, samples=32, tokens=2048),
    "v2-tiny": Model(name="v2-tiny", prepare=lambda: Path("checkpoints/deepseek-v2-tiny"), group=64),
}


def other_domain() -> Path:
    """Text of another domain than the calibration's: pages of Debian's perl-doc (Artistic licence or GPL)."""
    file = FOLDER / "perl.txt"
    if not file.exists():
        folder = FOLDER / "perl-doc"
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "-qq", "download", "perl-doc"], check=True, cwd=folder)
        (package,) = folder.glob("perl-doc_*.deb")
        subprocess.run(["dpkg-deb", "--extract", package.name, "."], check=True, cwd=folder)
        pages = [(folder / PERL / f"{page}.pod").read_text(errors="replace") for page in PAGES]
        file.write_text("\n".join(pages), encoding="utf-8")
        shutil.rmtree(folder)
    return file
