"""Lines of calibration files: what each holds, and what is wrong with it, by file, line and byte."""

from __future__ import annotations

import codecs
import json
import random
import re
from pathlib import Path

import pytest
import torch

from pipeline.errors import QuantizationError
from pipeline.quantization import documents, text
from pipeline.quantization.calibration_files import PlainFile
from pipeline.quantization.chat import ChatTemplate
from pipeline.quantization.documents import Documents
from tests.quantization.texts import PLAIN, ask, decode, sample, set_template, write_lines


def test_json_lines_by_any_key(tokenizer: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"body": f"text {i}", "id": i} for i in range(10)])
    path.write_text(path.read_text().replace("\n", "\n\n", 3))  # blank lines are no records
    whole = "".join(f"text {i}\n\n" for i in range(10))
    tokens = sample(tokenizer, PlainFile(path=path, key="body"), samples=len(whole) // 8)
    assert "".join(decode(tokenizer, piece) for piece in tokens) == whole[: len(whole) // 8 * 8]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "is not JSON: Expecting property name"),
        ("[1]", "is no JSON object, but list"),
        ('{"body": "x", "n": 1}', "there is no key \"text\" (there is 'body', 'n')"),
        ('{"text": 3}', '"text" holds no text, but int'),
        ("[" * 100_000, "recursion"),
        ('{"text": "\\ud800"}', "surrogates"),
        (b'{"text": "\xff"}', "is not UTF-8 (byte 64: invalid start byte)"),
        (b'{"text": "\0"}', "holds NUL bytes (byte 64): is it UTF-16?"),
        ('{"text": "a\\u0000"}', "its text holds NUL characters"),
    ],
)
def test_wrong_lines_are_named(tokenizer: Path, tmp_path: Path, line: str | bytes, problem: str) -> None:
    good = json.dumps({"text": "right"}).encode() + b"\n"
    (tmp_path / "a.jsonl").write_bytes(
        good * 3 + (line if isinstance(line, bytes) else line.encode()) + b"\n" + good * 3
    )
    with pytest.raises(QuantizationError, match=rf"a.jsonl:4: (?s:.*){re.escape(problem)}"):
        sample(tokenizer, tmp_path / "a.jsonl", samples=1, length=100)


def test_lines_are_counted_where_a_file_was_entered(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "WHOLE_BYTES", 1)
    write_lines(tmp_path / "a.jsonl", [{"text": "right"}] * 500 + [{"body": "wrong"}] * 5 + [{"text": "right"}] * 500)
    with pytest.raises(QuantizationError, match=r"a.jsonl:50[1-5]: there is no key"):
        sample(tokenizer, tmp_path / "a.jsonl", samples=1, length=8 * 1024)


@pytest.mark.parametrize(
    ("fault", "problem"), [(b"caf\xe9 ", "is not UTF-8 (byte %d:"), (b"caf\0", "NUL bytes (byte %d)")]
)
def test_faults_are_placed_where_a_file_was_entered(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: bytes, problem: str
) -> None:
    monkeypatch.setattr(text, "WHOLE_BYTES", 1000)
    right = b"right\n" * 1000
    (tmp_path / "a.txt").write_bytes(right + fault + b"\n" + right)
    with pytest.raises(QuantizationError, match=rf"a.txt:1001: .*{re.escape(problem % (len(right) + 3))}"):
        sample(tokenizer, tmp_path / "a.txt", samples=1, length=8 * 1024)


