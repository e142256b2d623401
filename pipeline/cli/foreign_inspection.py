"""What TensorRT-LLM's engines and the jobs that build them are, for `inspect`: by their own files, no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

Document = dict[str, Any]
LIMITS = ("max_batch_size", "max_seq_len", "max_input_len", "max_num_tokens", "max_beam_width", "kv_cache_type")
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


def _find_engine(path: Path) -> Path | None:
    from pipeline.engine.tensorrt_llm.record import ENGINE, RECORD

    return path / ENGINE if (path / RECORD).is_file() else None
