"""Opening checkpoint folders: what is read, and how damaged ones are refused."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.strict_json import read_json
from pipeline.errors import CheckpointError
from tests import fixtures

INDEX = "model.safetensors.index.json"
SHARD = "model-00002-of-000003.safetensors"


@pytest.fixture
def path(tmp_path: Path, llama_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(llama_path, tmp_path / "copy"))


def edit_json(file: Path, change: Callable[[Any], None]) -> None:
    value = json.loads(file.read_text())
    change(value)
    file.write_text(json.dumps(value))


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        CheckpointFolder.open(path)
    assert caught.value.hint
    return caught.value


def test_reads_every_tensor_of_every_shard(llama_path: Path) -> None:
    folder = CheckpointFolder.open(llama_path)
    expected = {name: t for file in llama_path.glob("*.safetensors") for name, t in load_file(file).items()}
    assert folder.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(folder.read(name).to_torch(), tensor)
        assert name in load_file(folder.file_of(name))
    assert folder.architecture.rope.kind == "linear"
    assert {file.name for file in folder.files} == {file.name for file in llama_path.iterdir()}
    assert [file.name for file in folder.tokenizer_files] == ["tokenizer.json", "tokenizer_config.json"]
    with pytest.raises(CheckpointError, match="no tensor nonsense"):
        folder.read("nonsense")


def test_single_file_and_links_as_in_the_hubs_cache(tmp_path: Path) -> None:
    real = fixtures.llama(tmp_path / "blobs", shards=1)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in real.iterdir():
        (snapshot / file.name).symlink_to(f"../blobs/{file.name}")
    assert CheckpointFolder.open(snapshot).tensors.keys() == CheckpointFolder.open(real).tensors.keys()


def test_custom_code_is_never_executed(deepseek_v2_path: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(deepseek_v2_path, tmp_path / "copy"))
    (path / "modeling_deepseek.py").write_text("raise SystemExit('executed')")
    folder = CheckpointFolder.open(path)
    assert "auto_map" in folder.config
    assert path / "modeling_deepseek.py" not in folder.files


def test_missing_shard_is_named_with_its_tensor_count(path: Path) -> None:
    held = len(load_file(path / SHARD))
    (path / SHARD).unlink()
    error = refusal(path)
    assert f"{SHARD} is missing; it holds {held} of the model's tensors" in error.message
    (path / "model-00003-of-000003.safetensors").unlink()
    assert "and 1 more of 3 shards" in refusal(path).message


def test_broken_link_and_pipe_are_refused(path: Path) -> None:
    (path / SHARD).unlink()
    (path / SHARD).symlink_to("nowhere")
    assert "broken link" in refusal(path).message
    (path / SHARD).unlink()
    os.mkfifo(path / SHARD)
    assert "no regular file" in refusal(path).message


def test_truncated_shard_is_named(path: Path) -> None:
    content = (path / SHARD).read_bytes()
    (path / SHARD).write_bytes(content[:-100])
    error = refusal(path)
    assert SHARD in error.message and "follow the header" in error.message


def test_lying_header_is_named(path: Path) -> None:
    content = (path / SHARD).read_bytes()
    assert b'"shape":[128,128]' in content
    (path / SHARD).write_bytes(content.replace(b'"shape":[128,128]', b'"shape":[128,129]', 1))
    error = refusal(path)
    assert SHARD in error.message and "[128, 129]" in error.message


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "a\\b.safetensors", 7, None, ["x"]]
)
def test_index_may_not_lead_out_of_the_folder(name: Any, path: Path) -> None:
    edit_json(path / INDEX, lambda index: index["weight_map"].update({"lm_head.weight": name}))
    error = refusal(path)
    assert INDEX in error.message and "lm_head.weight" in error.message


def test_index_and_headers_must_agree(path: Path) -> None:
    first = "model-00001-of-000003.safetensors"
    original = (path / INDEX).read_text()
    edit_json(path / INDEX, lambda index: index["weight_map"].update({"lm_head.weight": first}))
    assert f"{first} does not hold lm_head.weight" in refusal(path).message
    (path / INDEX).write_text(original)
    edit_json(path / INDEX, lambda index: index["weight_map"].pop("model.embed_tokens.weight"))
    assert f"{first} holds model.embed_tokens.weight" in refusal(path).message


@pytest.mark.parametrize("value", [{}, {"weight_map": {}}, {"weight_map": []}])
def test_index_without_a_map_is_refused(value: Any, path: Path) -> None:
    (path / INDEX).write_text(json.dumps(value))
    assert "weight_map" in refusal(path).message


def test_two_models_in_one_folder_are_refused(path: Path) -> None:
    save_file({"a": torch.ones(1)}, path / "model.safetensors")
    assert "both model.safetensors and" in refusal(path).message


def test_shards_without_an_index_are_refused(path: Path) -> None:
    (path / INDEX).unlink()
    assert f"neither {INDEX} nor" in refusal(path).message


def test_pickles_are_refused_unread(path: Path, tmp_path: Path) -> None:
    edit_json(path / INDEX, lambda index: index["weight_map"].update({"lm_head.weight": "pytorch_model.bin"}))
    assert "a pickle" in refusal(path).message
    only = tmp_path / "only"
    only.mkdir()
    (only / "config.json").write_text("{}")
    (only / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/executed'\ntR.")
    error = refusal(only)
    assert "pickles only (pytorch_model.bin)" in error.message
    assert "safetensors" in error.hint


def test_empty_and_missing_folders_are_refused(tmp_path: Path) -> None:
    assert "no safetensors" in refusal(tmp_path).message
    assert "no such folder" in refusal(tmp_path / "none").message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"a": 1,}', "line 1 column 9"),
        (b'{"a": 1, "a": 2}', "'a' appears twice"),
        (b"\xff\xfe", "utf-8"),
        (b"[1]", "not a JSON object"),
        (b'{"a": Infinity}', "Infinity"),
    ],
)
def test_bad_config_names_file_and_place(content: bytes, expected: str, path: Path) -> None:
    (path / "config.json").write_bytes(content)
    error = refusal(path)
    assert str(path / "config.json") in error.message and expected in error.message


def test_config_must_exist_and_be_of_a_known_architecture(path: Path) -> None:
    edit_json(path / "config.json", lambda config: config.update(architectures=["GPT5ForCausalLM"]))
    error = refusal(path)
    assert "GPT5ForCausalLM is not supported" in error.message and "LlamaForCausalLM" in error.hint
    (path / "config.json").unlink()
    assert "config.json is missing" in refusal(path).message


def test_read_json_refuses_huge_files(tmp_path: Path) -> None:
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate(300 << 20)
    with pytest.raises(CheckpointError, match="too many"):
        read_json(tmp_path / "config.json")
