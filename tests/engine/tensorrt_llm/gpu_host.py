"""A host with a GPU and trtllm-build, as far as a job's script sees one; jobs to be done there, and their engines."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from pipeline.config.load import load_config
from pipeline.engine.tensorrt_llm.job import write_job
from pipeline.engine.tensorrt_llm.request import EngineRequest, make_request

FAKE = Path(__file__).with_name("fake_trtllm_build.py")
REPOSITORY = Path(__file__).parents[3]
# docker run … IMAGE bash /job/build.sh /result/…: the same, the two volumes where they are and trtllm-build at hand.
DOCKER = """#!/usr/bin/env bash
set -euo pipefail
echo "$@" >> "{log}"
volumes=()
while [[ $1 != bash ]]; do
    case $1 in
        --volume) volumes+=("$2"); shift ;;
        --env) export "${{2?}}"; shift ;;
    esac
    shift
done
job=${{volumes[0]%%:*}} result=${{volumes[1]%%:*}}
script=${{2/#\\/job/$job}} output=${{3/#\\/result/$result}}
PATH="{container}:$PATH" bash "$script" "$output"
"""


@dataclass(frozen=True, kw_only=True)
class GpuHost:
    """`bin` has nvidia-smi, `container` trtllm-build of a Python with TensorRT-LLM. In `variables` is what both see."""

    bin: Path
    container: Path
    variables: dict[str, str]

    def run(self, job: Path, output: Path | str, cwd: Path, *, within: bool = True, **variables: str):
        """build.sh, with trtllm-build on the path if `within`."""
        places = [self.bin, *([self.container] if within else []), "/usr/bin", "/bin"]
        path = os.pathsep.join(map(str, places))
        environment = {"PATH": path, "HOME": str(cwd), **self.variables, **variables}
        command = ["bash", str(job / "build.sh"), str(output)]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def make_host(
    folder: Path, *, sms: tuple[str, ...] = ("9.0",), version: str = "1.2.1", tensorrt: str = "10.14.1.48"
) -> GpuHost:
    bin, container, site = folder / "bin", folder / "container", folder / "site"
    for place in (bin, container, site):
        place.mkdir(parents=True)
    for name, number in (("tensorrt_llm", version), ("tensorrt", tensorrt)):
        info = site / f"{name}-{number}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    python = container / "python-of-tensorrt-llm"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{site}" exec "{sys.executable}" -S "$@"\n')
    build = container / "trtllm-build"
    build.write_text(f"#!{python}\n{FAKE.read_text()}")
    smi = bin / "nvidia-smi"
    smi.write_text("#!/bin/sh\n" + "".join(f"echo {sm}\n" for sm in sms) if sms else "#!/bin/sh\nexit 9\n")
    for program in (python, build, smi):
        program.chmod(0o755)
    return GpuHost(bin=bin, container=container, variables={})


def add_docker(host: GpuHost, log: Path) -> None:
    docker = host.bin / "docker"
    docker.write_text(DOCKER.format(log=log, container=host.container))
    docker.chmod(0o755)


def make_small_request(monkeypatch, **changes) -> EngineRequest:
    """Of configs/h100-fp8-trtllm.yaml."""
    monkeypatch.chdir(REPOSITORY)
    return replace(make_request(load_config("h100-fp8-trtllm"), "FP8"), **changes)


def make_job(folder: Path, request: EngineRequest) -> Path:
    """With the checkpoint of a model of one layer."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True)
    parallel = request.parallel
    config = {
        "architecture": "LlamaForCausalLM",
        "dtype": "float16",
        "logits_dtype": "float32",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "vocab_size": 4096,
        "norm_epsilon": 1e-06,
        "max_position_embeddings": 8192,
        "rotary_scaling": {"type": "linear", "factor": 4.0},
        "mapping": {
            "world_size": parallel.world,
            "tp_size": parallel.tensor,
            "pp_size": parallel.pipeline,
            "cp_size": 1,
            "moe_tp_size": parallel.moe_tensor,
            "moe_ep_size": parallel.expert,
        },
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["*lm_head", "*router"]},
    }
    (checkpoint / "config.json").write_text(json.dumps(config))
    names = [
        "transformer.vocab_embedding.weight",
        "transformer.layers.0.attention.qkv.weight",
        "transformer.layers.0.mlp.fc.weight",
        "transformer.layers.0.mlp.fc.weights_scaling_factor",
        "transformer.ln_f.weight",
        "lm_head.weight",
    ]
    for rank in range(parallel.world):
        tensors = {name: np.full(4, rank, np.float16) for name in names}
        save_file(tensors, checkpoint / f"rank{rank}.safetensors")
    write_job(folder, request, name="h100-fp8-trtllm")
    return folder


def build(job: Path, output: Path, host: GpuHost, **variables: str) -> Path:
    """The engine that the job asks for."""
    done = host.run(job, output, output.parent, **variables)
    assert done.returncode == 0, done.stderr + done.stdout
    return output


def seal(engine: Path) -> None:
    """SHA256SUMS of an engine's folder as it is now."""
    files = sorted(path for path in engine.iterdir() if path.name != "SHA256SUMS")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files if path.is_file()]
    (engine / "SHA256SUMS").write_text("".join(sums))


def copy(engine: Path, target: Path) -> Path:
    return Path(shutil.copytree(engine, target, symlinks=True))
