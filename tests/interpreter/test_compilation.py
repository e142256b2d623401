"""Kernels are compiled once for each source, command and processor, and found whatever happens to the cache."""

import os
from pathlib import Path

import pytest

from pipeline.interpreter import native
from pipeline.interpreter.native import compilation

SOURCE = "long run(const void *words, long count, int threads) { return count + ANSWER; }\n"


@pytest.fixture(autouse=True)
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a library that takes no time to compile."""
    source = tmp_path / "sources" / "calls.c"
    source.parent.mkdir()
    source.write_text(SOURCE)
    monkeypatch.setattr(compilation, "HERE", source.parent)
    monkeypatch.setattr(compilation, "SOURCES", (source,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return source


def compiled(*options: str) -> Path:
    path = compilation.compile_library(options or ("-DANSWER=1",), load)
    assert path is not None, "no C compiler with OpenMP"
    return path


def load(path: Path) -> Path:
    native.Library(path)
    return path


def test_it_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = compiled()
    assert path.parent == tmp_path / "cache" / "trtseek"
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # what it was made in is gone
    written = path.stat().st_mtime_ns

    def fail(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compilation, "_compile", fail)
    assert compiled() == path and path.stat().st_mtime_ns == written


def test_what_it_depends_on_is_in_its_name(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiled()
    other = compiled("-DANSWER=2")
    source.write_text("// changed\n" + SOURCE)
    changed = compiled()
    monkeypatch.setattr(compilation, "_describe_processor", lambda: ["another"])
    moved = compiled()
    assert len({first, other, changed, moved}) == 4
    processor = compilation._describe_processor
    monkeypatch.undo()
    assert compilation._describe_processor() != processor()


def test_a_spoilt_file_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    path = compiled()
    start = path.read_bytes()[:100]
    path.unlink()  # it is loaded
    path.write_bytes(start)
    library = native.load_library.__wrapped__("-DANSWER=1")
    assert library is not None and library._run(None, 41, 1) == 42


def test_without_a_cache_it_is_compiled_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = compiled()
    assert path.exists() and tmp_path not in path.parents


def test_where_nothing_can_be_written_what_is_there_is_taken(tmp_path: Path) -> None:
    path = compiled()
    os.chmod(path.parent, 0o500)
    try:
        assert compiled() == path
        if os.getuid():  # root writes everywhere
            assert compiled("-DANSWER=2").parent != path.parent
    finally:
        os.chmod(path.parent, 0o700)


def test_where_code_cannot_be_loaded_from_the_cache_another_folder_is_taken(tmp_path: Path) -> None:
    first = compiled()

    def refuse(path: Path) -> Path:
        if path.parent == first.parent:
            raise OSError("failed to map segment from shared object")
        return load(path)

    found = compilation.compile_library(("-DANSWER=1",), refuse)
    assert found is not None and found.parent != first.parent
    assert compilation.compile_library(("-DANSWER=1",), lambda path: load(path / "none")) is None


def test_nobody_elses_file_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    path = compiled()
    written = path.stat().st_mtime_ns
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    monkeypatch.setattr(compilation, "SHARED", ())
    compiled()
    assert path.stat().st_mtime_ns > written


def test_what_does_not_compile_leaves_nothing(source: Path, tmp_path: Path) -> None:
    source.write_text("no C\n")
    assert compilation.compile_library((), load) is None
    assert not list((tmp_path / "cache" / "trtseek").iterdir())
