import json

import pytest

from pipeline.errors import StoreError


def states(result):
    return {stage["stage"]: stage["state"] for stage in json.loads(result.stdout)["stages"]}


def test_before_a_run_and_after(workplace, toy_stages, invoke):
    assert states(invoke("status", "small", "--json")) == {"convert": "missing", "package": "missing"}
    invoke("engine", "small", "--until", "convert")
    assert states(invoke("status", "small", "--json")) == {"convert": "cached", "package": "missing"}
    invoke("engine", "small")
    assert states(invoke("status", "small", "--set", "stages.convert.dtype=float16", "--json")) == {
        "convert": "stale",
        "package": "stale",
    }
    lines = invoke("status", "small").stdout.splitlines()
    assert lines[0] == "small: out/small"
    assert lines[1].split()[:2] == ["convert", "cached"]
    assert "out/store/convert/" in lines[1]


def test_failed_stage(workplace, toy_stages, invoke, monkeypatch):
    def fail(context):
        raise StoreError("no")

    import dataclasses

    failing = (toy_stages[0], dataclasses.replace(toy_stages[1], run=fail))
    monkeypatch.setattr("pipeline.stages.graph.load_stages", lambda: failing)
    with pytest.raises(StoreError):
        invoke("engine", "small")
    assert states(invoke("status", "small", "--json")) == {"convert": "cached", "package": "failed"}


def test_digests_find_what_kept_its_size_and_time(workplace, toy_stages, invoke):
    import os

    invoke("engine", "small")
    assert "every file of convert, package has the digest" in invoke("status", "small", "--digests").stdout
    file = workplace / "out/small/convert/one.txt"
    status = file.stat()
    file.chmod(0o644)
    file.write_bytes(b"X" + file.read_bytes()[1:])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert states(invoke("status", "small", "--json"))["convert"] == "cached"
    with pytest.raises(StoreError, match=r"convert: .*one.txt was changed"):
        invoke("status", "small", "--digests")


def test_digests_are_checked_of_what_is_stale_or_known_to_be_damaged(workplace, toy_stages, invoke):
    assert "nothing is made" in invoke("status", "small", "--digests").stdout
    invoke("engine", "small")
    file = workplace / "out/small/convert/one.txt"
    stale = ("status", "small", "--digests", "--set", "stages.convert.dtype=float16")
    assert "every file of convert, package has the digest" in invoke(*stale).stdout
    file.chmod(0o644)
    file.write_text("X")  # another size: no longer cached, and still to be named
    assert states(invoke("status", "small", "--json"))["convert"] == "stale"
    for arguments in (("status", "small", "--digests"), stale):
        with pytest.raises(StoreError, match=r"convert: .*one.txt holds 1 bytes") as error:
            invoke(*arguments)
        assert error.value.exit_code == 7
    (workplace / "out/small/convert/artifact.json").unlink()
    with pytest.raises(StoreError, match=r"convert: .*artifact.json is gone"):
        invoke("status", "small", "--digests")
