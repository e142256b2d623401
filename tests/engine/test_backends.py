from __future__ import annotations

import pytest
import tensorrt_rtx

from pipeline.engine import tensorrt
from pipeline.engine import tensorrt_rtx as rtx
from pipeline.engine.backends import BACKENDS, find_backend
from pipeline.errors import BuildError


def test_targets_are_those_of_the_installed_version() -> None:
    names = set(tensorrt_rtx.ComputeCapability.__members__) - {"NONE", "CURRENT"}
    assert {f"SM{sm}" for sm in rtx.TARGETS} == names


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_has_its_module(name: str) -> None:
    backend = find_backend(name)
    assert (name == "tensorrt_rtx") == backend.HAS_READABLE_FILES


def test_unknown_backend() -> None:
    with pytest.raises(BuildError, match="no build backend 'onnx'"):
        find_backend("onnx")


@pytest.mark.parametrize("sm", [70, 87, 90, 100])
def test_rtx_refuses_other_targets(sm: int) -> None:
    with pytest.raises(BuildError, match=f"does not build for SM{sm}") as caught:
        find_backend("tensorrt_rtx").check_target(sm)
    assert "backend: tensorrt" in caught.value.hint


def test_tensorrt_is_refused_where_it_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorrt", None)
    with pytest.raises(BuildError, match="TensorRT cannot be imported") as caught:
        find_backend("tensorrt").check_target(80)
    assert "backend: tensorrt_rtx" in caught.value.hint


def test_tensorrt_is_refused_on_another_gpu_and_in_an_old_version(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:
        __version__ = "11.4.0"

    monkeypatch.setitem(__import__("sys").modules, "tensorrt", Module)
    monkeypatch.setattr(tensorrt, "list_device_sms", lambda: [90])
    tensorrt.check_target(90)
    with pytest.raises(BuildError, match=r"SM80 is not among them \(found: SM90\)"):
        tensorrt.check_target(80)
    Module.__version__ = "10.3.0"
    with pytest.raises(BuildError, match="needs 11 or later"):
        tensorrt.load()
