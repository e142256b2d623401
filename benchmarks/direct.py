"""A package's model in this process: the executor without a server, and packages in another mode of the interpreter."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.runtime.executor import Executor
from pipeline.runtime.request import Request
from pipeline.triton.backend.loading import load_model
from pipeline.triton.canary import find_package
from pipeline.triton.installation import mirror
from pipeline.triton.model_config import parse_config, print_config
from pipeline.triton.repository import ARTIFACTS

MODEL = "tensorrt_llm"


@dataclass(frozen=True, slots=True)
class Direct:
    """CPU seconds in all and in the runner's steps, for so many tokens; the median time to a first token, seconds."""

    cpu: float
    network_cpu: float
    tokens: int
    first: float


class _Timed:
    """A runner that counts the CPU time of its steps."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.cpu = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def step(self, inputs: Any) -> Any:
        began = time.process_time()
        try:
            return self._runner.step(inputs)
        finally:
            self.cpu += time.process_time() - began


def measure_direct(
    package: Path, prompts: Sequence[Sequence[int]], tokens: int, alone: Sequence[Sequence[int]]
) -> Direct:
    """All prompts at once, then each of `alone` by itself for one token."""
    repository, _ = find_package(package)
    parameters = read_parameters(repository)
    loaded = load_model(repository / MODEL, parameters)
    runner = _Timed(loaded.runner)
    executor = Executor(runner, loaded.limits, vocab_size=loaded.vocab_size)
    executor.start()
    try:
        executor.submit(Request(input_ids=tuple(alone[0]), max_tokens=8)).result(120)
        began, runner.cpu = time.process_time(), 0.0
        handles = [
            executor.submit(Request(input_ids=tuple(prompt), max_tokens=tokens, streaming=True), lambda update: None)
            for prompt in prompts
        ]
        made = sum(len(handle.result(600).outputs[0].tokens) for handle in handles)
        cpu, network = time.process_time() - began, runner.cpu
        firsts = [_time_first(executor, prompt) for prompt in alone]
    finally:
        executor.shutdown(drain=False)
    return Direct(cpu, network, made, statistics.median(firsts))


def read_parameters(repository: Path) -> dict[str, str]:
    config = parse_config((repository / MODEL / "config.pbtxt").read_text(encoding="utf-8"), MODEL)
    return {key: value.string_value for key, value in config.parameters.items()}


def read_vocabulary(repository: Path) -> int:
    """How many tokens the package's model knows."""
    checkpoint = (repository / MODEL / read_parameters(repository)["checkpoint_path"]).resolve()
    return int(json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def change_mode(repository: Path, folder: Path, mode: str) -> Path:
    """The same repository under `folder`, its interpreter in another mode."""
    changed = folder / repository.name
    mirror(repository, changed)
    (folder / ARTIFACTS).symlink_to((repository.parent / ARTIFACTS).resolve(), target_is_directory=True)
    path = changed / MODEL / "config.pbtxt"
    config = parse_config(path.read_text(encoding="utf-8"), str(path))
    config.parameters["interpreter_mode"].string_value = mode
    path.unlink()  # a link to the package's own
    path.write_text(print_config(config), encoding="utf-8")
    return changed


def _time_first(executor: Executor, prompt: Sequence[int]) -> float:
    came = threading.Event()
    began = time.monotonic()
    executor.submit(Request(input_ids=tuple(prompt), max_tokens=1, streaming=True), lambda update: came.set())
    came.wait(120)
    return time.monotonic() - began
