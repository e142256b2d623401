"""What was checked is recognised; what changed is checked anew."""

import json
import os
import shutil

import pytest

from pipeline.checkpoint.checked_headers import read_checked, remember
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.config.compatibility import check_compatibility
from pipeline.config.schema import Config
from pipeline.errors import CheckpointError
from pipeline.stages.forecast import forecast
from tests import fixtures


def age(path):
    """Older than any tick of a clock: what is young is not remembered."""
    for file in path.iterdir():
        os.utime(file, (1e9, 1e9))


@pytest.fixture
def model(tmp_path):
    path = fixtures.deepseek_v3(tmp_path / "model", fp8=True, tokenizer=True)
    age(path)
    return path


@pytest.fixture
def memory(tmp_path):
    return tmp_path / "memory"


def read(path, memory):
    """Reads and remembers: the headers, and whether they were remembered before."""
    headers = read_checked(path, memory)
    remember(path, memory, headers)
    return headers, not headers.files


def facts(headers):
    return headers.architecture, dict(headers.tensors), headers.count, headers.nbytes


def test_the_second_time_nothing_is_read(model, memory, monkeypatch):
    first, _ = read(model, memory)
    folder = CheckpointFolder.open(model)
    assert first.count == len(folder.tensors)
    assert first.nbytes == sum(info.nbytes for info in folder.tensors.values())
    monkeypatch.setattr(CheckpointFolder, "open", None)
    second, recalled = read(model, memory)
    assert recalled
    assert facts(second) == facts(first)
    assert list(second.tensors) == list(first.tensors)


@pytest.mark.parametrize("dtype", [None, "float16"])
@pytest.mark.parametrize("fixture", ["llama", "qwen2", "deepseek_v2", "deepseek_v3"])
def test_some_tensors_tell_what_all_do(fixture, dtype, tmp_path, memory):
    options = {"fp8": True} if fixture == "deepseek_v3" else {}
    path = getattr(fixtures, fixture)(tmp_path / "model", tokenizer=True, **options)
    few, every = read_checked(path, memory).tensors, CheckpointFolder.open(path).tensors
    architecture = CheckpointFolder.open(path).architecture
    document = {
        "name": "tiny",
        "model": {"path": str(path)},
        "target": {"gpu": "L40S"},
        "stages": {"convert": {"dtype": dtype}, "quantize": {"group_size": 32}, "build": {"max_seq_len": 64}},
    }
    config = Config.model_validate_json(json.dumps(document))
    assert few.items() <= every.items()
    assert len(few) < len(every)
    for fp8 in (False, True):
        told = [forecast(config, architecture, headers, dtype="float16", fp8=fp8) for headers in (few, every)]
        assert told[0] == told[1]
    notes = [check_compatibility(config, architecture, headers) for headers in (few, every)]
    assert notes[0] == notes[1]


def change_shard(path):
    """Another header of the same length, and so a file of the same size."""
    shard = sorted(path.glob("*.safetensors"))[0]
    content = shard.read_bytes()
    name = next(name for name in CheckpointFolder.open(path).tensors if name.encode() in content[:2000])
    shard.write_bytes(content.replace(name.encode(), name[:-1].encode() + b"x", 1))


def change_index(path):
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("q_a_proj", "q_x_proj", 1))


def change_config(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": config["num_hidden_layers"] - 1}))


def cut_shard(path):
    shard = sorted(path.glob("*.safetensors"))[-1]
    os.truncate(shard, shard.stat().st_size - 1)


def remove_shard(path):
    sorted(path.glob("*.safetensors"))[-1].unlink()


def add_another_model(path):
    shutil.copy(sorted(path.glob("*.safetensors"))[0], path / "model.safetensors")


def remove_tokenizer(path):
    (path / "tokenizer.json").unlink()


CHANGES = (
    change_shard,
    change_index,
    change_config,
    cut_shard,
    remove_shard,
    add_another_model,
    remove_tokenizer,
)


@pytest.mark.parametrize("change", CHANGES)
def test_what_changed_is_checked_anew(model, memory, change):
    read(model, memory)
    assert read(model, memory)[1]
    change(model)
    with pytest.raises(CheckpointError) as found:
        read_checked(model, memory)
    with pytest.raises(CheckpointError) as expected:
        read_checked(model, memory / "empty")
    assert str(found.value) == str(expected.value)


def test_the_same_bytes_with_another_time_are_read_again(model, memory):
    first, _ = read(model, memory)
    os.utime(sorted(model.glob("*.safetensors"))[0], (1e9, 1e9 + 1))
    again, recalled = read(model, memory)
    assert not recalled
    assert facts(again) == facts(first)
    assert read(model, memory)[1]


def test_young_files_are_not_remembered(tmp_path, memory):
    path = fixtures.llama(tmp_path / "model", tokenizer=True)
    age(path)
    os.utime(path / "config.json", (4e9, 4e9))  # as young as can be
    read(path, memory)
    assert not memory.exists()


def test_a_model_in_another_folder_is_another_one(model, memory, tmp_path):
    read(model, memory)
    other = tmp_path / "other"
    shutil.copytree(model, other)
    assert not read(other, memory)[1]


@pytest.mark.parametrize("damage", [b"", b"{}", b"\n", b"nonsense\n12", None])
def test_a_damaged_memory_is_passed_over(model, memory, damage):
    first, _ = read(model, memory)
    (file,) = memory.iterdir()
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"count":', b'"count":1', 1) if damage is None else damage)
    again, recalled = read(model, memory)
    assert not recalled
    assert facts(again) == facts(first)
    assert file.read_bytes() == content


def test_a_memory_that_cannot_be_written_to(model, tmp_path):
    (tmp_path / "file").touch()
    assert not read(model, tmp_path / "file" / "memory")[1]
