"""trtseek engine where the engine is built elsewhere, or there is none: the stages' own work, verify's aside."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from pipeline.errors import BuildError, ConfigError, PackageError, PendingError
from pipeline.stages.graph import load_stages
from pipeline.triton.errors import ServerError
from tests.engine.tensorrt_llm.gpu_host import make_host


@pytest.fixture
def stages(monkeypatch):
    """The real ones, with nothing proved; `package` is another module's business."""

    def prove(context):
        (context.workspace.path / "network.json").write_text('{"network_digest": "blake3:proved"}')

    def verify(context):
        (context.workspace.path / "verify.json").write_text('{"network_digest": "blake3:proved", "gates": []}')

    short = [
        replace(stage, run={"prove": prove, "verify": verify}.get(stage.name, stage.run)) for stage in load_stages()
    ]
    monkeypatch.setattr("pipeline.stages.graph.load_stages", lambda: tuple(short))
    monkeypatch.setattr("pipeline.cli.engine.report_run", lambda config: None)
    monkeypatch.setattr("pipeline.engine.tensorrt_llm.builder.list_device_sms", list)


@pytest.fixture
def workplace(workplace):
    text = (workplace / "configs/small.yaml").read_text().replace("gpu: RTX 4090", "gpu: H100, backend: tensorrt_llm")
    text = text.replace("quantize: {group_size: 32, ", "quantize: {method: none, ")
    (workplace / "configs/small.yaml").write_text(text)
    return workplace


def test_a_job_where_no_engine_can_be_built(workplace, stages, invoke):
    result = invoke("engine", "small")
    assert result.return_value == PendingError.exit_code == 12
    lines = result.stdout.splitlines()
    assert lines[:5] == [f"{name.ljust(7)}  out/small/{name}" for name in ("convert", "prove", "verify", "job")] + [""]
    assert lines[5].startswith("Nothing failed: the engine is not built yet: this host has not trtllm-build")
    for wanted in (
        "rsync -rL --chmod=u+w out/small/job/ HOST:small-job/",
        "./build.sh engine'",
        "--resume small-engine",
    ):
        assert any(wanted in line for line in lines), wanted
    assert "build: waiting" in result.stderr
    assert not (workplace / "out/small/build").exists() and not (workplace / "out/small/build.failed").exists()
    status = {
        stage["stage"]: stage["state"] for stage in json.loads(invoke("status", "small", "--json").stdout)["stages"]
    }
    assert (status["job"], status["build"]) == ("cached", "waiting")
    plan = invoke("plan", "small").stdout
    assert any(line.split()[:3] == ["build", "will", "run"] and "waits for" in line for line in plan.splitlines())


def test_the_same_inputs_give_the_same_job(workplace, stages, invoke):
    for output in ("one", "two"):
        invoke("engine", "small", "--until", "job", "--set", f"output={output}")

    def read(output):
        job = (workplace / output / "small/job").resolve()
        files = [path for path in job.rglob("*") if path.is_file() and path.name != "artifact.json"]
        return {path.relative_to(job): path.read_bytes() for path in files}

    assert read("one") == read("two") != {}
    content = [json.loads((workplace / o / "small/job/artifact.json").read_text())["content"] for o in ("one", "two")]
    assert content[0] == content[1]


def test_limits_change_the_job_and_nothing_before_it(workplace, stages, invoke):
    invoke("engine", "small", "--until", "job")
    rows = json.loads(invoke("plan", "small", "--json", "--set", "stages.build.max_batch_size=4").stdout)["stages"]
    states = {row["stage"]: row["state"] for row in rows}
    assert (states["convert"], states["verify"], states["job"]) == ("cached", "cached", "run")
    rows = json.loads(invoke("plan", "small", "--json", "--set", "stages.package.enable_kv_cache_reuse=false").stdout)
    assert {row["stage"]: row["state"] for row in rows["stages"]}["job"] == "cached"


def test_there_and_back(workplace, stages, invoke):
    invoke("engine", "small", "--until", "job")
    host = make_host(workplace / "host")
    done = host.run(workplace / "out/small/job", "small-engine", workplace)
    assert done.returncode == 0, done.stderr
    result = invoke("engine", "small", "--until", "build", "--resume", "small-engine")
    assert "build: runs: --resume" in result.stderr
    assert result.stdout.splitlines()[-1] == "build    out/small/build"
    record = json.loads((workplace / "out/small/build/tensorrt_llm.json").read_text())
    assert (record["version"], record["sm"], record["network_digest"]) == ("1.2.1", 90, "blake3:proved")
    assert (workplace / "out/small/build/engine/rank0.engine").is_file()
    # From here on it is made: the same command, without the folder, goes on.
    again = invoke("engine", "small", "--until", "build")
    assert "build: cached" in again.stderr and again.return_value is None
    for folder in ("small-engine", "out/small/build"):
        found = json.loads(invoke("inspect", folder, "--json").stdout)
        assert (found["kind"], found["version"], found["built_on"]) == ("TensorRT-LLM engine", "1.2.1", "SM90")
        assert found["triton_images"] == ["26.04", "26.05", "26.06", "26.07"] and found["problems"] == []
        assert found["limits"]["max_batch_size"] == 2 and found["mapping"]["tp_size"] == 1
    assert "are both of TensorRT-LLM 1.2.1" in found["verdict"]
    job = json.loads(invoke("inspect", "out/small/job", "--json").stdout)
    assert job["kind"].startswith("job that builds") and "--max_batch_size 2" in job["arguments"]
    (workplace / "small-engine/rank0.engine").write_bytes(b"")
    assert json.loads(invoke("inspect", "small-engine", "--json").stdout)["problems"] == ["rank0.engine is empty"]


