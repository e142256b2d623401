import sys
from importlib.metadata import distributions

from pipeline.stages import versions


def test_agrees_with_importlib_on_everything_installed():
    installed = {d.metadata["Name"]: d.version for d in distributions()}
    assert len(installed) > 20
    assert {name: versions.find_version(name) for name in installed} == installed


def test_names_are_normalized_and_absence_is_none():
    assert versions.find_version("Tensorrt.RTX") == versions.find_version("tensorrt_rtx")
    assert versions.find_version("no-such-library") is None


def test_damaged_installation_is_none(tmp_path, monkeypatch):
    (tmp_path / "broken-1.0.dist-info").mkdir()
    (tmp_path / "hollow-1.0.dist-info").mkdir()
    (tmp_path / "hollow-1.0.dist-info" / "METADATA").write_text("Name: hollow\n\nVersion: 3 is what the text says\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "nowhere"), *sys.path])
    versions._list_distributions.cache_clear()
    try:
        assert versions.find_version("broken") is None
        assert versions.find_version("hollow") is None
        assert versions.find_version("click") is not None
    finally:
        versions._list_distributions.cache_clear()
