"""Which operations are plugins where a config says nothing: those whose kernels have passed on the target's SM."""

from __future__ import annotations

from typing import Any

from pipeline.config.backends import BACKENDS
from pipeline.config.gpus import find_gpu
from pipeline.errors import ConfigError

EXCHANGE = "moe_all_to_all"  # has nothing to do without expert parallelism


def choose_lowerings(config: dict[str, Any]) -> dict[str, Any]:
    """A config as it is read, not yet validated, with the lowerings that it leaves out and that are not native. What is
    not as it should be stays for validation to find."""
    from plugins.passed import list_passed

    target, stages = _section(config, "target"), _section(config, "stages")
    backend = BACKENDS.get(str(target.get("backend", "tensorrt_rtx")))
    try:
        gpu = find_gpu(str(target.get("gpu")))
    except ConfigError:
        return config
    passed = set(list_passed(gpu.sm)) if backend is not None and not backend.foreign else set()
    if _section(target, "parallel").get("expert", 1) == 1:
        passed.discard(EXCHANGE)
    if not passed:
        return config
    build = _section(stages, "build")
    lowering = dict.fromkeys(sorted(passed), "plugin") | _section(build, "lowering")
    return {**config, "stages": {**stages, "build": {**build, "lowering": lowering}}}


def _section(of: dict[str, Any], key: str) -> dict[str, Any]:
    found = of.get(key)
    return found if isinstance(found, dict) else {}
