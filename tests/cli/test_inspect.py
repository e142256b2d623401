import json
from pathlib import Path

import pytest

from pipeline.cli.inspection import InspectionError
from pipeline.errors import BuildError

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
