import json

import pytest

from pipeline.errors import CheckpointError, CompatibilityError, ConfigError


def test_valid(workplace, invoke):
    first, *notes = invoke("validate", "small.yaml").stdout.splitlines()
    assert first.startswith("small: valid. ")
    assert "LlamaForCausalLM" in first
    assert all(line.startswith("  note: ") for line in notes)


def test_json(workplace, invoke, llama_path):
    document = json.loads(invoke("validate", "small", "--json").stdout)
    assert document["config"]["stages"]["build"]["max_seq_len"] == 128
    config = json.loads((llama_path / "config.json").read_text())
    assert document["model"]["layers"] == config["num_hidden_layers"]
    files = sum(path.stat().st_size for path in llama_path.glob("*.safetensors"))
    assert 0.9 * files < document["model"]["bytes"] < files  # all but the headers


def test_problems_name_their_place(workplace, invoke):
    with pytest.raises(ConfigError, match=r"small.yaml:4: stages.quantize.group_size"):
        (workplace / "configs" / "small.yaml").write_text(
            (workplace / "configs" / "small.yaml").read_text().replace("group_size: 32", "group_size: 33")
        )
        invoke("validate", "small")
    with pytest.raises(CheckpointError, match="elsewhere"):
        invoke("validate", "small", "--set", "stages.quantize.group_size=32", "--set", "model.path=elsewhere")
    with pytest.raises(CompatibilityError, match="SM90"):
        invoke("validate", "small", "--set", "stages.quantize.group_size=32", "--set", "target.gpu=H100")
    assert not (workplace / "out").exists()


def test_is_quick(workplace, cpu_seconds):
    # Wider than the half second that benchmarks/commands.py holds it to: tests run beside other tests.
    assert cpu_seconds("-m", "pipeline.cli.main", "validate", "small") < 0.8
