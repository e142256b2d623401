import json

import pytest

from pipeline.digest import set_digest_cache
from pipeline.errors import CompatibilityError, ConfigError


def read(invoke, *options):
    return json.loads(invoke("explain", *options, "--json").stdout)


def test_what_a_fingerprint_is_made_of(workplace, invoke, llama_path):
    document = read(invoke, "small", "quantize")
    plan = {stage["stage"]: stage for stage in json.loads(invoke("plan", "small", "--json").stdout)["stages"]}
    assert document["fingerprint"] == plan["quantize"]["fingerprint"]
    record = document["record"]
    assert record["inputs"] == {"convert": plan["convert"]["fingerprint"]}
    assert record["parameters"]["group_size"] == 32
    assert [name for name, _ in record["sources"]["calibration"]] == ["text.txt"]
    assert document["changes"] is None
    text = invoke("explain", "small", "convert").stdout
    for name in ("overflow", "config.json", "torch", *(path.name for path in llama_path.glob("*.safetensors"))):
        assert name in text
    assert "nothing to compare with: the last run in out/small has no convert" in text


def test_changes_are_told_with_their_cause_and_once(workplace, toy_stages, invoke):
    invoke("engine", "small")
    assert read(invoke, "small", "package")["changes"] == []
    assert "the same as in the last run in out/small" in invoke("explain", "small", "package").stdout
    changed = read(invoke, "small", "package", "--set", "stages.convert.dtype=float16")["changes"]
    assert changed == [{"stage": "convert", "change": "dtype: unset → float16"}]
    lines = invoke("explain", "small", "package", "--set", "stages.convert.dtype=float16").stdout.splitlines()
    assert lines[-2:] == ["changed against the last run in out/small", "  convert  dtype: unset → float16"]


def test_against_another_config(workplace, invoke):
    (workplace / "configs" / "other.yaml").write_text("extends: small.yaml\nstages: {quantize: {group_size: 64}}\n")
    (workplace / "text.txt").write_text("changes nothing here, it is the same file\n")
    changes = read(invoke, "small", "build", "--against", "other.yaml")["changes"]
    assert changes == [{"stage": "quantize", "change": "group_size: 64 → 32"}]
    everything = read(invoke, "small", "package", "--against", "other")["changes"]
    assert {"stage": "package", "change": "name: other → small"} in everything


def test_a_large_source_is_not_read(workplace, invoke, monkeypatch, llama_path):
    monkeypatch.setattr("pipeline.stages.fingerprint.READ_AT_ONCE", 1000)
    document = read(invoke, "small", "quantize")
    assert document["fingerprint"] is None
    convert = read(invoke, "small", "convert")
    assert convert["unread_bytes"] > 1000
    assert {digest for _, digest in convert["record"]["sources"]["model"]} == {None}
    assert "not read yet" in invoke("explain", "small", "convert").stdout


def test_what_was_never_read_is_not_called_changed(workplace, toy_stages, invoke, monkeypatch):
    invoke("engine", "small")
    monkeypatch.setattr("pipeline.stages.fingerprint.READ_AT_ONCE", 1000)
    (workplace / "out" / "store" / "digests.jsonl").unlink(missing_ok=True)
    set_digest_cache(None)
    assert read(invoke, "small", "package")["changes"] == []
    changed = read(invoke, "small", "package", "--set", "stages.convert.dtype=float16")
    assert changed["fingerprint"] is None
    assert changed["changes"] == [{"stage": "convert", "change": "dtype: unset → float16"}]


def test_stage_that_is_none_or_of_no_use(workplace, invoke):
    with pytest.raises(ConfigError, match="no stage 'quantise'") as error:
        invoke("explain", "small", "quantise")
    assert "did you mean quantize" in error.value.hint
    with pytest.raises(CompatibilityError, match="small has no use for quantize"):
        invoke("explain", "small", "quantize", "--set", "stages.quantize.method=none")
