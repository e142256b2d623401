import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.cli.inspection import InspectionError
from pipeline.engine.description import KernelDescription, PluginDescription
from pipeline.errors import BuildError, CheckpointError
from pipeline.exports.formats import export_checkpoint
from pipeline.network.spec import Lowering, NetworkSpec
from tests.checkpoint.foreign.cases import write
from tests.engine.tensorrt_llm import rank_cases
from tests.exports.support import convert
from tests.triton.emission import describe_engine

REPOSITORY = Path(__file__).parents[2] / "model_repo"


def read(invoke, path):
    return json.loads(invoke("inspect", str(path), "--json").stdout)


def test_checkpoint(invoke, deepseek_v2_path):
    document = read(invoke, deepseek_v2_path)
    config = json.loads((deepseek_v2_path / "config.json").read_text())
    assert document["kind"] == "Hugging Face checkpoint"
    assert document["routed_experts"] == config["n_routed_experts"]
    assert document["latent_width"] == config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert document["rope"]["factor"] == config["rope_scaling"]["factor"]
    index = json.loads((deepseek_v2_path / "model.safetensors.index.json").read_text())
    assert sum(row["count"] for row in document["tensors"]) == len(index["weight_map"])
    assert document["bytes"] == index["metadata"]["total_size"]


def test_what_another_tool_quantized_is_said_to_be(invoke, tmp_path):
    awq = read(invoke, write("awq", tmp_path / "awq"))["quantization"]
    assert (awq["quant_method"], awq["bits"], awq["group_size"]) == ("awq", 4, 64)
    path = write("modelopt-fp8", tmp_path / "fp8")
    config = json.loads((path / "config.json").read_text())
    config.pop("quantization_config", None)  # then hf_quant_config.json alone says so
    (path / "config.json").write_text(json.dumps(config))
    found = read(invoke, path)["quantization"]
    assert (found["quant_method"], found["quant_algo"]) == ("modelopt", "FP8")


def test_text_says_the_same(invoke, llama_path):
    lines = invoke("inspect", str(llama_path)).stdout.splitlines()
    assert ["architecture", "LlamaForCausalLM"] in [line.split() for line in lines]
    assert lines[lines.index("rope") + 1].split() == ["kind", "linear"]
    assert not any(line != line.rstrip() for line in lines)


def test_repository(invoke):
    document = read(invoke, REPOSITORY)
    assert document["kind"] == "Triton model repository"
    assert {model["name"]: model["backend"] for model in document["models"]}["tensorrt_llm"] == "trtseek"
    assert "input_ids" in next(m for m in document["models"] if m["name"] == "tensorrt_llm")["inputs"]
    assert " more" in invoke("inspect", str(REPOSITORY)).stdout  # long lists are cut for people, not for programs


def test_stage_output(workplace, toy_stages, invoke):
    invoke("engine", "small")
    document = read(invoke, "out/small/package")
    assert document["artifact"]["stage"] == "package"
    assert document["artifact"]["files"] == 1


def test_nothing_known(invoke, tmp_path):
    with pytest.raises(InspectionError, match="nothing that inspect knows"):
        invoke("inspect", str(tmp_path))
    with pytest.raises(InspectionError, match="no such file"):
        invoke("inspect", str(tmp_path / "x"))


