"""llama.cpp, from PyPI's prebuilt xllamacpp, in an environment of its own: its numpy is not this project's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENT = Path("out/peers/xllamacpp")
CHILD = Path(__file__).with_name("llamacpp_child.py")


@pytest.fixture(scope="session")
def llamacpp() -> Callable[[Path, list[list[int]], int], list[dict[str, Any]]]:
    """(file, prompts, new) → for each prompt {"ids", "logprobs"}. Skips where it cannot be installed."""
    from benchmarks.int4 import XLLAMACPP

    python = ENVIRONMENT.absolute() / "bin" / "python"
    if not python.exists():
        for command in (
            [sys.executable, "-m", "venv", str(ENVIRONMENT)],
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", XLLAMACPP],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"{XLLAMACPP} cannot be installed: {done.stderr.strip().splitlines()[-1:]}")

    def run(file: Path, prompts: list[list[int]], new: int) -> list[dict[str, Any]]:
        command = [str(python), str(CHILD), str(file), json.dumps(prompts), str(new)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        found: list[dict[str, Any]] = json.loads(done.stdout)
        return found

    return run
