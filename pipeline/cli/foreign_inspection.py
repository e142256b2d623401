"""What TensorRT-LLM's rank checkpoints, the jobs that build engines of them and the engines are, for `inspect`: by
their own files, no GPU."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from pipeline.cli.file_inspection import summarize_tensors

if TYPE_CHECKING:
    from collections.abc import Container, Iterator
    from pathlib import Path

Document = dict[str, Any]
LIMITS = ("max_batch_size", "max_seq_len", "max_input_len", "max_num_tokens", "max_beam_width", "kv_cache_type")
RANKS, MAX_RANKS = "rank*.safetensors", 1 << 16
FEATURES = ("tokens_per_block", "use_paged_context_fmha", "use_fp8_context_fmha", "gemm_plugin")


def is_foreign_engine(path: Path) -> bool:
    """A folder that trtllm-build made, or the build stage's output with one."""
    from pipeline.engine.tensorrt_llm.engine_folder import is_engine_folder

    return _find_engine(path) is not None or is_engine_folder(path)


def describe_foreign_engine(path: Path) -> Document:
    """Raises BuildError where it is damaged beyond description."""
    from pipeline.engine.tensorrt_llm.engine_folder import read_engine_folder
    from pipeline.engine.tensorrt_llm.record import load_record
    from pipeline.engine.tensorrt_llm.versions import judge, list_fitting, load_releases

    inner = _find_engine(path)
    record = load_record(path) if inner else None
    engine = read_engine_folder(inner or path)
    model, build = engine.config["pretrained_config"], engine.config["build_config"]
    plugins, receipt = build.get("plugin_config") or {}, engine.receipt or {}
    release = load_releases().get(engine.version)
    verdict = judge(engine.version, record.image) if record else None
    return {
        "kind": "TensorRT-LLM engine",
        "path": str(engine.path),
        "bytes": sum(engine.files.values()),
        "version": engine.version,
        "tensorrt": receipt.get("tensorrt") or (release and release.tensorrt),
        "built_on": f"SM{receipt['sm']}" if "sm" in receipt else None,
        "job": receipt.get("job"),
        "triton_images": list_fitting(engine.version),
        "image": record.image if record else None,
        "verdict": verdict.reason if verdict else None,
        "network_digest": record.network_digest if record else None,
        "architecture": model.get("architecture"),
        "dtype": model.get("dtype"),
        "logits_dtype": model.get("logits_dtype"),
        "quantization": model.get("quantization"),
        "mapping": model["mapping"],
        "limits": {name: build.get(name) for name in LIMITS} | {name: plugins.get(name) for name in FEATURES},
        "files": [{"name": name, "bytes": size} for name, size in engine.files.items()],
        "problems": engine.find_gaps(),
    }


def is_job(path: Path) -> bool:
    return (path / "job.json").is_file() and (path / "build.sh").is_file()


def describe_job(path: Path) -> Document:
    """Raises BuildError where it is damaged beyond description."""
    from pipeline.engine.tensorrt_llm.job import name_job, read_request

    request = read_request(path)
    return {
        "kind": "job that builds a TensorRT-LLM engine",
        "path": str(path),
        "bytes": sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        "job": name_job(path),
        "version": request.version,
        "image": request.image,
        "gpu": f"{request.gpu}, SM{request.sm}",
        "ranks": request.parallel.world,
        "arguments": " ".join((path / "arguments").read_text(encoding="utf-8").split()),
    }


def is_ranks(path: Path) -> bool:
    """Rank checkpoints, ours or another's: what trtllm-build builds from."""
    return (path / "config.json").is_file() and any(path.glob(RANKS))


def describe_ranks(path: Path) -> Document:
    """Raises CheckpointError where config.json or a rank's header is damaged."""
    from pipeline.checkpoint.safetensors_file import SafetensorsFile
    from pipeline.checkpoint.strict_json import read_json

    config = read_json(path / "config.json")
    files = {file.name: SafetensorsFile(file) for file in sorted(path.glob(RANKS), key=lambda f: (len(f.name), f.name))}
    return {
        "kind": "TensorRT-LLM rank checkpoints",
        "path": str(path),
        "bytes": sum((path / name).stat().st_size for name in files),
        "architecture": config.get("architecture"),
        "layers": config.get("num_hidden_layers"),
        "hidden_size": config.get("hidden_size"),
        "dtype": config.get("dtype"),
        "quantization": config.get("quantization"),
        "linears": _count_algos(path / "quant_cfg.json"),
        "mapping": config.get("mapping"),
        "tensors": summarize_tensors(info for file in files.values() for info in file.tensors.values()),
        "ranks": [
            {"rank": name, "tensors": len(file.tensors), "bytes": (path / name).stat().st_size}
            for name, file in files.items()
        ],
        "problems": list(_find_missing(config.get("mapping"), files)),
    }


def _find_missing(mapping: Any, files: Container[str]) -> Iterator[str]:
    world = mapping.get("world_size") if isinstance(mapping, dict) else None
    if not isinstance(world, int) or not 0 < world <= MAX_RANKS:
        yield f"config.json: mapping.world_size is {str(world)[:20]}, no number of ranks"
        return
    for rank in range(world):
        if (name := f"rank{rank}.safetensors") not in files:
            yield f"{name} is missing"


def _count_algos(path: Path) -> list[Document]:
    """Of mixed precision: how many linears each algorithm has."""
    from pipeline.checkpoint.strict_json import read_json

    layers = read_json(path).get("quantized_layers") if path.is_file() else None
    rows = layers.values() if isinstance(layers, dict) else ()
    counts = Counter(str(row.get("quant_algo")) for row in rows if isinstance(row, dict))
    return [{"quant_algo": algo, "count": count} for algo, count in sorted(counts.items())]


def _find_engine(path: Path) -> Path | None:
    from pipeline.engine.tensorrt_llm.record import ENGINE, RECORD

    return path / ENGINE if (path / RECORD).is_file() else None
