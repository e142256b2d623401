from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.config.gpus import load_gpus
from pipeline.engine.backends import find_backend
from pipeline.engine.build_memory import build_memory
from pipeline.engine.builder import _warn_about_memory, build_engine
from pipeline.engine.description import load_description
from pipeline.engine.engine_file import inspect_engine
from pipeline.engine.limits import FULL
from pipeline.errors import BuildError, CheckpointError, StoreError
from pipeline.network.spec import NetworkSpec
from tests.engine.checkpoints import TINY_LLAMA, TINY_V2, write_engine_checkpoint
from tests.engine.conftest import LLAMA_INT4, Built, build
from tests.engine.failing import SMALL, fail


def _backends(sm: int) -> tuple[str, ...]:
    return next(gpu.backends for gpu in load_gpus().values() if gpu.sm == sm)


class Recorder:
    """A Progress that remembers."""

    def __init__(self) -> None:
        self.items: list[str] = []
        self.done: dict[str, float] = {}
        self.totals: dict[str, float] = {}
        self.notes: list[str] = []

    def start(self, item: str, total: float, unit: str) -> None:
        self.items.append(item)
        self.totals[item], self.done[item] = total, 0

    def advance(self, amount: float) -> None:
        self.done[self.items[-1]] += amount

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint in it, for builds that share nothing else."""
    path = tmp_path_factory.mktemp("builds")
    write_engine_checkpoint(path / "checkpoint", TINY_LLAMA | {"num_hidden_layers": 1}, int4=LLAMA_INT4, group=64)
    return path


SMS = sorted({gpu.sm for gpu in load_gpus().values()})
BUILT_HERE = [sm for sm in SMS if "tensorrt_rtx" in _backends(sm)]


def test_every_gpu_of_the_table_has_a_backend() -> None:
    """Those that TensorRT-RTX does not build for name TensorRT, on the GPU; so does the refusal."""
    for gpu in load_gpus().values():
        assert "tensorrt" in gpu.backends, gpu.name
        if gpu.sm not in BUILT_HERE:
            with pytest.raises(BuildError, match=f"does not build for SM{gpu.sm}") as caught:
                find_backend("tensorrt_rtx").check_target(gpu.sm)
            assert "backend: tensorrt on that GPU" in caught.value.hint
    assert set(SMS) - set(BUILT_HERE) == {90, 100, 103}


@pytest.mark.parametrize(
    "sm", [sm if sm in (80, 120) else pytest.param(sm, marks=pytest.mark.thorough) for sm in BUILT_HERE]
)
def test_builds_for_every_target(folder: Path, sm: int, tmp_path: Path) -> None:
    progress = Recorder()
    # Turing takes no INT4.
    place, roles = (folder, LLAMA_INT4) if sm >= 80 else (tmp_path, ())
    built = build(place, TINY_LLAMA | {"num_hidden_layers": 1}, roles, SMALL, sm=sm, progress=progress)
    engine = inspect_engine(built.path)
    assert engine.targets == (sm,) and engine.profiles[0].graph.targets == (f"sm{sm}",)
    assert progress.items == ["lay out the network", "compile", "write"]
    assert progress.done["compile"] == progress.totals["compile"] == 5 * len(SMALL.profiles())
    assert progress.done["write"] == built.path.stat().st_size
    assert sorted(path.name for path in built.path.parent.iterdir()) == ["engine.json", "model.engine"]


@pytest.mark.thorough
def test_what_turing_lacks_is_explained(v2_engine: Built, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="HW-specific datatypes: int4") as caught:
        build(folder, TINY_LLAMA | {"num_hidden_layers": 1}, LLAMA_INT4, SMALL, sm=75)
    assert "INT4 needs SM80" in caught.value.hint
    with pytest.raises(BuildError, match=r"at layers\.1\.mlp\.router.*FP32 GEMM is not supported") as caught:
        build(tmp_path, TINY_V2, (), SMALL, sm=75)
    assert "a GPU of SM80 or later" in caught.value.hint


def test_description_says_what_went_in_and_what_came_out(llama_engine: Built) -> None:
    described = load_description(llama_engine.path.parent)
    assert described == llama_engine.description
    assert described.nbytes == llama_engine.path.stat().st_size
    assert described.sources.keys() == {"config.json", "model.safetensors"}
    assert re.fullmatch(r"blake3:[0-9a-f]{64}", described.network_digest)
    assert described.spec == llama_engine.spec and described.limits == llama_engine.limits
    assert [t.name for t in described.inputs][-1] == "v_pool_1" and described.outputs[0].name == "logits"
    context = described.profiles[0]
    assert context.shapes["pad_index"].maximum == (8, 64) and context.shapes["k_pool_0"].minimum == (1, 2, 64, 64)
    assert 0 < described.build.peak_anonymous_bytes <= described.build.peak_bytes < 2 << 30


def test_network_digest_is_the_interpreted_networks(llama_engine: Built) -> None:
    """What is built is what is proved: the child's network against one built and read back here."""
    program = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, tensorrt_rtx as trt\n"
            "from pathlib import Path\n"
            "from pipeline.checkpoint.folder import CheckpointFolder\n"
            "from pipeline.network.network import build_network\n"
            "from pipeline.network.readback import read_network\n"
            "from pipeline.network.spec import NetworkSpec\n"
            "source = CheckpointFolder.open(Path(sys.argv[1]))\n"
            "network = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_network(0)\n"
            "spec = NetworkSpec.from_json(sys.argv[2])\n"
            "print(read_network(build_network(trt, network, spec, source.architecture, source)).digest())\n",
            str(llama_engine.checkpoint),
            llama_engine.spec.to_json(),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=True,
    )
    assert program.stdout.split()[-1] == llama_engine.description.network_digest


