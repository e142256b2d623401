import json

import click
import pytest

from pipeline.errors import StoreError


def read(invoke, *options):
    return json.loads(invoke("gc", *options, "--json").stdout)


def test_says_what_goes_and_removes_only_when_told(workplace, toy_stages, invoke):
    invoke("engine", "small", "--set", "stages.convert.dtype=float16")
    invoke("engine", "small")
    document = read(invoke, "small")
    assert [entry["stage"] for entry in document["kept"]] == ["convert", "package"]
    assert [entry["stage"] for entry in document["garbage"]] == ["convert", "package"]
    assert document["removed"] == []
    assert document["garbage_bytes"] == sum(entry["bytes"] for entry in document["garbage"]) > 0
    text = invoke("gc", "small").stdout
    assert "out/small/convert shows it" in text
    assert "2 unused" in text
    assert text.endswith("nothing was removed: --yes does it\n")
    assert read(invoke, "--output", "out") == document
    assert read(invoke, "--store", "out/store") == document
    text = invoke("gc", "small", "--yes").stdout
    assert text.splitlines()[-1].endswith(" freed")
    assert "everything is in use" in invoke("gc", "small").stdout
    assert invoke("engine", "small").stdout.count("out/small/") == 2
    assert (workplace / "out/small/package/convert.txt").is_file()


def test_a_store_of_its_own(workplace, toy_stages, invoke):
    for output in ("one", "two"):
        invoke("engine", "small", "--set", "store=shared", "--set", f"output={output}")
    assert {path.name for path in (workplace / "shared").iterdir() if path.is_dir()} >= {"convert", "package"}
    document = read(invoke, "--store", "shared")
    assert (len(document["kept"]), document["garbage"]) == (2, [])
    assert not (workplace / "one" / "store").exists()


@pytest.mark.parametrize("options", [[], ["small", "--output", "out"], ["--store", "a", "--output", "b"]])
def test_wants_exactly_one_place(workplace, invoke, options):
    with pytest.raises(click.UsageError):
        invoke("gc", *options)


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--output", "nowhere"], "a config's `output:`"),
        (["--store", "nowhere/store"], "a config's `output:`"),
        (["--output", "configs/small.yaml"], "is a file"),
        (["--store", "configs/small.yaml"], "is a file"),
        (["--output", "configs"], "nothing was made in it"),
    ],
)
def test_a_place_that_is_none(workplace, invoke, options, hint):
    with pytest.raises(StoreError, match=f"{options[1]}.*there is no such store") as caught:
        invoke("gc", *options)
    assert hint in caught.value.hint
    assert not (workplace / "nowhere").exists()


def test_a_config_that_was_never_run(workplace, invoke):
    assert "everything is in use" not in invoke("gc", "small").stdout
    assert "nothing was made yet" in invoke("gc", "small").stdout
