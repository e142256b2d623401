"""The quantizers that this project is measured against, each in an environment of its own: their pins exclude another.

torch is this project's version, of the same kind where pip has a CPU wheel of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PEERS = Path("out/peers")
TORCH = "torch==2.13.0"
PACKAGES = {
    # `requests` is imported and not required by it. transformers: as here, beyond its [hf] extra's range, and works.
    "modelopt": ("nvidia-modelopt==0.47.0", "transformers==5.24.0", "requests", "accelerate"),
    "llmcompressor": ("llmcompressor==0.14.0.1",),
}
SCRIPTS = {"modelopt": "modelopt_awq.py", "llmcompressor": "llmcompressor_gptq.py"}


def install(peer: str) -> Path:
    """Its Python, the environment made when missing."""
    python = PEERS / peer / "bin" / "python"
    ready = PEERS / peer / ".ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEERS / peer)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, TORCH], check=True)
        subprocess.run([*pip, *PACKAGES[peer]], check=True)
        ready.touch()
    return python


def run(peer: str, arguments: Sequence[str], log: Path, *, script: str | None = None) -> dict[str, Any]:
    """What the peer's script (its own of SCRIPTS unless named) prints last, as JSON; all else goes to `log`."""
    python = install(peer).absolute()  # not resolved: the link in its environment is what makes it that one's
    path = Path(__file__).parent / "peers" / (script or SCRIPTS[peer])
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as file:
        done = subprocess.run(
            [str(python), str(path), *arguments], stdout=subprocess.PIPE, stderr=file, text=True, env=environment
        )
    if done.returncode:
        raise SystemExit(f"{peer} ended with {done.returncode}; see {log}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
