"""What `doctor` looks at, one function per subject: each says what is there, a verdict, and what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Verdict = Literal["ok", "warning", "failed"]
LOCK = "requirements.lock"
PYTHONS = ((3, 11), (3, 12))
# A decoder layer of the largest model and its working set, and one checkpoint of the smallest real one.
WANTED_MEMORY, WANTED_DISK = 8 << 30, 10 << 30
# Kernel's name in /proc/cpuinfo -> what it serves here.
CPU_FEATURES = {
    "avx2": "needed",
    "avx512f": "16-bit weights and KV cache in fast mode, which are fp32 without",
    "avx512_vnni": "8-bit products",
    "avx512_bf16": "bfloat16 products",
    "amx_tile": "matrix tiles",
    "amx_bf16": "bfloat16 matrix products",
    "amx_int8": "8-bit matrix products",
}
TRITON_PLACES = (Path("/opt/tritonserver/bin/tritonserver"),)


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    subject: str
    found: str
    verdict: Verdict
    advice: str = ""


def check_all(output: Path) -> list[Finding]:
    """Every finding, in order. `output` is where results would go."""
    return [finding for check in CHECKS for finding in check(output)]


def _check_python(_: Path) -> Iterator[Finding]:
    wanted = " or ".join(".".join(map(str, pair)) for pair in PYTHONS)
    fits = sys.version_info[:2] in PYTHONS
    yield Finding(
        subject="Python",
        found=f"{platform.python_version()} in {sys.prefix}",
        verdict="ok" if fits else "failed",
        advice="" if fits else f"trtseek runs on {wanted}: make the environment again with `make PYTHON=python3.11 …`",
    )
    machine = f"{platform.system()} {platform.machine()}"
    fits = machine == "Linux x86_64"
    yield Finding(
        subject="system",
        found=f"{machine}, {platform.release()}",
        verdict="ok" if fits else "failed",
        advice="" if fits else "TensorRT-RTX's wheels are for Linux on x86-64",
    )


def _check_libraries(_: Path) -> Iterator[Finding]:
    from pipeline.stages.versions import find_version

    lock = Path(__file__).parents[2] / LOCK
    if not lock.is_file():
        yield Finding(
            subject="libraries", found=f"no {LOCK} beside the package: nothing to compare with", verdict="warning"
        )
        return
    lines = (line.partition(" ")[0] for line in lock.read_text(encoding="utf-8").splitlines())
    wanted = dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))
    found = {name: find_version(name) for name in wanted}
    # A CUDA build of torch is the same version with a local part: 2.13.0+cu130.
    other = {
        name: version for name, version in found.items() if (version or "").split("+")[0] != wanted[name].split("+")[0]
    }
    yield Finding(
        subject="libraries",
        found=f"{len(wanted) - len(other)} of {len(wanted)} as {LOCK} has them",
        verdict="warning" if other else "ok",
        advice="`pip install -r requirements.lock`, or `make` with a fresh .venv" if other else "",
    )
    for name, version in sorted(other.items()):
        yield Finding(
            subject=f"library {name}",
            found=f"{version or 'absent'}, tested with {wanted[name]}",
            verdict="failed" if version is None else "warning",
        )


def _check_compiler(_: Path) -> Iterator[Finding]:
    from pipeline.interpreter.native.compilation import find_compiler

    compiler = find_compiler()
    yield Finding(
        subject="C compiler",
        found=compiler or "none",
        verdict="ok" if compiler else "warning",
        advice="" if compiler else "install gcc or clang, or name one in CC: without, serving on the CPU is slower",
    )


def _check_processor(_: Path) -> Iterator[Finding]:
    flags = _read_cpu_flags()
    present = [name for name in CPU_FEATURES if name in flags]
    absent = [f"{name} ({use})" for name, use in CPU_FEATURES.items() if name not in flags]
    cores = len(os.sched_getaffinity(0))
    yield Finding(
        subject="processor",
        found=f"{cores} cores; {', '.join(present) or 'none of the features that are used'}",
        verdict="ok" if "avx2" in flags else "failed",
        advice=f"without {', '.join(absent)}" if absent else "",
    )


def _read_cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in text.splitlines() if line.startswith("flags")), set())


def _check_memory(_: Path) -> Iterator[Finding]:
    from pipeline.cli.tables import format_bytes
    from pipeline.host_memory import read_memory

    free, total = read_memory()
    enough = free >= WANTED_MEMORY
    yield Finding(
        subject="memory",
        found=f"{format_bytes(free)} available of {format_bytes(total)}",
        verdict="ok" if enough else "warning",
        advice=""
        if enough
        else f"large models want {format_bytes(WANTED_MEMORY)}: one decoder layer is held at a time",
    )


def _check_disk(output: Path) -> Iterator[Finding]:
    from pipeline.cli.tables import format_bytes

    place = next(path for path in (output.absolute(), *output.absolute().parents) if path.exists())
    usage = shutil.disk_usage(place)
    writable = os.access(place, os.W_OK)
    verdict: Verdict = "failed" if not writable else "ok" if usage.free >= WANTED_DISK else "warning"
    advice = {
        "failed": "set `output:` to a folder that can be written to",
        "warning": "`trtseek gc` frees what is not used; `output:` and `store:` may be on another disk",
        "ok": "",
    }
    found = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)} at {place}"
    yield Finding(subject="disk", found=found, verdict=verdict, advice=advice[verdict])


def _check_gpu(_: Path) -> Iterator[Finding]:
    from pipeline.engine.tensorrt import list_device_sms

    sms = list_device_sms()
    driver = _read_driver()
    if not sms:
        advice = "none is needed to convert, quantize, prove and build with tensorrt_rtx; engines run on one"
        yield Finding(subject="GPU", found=f"none (driver: {driver or 'none'})", verdict="ok", advice=advice)
        return
    known = ", ".join(f"SM{sm}" for sm in sms)
    yield Finding(subject="GPU", found=f"{known}, driver {driver or 'unknown'}", verdict="ok")


def _read_driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    words = text.splitlines()[0].split()
    return next((word for word in words if word.count(".") >= 1 and word.replace(".", "").isdigit()), "")


def _check_backends(_: Path) -> Iterator[Finding]:
    from pipeline.engine import tensorrt, tensorrt_rtx
    from pipeline.stages.versions import find_version

    sms = tensorrt.list_device_sms()
    rtx, targets = find_version("tensorrt_rtx"), ", ".join(f"SM{sm}" for sm in tensorrt_rtx.TARGETS)
    runs = [sm for sm in sms if sm in tensorrt_rtx.TARGETS]
    yield Finding(
        subject="tensorrt_rtx",
        found=f"{rtx}: builds for {targets}; runs here on {', '.join(f'SM{sm}' for sm in runs) or 'nothing'}"
        if rtx
        else "not installed",
        verdict="ok" if rtx else "failed",
        advice="" if rtx else "pip install tensorrt-rtx",
    )
    proper = find_version("tensorrt")
    new = proper is not None and int(proper.split(".")[0]) >= tensorrt.MINIMUM_VERSION
    able = new and bool(sms)
    where = ", ".join(f"SM{sm}" for sm in sms)
    yield Finding(
        subject="tensorrt",
        found=f"{proper or 'not installed'}: " + (f"builds for and runs on {where}" if able else "builds nothing here"),
        verdict="warning" if sms and not able else "ok",
        advice=""
        if able
        else f"version {tensorrt.MINIMUM_VERSION} or later, on the GPU's host: pip install 'trtseek[tensorrt]'",
    )


def _check_triton(_: Path) -> Iterator[Finding]:
    server = shutil.which("tritonserver") or next((str(path) for path in TRITON_PLACES if path.is_file()), None)
    server = server or _find_bundled_server()
    yield Finding(
        subject="tritonserver",
        found=server or "not installed",
        verdict="ok",
        advice="" if server else "packages are made without it; serve them in NVIDIA's Triton container",
    )


def _find_bundled_server() -> str | None:
    """The server that nvidia-pytriton's wheel carries."""
    for place in map(Path, sys.path):
        binary = place / "pytriton" / "tritonserver" / "bin" / "tritonserver"
        if binary.is_file():
            return str(binary)
    return None


CHECKS: tuple[Callable[[Path], Iterator[Finding]], ...] = (
    _check_python,
    _check_libraries,
    _check_compiler,
    _check_processor,
    _check_memory,
    _check_disk,
    _check_gpu,
    _check_backends,
    _check_triton,
)
