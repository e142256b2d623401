"""Whether an ensemble's steps fit together: every tensor produced once, consumed, and of one type and shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class _Signature:
    """Type and dims of a tensor; -1 in dims fits any size."""

    data_type: int
    dims: tuple[int, ...]
    optional: bool = False

    @staticmethod
    def of(tensor: Any) -> _Signature:
        return _Signature(tensor.data_type, tuple(tensor.dims), getattr(tensor, "optional", False))

    def fits(self, other: _Signature) -> bool:
        same_rank = len(self.dims) == len(other.dims)
        sizes = zip(self.dims, other.dims, strict=False)
        return self.data_type == other.data_type and same_rank and all(a == b or -1 in (a, b) for a, b in sizes)

    def __str__(self) -> str:
        from tritonclient.grpc.model_config_pb2 import DataType

        return f"{DataType.Name(self.data_type)}{list(self.dims)}"


def find_wiring_problems(ensemble: Any, configs: Mapping[str, Any]) -> Iterator[str]:
    """Problems of the ensemble among the repository's ModelConfigs, one sentence each."""
    steps = [step for step in ensemble.ensemble_scheduling.step if step.model_name in configs]
    for step in ensemble.ensemble_scheduling.step:
        if step.model_name not in configs:
            yield f"step {step.model_name}: there is no such model"
    for step in steps:
        size = configs[step.model_name].max_batch_size
        if size != ensemble.max_batch_size:
            yield f"step {step.model_name} has max_batch_size {size}, the ensemble {ensemble.max_batch_size}"
    known = {tensor.name: _Signature.of(tensor) for tensor in ensemble.input}
    yield from _check_producers(ensemble, steps, configs, known)
    yield from _check_consumers(ensemble, steps, configs, known)
    yield from _check_order(ensemble, steps)


def _check_producers(
    ensemble: Any, steps: list[Any], configs: Mapping[str, Any], known: dict[str, _Signature]
) -> Iterator[str]:
    """Adds what the steps produce to `known`."""
    for step in steps:
        outputs = {tensor.name: _Signature.of(tensor) for tensor in configs[step.model_name].output}
        for key, name in step.output_map.items():
            if key not in outputs:
                yield f"step {step.model_name}: the model has no output {key}"
            elif name in known:
                yield f"step {step.model_name}: {name} is already produced elsewhere"
            else:
                known[name] = outputs[key]
    for tensor in ensemble.output:
        produced, declared = known.get(tensor.name), _Signature.of(tensor)
        if produced is None:
            yield f"output {tensor.name} is produced by no step"
        elif not produced.fits(declared):
            yield f"output {tensor.name} is declared {declared}, and produced as {produced}"


def _check_consumers(
    ensemble: Any, steps: list[Any], configs: Mapping[str, Any], known: Mapping[str, _Signature]
) -> Iterator[str]:
    used: set[str] = set()
    for step in steps:
        inputs = {tensor.name: _Signature.of(tensor) for tensor in configs[step.model_name].input}
        for key, name in step.input_map.items():
            used.add(name)
            if key not in inputs:
                yield f"step {step.model_name}: the model has no input {key}"
            elif name not in known:
                yield f"step {step.model_name}: {key} is to be {name}, which nothing produces"
            elif not known[name].fits(inputs[key]):
                yield f"step {step.model_name}: {key} is {inputs[key]}, and {name} is {known[name]}"
            elif known[name].optional and not inputs[key].optional:
                yield f"step {step.model_name}: {key} is required, and {name} is optional"
        for key, signature in inputs.items():
            if not signature.optional and key not in step.input_map:
                yield f"step {step.model_name}: required input {key} is not mapped"
    for tensor in ensemble.input:
        if tensor.name not in used:
            yield f"input {tensor.name} is used by no step"


def _check_order(ensemble: Any, steps: list[Any]) -> Iterator[str]:
    """Steps run when their inputs are there; a step left over waits for itself."""
    ready = {tensor.name for tensor in ensemble.input}
    produced = {name for step in steps for name in step.output_map.values()}
    waiting = list(steps)
    while runnable := [s for s in waiting if all(n in ready or n not in produced for n in s.input_map.values())]:
        ready.update(name for step in runnable for name in step.output_map.values())
        waiting = [step for step in waiting if step not in runnable]
    for step in waiting:
        yield f"step {step.model_name} waits for its own output"
