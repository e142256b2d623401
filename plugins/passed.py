"""Which kernels have passed `benchmarks/gpu.py`, and where: passed.json, which `python -m benchmarks.passed` fills from
a saved run.

A row is {"source": digest of the kernel's plugin, "sm": 80, "device": "NVIDIA A100-SXM4-80GB", "date": "2026-12-01"}:
the PTX for that SM gave the reference's results on that device, at every size that the benchmark has and in every
variant that a config can ask for (subjects.py). A plugin that was
edited since, its kernel or what launches it, has another digest, and has passed nowhere.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.digest import digest_bytes, digest_json
from plugins.operation import Kernel, Operation

TABLE = Path(__file__).with_name("passed.json")


@cache
def digest_plugin(name: str) -> str:
    """Of all that a plugin puts into an engine: its modules, but for the reference, which only the interpreter runs."""
    modules = sorted(Path(__file__).with_name(name).glob("*.py"))
    return digest_json(
        {module.name: digest_bytes(module.read_bytes()) for module in modules if module.stem != "reference"}
    )


def find_run(kernel: Kernel, sm: int, table: Path | None = None) -> str | None:
    """The device and day of a run that this kernel's PTX for this SM passed; None where there was none."""
    source = digest_plugin(kernel.plugin)
    for run in json.loads((table or TABLE).read_text(encoding="utf-8"))["runs"]:
        if (run["source"], run["sm"]) == (source, sm):
            return f"{run['device']}, {run['date']}"
    return None


def list_passed(sm: int, table: Path | None = None) -> list[str]:
    """The lowerings whose kernels, as they are today, have passed on GPUs of this SM."""
    from plugins.compiler import choose_sm

    runs = json.loads((table or TABLE).read_text(encoding="utf-8"))["runs"]
    sources = {run["source"] for run in runs if run["sm"] == choose_sm(sm)}
    names = sorted(kernel.parent.name for kernel in Path(__file__).parent.glob("*/kernel.py")) if sources else []
    return [name for name in names if digest_plugin(name) in sources]


def describe_kernels(operation: Operation, sm: int) -> list[dict[str, Any]]:
    """What an engine carries for an operation, for engine.json. sm: of the PTX."""
    from plugins.compiler import compile_kernel

    described = []
    for kernel in operation.kernels():
        made = compile_kernel(kernel, sm)
        described.append(
            {
                "function": kernel.function,
                "source": digest_plugin(kernel.plugin),
                "sm": sm,
                "threads": made.threads,
                "registers": made.registers,
                "spills": made.spills,
                "shared": made.shared,
                "passed": find_run(kernel, sm),
            }
        )
    return described
