from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.engine.description import load_description
from pipeline.errors import BuildError
from tests.engine.conftest import Built


def test_round_trip(llama_engine: Built, tmp_path: Path) -> None:
    (tmp_path / "engine.json").write_text(llama_engine.description.to_json())
    assert load_description(tmp_path) == llama_engine.description
    assert load_description(tmp_path / "engine.json") == llama_engine.description


def test_workspace_is_the_largest_profiles(llama_engine: Built) -> None:
    sizes = [profile.workspace_bytes for profile in llama_engine.description.profiles]
    assert llama_engine.description.workspace_bytes == max(size for size in sizes if size)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not an engine description"),
        ('{"format": 99}', "not an engine description of format 1"),
        ('{"a', "not JSON"),
        ('{"format": 1, "spec": [], "limits": 3}', "does not describe an engine"),
        ('{"format": 1}', "does not describe an engine"),
    ],
)
def test_damaged(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "engine.json").write_text(content)
    with pytest.raises(BuildError, match=message):
        load_description(tmp_path)


def test_unknown_key(llama_engine: Built, tmp_path: Path) -> None:
    values = json.loads(llama_engine.description.to_json())
    (tmp_path / "engine.json").write_text(json.dumps(values | {"colour": "red"}))
    with pytest.raises(BuildError, match="colour"):
        load_description(tmp_path)


@pytest.mark.parametrize("changes", [{"file": 7}, {"file": None}, {"sources": ["config.json"]}])
def test_places_of_another_type(llama_engine: Built, tmp_path: Path, changes: dict[str, object]) -> None:
    values = json.loads(llama_engine.description.to_json())
    (tmp_path / "engine.json").write_text(json.dumps(values | changes))
    with pytest.raises(BuildError, match="file must be a name, sources an object"):
        load_description(tmp_path)


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="No such file"):
        load_description(tmp_path)
