"""Whether `package` tries what it made in a server, without one: tests/serving loads real packages."""

import json
import types
from pathlib import Path

import pytest

from pipeline.config.schema import Config
from pipeline.errors import PackageError
from pipeline.progress import SILENT
from pipeline.stages import package_check
from pipeline.stages.package import STAGE
from pipeline.triton import canary, footprint, installation
from pipeline.triton import package as packages
from pipeline.triton.errors import ServerError
from pipeline.triton.serving_memory import Part


class Notes(type(SILENT)):
    def __init__(self, notes):
        self.note = notes.append


def make_context(tmp_path, check, backend="tensorrt_rtx"):
    config = Config(
        name="x",
        model={"path": Path("m")},
        target={"gpu": "L4", "backend": backend},
        output=tmp_path,
        stages={"package": {"check": check}},
    )
    notes = []
    return types.SimpleNamespace(config=config, progress=Notes(notes), notes=notes)


@pytest.fixture
def asked(monkeypatch):
    """The packages that were loaded in a server."""
    tried = []

    def check(folder, *, log, installation, rehearsal):
        tried.append(folder)
        tried.extend([rehearsal] if rehearsal else [])
        return canary.Check(loaded=1.0, answered=0.5)

    monkeypatch.setattr(canary, "check_package", check)
    monkeypatch.setattr(installation, "find_installation", lambda: None)
    # What it would take is estimated of a real package in tests/serving.
    parts = (Part(name="one", processes=2, nbytes=3 << 30), Part(name="other", processes=1, nbytes=4 << 30))
    monkeypatch.setattr(footprint, "estimate_memory", lambda package, rehearsal: parts)
    monkeypatch.setattr(packages, "find_package", lambda folder: None)
    monkeypatch.setattr("pipeline.host_memory.free_memory", lambda: 7 << 30)
    return tried


def remove_server(monkeypatch):
    def find():
        raise ServerError("there is no tritonserver on PATH")

    monkeypatch.setattr(installation, "find_installation", find)


@pytest.mark.parametrize("check", ["auto", "always"])
def test_a_package_is_tried(tmp_path, asked, check):
    context = make_context(tmp_path, check)
    package_check.check_package(context, tmp_path / "package", tmp_path)
    assert asked == [tmp_path / "package"]
    assert context.notes == ["loaded in Triton in 1.0 s, a request answered in 0.5 s"]


def test_a_package_for_nvidias_image_is_rehearsed(tmp_path, asked):
    context = make_context(tmp_path, "auto", "tensorrt_llm")
    package_check.check_package(context, tmp_path / "package", tmp_path)
    assert asked == [tmp_path / "package", packages.Rehearsal(checkpoint=tmp_path, mode="fast")]
    assert context.notes[0].startswith("rehearsed in Triton, the interpreter in the engine's place: loaded in 1.0 s")


def test_the_llm_api_is_in_nvidias_image_alone(tmp_path, asked):
    context = make_context(tmp_path, "always", "llmapi")
    package_check.check_package(context, tmp_path / "package", tmp_path)
    assert asked == []
    assert "NVIDIA's Triton model of the LLM API is in its image alone" in context.notes[0]


def test_never_means_never(tmp_path, asked):
    package_check.check_package(make_context(tmp_path, "never"), tmp_path, tmp_path)
    assert asked == []


def test_without_a_server_it_is_noted_or_an_error(tmp_path, asked, monkeypatch):
    remove_server(monkeypatch)
    context = make_context(tmp_path, "auto")
    package_check.check_package(context, tmp_path, tmp_path)
    assert context.notes == ["not loaded in a server: there is no tritonserver on PATH"]
    with pytest.raises(ServerError):
        package_check.check_package(make_context(tmp_path, "always"), tmp_path, tmp_path)


def test_what_does_not_fit_in_memory_is_not_tried(tmp_path, asked, monkeypatch):
    monkeypatch.setattr("pipeline.host_memory.free_memory", lambda: (7 << 30) - 1)
    context = make_context(tmp_path, "auto")
    package_check.check_package(context, tmp_path, tmp_path)
    assert asked == []
    (note,) = context.notes
    assert note == "not loaded in a server: its 3 processes may need 7.52 GB of memory, and 7.52 GB are free"
    package_check.check_package(make_context(tmp_path, "always"), tmp_path, tmp_path)
    assert asked == [tmp_path]


def test_it_is_no_parameter_of_the_stage(tmp_path):
    """Whether a package is tried changes no byte of it, so one that was tried serves a config that never does."""
    parameters = [STAGE.parameters(make_context(tmp_path, check).config) for check in ("auto", "never")]
    assert parameters[0] == parameters[1]
    assert "check" not in parameters[0]["stages"]["package"]


def test_a_folder_that_is_no_package(tmp_path):
    with pytest.raises(PackageError, match="is no package"):
        packages.find_package(tmp_path)


def test_a_damaged_package_is_refused_before_triton_says_nothing_of_it(tmp_path):
    models, engine = tmp_path / "model_repository", tmp_path / "artifacts" / "model.engine"
    config = models / "m" / "config.pbtxt"
    for folder in (config.parent, tmp_path / "backends", engine.parent):
        folder.mkdir(parents=True)
    config.write_text('name: "m"')
    engine.write_bytes(b"12345")
    sizes = {"artifacts/model.engine": {"size": 5}, "model_repository/m/config.pbtxt": {"size": 9}}
    (tmp_path / "manifest.json").write_text(json.dumps({"files": sizes}))
    found = packages.find_package(tmp_path)
    assert (found.repository, found.backends) == (models.resolve(), (tmp_path / "backends").resolve())
    config.write_text('name: "m" max_batch_size: 4')  # whoever serves it may
    packages.find_package(tmp_path)
    config.write_text("garbage {")
    with pytest.raises(PackageError, match=r"m/config.pbtxt: 1:1 .*garbage"):
        packages.find_package(tmp_path)
    engine.write_bytes(b"1")
    with pytest.raises(PackageError, match=r"model.engine has 1 bytes, manifest.json says 5"):
        packages.find_package(tmp_path)
