"""Which runner serves a package."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.engine.description import load_description
from pipeline.errors import CompatibilityError, PackageError
from pipeline.runtime.runner import InterpreterRunner
from pipeline.triton.backend import loading, ranks
from pipeline.triton.model_config import parse_config
from tests.serving.support import make_config, serve_package


@pytest.mark.parametrize(("sms", "kind"), [([], "interpreter"), ([90], "engine"), ([80, 90], "engine")])
def test_auto_asks_the_driver(sms: list[int], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU build of torch on a host with a GPU must not serve from the CPU unnoticed."""
    monkeypatch.setattr(loading, "list_device_sms", lambda: sms)
    assert loading.pick_runner("auto") == kind


@pytest.mark.parametrize("wanted", ["engine", "interpreter"])
def test_takes_what_is_asked_for(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "list_device_sms", lambda: pytest.fail("asked the driver"))
    assert loading.pick_runner(wanted) == wanted


def test_refuses_other_runners() -> None:
    with pytest.raises(CompatibilityError, match="parameter runner is 'gpu'"):
        loading.pick_runner("gpu")


@pytest.fixture(scope="module")
def emitted(tmp_path_factory: pytest.TempPathFactory, llama_path: Path) -> Path:
    """A package of two ranks."""
    config = make_config("halved", parallel={"tensor": 2})
    return serve_package(tmp_path_factory.mktemp("halved") / "llama", llama_path, config).repository.path.parent


def load(package: Path) -> loading.Loaded:
    folder = package / "model_repository/tensorrt_llm"
    config = parse_config((folder / "config.pbtxt").read_text(), "config.pbtxt")
    return loading.load_model(folder, {key: value.string_value for key, value in config.parameters.items()})


def find_engine(package: Path) -> Path:
    (joint,) = (path for path in package.glob("artifacts/*/engine.json"))
    return joint.parent


def swap(first: Path, second: Path) -> None:
    held = first.with_name("held")
    first.rename(held)
    second.rename(first)
    held.rename(second)


DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    ("a rank's engine is missing", lambda e: (e / "rank1/model.engine").unlink(), "rank1/model.engine is missing"),
    (
        "a rank's engine is cut",
        lambda e: (e / "rank1/model.engine").write_bytes(b"ra"),
        "rank1/model.engine has 2 bytes, engine.json says 6",
    ),
    (
        "one rank's description stands for all",
        lambda e: shutil.copy(e / "rank1/engine.json", e / "engine.json"),
        "engine.json is of engine",
    ),
    (
        "the description of all is cut",
        lambda e: (e / "engine.json").write_bytes((e / "engine.json").read_bytes()[:-100]),
        "not JSON",
    ),
]


@pytest.mark.parametrize(("damage", "message"), [row[1:] for row in DAMAGE], ids=[row[0] for row in DAMAGE])
def test_a_damaged_set_is_refused(
    damage: Callable[[Path], object], message: str, emitted: Path, tmp_path: Path
) -> None:
    package = Path(shutil.copytree(emitted, tmp_path / "package"))
    damage(find_engine(package))
    with pytest.raises(PackageError, match=message):
        load(package)


def test_engines_that_changed_places_are_told_from_each_other(emitted: Path, tmp_path: Path) -> None:
    """Same names, same sizes; what each rank runs is said by the description of all, which the package is held to."""
    engine = find_engine(Path(shutil.copytree(emitted, tmp_path / "package")))
    swap(engine / "rank0", engine / "rank1")
    for rank in load_description(engine).all_ranks:
        with pytest.raises(PackageError, match=r"model\.engine is blake3:\w+, engine.json says"):
            ranks.run_engine(engine, rank)
    loaded = load(tmp_path / "package")  # of the checkpoint alone
    try:
        loaded.runner.allocate(2)
    finally:
        loaded.close()


def test_weights_that_memory_has_no_room_for_are_prepared_at_each_use(
    tmp_path: Path, llama_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = serve_package(tmp_path / "llama", llama_path, make_config("whole")).repository.path.parent
    roomy = load(package).runner
    monkeypatch.setattr(loading, "HOST_WEIGHTS_FRACTION", 0.0)
    tight = load(package).runner
    assert isinstance(roomy, InterpreterRunner) and isinstance(tight, InterpreterRunner)
    assert tight.interpreter.prepared_bytes < roomy.interpreter.prepared_bytes / 4
