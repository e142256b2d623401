"""The job bundle, and its script on stand-ins for a GPU host."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.engine.tensorrt_llm.engine_folder import read_engine_folder
from pipeline.engine.tensorrt_llm.job import name_job, read_request, write_job
from pipeline.errors import BuildError
from pipeline.sharding.ranks import Parallel
from tests.engine.tensorrt_llm.gpu_host import REPOSITORY, add_docker, build, make_host, make_job, make_small_request

SCRIPT = REPOSITORY / "pipeline/engine/tensorrt_llm/build.sh"


@pytest.fixture
def job(tmp_path, monkeypatch):
    request = make_small_request(monkeypatch, parallel=Parallel(tensor=2))
    return make_job(tmp_path / "job", request)


def test_the_script_is_clean():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([str(shellcheck), str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_same_request_gives_the_same_bytes(tmp_path, monkeypatch, job):
    request = read_request(job)
    again = make_job(tmp_path / "again", request)
    assert {f.relative_to(job): f.read_bytes() for f in job.rglob("*") if f.is_file()} == {
        f.relative_to(again): f.read_bytes() for f in again.rglob("*") if f.is_file()
    }
    assert name_job(job) == name_job(again)
    (again / "checkpoint/rank1.safetensors").write_bytes(b"other weights")
    write_job(again, request, name="h100-fp8-trtllm")
    assert name_job(job) != name_job(again)


def test_what_is_in_it(job):
    assert sorted(path.relative_to(job).as_posix() for path in job.rglob("*") if path.is_file()) == [
        *("README.md", "SHA256SUMS", "arguments", "build.sh", "build_config.json"),
        *("checkpoint/config.json", "checkpoint/rank0.safetensors", "checkpoint/rank1.safetensors"),
        *("job.env", "job.json"),
    ]
    assert os.access(job / "build.sh", os.X_OK)
    assert (job / "build.sh").read_bytes() == SCRIPT.read_bytes()
    assert subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=job).returncode == 0
    text = (job / "README.md").read_text()
    for wanted in (
        "H100 (SM90)",
        "2 rank(s)",
        "26.07-trtllm-python-py3",
        "TensorRT-LLM 1.2.1",
        "10.14.1",
        "--resume",
        "every `--set`",
    ):
        assert wanted in text
    assert "{" not in text and str(job) not in text
    assert json.loads((job / "job.json").read_text())["request"]["parallel"]["tensor"] == 2


def test_a_job_without_a_checkpoint_is_refused(tmp_path, monkeypatch):
    with pytest.raises(BuildError, match=r"holds no config\.json"):
        write_job(tmp_path, make_small_request(monkeypatch), name="x")
    with pytest.raises(BuildError, match="job stage again"):
        read_request(tmp_path)
    (tmp_path / "job.json").write_text('{"format": 1, "request": {"parallel": {"tensor": 1}}}')
    with pytest.raises(BuildError, match="states no request"):
        read_request(tmp_path)


def test_built_within_the_container(tmp_path, job):
    engine = build(job, tmp_path / "engine", make_host(tmp_path / "host"))
    found = read_engine_folder(engine)
    assert found.ranks == [0, 1] and found.version == "1.2.1" and found.find_damage() == []
    assert found.receipt == {
        "job": name_job(job),
        "tensorrt_llm": "1.2.1",
        "tensorrt": "10.14.1.48",
        "sm": 90,
        "image": "",
    }
    assert "Engine serialized" in (engine / "build.log").read_text()
    assert not (engine / "model.cache").exists() and not (tmp_path / "model.cache").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("engine")) == ["engine"]


def test_built_by_docker(tmp_path, job):
    host, log = make_host(tmp_path / "host"), tmp_path / "docker.log"
    add_docker(host, log)
    pinned = "registry.local/tritonserver:26.07-trtllm-python-py3@sha256:" + "a" * 64
    done = host.run(job, "deep/engine", tmp_path, within=False, IMAGE=pinned)
    assert done.returncode == 0, done.stderr
    assert read_engine_folder(tmp_path / "deep/engine").receipt["image"] == pinned
    assert f"--volume {job}:/job:ro --volume {tmp_path}/deep:/result" in log.read_text()
    assert f"{pinned} bash /job/build.sh /result/engine" in log.read_text()
    assert done.stdout.splitlines()[-1].endswith("trtseek engine h100-fp8-trtllm --resume deep/engine")
    unpinned = host.run(job, "other", tmp_path, within=False)
    assert unpinned.returncode == 0
    assert "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3 bash" in log.read_text()


# host, variables, exit code, a piece of what is said
REFUSALS = [
    ({"sms": ("8.0",)}, {}, 3, "the job is for a H100 (SM90), and this host has a GPU of SM80"),
    ({"sms": ()}, {}, 3, "nvidia-smi finds no GPU"),
    ({"version": "1.1.0"}, {}, 4, "the job is for TensorRT-LLM 1.2.1, and this trtllm-build is of 1.1.0"),
    ({"version": "1.3.0"}, {}, 4, "use nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"),
    ({"tensorrt": "10.14.10"}, {}, 4, "is of TensorRT 10.14.1, and this one is 10.14.10"),
    ({}, {"FAKE_FAILURE": "engine"}, 6, "trtllm-build failed; its output is in engine.log"),
]


@pytest.mark.parametrize(("host", "variables", "code", "said"), REFUSALS)
def test_refusals(tmp_path, job, host, variables, code, said):
    done = make_host(tmp_path / "host", **host).run(job, "engine", tmp_path, **variables)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert not (tmp_path / "engine").exists()


def test_without_any_builder(tmp_path, job):
    tools = tmp_path / "tools"  # what the script calls, and neither docker nor trtllm-build
    tools.mkdir()
    for name in ("bash", "dirname", "sha256sum", "wc", "head", "sh"):
        (tools / name).symlink_to(shutil.which(name))
    host = make_host(tmp_path / "host")
    environment = {"PATH": f"{host.bin}:{tools}"}
    command = [shutil.which("bash"), str(job / "build.sh")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 5 and "neither trtllm-build nor docker" in done.stderr


@pytest.mark.parametrize("change", ["cut", "gone", "arguments"])
def test_a_job_that_is_not_whole(tmp_path, job, change):
    weights = job / "checkpoint/rank1.safetensors"
    if change == "cut":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif change == "gone":
        weights.unlink()
    else:
        (job / "arguments").write_text("--max_batch_size\n2048\n")
    done = make_host(tmp_path / "host").run(job, "engine", tmp_path)
    assert done.returncode == 2 and "a file of the job is missing or changed" in done.stderr


def test_a_folder_that_is_there_is_left_alone(tmp_path, job):
    (tmp_path / "engine").mkdir()
    done = make_host(tmp_path / "host").run(job, "engine", tmp_path)
    assert done.returncode == 2 and "engine is there already" in done.stderr
    assert list((tmp_path / "engine").iterdir()) == []


def test_what_a_killed_build_left_is_cleared(tmp_path, job):
    partial = tmp_path / "engine.partial"
    partial.mkdir()
    (partial / "rank7.engine").write_bytes(b"of an earlier run")
    engine = build(job, tmp_path / "engine", make_host(tmp_path / "host"))
    assert read_engine_folder(engine).ranks == [0, 1]


def test_a_job_may_lie_in_any_folder(tmp_path, job):
    moved = Path(shutil.move(job, tmp_path / "a job's folder"))
    build(moved, tmp_path / "engine", make_host(tmp_path / "host"))
