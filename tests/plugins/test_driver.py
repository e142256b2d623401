"""Launches against a stand-in for libcuda, which remembers what it was called with."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from pipeline.errors import CompatibilityError
from plugins.carried import Carried
from plugins.driver import Driver, Function
from plugins.operation import Scratch
from plugins.tensorrt_plugin import run_launches
from tests.plugins.test_rope_paged_kv import HEADS

FUNCTION = Function(ptx=b".version 8.7", entry="write_heads", threads=128, shared=1024)


class FakeCuda:
    """context: the current one. refuse: a call's name -> the status it answers with."""

    def __init__(self) -> None:
        self.context, self.refuse = 1, {}  # type: ignore[var-annotated]
        self.calls: list[str] = []
        self.launched: dict[str, Any] = {}
        self.shared: list[int] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            getattr(self, f"on_{name}", lambda *_: None)(*arguments)
            return self.refuse.get(name, 0)

        if name.startswith("on_"):
            raise AttributeError(name)
        return call

    def on_cuCtxGetCurrent(self, context: Any) -> None:  # noqa: N802
        context._obj.value = self.context

    def on_cuModuleLoadDataEx(self, module: Any, ptx: Any, count: int, options: Any, values: Any) -> None:  # noqa: N802
        ctypes.memmove(values[0], b"ptxas: no such instruction\0", 27)

    def on_cuGetErrorName(self, status: int, name: Any) -> None:  # noqa: N802
        name._obj.value = b"CUDA_ERROR_INVALID_PTX"

    def on_cuFuncSetAttribute(self, function: Any, attribute: int, value: int) -> None:  # noqa: N802
        assert attribute == 8
        self.shared.append(value)

    def on_cuLaunchKernel(self, function: Any, *rest: Any) -> None:  # noqa: N802
        *numbers, stream, pointers, extra = rest
        assert extra is None
        words = [ctypes.c_uint32.from_address(pointer).value for pointer in pointers]
        self.launched = {"numbers": numbers, "stream": stream.value, "words": words}


def test_arguments_end_with_two_null_pointers() -> None:
    cuda = FakeCuda()
    Driver(cuda).launch(FUNCTION, (3, 2, 1), [ctypes.c_void_p(4096), ctypes.c_int32(7)], 99)
    assert cuda.launched == {"numbers": [3, 2, 1, 128, 1, 1, 1024], "stream": 99, "words": [4096, 7, 0, 0]}


def test_a_kernel_is_loaded_once_for_each_context() -> None:
    cuda = FakeCuda()
    driver = Driver(cuda)
    for context in (1, 1, 2, 1):
        cuda.context = context
        driver.launch(FUNCTION, (1, 1, 1), [], 0)
    assert cuda.calls.count("cuModuleLoadDataEx") == 2
    assert cuda.calls.count("cuLaunchKernel") == 4


def test_much_shared_memory_is_asked_for() -> None:
    cuda = FakeCuda()
    large = Function(ptx=b"", entry="k", threads=32, shared=100_000)
    Driver(cuda).launch(large, (1, 1, 1), [], 0)
    Driver(cuda).launch(FUNCTION, (1, 1, 1), [], 0)
    assert cuda.shared == [100_000]


def test_a_refused_kernel_says_why() -> None:
    cuda = FakeCuda()
    cuda.refuse = {"cuModuleLoadDataEx": 218}
    with pytest.raises(CompatibilityError, match=r"write_heads: ptxas: no such instruction \(CUDA_ERROR_INVALID_PTX\)"):
        Driver(cuda).launch(FUNCTION, (1, 1, 1), [], 0)


def test_a_plan_becomes_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses where the kernel's pointers are, the step's numbers where its integers are."""
    cuda = FakeCuda()
    monkeypatch.setattr("plugins.tensorrt_plugin.open_driver", lambda: Driver(cuda))
    monkeypatch.setattr("plugins.tensorrt_plugin.find_sm", lambda: 86)
    carried = Carried({(0, 80): FUNCTION})
    shapes = [(4, 40), (64, 4), (64, 4), (4,), (4,), (4,), (2, 3), (2, 5), (9, 1, 16, 8), (9, 1, 16, 8)]
    run_launches(HEADS, carried, shapes, [*range(100, 110)], [200, 201, 202], 300, 7)
    assert cuda.launched["numbers"] == [4, 3, 1, 128, 1, 1, 1024]
    assert cuda.launched["words"][:12] == [100, 101, 102, 103, 104, 105, 107, 200, 201, 202, 4, 3]
    assert Scratch(16).offset == 16


def test_an_engine_without_a_kernel_for_this_gpu_is_refused() -> None:
    older, tied = Carried({(0, 80): FUNCTION}), Carried({(0, 90): FUNCTION})
    assert older.find("rope_paged_kv", 0, 120) is FUNCTION  # PTX for SM80 runs on what comes later
    with pytest.raises(CompatibilityError, match="carries plugin rope_paged_kv for SM90, and this GPU is SM120"):
        tied.find("rope_paged_kv", 0, 120)
    with pytest.raises(CompatibilityError, match="this GPU is SM75"):
        older.find("rope_paged_kv", 0, 75)
    assert Carried.from_json(older.to_json()) == older
