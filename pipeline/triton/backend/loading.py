"""From an emitted model's parameters to a runner: what belongs together is checked, then the network is made to run.

On a machine without a GPU, the network is written again from the packaged checkpoint and network.json, and runs in the
interpreter; its digest must be the one that was proved and built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pipeline.engine.tensorrt import list_device_sms
from pipeline.errors import CompatibilityError, PackageError
from pipeline.host_memory import free_memory
from pipeline.runtime.limits import Limits
from pipeline.triton.backend import ranks
from pipeline.triton.backend.belonging import check_format, check_model, describe

if TYPE_CHECKING:
    from pipeline.checkpoint.architecture import Architecture
    from pipeline.engine.limits import BuildLimits
    from pipeline.network.spec import NetworkSpec
    from pipeline.runtime.engine_runner import EngineRunner
    from pipeline.runtime.runner import Runner

RUNNERS = ("auto", "engine", "interpreter")
# Of the host's free memory, what the interpreter's pools may take: the page cache that holds the weights needs room.
HOST_POOL_FRACTION = 0.25
# … and what its weights may, as its kernels want them: those that do not fit are prepared at each use.
HOST_WEIGHTS_FRACTION = 0.6
# A context step of the interpreter. One of twice as many rows saves 10 % of a row's time on a CPU (SmolLM2, AVX2), and
# whoever generates, or comes meanwhile, waits for it twice as long: with 128 rows an urgent request waited longer for
# the step at hand than for its own. Rows that attention pads cost as much as others: unequal prompts may waste half.
HOST_STEP_TOKENS, HOST_PADDED_ROWS = 64, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What the executor needs. `kind`: "engine" or "interpreter", with its mode. `close`: ends what the runner started
    beside itself."""

    runner: Runner
    limits: Limits
    vocab_size: int
    kind: str
    close: Callable[[], object] = lambda: None


def load_model(folder: Path, parameters: Mapping[str, str]) -> Loaded:
    """The runner of the model whose own folder is `folder`; path parameters are relative to it.

    Raises PackageError where engine, checkpoint and proof do not belong together, CompatibilityError where the runner
    that is asked for cannot be had.
    """
    check_format(folder, parameters)
    if problems := check_model(folder, parameters):
        raise PackageError("; ".join(problems), hint="package the engine again")
    kind = pick_runner(parameters.get("runner", "auto"))
    if kind == "engine":
        return _load_engine(folder, parameters)
    return _load_interpreter(folder, parameters)


def pick_runner(wanted: str) -> str:
    """ "engine" or "interpreter": where there is a GPU, `auto` is the engine, never quietly the interpreter. The driver
    is asked, not torch, whose CPU build sees no GPU: then the engine's runner says so."""
    if wanted not in RUNNERS:
        raise CompatibilityError(f"parameter runner is {wanted!r}", hint=f"one of {', '.join(RUNNERS)}")
    if wanted != "auto":
        return wanted
    return "engine" if list_device_sms() else "interpreter"


def _load_engine(folder: Path, parameters: Mapping[str, str]) -> Loaded:
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.runtime.rank_group import RankGroup

    description = describe(folder, parameters)
    engine = (folder / parameters["gpt_model_path"]).resolve()
    architecture = CheckpointFolder.open((folder / parameters["checkpoint_path"]).resolve()).architecture
    # The name is TensorRT-LLM's, and so is its meaning: a share from 0 to 1.
    weights = float(parameters.get("gpu_weights_percent", "1"))
    runner: EngineRunner | RankGroup
    close: Callable[[], object] = lambda: None  # noqa: E731
    if description.ranks:
        parallel = description.spec.rank.parallel
        if parallel.pipeline > 1:
            raise CompatibilityError(
                f"engines of {parallel.pipeline} pipeline stages are not run on GPUs by this version",
                hint="build with target.parallel.pipeline: 1, or serve on the CPU: stages.package.runner: interpreter",
            )
        runner = RankGroup(parallel, f"{ranks.__name__}:load_rank_engine", {"engine": str(engine), "weights": weights})
        close = runner.close
    else:
        runner = ranks.run_engine(engine, description, weights_fraction=weights)
    fraction = float(parameters.get("kv_cache_free_gpu_mem_fraction", "0.9"))
    blocks = min(runner.count_blocks(fraction), count_wanted(description.limits, parameters))
    limits = Limits.of_engine(description.limits, blocks)
    return Loaded(runner=runner, limits=limits, vocab_size=architecture.vocab_size, kind="engine", close=close)


