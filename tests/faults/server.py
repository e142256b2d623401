"""`python -m tests.faults.server`: forks children for the tests, one request per line of JSON, one answer per line.

A process of its own, because a fork inherits no threads and BLAKE3's pool of them would be waited for in vain: here
nothing is ever digested, whatever the tests' own process did before.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipeline.config.schema import Config
from tests.faults import children


def start(request: dict[str, Any]) -> int:
    """The process id of a child that runs the stages, or looks for damage."""
    config = Config.model_validate_json(json.dumps(request["config"]))
    if len(os.listdir("/proc/self/task")) > 1:
        raise SystemExit("the server has more than one thread: its forks could hang")
    child = os.fork()
    if child == 0:
        code = children.CRASHED
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the answers are the server's
            if request["what"] == "damage":
                code = children.count_damaged(config)
            else:
                code = children.run_stages(config, Path(request["log"]), request["death"], find(request["prepare"]))
        finally:
            os._exit(code)
    return child


def find(name: str | None) -> Callable[[], None]:
    if name is None:
        return lambda: None
    module, _, function = name.partition(":")
    found: Callable[[], None] = getattr(importlib.import_module(module), function)
    return found


def main() -> None:
    torch.set_num_threads(1)
    for module in ("pipeline.checkpoint.convert", "pipeline.quantization.quantize"):
        importlib.import_module(module)
    for line in sys.stdin:
        request = json.loads(line)
        if request["what"] == "wait":
            answer = os.waitstatus_to_exitcode(os.waitpid(request["child"], 0)[1])
        else:
            answer = start(request)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
