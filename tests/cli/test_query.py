"""`trtseek query` before and without a server; with one: tests/serving/test_serve.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pipeline.cli.query import command
from pipeline.cli.serve import command as serve
from pipeline.runtime.errors import ServingError
from pipeline.triton.client import Answer
from pipeline.triton.errors import ServerError


def run(*arguments: str) -> Any:
    return CliRunner().invoke(command, ["--url", "127.0.0.1:9", *arguments])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("not json", "Expecting value at column 1: a line of a .jsonl is a JSON object, such as {"),
        ("[1]", "is not a JSON object"),
        ('{"promt": "x", "stop": []}', "one of prompt, messages and input_ids; its keys: promt, stop"),
        ("{}", "its keys: none"),
        ('{"prompt": "a", "bad": 1}', "unknown options bad (known: max_tokens, temperature, "),
        ('{"prompt": "a", "priority": "P0"}', 'what is no tensor stands apart: "parameters": {"priority_class": "P0"'),
        ('{"prompt": 5}', "the text is 5"),
        ('{"prompt": "a", "max_tokens": "three"}', "max_tokens is 'three'"),
        ('{"prompt": "a", "stop": "x"}', "stop is 'x'"),
        ('{"input_ids": [1.5]}', "not a list of whole numbers"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"prompt": "a", "parameters": {"priority": 1}}', "the parameter 'priority' is Triton's own"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_asked(tmp_path: Path, line: str, problem: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "good"}) + "\n\n" + line + "\n")
    result = run("--file", str(file))
    assert result.exit_code == 2
    assert f"{file}:3: " in result.output and problem in result.output


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e300", "-1"])
def test_a_time_that_nobody_can_wait_is_refused(seconds: str) -> None:
    result = run("x", f"--timeout={seconds}")
    assert result.exit_code == 2 and "Invalid value for '--timeout'" in result.output
    result = CliRunner().invoke(serve, ["a.yaml", f"--grace={seconds}"])
    assert result.exit_code == 2 and "Invalid value for '--grace'" in result.output


def test_token_ids_are_no_chat() -> None:
    result = run("--chat", "--input-ids=5")
    assert result.exit_code == 2 and "--chat goes with text" in result.output


@pytest.mark.parametrize(
    ("address", "problem"),
    [("", "is empty"), ("http://127.0.0.1:8001", "has no scheme"), ("HTTPS://example.com", "has no scheme")],
)
def test_what_is_no_grpc_address_is_refused(address: str, problem: str) -> None:
    result = run("x", f"--url={address}")
    assert isinstance(result.exception, ServerError) and problem in result.exception.message
    assert "--url HOST:PORT" in result.exception.hint


def test_an_absent_server_is_told_once(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("one\ntwo\nthree\n")
    result = run("--file", str(file))
    assert isinstance(result.exception, ServerError)
    assert result.output == ""
    assert isinstance(run("x").exception, ServerError)


@pytest.mark.parametrize("how", [[], ["--json"]])
def test_a_refusal_is_printed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: list[str]) -> None:
    """Where the answer would be: it may be long, and another one is as long."""
    refusal = ServingError("temprature: is neither a parameter nor an input", hint="did you mean temperature?")
    monkeypatch.setattr(
        "pipeline.triton.client.ask_all", lambda queries, **_: iter([refusal, Answer(text="good"), refusal])
    )
    (tmp_path / "prompts.txt").write_text("one\ntwo\nthree\n")
    result = run("--file", str(tmp_path / "prompts.txt"), *how)
    assert result.output.count("did you mean temperature?") == 2 and "good" in result.output
    assert isinstance(result.exception, ServingError) and str(result.exception).startswith("2 of 3 queries failed")
    assert "temprature" not in str(result.exception)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("none.txt", "No such file or directory"),
        (".", "Is a directory"),
        ("latin.txt", "is not UTF-8 text"),
        ("empty.txt", "holds no prompts"),
    ],
)
def test_a_file_of_no_prompts(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_text("\n \n")
    result = run("--file", str(tmp_path / name))
    assert result.exit_code == 2
    assert "--file" in result.output and name in result.output and problem in result.output


def test_a_prompt_that_is_not_utf_8() -> None:
    result = CliRunner().invoke(command, ["--url", "127.0.0.1:9", "caf\udce9"])
    assert isinstance(result.exception, ServingError)
