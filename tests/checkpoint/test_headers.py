import json
import re

import pytest

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.headers import check_headers
from pipeline.errors import CheckpointError
from tests import fixtures
from tests.checkpoint.foreign.cases import write


def refuse(path, **config):
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(CheckpointError) as caught:
        check_headers(CheckpointFolder.open(path))
    return caught.value


def test_a_model_and_its_own_config_agree(llama_path, deepseek_v2_path, tmp_path):
    for path in (llama_path, deepseek_v2_path, fixtures.deepseek_v3(tmp_path, fp8=True, tokenizer=True)):
        check_headers(CheckpointFolder.open(path))


def test_another_models_config(tmp_path):
    path = fixtures.llama(tmp_path, tokenizer=True)
    config = json.loads((path / "config.json").read_text())
    layers, width = config["num_hidden_layers"], config["intermediate_size"]
    assert f"model.layers.{layers}." in str(refuse(path, num_hidden_layers=layers + 1))
    assert f"model.layers.{layers - 1}." in str(refuse(path, num_hidden_layers=layers - 1))
    assert f"[{2 * width}, " in str(refuse(path, num_hidden_layers=layers, intermediate_size=2 * width))


def test_plain_weights_that_are_said_to_be_fp8(tmp_path):
    path = fixtures.deepseek_v3(tmp_path, tokenizer=True)
    message = str(refuse(path, quantization_config=fixtures.FP8_CONFIG))
    shard, tensor = re.match(r"(\S+\.safetensors): (\S+) is BF16", message).groups()
    assert tensor in CheckpointFolder.open(path).tensors
    assert json.loads((path / "model.safetensors.index.json").read_text())["weight_map"][tensor] in shard
    assert "gptq" in str(refuse(path, quantization_config={"quant_method": "gptq"}))
    kept = fixtures.FP8_CONFIG | {"modules_to_not_convert": ["self_attn", "mlp"]}
    (path / "config.json").write_text(
        json.dumps(json.loads((path / "config.json").read_text()) | {"quantization_config": kept})
    )
    check_headers(CheckpointFolder.open(path))


def test_no_tokenizer(tmp_path):
    assert "tokenizer.json is missing" in str(refuse(fixtures.llama(tmp_path)))


def test_a_quantization_that_nobody_reads_is_named_before_its_weights_are_missed(tmp_path):
    path = write("awq", tmp_path)
    error = refuse(path, quantization_config={"quant_method": "bitsandbytes"})
    assert "quantization_config says that the weights are quantized (bitsandbytes)" in error.message
    error = refuse(path, quantization_config=None)
    assert re.search(r"has no quantization_config, and .*\.qweight is of a quantized model", error.message)
