"""launch.sh, with stand-ins for what NVIDIA's image has: they write down how they were called."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pipeline.triton import MODEL_REPO
from pipeline.triton.launch import write_launch

RECORD = '#!/usr/bin/env bash\nprintf "%s\\n" "$(basename "$0")" "$PWD" "$@" >"$RECORD"\n'
IMAGE = "nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3"


def write_tools(folder: Path, **tools: str) -> Path:
    folder.mkdir()
    for name, text in tools.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def tools(version: str = "1.2.1", gpus: int = 2) -> dict[str, str]:
    listed = "".join(f"GPU {index}: NVIDIA H100\\n" for index in range(gpus))
    return {
        "tritonserver": RECORD,
        "mpirun": RECORD,
        "python3": f"#!/bin/sh\necho {version}\n",
        "nvidia-smi": f"#!/bin/sh\nprintf '{listed}'\n",
    }


def launch(folder: Path, given: dict[str, str], *arguments: str, ranks: int = 1, **environment: str) -> list[str]:
    """The command that was run at last; the folder that it was run in is its second word."""
    package = folder / "the package"
    package.mkdir()
    body = MODEL_REPO / "launch" / "tensorrtllm.sh"
    script = write_launch(package, body, ranks=ranks, tensorrt_llm="1.2.1", image=IMAGE)
    path = f"{write_tools(folder / 'bin', **given)}:/usr/bin:/bin"
    record = folder / "record"
    subprocess.run(
        [str(script), *arguments],
        env={"PATH": path, "RECORD": str(record), **environment},
        check=True,
        capture_output=True,
        text=True,
        cwd="/",
    )
    return record.read_text().splitlines()


def test_one_rank_is_one_server(tmp_path: Path) -> None:
    name, place, *options = launch(tmp_path, tools(), "--log-verbose=1")
    assert (name, place) == ("tritonserver", str(tmp_path / "the package"))
    assert f"--model-repository={tmp_path / 'the package'}/model_repository" in options
    assert {"--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1"} <= set(options)
    assert "--disable-auto-complete-config" in options
    assert "--log-verbose=1" in options
    assert not [option for option in options if "model-control-mode" in option]  # nobody may load models


def test_what_touches_the_host_needs_a_key(tmp_path: Path) -> None:
    options = launch(tmp_path, tools(), TRITON_KEY="secret")
    guarded = "model-repository,shared-memory,trace,logging:trtseek-key=secret"
    assert f"--http-restricted-api={guarded}" in options
    assert f"--grpc-restricted-protocol={guarded}" in options


def test_without_a_key_nobody_knows_it(tmp_path: Path) -> None:
    (option,) = [o for o in launch(tmp_path, tools()) if o.startswith("--http-restricted-api=")]
    assert len(option.rpartition("=")[2]) == 32


def test_each_rank_is_a_process_of_mpi(tmp_path: Path) -> None:
    name, _, *words = launch(tmp_path, tools(), ranks=2, HTTP_PORT="9000", ADDRESS="0.0.0.0")
    assert name == "mpirun"
    words = [word for word in words if word != "--allow-run-as-root"]
    first, second = words[: words.index(":")], words[words.index(":") + 1 :]
    for rank, command in enumerate((first, second)):
        assert command[:3] == ["-n", "1", "tritonserver"]
        assert f"--backend-config=python,shm-region-prefix-name=rank{rank}_" in command
        assert {"--http-port=9000", "--http-address=0.0.0.0"} <= set(command)
    followers = {"--model-control-mode=explicit", "--load-model=tensorrt_llm"}
    assert followers <= set(second)
    assert not followers & set(first)


@pytest.mark.parametrize(
    ("given", "ranks", "message"),
    [
        ({**tools(), "python3": "#!/bin/sh\nexit 1\n"}, 1, "TensorRT-LLM is not installed here"),
        (tools(version="1.1.0"), 1, "TensorRT-LLM 1.1.0 is installed, and the engine is of 1.2.1"),
        (tools(gpus=1), 2, "the engine has 2 rank(s), and 1 GPU(s) are visible"),
        ({name: text for name, text in tools().items() if name != "tritonserver"}, 1, "there is no tritonserver here"),
        ({name: text for name, text in tools().items() if name != "mpirun"}, 2, "there is no mpirun here"),
    ],
)
def test_another_machine_is_refused(tmp_path: Path, given: dict[str, str], ranks: int, message: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        launch(tmp_path, given, ranks=ranks)
    assert caught.value.returncode == 1
    assert caught.value.stderr.startswith(f"launch.sh: {message}")
    assert os.linesep not in caught.value.stderr.strip()


def launch_llmapi(folder: Path, *, gpus: int = 1, ranks: int = 1, **environment: str) -> list[str]:
    """The same for flavour llmapi, whose Triton model the image brings."""
    package, image = folder / "the package", folder / "image"
    (package / "model_repository" / "tensorrt_llm" / "1").mkdir(parents=True)
    (package / "model_repository" / "tensorrt_llm" / "1" / "model.yaml").write_text("model: ours\n")
    (image / "tensorrt_llm" / "1").mkdir(parents=True)
    for name in ("model.py", "model.yaml"):
        (image / "tensorrt_llm" / "1" / name).write_text("theirs\n")
    script = write_launch(package, MODEL_REPO / "launch" / "llmapi.sh", ranks=ranks)
    given = tools(gpus=gpus)
    # What the server sees is gone when it has ended.
    given["tritonserver"] += 'cat "${1#--model-repository=}"/tensorrt_llm/1/model.* >>"$RECORD"\nexit 3\n'
    result = subprocess.run(
        [str(script)],
        env={
            "PATH": f"{write_tools(folder / 'bin', **given)}:/usr/bin:/bin",
            "RECORD": str(folder / "record"),
            "MODELS": str(image),
            "TMPDIR": str(folder),
            **environment,
        },
        capture_output=True,
        text=True,
        cwd="/",
    )
    assert result.returncode == (3 if (folder / "record").exists() else 1)
    return (folder / "record").read_text().splitlines() if (folder / "record").exists() else [result.stderr]


def test_the_llm_apis_model_is_the_images_own_and_what_it_is_told_ours(tmp_path: Path) -> None:
    name, place, *options = launch_llmapi(tmp_path)
    assert (name, place) == ("tritonserver", str(tmp_path / "the package"))
    assert options[-2:] == ["theirs", "model: ours"]
    assert "--disable-auto-complete-config" not in options  # its model completes its own
    assert not list(tmp_path.glob("tmp.*"))


def test_too_few_gpus_for_the_llm_api(tmp_path: Path) -> None:
    (message,) = launch_llmapi(tmp_path, gpus=1, ranks=2)
    assert message == "launch.sh: 2 GPU(s) are asked for, and 1 are visible (docker run --gpus all)\n"


def test_an_image_without_the_llm_api(tmp_path: Path) -> None:
    (message,) = launch_llmapi(tmp_path, MODELS=str(tmp_path / "nothing"))
    assert "nothing holds no model tensorrt_llm: set MODELS" in message
