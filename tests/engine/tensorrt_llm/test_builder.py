"""Building on a host that can: the job's script in a child, its log, its failures."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from pipeline.engine.tensorrt_llm import builder
from pipeline.engine.tensorrt_llm.builder import build_engine, list_lacks
from pipeline.engine.tensorrt_llm.job import read_request
from pipeline.engine.tensorrt_llm.record import load_record
from pipeline.errors import BuildError
from pipeline.progress import SILENT
from pipeline.sharding.ranks import Parallel
from tests.engine.tensorrt_llm.gpu_host import make_host, make_job, make_small_request


class Counter:
    """A Progress that keeps what it was told."""

    def __init__(self) -> None:
        self.items: list[tuple[str, float, str]] = []
        self.done = 0.0

    def start(self, item, total, unit):
        self.items.append((item, total, unit))

    def advance(self, amount):
        if self.items[-1][0] == "trtllm-build":
            self.done += amount

    def note(self, message):
        pass


@pytest.fixture
def job(tmp_path, monkeypatch):
    return make_job(tmp_path / "job", make_small_request(monkeypatch, parallel=Parallel(tensor=2)))


@pytest.fixture
def enter(tmp_path, monkeypatch):
    """This process on a GPU host."""

    def set_up(**settings):
        host = make_host(tmp_path / "host", **settings)
        monkeypatch.setenv("PATH", f"{host.bin}:{host.container}:/usr/bin:/bin")
        monkeypatch.setattr(
            builder, "list_device_sms", lambda: [int(float(sm) * 10) for sm in settings.get("sms", "9")]
        )
        folder = tmp_path / "build"
        folder.mkdir()
        return folder

    return set_up


def test_builds_with_progress_and_keeps_the_log(job, enter):
    folder, progress = enter(), Counter()
    record = build_engine(job, folder, read_request(job), "blake3:0", progress)
    assert load_record(folder) == record and record.sm == 90
    assert ("trtllm-build", 2, "ranks") in progress.items and progress.done == 2
    assert "Serializing engine to" in (folder / "engine/build.log").read_text()
    assert sorted(path.name for path in folder.iterdir()) == ["engine", "tensorrt_llm.json"]


def test_a_failure_is_told_in_its_own_words(job, enter, monkeypatch):
    folder = enter()
    monkeypatch.setenv("FAKE_FAILURE", "engine")
    with pytest.raises(BuildError) as caught:
        build_engine(job, folder, read_request(job), "blake3:0", SILENT)
    assert caught.value.message == ("trtllm-build: AssertionError: Engine building failed, please check the error log.")
    assert caught.value.hint == f"its output is in {folder / 'engine.log'}"
    assert "OutOfMemory" in (folder / "engine.log").read_text()
    assert not (folder / "engine").exists() and not (folder / "tensorrt_llm.json").exists()


def test_a_checkpoint_that_lacks_a_tensor(tmp_path, enter, job):
    """What PretrainedModel.load says."""
    from safetensors.numpy import load_file, save_file

    from pipeline.engine.tensorrt_llm.job import write_job

    weights = job / "checkpoint/rank1.safetensors"
    tensors = load_file(weights)
    del tensors["lm_head.weight"]
    save_file(tensors, weights)
    write_job(job, read_request(job), name="h100-fp8-trtllm")
    with pytest.raises(BuildError, match=r"RuntimeError: Required but not provided tensors:\{'lm_head.weight'\}"):
        build_engine(job, enter(), read_request(job), "blake3:0", SILENT)


def test_the_wrong_version_is_told(job, enter):
    with pytest.raises(BuildError, match=r"for TensorRT-LLM 1\.2\.1, and this trtllm-build is of 1\.1\.0"):
        build_engine(job, enter(version="1.1.0"), read_request(job), "blake3:0", SILENT)


def test_an_engine_that_states_another_version_is_not_taken(job, enter, monkeypatch):
    folder = enter()
    monkeypatch.setenv("FAKE_WRITES", "1.2.0")
    with pytest.raises(BuildError, match=r"version is 1\.2\.0, asked for 1\.2\.1"):
        build_engine(job, folder, read_request(job), "blake3:0", SILENT)
    assert not (folder / "tensorrt_llm.json").exists()


def test_what_this_host_lacks(job, enter, monkeypatch):
    request = read_request(job)
    enter(sms=("8.0",))
    assert list_lacks(request) == ["a GPU of SM90, as the H100 is"]
    monkeypatch.setattr(builder, "list_device_sms", lambda: [80, 90])
    assert list_lacks(request) == []
    monkeypatch.setenv("PATH", "/nowhere")
    assert list_lacks(request) == ["trtllm-build of TensorRT-LLM 1.2.1"]


def test_nothing_outlives_an_interrupted_build(job, enter, monkeypatch):
    """Ctrl-C: the script and what it started end with it."""
    folder = enter()
    monkeypatch.setenv("FAKE_FAILURE", "hang")  # trtllm-build stops itself while it builds
    started: list[int] = []
    popen = builder.subprocess.Popen

    def start(*args, **kwargs):
        child = popen(*args, **kwargs)
        started.append(child.pid)
        return child

    monkeypatch.setattr(builder.subprocess, "Popen", start)

    class Interrupting(Counter):
        """Raises what Ctrl-C raises, from within the loop that reads the child."""

    interrupted = threading.Event()

    def wait_and_interrupt():
        log = folder / "engine.log"
        while not (log.exists() and "Build TensorRT engine" in log.read_text()):
            time.sleep(0.02)
        interrupted.set()
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait_and_interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        build_engine(job, folder, read_request(job), "blake3:0", Interrupting())
    thread.join()
    assert interrupted.is_set()
    with pytest.raises(ProcessLookupError):
        for _ in range(200):
            os.killpg(started[0], 0)
            time.sleep(0.02)
