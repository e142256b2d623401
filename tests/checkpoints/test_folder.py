"""Outputs are replaced in one step."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints.folder import replace_folder, replace_text


def test_a_finished_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "stale").touch()
    with replace_folder(target) as fresh:
        (fresh / "new").touch()
        assert (target / "stale").exists()
    assert [path.name for path in target.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [target]


def test_an_error_leaves_the_old_folder(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(RuntimeError), replace_folder(target) as fresh:
        (fresh / "half").touch()
        raise RuntimeError
    assert [path.name for path in target.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_failed_exchange_brings_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").touch()
    rename = Path.rename

    def fail_on_the_new(source: Path, place: Path) -> Path:
        if source.name == "new":
            raise OSError("disk")
        return rename(source, place)

    monkeypatch.setattr(Path, "rename", fail_on_the_new)
    with pytest.raises(OSError, match="disk"), replace_folder(target):
        pass
    assert [path.name for path in target.iterdir()] == ["old"]


def test_text_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "below" / "text"
    replace_text(target, "one")
    replace_text(target, "twø")
    assert target.read_text(encoding="utf-8") == "twø"
    assert list(target.parent.iterdir()) == [target]