def test_an_engine_of_other_limits_is_refused_and_nothing_is_kept(workplace, stages, invoke):
    invoke("engine", "small", "--until", "job")
    done = make_host(workplace / "host").run(workplace / "out/small/job", "small-engine", workplace)
    assert done.returncode == 0, done.stderr
    options = ("--until", "build", "--resume", "small-engine", "--set", "stages.build.max_batch_size=4")
    with pytest.raises(BuildError) as caught:
        invoke("engine", "small", *options)
    assert "build_config.max_batch_size is 2, asked for 4" in caught.value.message
    assert "the receipt is of another job" in caught.value.message
    assert not (workplace / "out/small/build").exists()


def test_built_here_where_it_can_be(workplace, stages, invoke, monkeypatch):
    host = make_host(workplace / "host")
    monkeypatch.setenv("PATH", f"{host.bin}:{host.container}:{os.environ['PATH']}")
    monkeypatch.setattr("pipeline.engine.tensorrt_llm.builder.list_device_sms", lambda: [90])
    result = invoke("engine", "small", "--until", "build")
    assert (workplace / "out/small/build/engine/build.log").is_file()
    assert "build: made in" in result.stderr


def test_the_way_on_is_that_of_the_same_config(workplace, stages, invoke):
    result = invoke("engine", "small", "--set", "output=my out", "--set", "stages.build.max_batch_size=1")
    assert (
        "engine small '--set=output=my out' --set=stages.build.max_batch_size=1 --resume small-engine" in result.stdout
    )


def test_resume_beyond_the_stages_that_run(workplace, stages, invoke):
    with pytest.raises(ConfigError, match="--resume: build is outside of what --from and --until leave to run"):
        invoke("engine", "small", "--until", "job", "--resume", "small-engine")


def test_resume_is_for_this_backend(workplace, stages, invoke):
    import click

    with pytest.raises(click.UsageError, match="takes engines of backend tensorrt_llm, and this is llmapi"):
        invoke("engine", "small", "--set", "target.backend=llmapi", "--resume", "small-engine")
    with pytest.raises(BuildError, match="there is no such folder"):
        invoke("engine", "small", "--until", "build", "--resume", "nowhere")


def test_llmapi_has_a_checkpoint_for_an_engine(workplace, stages, invoke):
    invoke("engine", "small", "--until", "build", "--set", "target.backend=llmapi")
    folder = workplace / "out/small/build/checkpoint"
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert not (folder / "hf_quant_config.json").exists()
    options = ("--set", "stages.quantize.method=rtn", "--set", "stages.quantize.group_size=32")
    invoke("engine", "small", "--until", "build", "--set", "target.backend=llmapi", *options)
    assert json.loads((folder / "hf_quant_config.json").read_text())["quantization"]["quant_algo"] == "W4A16_AWQ"


@pytest.fixture
def engine_back(workplace, stages, invoke):
    """The engine that the job asks for, back from the host that built it."""
    invoke("engine", "small", "--until", "job")
    done = make_host(workplace / "host").run(workplace / "out/small/job", "small-engine", workplace)
    assert done.returncode == 0, done.stderr
    return "small-engine"


def test_a_package_for_nvidias_image(workplace, engine_back, invoke):
    invoke("engine", "small", "--resume", engine_back, "--set", "stages.package.check=never")
    package = workplace / "out/small/package"
    manifest = json.loads((package / "manifest.json").read_text())
    assert (manifest["target"]["backend"], manifest["target"]["backend_version"]) == ("tensorrt_llm", "1.2.1")
    assert (manifest["target"]["sm"], manifest["network_digest"]) == (90, "blake3:proved")
    assert {"launch.sh", "model_repository/tensorrt_llm/config.pbtxt"} <= manifest["files"].keys()
    assert not (package / "backends").exists()
    with pytest.raises(ServerError, match=r"launch\.sh there, or rehearse it here"):
        invoke("serve", "small", "--check")
    found = json.loads(invoke("inspect", "out/small/package", "--json").stdout)
    assert {model["name"]: model["backend"] for model in found["models"]}["tensorrt_llm"] == "tensorrtllm"
    assert found["problems"] == []


@pytest.mark.slow  # starts two servers; tests/triton/tensorrtllm/test_rehearsal.py rehearses in every run
def test_it_is_rehearsed_here(workplace, engine_back, invoke):
    """From the engine that came back to a package that a real tritonserver has answered from."""
    result = invoke("engine", "small", "--resume", engine_back)
    assert "rehearsed in Triton, the interpreter in the engine's place" in result.stderr
    assert "a request answered in" in invoke("serve", "small", "--check", "--rehearse").stdout


def test_a_package_for_the_llm_api(workplace, stages, invoke):
    result = invoke("engine", "small", "--set", "target.backend=llmapi")
    assert "not loaded in a server: NVIDIA's Triton model of the LLM API is in its image alone" in result.stderr
    package = workplace / "out/small/package"
    manifest = json.loads((package / "manifest.json").read_text())
    assert (manifest["target"]["backend"], manifest["engine_digest"]) == ("llmapi", None)
    assert {"launch.sh", "model_repository/tensorrt_llm/1/model.yaml"} <= manifest["files"].keys()
    with pytest.raises(PackageError, match="for TensorRT-LLM's LLM API, whose Triton model is in NVIDIA's image alone"):
        invoke("serve", "small", "--check", "--set", "target.backend=llmapi")
    assert "model.yaml" in invoke("inspect", "out/small/package").stdout
