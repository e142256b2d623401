import json
import shutil
from pathlib import Path

import psutil
import pytest

from pipeline import host_memory
from pipeline.cli import checkup, main


@pytest.fixture
def find(tmp_path):
    def of(subject):
        return next(finding for finding in checkup.check_all(tmp_path / "out") if finding.subject == subject)

    return of


def test_this_machine_passes_and_every_line_has_a_verdict(invoke):
    document = json.loads(invoke("doctor", "--json").stdout)
    subjects = [finding["subject"] for finding in document["findings"]]
    assert {"Python", "libraries", "processor", "memory", "disk", "GPU", "tensorrt_rtx", "tritonserver"} <= set(
        subjects
    )
    assert not [finding for finding in document["findings"] if finding["verdict"] == "failed"]
    lines = invoke("doctor").stdout.splitlines()
    assert all(line.split()[0] in ("ok", "warning") for line in lines if line[2] != " ")


def test_memory_is_what_psutil_says():
    free, total = host_memory.read_memory()
    assert total <= psutil.virtual_memory().total
    assert 0 < free <= total
    if total == psutil.virtual_memory().total:  # no control group's limit
        assert free == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_what_is_missing_fails_and_says_what_to_do(invoke, find, monkeypatch):
    monkeypatch.setattr("pipeline.stages.versions.find_version", lambda name: None if "rtx" in name else "1.0")
    assert (find("tensorrt_rtx").verdict, find("tensorrt_rtx").advice) == ("failed", "pip install tensorrt-rtx")
    assert find("libraries").verdict == "warning"
    assert find("library tensorrt_rtx").found.startswith("absent, tested with 1.7")
    assert find("library torch").found.startswith("1.0, tested with ")
    assert main._run(["doctor"]) == 1


def test_a_cuda_build_of_the_locked_version_is_as_locked(find, monkeypatch):
    lock = (Path(__file__).parents[2] / "requirements.lock").read_text()
    wanted = dict(line.split("==") for line in lock.splitlines() if "==" in line and line[0] != "#")
    monkeypatch.setattr(
        "pipeline.stages.versions.find_version",
        lambda name: wanted[name].split("+")[0] + "+cu130" if name == "torch" else wanted.get(name),
    )
    assert find("libraries").verdict == "ok"


def test_a_gpu_is_named_with_what_can_be_done_on_it(find, monkeypatch):
    monkeypatch.setattr("pipeline.engine.tensorrt.list_device_sms", lambda: [80, 90])
    assert find("GPU").found.startswith("SM80, SM90")
    assert "runs here on SM80" in find("tensorrt_rtx").found
    assert (find("tensorrt").verdict, "builds nothing here" in find("tensorrt").found) == ("warning", True)
    monkeypatch.setattr("pipeline.stages.versions.find_version", lambda name: "11.4.0")
    assert "builds for and runs on SM80, SM90" in find("tensorrt").found


def test_little_room_is_a_warning_and_no_permission_a_failure(find, monkeypatch):
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(checkup.shutil, "disk_usage", lambda _: usage._replace(free=1 << 20))
    monkeypatch.setattr(host_memory, "read_memory", lambda: (1 << 30, 2 << 30))
    monkeypatch.setattr(checkup, "_read_cpu_flags", lambda: {"sse2"})
    assert (find("disk").verdict, "trtseek gc" in find("disk").advice) == ("warning", True)
    assert find("memory").verdict == "warning"
    assert find("processor").verdict == "failed"
    monkeypatch.setattr(checkup.os, "access", lambda *_: False)
    assert find("disk").verdict == "failed"


@pytest.mark.parametrize(
    ("named", "there", "found"),
    [("", ["cc"], "/bin/cc"), ("", ["gcc", "cc"], "/bin/gcc"), ("my-cc", ["my-cc", "gcc"], "/bin/my-cc")],
)
def test_the_compiler_is_the_one_that_the_interpreter_asks(find, monkeypatch, named, there, found):
    monkeypatch.setenv("CC", named)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name in there else None)
    assert (find("C compiler").found, find("C compiler").verdict) == (found, "ok")


def test_without_a_compiler_it_is_said_what_is_lost(find, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert find("C compiler").verdict == "warning"
    assert "serving on the CPU is slower" in find("C compiler").advice
