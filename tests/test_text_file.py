from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.text_file import write_text


def test_replaces_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.yaml"
    write_text(path, "first")
    write_text(path, "zweitens: größer")
    assert path.read_text(encoding="utf-8") == "zweitens: größer"
    assert list(path.parent.iterdir()) == [path]


def test_what_was_there_stays_where_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.yaml"
    write_text(path, "first")

    def fill_disk(self: Path, text: str, encoding: str) -> None:
        with open(self, "w") as file:
            file.write(text[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill_disk)
    with pytest.raises(OSError, match="No space"):
        write_text(path, "second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]
