"""What engines of trtseek's own network are, for `inspect`: by the engine's file and engine.json, no GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pipeline.cli.file_inspection import is_engine_file

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pipeline.engine.description import EngineDescription

Document = dict[str, Any]


def is_engine(path: Path) -> bool:
    return is_engine_file(path) or any(path.glob("*.engine"))


def is_engine_set(path: Path) -> bool:
    from pipeline.engine.rank_engines import name_rank

    return is_engine(path / name_rank(0))


def is_engine_json(path: Path) -> bool:
    from pipeline.engine.description import DESCRIPTION

    return path.name == DESCRIPTION and path.is_file()


def describe_engine(path: Path) -> Document:
    from pipeline.engine.description import DESCRIPTION, load_description
    from pipeline.engine.engine_file import inspect_engine

    file = path if path.is_file() else min(path.glob("*.engine"))
    engine = inspect_engine(file)
    beside = file.with_name(DESCRIPTION)
    built = load_description(beside) if beside.is_file() else None
    names = [profile.name for profile in built.profiles] if built else []
    return {
        "kind": "TensorRT-RTX engine",
        "path": str(file),
        "bytes": engine.nbytes,
        "version": engine.version,
        "targets": [f"SM{sm}" for sm in engine.targets],
        "weights": built.weights if built else "full",
        "weights_bytes": (built and built.weights_bytes) or engine.weights_bytes,
        "network_digest": built.network_digest if built else None,
        **(_describe_lowering([built]) if built else {}),
        "profiles": [
            {
                "profile": names[index] if index < len(names) else str(index),
                "workspace_bytes": profile.workspace_bytes,
                "kernels": sum(profile.graph.kernels.values()),
            }
            for index, profile in enumerate(engine.profiles)
        ],
        "kernels": [{"kind": kind, "launches": count} for kind, count in sorted(engine.kernels.items())],
        "fusions": [{"fused": name, "launches": count} for name, count in sorted(engine.fusions.items())],
        "inputs": [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in engine.inputs],
        "outputs": [{"name": t.name, "dtype": t.dtype, "shape": list(t.shape)} for t in engine.outputs],
    }


def describe_engine_set(path: Path) -> Document:
    """What the engines of all ranks have in common, and what is each one's own."""
    from pipeline.engine.description import load_description
    from pipeline.engine.rank_engines import list_folders

    joint = load_description(path)
    ranks = [describe_engine(folder) for folder in list_folders(path)]
    own = ("bytes", "weights_bytes", "network_digest")
    return {
        "kind": f"{ranks[0]['kind']}s of {len(ranks)} ranks",
        "path": str(path),
        "parallel": asdict(joint.spec.rank.parallel),
        **{key: ranks[0][key] for key in ("version", "targets", "weights")},
        **_describe_lowering(joint.all_ranks),
        "ranks": [
            {
                "rank": index,
                **{key: rank[key] for key in own},
                "workspace_bytes": max(profile["workspace_bytes"] for profile in rank["profiles"]),
                "kernels": max(profile["kernels"] for profile in rank["profiles"]),
                "exchanges": sum(row["launches"] for row in rank["kernels"] if row["kind"].startswith("comm_")),
            }
            for index, rank in enumerate(ranks)
        ],
    }


def describe_engine_json(path: Path) -> Document:
    """Of engines of which only that is there, or is asked for. Raises BuildError where it is damaged."""
    from pipeline.engine.description import load_description

    built = load_description(path)
    return {
        "kind": "description of an engine" if not built.ranks else f"description of {len(built.all_ranks)} engines",
        "path": str(path),
        "backend": built.backend,
        "version": built.backend_version,
        "targets": [f"SM{built.sm}"],
        "weights": built.weights,
        "network_digest": [rank.network_digest for rank in built.all_ranks],
        **_describe_lowering(built.all_ranks),
        "engines": [
            {"file": rank.file, "bytes": rank.nbytes, "weights_bytes": rank.weights_bytes, "digest": rank.digest}
            for rank in built.all_ranks
        ],
        "see": f"trtseek inspect {path.parent}" if is_engine(path.parent) or is_engine_set(path.parent) else None,
    }


def _find_lowering(operation: str) -> str:
    from plugins.registry import OPERATIONS, find_class

    return find_class(operation).LOWERING if operation in OPERATIONS else operation  # another version's


def _describe_lowering(ranks: Sequence[EngineDescription]) -> Document:
    """How each operation that has a plugin was written, and of the plugins' kernels, variants together, whether they
    had passed a recorded run on the SM that they are compiled for when the engine was built."""
    variants: Counter[tuple[Any, ...]] = Counter()
    for rank in ranks:
        variants |= Counter(
            (_find_lowering(plugin.operation), plugin.operation, kernel.function, kernel.sm, kernel.passed)
            for plugin in rank.plugins
            for kernel in plugin.kernels
        )
    used = {_find_lowering(plugin.operation) for rank in ranks for plugin in rank.plugins}
    return {
        "lowering": {
            name: "plugin, of which no layer has need" if how == "plugin" and name not in used else how
            for name, how in asdict(ranks[0].spec.lowering).items()
        },
        "plugin_kernels": [
            {
                "lowering": lowering,
                "operation": operation,
                "kernel": function,
                "variants": count,
                "compiled_for": f"SM{sm}",
                "passed": passed is not None,
                "run": passed,
            }
            for (lowering, operation, function, sm, passed), count in variants.items()
        ],
    }