def test_damaged_description_beside_an_engine(invoke, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.engine.engine_file.inspect_engine", lambda file: None)
    (tmp_path / "model.engine").write_bytes(b"vtrt")
    (tmp_path / "engine.json").write_text('{"a')
    with pytest.raises(BuildError, match=r"engine.json: not JSON"):
        invoke("inspect", str(tmp_path))


def describe_plugins(passed):
    kernel = {"source": "blake3:x", "threads": 128, "registers": 9, "spills": 0, "shared": 0}
    kernels = [
        KernelDescription(function=function, sm=80, passed=passed, **kernel)
        for function in ("attend", "attend", "combine")
    ]
    plugin = PluginDescription(operation="paged_latent_attention", layers=2, kernels=tuple(kernels))
    lowering = Lowering(paged_attention="plugin", moe_experts="plugin")
    spec = NetworkSpec(dtype="float16", max_seq_len=256, lowering=lowering)
    return describe_engine(sm=86, spec=spec, plugins=(plugin,))


@pytest.mark.parametrize("run", ["NVIDIA A10, 2026-12-01", None])
def test_what_plugins_an_engine_has_and_whether_they_have_run(invoke, tmp_path, run):
    (tmp_path / "engine.json").write_text(describe_plugins(run).to_json())
    document = read(invoke, tmp_path / "engine.json")
    assert (document["kind"], document["targets"], document["see"]) == ("description of an engine", ["SM86"], None)
    assert document["lowering"] == {
        "rope_paged_kv": "native",
        "paged_attention": "plugin",
        "moe_all_to_all": "native",
        "moe_experts": "plugin, of which no layer has need",
    }
    usual = {"lowering": "paged_attention", "operation": "paged_latent_attention", "compiled_for": "SM80"}
    assert document["plugin_kernels"] == [
        {**usual, "kernel": "attend", "variants": 2, "passed": run is not None, "run": run},
        {**usual, "kernel": "combine", "variants": 1, "passed": run is not None, "run": run},
    ]
    lines = [line.split() for line in invoke("inspect", str(tmp_path / "engine.json")).stdout.splitlines()]
    told = ["yes", *run.split()] if run else ["no", "-"]
    assert ["paged_attention", "paged_latent_attention", "attend", "2", "SM80", *told] in lines


def test_the_plugins_of_all_ranks_are_told_once(invoke, tmp_path):
    first = describe_plugins("NVIDIA A10, 2026-12-01")
    ranks = tuple(describe_plugins(None) for _ in range(2))
    (tmp_path / "engine.json").write_text(replace(first, ranks=ranks).to_json())
    document = read(invoke, tmp_path / "engine.json")
    assert document["kind"] == "description of 3 engines" and len(document["engines"]) == 3
    assert [(row["kernel"], row["variants"], row["passed"]) for row in document["plugin_kernels"]] == [
        ("attend", 2, True),
        ("combine", 1, True),
        ("attend", 2, False),
        ("combine", 1, False),
    ]


def test_run_folder(workplace, toy_stages, invoke):
    import shutil

    invoke("engine", "small")
    document = read(invoke, "out/small")
    assert (document["kind"], document["name"]) == ("run", "small")
    first, second = document["stages"]
    assert (first["stage"], first["state"], first["files"]) == ("convert", "made", 1)
    assert first["bytes"] == (workplace / "out/small/convert/one.txt").stat().st_size
    assert second["path"] == "out/small/package"
    shutil.rmtree((workplace / "out/small/convert").resolve())
    assert read(invoke, "out/small")["stages"][0]["state"] == "no longer in the store"
    for path in ("out/small/convert", "out/small/convert/one.txt"):
        with pytest.raises(InspectionError, match=r"out/small/convert is a link .* no longer in the store"):
            invoke("inspect", path)


def test_safetensors_file(invoke, deepseek_v2_path):
    from safetensors import safe_open

    file = min(deepseek_v2_path.glob("*.safetensors"))
    document = read(invoke, file)
    with safe_open(file, "np") as reference:
        names = list(reference.keys())
        assert document["metadata"] == reference.metadata()
    assert sum(row["count"] for row in document["tensors"]) == len(names)
    assert {row["name"] for row in document["largest"]} <= set(names)


def test_other_files(invoke, deepseek_v2_path, tmp_path):
    document = read(invoke, deepseek_v2_path / "config.json")
    assert document["kind"] == "JSON file" and "rope_scaling" in document["keys"]
    assert document["see"] == f"trtseek inspect {deepseek_v2_path}"
    for name, content, problem, hint in (
        ("a.yaml", b"extends: b", "is a config", "trtseek validate"),
        ("a.json", b'{"a', "not valid JSON", "damaged"),
        ("a.txt", b"text", "of no kind that inspect knows", "a checkpoint's folder"),
        ("empty", b"", "of no kind that inspect knows", "a checkpoint's folder"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InspectionError, match=problem) as caught:
            invoke("inspect", str(tmp_path / name))
        assert hint in caught.value.hint
        assert caught.value.exit_code == 1
    (tmp_path / "renamed").write_bytes(b"vtrt" + bytes(60))  # an engine's first bytes, under another name
    with pytest.raises(BuildError, match="renamed"):
        invoke("inspect", str(tmp_path / "renamed"))


@pytest.mark.parametrize(("name", "text"), [("config.json", '{"a'), ("config.json", "[]")])
def test_broken_config_of_a_checkpoint(invoke, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=r"config.json(: not valid JSON| is not a JSON object)"):
        invoke("inspect", str(tmp_path))


def test_weights_without_config(invoke, tmp_path, llama_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        invoke("inspect", str(tmp_path))


def test_rank_checkpoints(invoke, tmp_path):
    engine = rank_cases.make_engine(tmp_path, "llama", "fp8")
    ranks = tmp_path / "ranks"
    rank_cases.write(engine, ranks, tensor=2)
    document = read(invoke, ranks)
    assert (document["kind"], document["architecture"]) == ("TensorRT-LLM rank checkpoints", "LlamaForCausalLM")
    assert document["quantization"]["quant_algo"] == "FP8" and document["mapping"]["tp_size"] == 2
    assert [row["rank"] for row in document["ranks"]] == ["rank0.safetensors", "rank1.safetensors"]
    assert sum(row["tensors"] for row in document["ranks"]) == sum(row["count"] for row in document["tensors"])
    assert document["problems"] == []
    (ranks / "rank1.safetensors").unlink()
    assert read(invoke, ranks)["problems"] == ["rank1.safetensors is missing"]
    config = json.loads((ranks / "config.json").read_text())
    (ranks / "config.json").write_text(json.dumps(config | {"mapping": {"world_size": 10**40}}))
    assert "no number of ranks" in read(invoke, ranks)["problems"][0]


def test_gguf(invoke, tmp_path):
    engine = convert("llama", tmp_path)
    export_checkpoint(engine, tmp_path / "gguf", "gguf")
    document = read(invoke, tmp_path / "gguf/model.gguf")
    config = json.loads((engine.path / "config.json").read_text())
    assert (document["kind"], document["architecture"]) == ("GGUF file", "llama")
    assert document["layers"] == config["num_hidden_layers"] and document["hidden_size"] == config["hidden_size"]
    assert document["vocabulary"] == config["vocab_size"]
    assert sum(row["count"] for row in document["tensors"]) > 9 * document["layers"]
    assert read(invoke, tmp_path / "gguf") == document
    (engine.path / "beside.gguf").write_bytes((tmp_path / "gguf/model.gguf").read_bytes())
    assert read(invoke, engine.path)["kind"] != "GGUF file"  # a checkpoint's folder is that first
