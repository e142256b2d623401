import dataclasses
import shutil
from importlib.metadata import version

import pytest

from pipeline.errors import ConfigError
from pipeline.stages import fingerprint
from pipeline.stages.fingerprint import Fingerprinter, list_source
from tests.stages.toys import COPY, LINK, UPPER, make_config


def make_folder(path):
    (path / "sub").mkdir(parents=True)
    (path / ".git").mkdir()
    for name in ("b.json", "a.safetensors", "sub/c.txt", ".hidden", ".git/config"):
        (path / name).write_text(name)
    return path


def of_source(*paths):
    stage = dataclasses.replace(COPY, sources=lambda _: {"model": list(paths)})
    return lambda config: Fingerprinter(config).fingerprint(stage)


def test_folder_is_all_but_its_hidden_files(tmp_path):
    folder = make_folder(tmp_path / "model")
    assert [name for name, _ in list_source([folder], owner="x")] == ["a.safetensors", "b.json", "sub/c.txt"]
    assert next(name for name, _ in list_source([folder / "b.json", folder], owner="x")) == "b.json"
    with pytest.raises(ConfigError, match=r"convert: model: .*nowhere does not exist"):
        list_source([tmp_path / "nowhere"], owner="convert: model")


def test_place_of_a_source_does_not_matter_its_content_and_names_do(tmp_path):
    config = make_config(tmp_path)
    folder = make_folder(tmp_path / "model")
    first = of_source(folder)(config)
    moved = tmp_path / "elsewhere" / "other name"
    shutil.copytree(folder, moved)
    assert of_source(moved)(config) == first
    (moved / ".hidden").write_text("changed")
    assert of_source(moved)(config) == first
    (moved / "b.json").write_text("changed")
    assert of_source(moved)(config).digest != first.digest
    (moved / "b.json").write_text("b.json")
    (moved / "b.json").rename(moved / "d.json")
    assert of_source(moved)(config).digest != first.digest


def test_order_of_files_matters(tmp_path):
    config = make_config(tmp_path)
    folder = make_folder(tmp_path / "model")
    files = [folder / "b.json", folder / "a.safetensors"]
    assert of_source(*files)(config).digest != of_source(*reversed(files))(config).digest


def test_everything_that_decides_the_bytes_changes_the_fingerprint_and_all_after_it(tmp_path):
    def chain(stages, config):
        fingerprinter = Fingerprinter(config)
        return [fingerprinter.fingerprint(stage).digest for stage in stages]

    config = make_config(tmp_path)
    base = chain((COPY, UPPER, LINK), config)
    assert chain((COPY, UPPER, LINK), config) == base
    for changed in (
        dataclasses.replace(COPY, version=2),
        dataclasses.replace(COPY, name="copy", parameters=lambda _: {"suffix": "!"}),
        dataclasses.replace(COPY, libraries=("click",)),
        dataclasses.replace(COPY, target=lambda _: 80),
        dataclasses.replace(COPY, sources=lambda _: {}),
    ):
        assert not set(chain((changed, UPPER, LINK), config)) & set(base)
    assert chain((COPY, UPPER, dataclasses.replace(LINK, version=2)), config)[:2] == base[:2]


def test_libraries_by_version(tmp_path):
    record = Fingerprinter(make_config(tmp_path)).fingerprint(COPY).record
    assert record["libraries"] == {"click": version("click"), "no-such-library": None}


def test_source_that_two_stages_read_is_read_once_and_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "READ_AT_ONCE", 3)
    shown = []

    class Progress:
        def start(self, item, total, unit):
            shown.append([item, total, 0])

        def advance(self, amount):
            shown[-1][2] += amount

    fingerprinter = Fingerprinter(make_config(tmp_path), Progress())
    assert fingerprinter.unread_bytes(COPY) == 5
    fingerprinter.fingerprint(COPY)
    fingerprinter.fingerprint(dataclasses.replace(COPY, name="again"))
    assert shown == [["reading text for its digests", 5, 5]]
