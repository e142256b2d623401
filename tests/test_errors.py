"""What messages say of errors that the system gave."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.engine.tensorrt_llm.job import read_json
from pipeline.errors import BuildError, PackageError, spell_reason
from pipeline.release.manifest import find_wrong_sizes
from pipeline.triton.backend.belonging import _read_json


def test_an_errors_file_is_left_to_the_message() -> None:
    with pytest.raises(OSError) as caught:
        Path("absent").read_bytes()
    assert spell_reason(caught.value) == "No such file or directory"
    assert spell_reason(OSError("nothing else")) == "nothing else"
    assert spell_reason(ValueError("no number")) == "no number"


def test_no_message_names_its_file_twice(tmp_path: Path) -> None:
    file = tmp_path / "manifest.json"
    with pytest.raises(PackageError) as package:
        find_wrong_sizes(tmp_path)
    assert package.value.message == f"{file}: is not a manifest: No such file or directory"
    with pytest.raises(BuildError) as build:
        read_json(file)
    assert build.value.message == f"{file}: cannot be read: No such file or directory"
    problems: list[str] = []
    _read_json(file, problems)
    assert problems == ["manifest.json: No such file or directory"]