def test_refused_network_names_the_layer_and_a_way_out(folder: Path) -> None:
    with pytest.raises(BuildError) as caught:
        fail(folder, "misshapen")
    assert "layers.9.wrong" in caught.value.message and "must have same input types" in caught.value.message
    assert "/_src/" not in caught.value.message and "cudaError" not in caught.value.message
    assert not (folder / "misshapen" / "model.engine").exists()
    assert "must have same input types" in (folder / "build.log").read_text()


def test_network_that_has_no_kernel_names_the_layers(v2_engine: Built, tmp_path: Path) -> None:
    """TensorRT names none here: those of the type that its error is about are named instead."""
    with pytest.raises(BuildError) as caught:
        build_engine(
            backend="tensorrt_rtx",
            checkpoint=v2_engine.checkpoint,
            spec=NetworkSpec(dtype="float16", max_seq_len=128, block_size=32),
            limits=SMALL,
            sm=80,
            output=tmp_path / "model.engine",
            log=tmp_path / "build.log",
            factory="tests.engine.factories:refused",
        )
    assert "layers.0.attention.attention, layers.1.attention.attention" in caught.value.message
    assert "not supported by a dedicated kernel" in caught.value.message
    assert "decomposable" in caught.value.hint


def test_a_mistake_while_laying_out_the_network_leaves_a_traceback_in_the_log(folder: Path) -> None:
    with pytest.raises(BuildError, match=r"RuntimeError: a mistake in the network's code"):
        fail(folder, "raises", log="raises.log")
    assert "Traceback" in (folder / "raises.log").read_text()


def test_a_killed_build_says_so_with_the_memory_needed(folder: Path) -> None:
    with pytest.raises(BuildError, match=r"killed during 'lay out the network', .* needs about 5\d\d\.\d+ MB"):
        fail(folder, "killed")
    assert list((folder / "killed").iterdir()) == []


def test_full_disk(folder: Path) -> None:
    output = folder / "full" / "model.engine"
    output.parent.mkdir()
    output.with_name(".model.engine.partial").symlink_to("/dev/full")
    with pytest.raises(StoreError, match="No space left on device"):
        build_engine(
            backend="tensorrt_rtx",
            checkpoint=folder / "checkpoint",
            spec=NetworkSpec(dtype="float16", max_seq_len=128, block_size=32),
            limits=SMALL,
            sm=80,
            output=output,
            log=folder / "full.log",
        )
    assert list(output.parent.iterdir()) == []


def test_refused_before_any_process_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    spec = NetworkSpec(dtype="float16", max_seq_len=128, block_size=32)
    common = {"spec": spec, "limits": SMALL, "output": folder / "no" / "model.engine", "log": folder / "no.log"}
    with pytest.raises(BuildError, match="does not build for SM90"):
        build_engine(backend="tensorrt_rtx", checkpoint=folder / "checkpoint", sm=90, **common)
    with pytest.raises(CheckpointError, match="no such folder"):
        build_engine(backend="tensorrt_rtx", checkpoint=folder / "nothing", sm=80, **common)
    assert not (folder / "no").exists()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_build_outlives_whoever_asked_for_it(folder: Path, tmp_path: Path, how: signal.Signals) -> None:
    pid_file, temporary = tmp_path / "pid", tmp_path / "temporary"
    temporary.mkdir()
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from pathlib import Path; from tests.engine.failing import fail; fail(Path({str(folder)!r}), 'hangs')",
        ],
        env={
            **os.environ,
            "TRTSEEK_TEST_PID_FILE": str(pid_file),
            "TMPDIR": str(temporary),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        stderr=subprocess.DEVNULL,
    )
    pid = _wait_for(lambda: int(pid_file.read_text() or 0) if pid_file.exists() else 0)
    parent.send_signal(how)
    parent.wait(timeout=60)
    _wait_for(lambda: not _is_running(pid))
    assert not list(temporary.iterdir())


def test_memory_needed_is_more_than_what_a_build_took(llama_engine: Built) -> None:
    from pipeline.checkpoint.folder import CheckpointFolder

    source = CheckpointFolder.open(llama_engine.checkpoint)
    needed = build_memory(source.architecture, source.nbytes, FULL)
    assert llama_engine.description.build.peak_anonymous_bytes < needed


def test_too_little_memory_is_said_before_the_build() -> None:
    progress = Recorder()
    _warn_about_memory(1, progress)
    assert progress.notes == []
    _warn_about_memory(10**18, progress)
    assert re.fullmatch(r"the build needs about 1000000.00 TB of memory, [\d.]+ GB are free", progress.notes[0])


def _wait_for(condition, seconds: float = 120):  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return value


def _is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie (its new parent may not have looked yet)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