def test_a_key_is_not_passed_over(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text('{"body": "x"}\n' * 99)
    with pytest.raises(QuantizationError, match=r"a.txt: key: body is for JSON lines"):
        sample(tokenizer, PlainFile(path=tmp_path / "a.txt", key="body"))
    set_template(tmp_path, PLAIN)
    record = {"talk": ask(role="assistant", content="so"), "messages": 3, "text": "abcdefgh" * 9}
    path = write_lines(tmp_path / "a.jsonl", [record] * 9)
    found = [sample(tokenizer, PlainFile(path=path, key=key), samples=1) for key in ("talk", "text")]
    assert not torch.equal(*found)


def test_reading_on_repeats_nothing(tokenizer: Path, tmp_path: Path) -> None:
    """However often a file is entered where the last part ended, also where a character has many bytes."""
    template, draw = ChatTemplate(tmp_path), random.Random(1)
    words = [f"{draw.choice(('é', '字', 'x', ''))}{i:05}{draw.choice((' ', ' ', ' ', chr(10)))}" for i in range(6000)]
    texts = ["".join(words[:2000]), words[2000], "".join(words[2001:])]
    write_lines(tmp_path / "a.jsonl", [{"text": each} for each in texts])  # spells é and 字 in six characters
    (tmp_path / "a.txt").write_text("".join(texts).replace("\n", " "))
    for name, whole in (("a.jsonl", "".join(f"{each}\n\n" for each in texts)), ("a.txt", "".join(texts))):
        file, at, found = PlainFile(path=tmp_path / name), 0, ""
        while step := next(Documents(file, template).read(at, part=100), None):
            at, piece = step
            found += piece
        numbers = [int(number) for number in re.findall(r"\d{5}", found)]
        assert numbers == sorted(set(numbers))
        assert len(numbers) > 0.6 * len(words)
        read = "".join(piece for _, piece in Documents(file, template).read(part=100))
        assert read == (whole if name == "a.jsonl" else whole.replace("\n", " "))


def test_a_byte_order_mark_is_no_text(tokenizer: Path, tmp_path: Path) -> None:
    body = "".join(f"text {i}\n" for i in range(30))
    (tmp_path / "a.txt").write_text(body, encoding="utf-8-sig")
    line = json.dumps({"text": body}) + "\n"
    (tmp_path / "a.jsonl").write_text(line, encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text("\n\n" + line)
    for name in ("a.txt", "a.jsonl", "b.jsonl"):
        assert decode(tokenizer, sample(tokenizer, tmp_path / name, samples=4, length=50)[0]) == body[:50]


def test_json_files_are_not_read_as_text(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "x" * 99}]))
    with pytest.raises(QuantizationError, match=r"a.json: what a .json file holds is to be told") as caught:
        sample(tokenizer, tmp_path / "a.json")
    assert "a.json, format: jsonl}] or chat, where each line is an object of its own; text, to" in caught.value.hint
    told = PlainFile(path=tmp_path / "a.json", format="text")
    assert decode(tokenizer, sample(tokenizer, told)[0]) == '[{"text"'


SHARED = [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "since"}]


def test_lines_of_sharegpt_are_told_as_such(tokenizer: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"conversations": SHARED}])
    for file in (PlainFile(path=path), PlainFile(path=path, format="chat")):
        with pytest.raises(
            QuantizationError, match=r"a.jsonl:1: there is no key .*: ShareGPT's form; write .* \"role\""
        ):
            sample(tokenizer, file)


@pytest.mark.parametrize("tools", ["[]", {"name": "look_up"}, ["look_up"]])
def test_tools_are_objects(tokenizer: Path, tmp_path: Path, tools: object) -> None:
    set_template(tmp_path, PLAIN)
    chat = ask(role="assistant", content="since")
    path = write_lines(tmp_path / "a.jsonl", [{"messages": chat}, {"messages": chat, "tools": tools}])
    with pytest.raises(QuantizationError, match=r'a.jsonl:2: "tools" is no list of objects'):
        sample(tokenizer, path)


def test_a_number_without_end(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x", "id": 1}\n{"text": "x", "id": ' + "7" * 5000 + "}\n")
    with pytest.raises(QuantizationError, match=r"a.jsonl:2: holds a number of 5,000 digits: put it in quotes, or"):
        sample(tokenizer, tmp_path / "a.jsonl")


def test_lines_have_an_end(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_LINE", 1 << 20)
    (tmp_path / "a.jsonl").write_bytes(b" " * (3 << 20))
    with pytest.raises(QuantizationError, match=r"a.jsonl:1: is longer than 1 MiB"):
        sample(tokenizer, tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_blank_lines_without_end(tokenizer: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at the file refuses them, and those before a document are passed over at once."""
    blank, said = (
        codecs.BOM_UTF8 + b" \n" * (1 << 20),
        (b'{"messages": []}' if name == "a.jsonl" else b"def f(x):\n" * 9),
    )
    (tmp_path / name).write_bytes(blank)
    with pytest.raises(QuantizationError, match="holds no text"):
        Documents(PlainFile(path=tmp_path / name), ChatTemplate(tmp_path)).check()
    (tmp_path / name).write_bytes(blank + said + b"\n")
    if name == "a.txt":
        Documents(PlainFile(path=tmp_path / name), ChatTemplate(tmp_path)).check()
        return
    decoded: list[int] = []

    def count(self: Documents, line: bytes, begin: int) -> str:
        decoded.append(begin)
        return line.decode()

    monkeypatch.setattr(Documents, "_decode", count)
    found = Documents(PlainFile(path=tmp_path / name), ChatTemplate(tmp_path))
    assert found.format == "chat" and len(list(found.read())) < 5 and len(decoded) < 5
    monkeypatch.undo()
    for read in (found.check, lambda: list(found.read())):
        with pytest.raises(QuantizationError, match=r'a.jsonl:1048577: "messages" is no list of messages'):
            read()
