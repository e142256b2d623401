"""What a server and its models' processes find in their environment."""

import os
import sys
from pathlib import Path

import pytest

from pipeline.triton.installation import Installation


def test_memory_settings_are_ours_unless_the_user_has_his_own(monkeypatch: pytest.MonkeyPatch) -> None:
    binary, backend = Path("tritonserver"), Path("python")
    installation = Installation(
        binary=binary, python_backend=backend, stub=backend / "stub", libraries=(Path("/lib/triton"),)
    )
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/lib/own")
    environment = installation.environment()
    assert environment["MALLOC_ARENA_MAX"] == "2" and environment["THP_MEM_ALLOC_ENABLE"] == "0"
    first, *_, last = environment["LD_LIBRARY_PATH"].split(os.pathsep)
    assert (first, last) == ("/lib/triton", "/lib/own")
    assert environment["PATH"].startswith(str(Path(sys.executable).parent) + os.pathsep)
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    assert installation.environment()["THP_MEM_ALLOC_ENABLE"] == "1"