def _load_interpreter(folder: Path, parameters: Mapping[str, str]) -> Loaded:
    from pipeline.checkpoint.folder import CheckpointFolder
    from pipeline.runtime.rank_group import RankGroup
    from pipeline.runtime.runner import InterpreterRunner

    description, mode = describe(folder, parameters), parameters.get("interpreter_mode", "fast")
    checkpoint = CheckpointFolder.open((folder / parameters["checkpoint_path"]).resolve())
    runner: InterpreterRunner | RankGroup
    resident = int(free_memory() * HOST_WEIGHTS_FRACTION)
    if description.ranks:
        places = {"engine": str((folder / parameters["gpt_model_path"]).resolve()), "checkpoint": str(checkpoint.path)}
        parallel = description.spec.rank.parallel
        each = {"mode": mode, "resident_bytes": resident // parallel.world}
        runner = RankGroup(parallel, f"{ranks.__name__}:load_rank", {**places, **each})
    else:
        program = ranks.rebuild_program(checkpoint, description.spec, parameters["network_digest"])
        runner = InterpreterRunner(program, mode=cast("Any", mode), resident_bytes=resident)
    loaded = serve_on_host(
        runner,
        checkpoint.architecture,
        [rank.spec for rank in description.all_ranks],
        description.limits,
        mode=mode,
        blocks=count_wanted(description.limits, parameters),
    )
    return replace(loaded, close=runner.close) if isinstance(runner, RankGroup) else loaded


def serve_on_host(
    runner: Runner,
    architecture: Architecture,
    specs: Sequence[NetworkSpec],
    build: BuildLimits,
    *,
    mode: str,
    blocks: int,
) -> Loaded:
    """An interpreter's runner, with as many of the KV `blocks` as memory has room for, over the networks of all ranks.
    Raises CompatibilityError where not even one sequence has."""
    blocks = min(blocks, build.max_blocks, count_affordable(measure_block(architecture, specs, mode)))
    needed = build.table_width(build.max_seq_len) + 1
    if blocks < needed:
        raise CompatibilityError(
            f"the KV pool would have {blocks} blocks, and one sequence of max_seq_len tokens needs {needed}",
            hint="free memory, raise max_tokens_in_paged_kv_cache, or lower stages.build.max_seq_len",
        )
    limits = Limits.of_engine(build, blocks)
    step = min(limits.max_num_tokens, max(HOST_STEP_TOKENS, limits.max_batch_size))
    ranks = f", {len(specs)} ranks" if len(specs) > 1 else ""
    return Loaded(
        runner=runner,
        limits=replace(limits, max_num_tokens=step, max_padded_rows=max(step, HOST_PADDED_ROWS), mixed=False),
        vocab_size=architecture.vocab_size,
        kind=f"interpreter, {mode} mode{ranks}",
    )


def measure_block(architecture: Architecture, specs: Sequence[NetworkSpec], mode: str) -> int:
    """Bytes that a KV block takes on the host, in the pools of all ranks together."""
    from pipeline.interpreter.numerics import Numerics
    from pipeline.network import inputs

    held = Numerics(cast("Any", mode)).held
    return sum(
        math.prod(port.resolve({"NB": 1})) * held(port.dtype).itemsize
        for spec in specs
        for port in inputs.pools(architecture, spec)
    )


def count_affordable(block_bytes: int) -> int:
    """Blocks that the host's memory has room for now."""
    return int(free_memory() * HOST_POOL_FRACTION) // block_bytes


def count_wanted(limits: BuildLimits, parameters: Mapping[str, str]) -> int:
    """KV blocks that the model is to have where memory allows, with the one for padding, which holds no token."""
    tokens = parameters.get("max_tokens_in_paged_kv_cache")
    return limits.max_blocks if tokens is None else 1 + int(tokens) // limits.block_size
