"""A server's models as processes: which have ended, and who is left without an answer by that."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_MODEL = re.compile(r"/([^/ ]+)/\d+/model\.py")  # in a stub's command line, which names its model's file
ASKED = "tensorrt_llm_model_name"  # the parameter of a model that asks another


class Instances:
    """Those that were there at the beginning. `stubs`: process ids, with the command line of the stub that the process
    is, or leads it: one command line is one instance, which is of no use without any of its processes."""

    def __init__(self, stubs: Mapping[int, str] | None = None) -> None:
        self._instances: dict[str, set[int]] = {}
        for pid, command in (stubs or {}).items():
            if _name(command):
                self._instances.setdefault(command, set()).add(pid)

    def find_lost(self, stubs: Mapping[int, str]) -> dict[str, bool]:
        """The models of which an instance has lost a process, by what is there now: whether another is whole."""
        whole: dict[str, list[bool]] = {}
        for command, pids in self._instances.items():
            whole.setdefault(_name(command), []).append(pids <= stubs.keys())
        return {model: any(each) for model, each in whole.items() if not all(each)}

    def without(self, models: Iterable[str], stubs: Mapping[int, str]) -> Instances:
        """What is there now, but for these models' instances of before: what they have in hand they end, but Triton
        keeps them after that, as long as a request of another that died has no answer. Nobody needs them any more."""
        gone = {pid for command, pids in self._instances.items() if _name(command) in models for pid in pids}
        return Instances({pid: command for pid, command in stubs.items() if pid not in gone})


def _name(command: str) -> str:
    match = _MODEL.search(command)
    return match[1] if match else ""


def find_askers(models: set[str], configs: Mapping[str, Any]) -> set[str]:
    """These models, and those that ask them, directly or not: what one of those owed, so did they. `configs`:
    ModelConfigs by name."""
    found = set(models)
    while more := {name for name, config in configs.items() if name not in found and found & _list_asked(config)}:
        found |= more
    return found


def _list_asked(config: Any) -> set[str]:
    asked = {step.model_name for step in config.ensemble_scheduling.step}
    return asked | ({config.parameters[ASKED].string_value} if ASKED in config.parameters else set())
