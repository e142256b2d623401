"""Engines without weights, at the shapes of large models, native or with plugins: `benchmarks.scale` runs it."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks import synthetic
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.engine.builder import build_engine
from pipeline.engine.description import EngineDescription
from pipeline.engine.engine_file import EngineFile, inspect_engine
from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.engine.memory import Design, plan_memory
from pipeline.engine.refit_list import load_refit_list
from pipeline.network.spec import Lowering, NetworkSpec
from pipeline.progress import format_amount, make_reporter

FOLDER = Path("out/benchmarks/scale")
LIMITS = BuildLimits(
    max_seq_len=4096,
    max_batch_size=16,
    max_num_tokens=2048,
    generation=(Rectangle(batch=16, length=4096),),
    max_blocks=1025,
)
NATIVE = Lowering()
PLUGINS = Lowering(rope_paged_kv="plugin", paged_attention="plugin", moe_experts="plugin")


def build_stripped(names: Sequence[str], lowering: Lowering = NATIVE) -> bool:
    """INT4 by the default rules, MLA, dense experts; one context and one generation profile, SM80."""
    for name in names or ["v2-lite"]:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        folder = FOLDER / f"{name}-stripped"
        shutil.rmtree(folder, ignore_errors=True)
        checkpoint = synthetic.sparse_int4(folder / "checkpoint", synthetic.MODELS[name][0])
        description = build_engine(
            backend="tensorrt_rtx",
            checkpoint=checkpoint,
            spec=NetworkSpec(
                dtype="float16", max_seq_len=LIMITS.max_seq_len, block_size=LIMITS.block_size, lowering=lowering
            ),
            limits=LIMITS,
            sm=80,
            output=folder / "engine" / "model.engine",
            log=folder / "build.log",
            progress=make_reporter(),
            weights="stripped",
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        build, wanted = description.build, load_refit_list(folder / "engine")
        engine = inspect_engine(folder / "engine" / "model.engine")
        print(f"{name}, {', '.join(lowering.plugins()) or 'native'}: "
              f"{len(wanted.constants)} constants of {format_amount(wanted.nbytes, 'B')}, not in the engine "
              f"of {format_amount(description.nbytes, 'B')}")  # fmt: skip
        print(f"  built in {build.seconds:.0f} s, {processor:.0f} s of processor; "
              f"peak memory {format_amount(build.peak_bytes, 'B')} resident, "
              f"{format_amount(build.peak_anonymous_bytes, 'B')} of it anonymous (sampled)")  # fmt: skip
        report_profiles(checkpoint, description, engine)
        shutil.rmtree(folder / "checkpoint")
    return True


def report_profiles(checkpoint: Path, description: EngineDescription, engine: EngineFile) -> None:
    """Workspace against the plan, and kernels by layer: those of the file's graphs, and the launches of rope_paged_kv,
    which it does not show. A plugin that the file does show counts once, whatever it launches."""
    architecture = CheckpointFolder.open(checkpoint).architecture
    layers, lowering = architecture.num_layers, description.spec.lowering
    hidden = layers if lowering.rope_paged_kv == "plugin" else 0
    plan = plan_memory(Design(architecture, dtype="float16", lowering=lowering), LIMITS)
    for (limit, planned), profile in zip(plan.workspaces, engine.profiles, strict=True):
        kernels = sum(profile.graph.kernels.values()) + hidden
        print(f"  {limit.name}: workspace {format_amount(profile.workspace_bytes, 'B')} "
              f"(planned {planned.nbytes / profile.workspace_bytes:.1%} of it), {kernels} kernels, "
              f"{kernels / layers:.1f} a layer: {dict(profile.graph.kernels)}")  # fmt: skip
