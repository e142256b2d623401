import errno
import json
import os
import re
import shutil

import pytest

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.digest import digest_file
from pipeline.errors import PackageError
from pipeline.triton.model_config import MODELS, parse_config
from pipeline.triton.package import find_package
from tests.triton.emission import NETWORK_DIGEST, emit, make_engine


class Notes:
    def __init__(self):
        self.notes, self.total, self.done = [], 0, 0

    def start(self, item, total, unit):
        self.total = total

    def advance(self, amount):
        self.done += amount

    def note(self, message):
        self.notes.append(message)


def test_layout(tmp_path, llama_path):
    package = emit(tmp_path, llama_path)
    assert sorted(entry.name for entry in package.path.iterdir()) == sorted(MODELS)
    assert (package.backends / "trtseek" / "model.py").is_file()
    assert {kind: folder.name.partition("-")[0] for kind, folder in package.artifacts.items()} == {
        "engine": "engine",
        "checkpoint": "checkpoint",
        "tokenizer": "tokenizer",
    }
    assert sorted(f.name for f in package.artifacts["engine"].iterdir()) == ["engine.json", "model.engine"]
    names = {file.name for file in CheckpointFolder.open(llama_path).files}
    assert {f.name for f in package.artifacts["checkpoint"].iterdir()} == names | {"network.json"}
    assert CheckpointFolder.open(package.artifacts["checkpoint"]).tensors
    assert package.network_digest == NETWORK_DIGEST


def test_the_ensemble_has_the_code_of_the_text_path(tmp_path, llama_path):
    package = emit(tmp_path, llama_path)
    texts = [
        {file.name: file.read_text() for file in (package.path / model / "1").iterdir()}
        for model in ("ensemble", "tensorrt_llm_bls")
    ]
    assert texts[0] == texts[1]
    assert "model.py" in texts[0]


def test_an_engine_without_weights_takes_its_list_along(tmp_path, llama_path):
    engine = make_engine(tmp_path / "engine", llama_path)
    description = json.loads((engine / "engine.json").read_text())
    (engine / "engine.json").write_text(json.dumps(description | {"weights": "stripped"}))
    (engine / "refit.json").write_text("{}")
    package = emit(tmp_path, llama_path)
    names = sorted(f.name for f in package.artifacts["engine"].iterdir())
    assert names == ["engine.json", "model.engine", "refit.json"]


def test_artifacts_are_hard_links(tmp_path, llama_path):
    linked = {}
    progress = Notes()
    package = emit(tmp_path, llama_path, on_link=linked.__setitem__, progress=progress)
    for name in os.listdir(package.artifacts["checkpoint"]):
        source = tmp_path / "engine" / name if name == "network.json" else llama_path / name
        assert (package.artifacts["checkpoint"] / name).samefile(source)
    assert all(digest == digest_file(file) for file, digest in linked.items())
    assert len(linked) == sum(1 for file in (tmp_path / "package" / "artifacts").rglob("*") if file.is_file())
    assert progress.notes == []
    assert progress.done == progress.total > 0


def test_another_file_system_means_copies_and_one_note(tmp_path, llama_path, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    progress = Notes()
    package = emit(tmp_path, llama_path, progress=progress)
    copied = package.artifacts["checkpoint"] / "config.json"
    assert copied.read_bytes() == (llama_path / "config.json").read_bytes()
    assert not copied.samefile(llama_path / "config.json")
    (note,) = progress.notes
    assert note.startswith("files are copied, not linked: Invalid cross-device link")


def test_another_error_of_the_disk_is_not_hidden(tmp_path, llama_path, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OSError, match="No space left"):
        emit(tmp_path, llama_path)


def test_folders_are_named_after_their_content(tmp_path, llama_path):
    first = emit(tmp_path, llama_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    again = emit(tmp_path / "a", llama_path)
    assert {k: v.name for k, v in first.artifacts.items()} == {k: v.name for k, v in again.artifacts.items()}
    copy = tmp_path / "b" / "copy"
    shutil.copytree(llama_path, copy)
    (copy / "generation_config.json").write_text("{}")
    other = emit(tmp_path / "b", copy)
    assert other.artifacts["checkpoint"].name != first.artifacts["checkpoint"].name
    assert other.artifacts["tokenizer"].name == first.artifacts["tokenizer"].name


def test_the_package_can_be_moved(tmp_path, llama_path):
    package = emit(tmp_path, llama_path)
    moved = tmp_path / "elsewhere"
    (tmp_path / "package").rename(moved)
    for model in MODELS:
        folder = moved / package.path.name / model
        text = (folder / "config.pbtxt").read_text()
        assert str(tmp_path) not in text
        for key, value in parse_config(text, model).parameters.items():
            if key.endswith(("_path", "_dir")):
                assert (folder / value.string_value).exists(), (model, key)


def test_a_package_of_another_version_is_named_before_it_is_served(tmp_path, llama_path):
    package = emit(tmp_path, llama_path)
    assert find_package(tmp_path / "package").repository == package.path
    config = package.path / "tensorrt_llm" / "config.pbtxt"
    text = config.read_text()
    first = re.sub(
        r'parameters \{\s+key: "package_format"\s+value \{[^}]*\}\s*\}\n', "", text
    )  # said nothing of its format
    assert first != text
    config.write_text(first)
    with pytest.raises(
        PackageError, match="/package was emitted by another version of trtseek: it is of format 1"
    ) as caught:
        find_package(tmp_path / "package")
    assert caught.value.hint.startswith("emit it again with this version")


def test_two_emissions_are_equal(tmp_path, llama_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for name in "ab":
        emit(tmp_path / name, llama_path)
    files = {
        name: {
            str(file.relative_to(tmp_path / name)): file.read_bytes()
            for file in (tmp_path / name / "package").rglob("*")
            if file.is_file()
        }
        for name in "ab"
    }
    assert files["a"] == files["b"]


def test_a_network_that_was_not_built_is_refused(tmp_path, llama_path):
    engine = make_engine(tmp_path / "engine", llama_path)
    (engine / "network.json").write_text(json.dumps({"spec": {}, "digest": "blake3:other"}))
    with pytest.raises(PackageError, match=r"network\.json is of network blake3:other, the engine of blake3:ab"):
        emit(tmp_path, llama_path)


def test_an_engine_of_another_checkpoint_is_refused(tmp_path, llama_path, deepseek_v2_path):
    make_engine(tmp_path / "engine", deepseek_v2_path)
    with pytest.raises(
        PackageError, match=r"model-00001-of-000003\.safetensors is not the one the engine was built from"
    ):
        emit(tmp_path, llama_path)


def test_a_missing_shard_is_refused(tmp_path, llama_path):
    engine = make_engine(tmp_path / "engine", llama_path)
    description = json.loads((engine / "engine.json").read_text())
    description["sources"]["model-00009-of-00009.safetensors"] = "blake3:x"
    (engine / "engine.json").write_text(json.dumps(description))
    with pytest.raises(PackageError, match="is missing, and the engine was built from it"):
        emit(tmp_path, llama_path)


def test_a_checkpoint_without_tokenizer_is_refused(tmp_path, deepseek_v2_lite_path):
    with pytest.raises(PackageError, match="has no tokenizer"):
        emit(tmp_path, deepseek_v2_lite_path)


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_broken_engine_description_is_refused(tmp_path, llama_path, text):
    engine = make_engine(tmp_path / "engine", llama_path)
    (engine / "engine.json").write_text(text)
    with pytest.raises(PackageError, match=r"engine\.json"):
        emit(tmp_path, llama_path)
