"""Calibration text: seeded, without overlap, and refused by name where there is too little."""

from __future__ import annotations

import codecs
import itertools
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch

from pipeline.checkpoint.text import CHUNK_CHARACTERS
from pipeline.errors import QuantizationError
from pipeline.quantization import documents, text
from pipeline.quantization.calibration_files import CalibrationFile, PlainFile
from pipeline.quantization.chat import ChatTemplate
from pipeline.quantization.documents import Documents
from tests.fixtures import write_tokenizer


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path / "tokenizer.json"


def sample(
    tokenizer: Path, *files: Path | CalibrationFile, samples: int = 4, length: int = 8, **options: Any
) -> torch.Tensor:
    values: dict[str, Any] = {"seed": 0, "vocab_size": 512, **options}
    return text.sample_tokens(tokenizer, files, samples=samples, length=length, **values)


def decode(tokenizer: Path, ids: torch.Tensor) -> str:
    vocabulary = json.loads(tokenizer.read_text())["model"]["vocab"]
    letters = {index: letter for letter, index in vocabulary.items()}
    return "".join(letters[i] for i in ids.tolist()).replace("Ġ", " ").replace("Ċ", "\n")


def test_pieces_are_the_text_itself(tokenizer: Path, tmp_path: Path) -> None:
    lines = "".join(f"line {i:03}\n" for i in range(100))
    (tmp_path / "a.txt").write_text(lines)
    tokens = sample(tokenizer, tmp_path / "a.txt", samples=100, length=9)
    assert tokens.shape == (100, 9) and tokens.dtype == torch.int64
    assert "".join(decode(tokenizer, piece) for piece in tokens) == lines
    # With BOS the pieces are one token shorter.
    tokens = sample(tokenizer, tmp_path / "a.txt", samples=100, length=10, bos=0)
    assert (tokens[:, 0] == 0).all()
    assert "".join(decode(tokenizer, piece[1:]) for piece in tokens) == lines


def test_seed_decides(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{i} " for i in range(2000)))
    (tmp_path / "b.txt").write_text("".join(f"{i} " for i in range(5000, 6000)))
    files = tmp_path / "a.txt", tmp_path / "b.txt"
    first, again, other = (sample(tokenizer, *files, samples=50, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert len({tuple(piece) for piece in first.tolist()}) == 50


@pytest.mark.parametrize("whole", [True, False])
def test_tokenizing_says_where_it_is(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """Of each file: bytes, or where only pieces are drawn, pieces; more than once, and to the end."""
    monkeypatch.setattr(text, "WHOLE_BYTES", 1 << 24 if whole else 1000)
    write_lines(tmp_path / "a.jsonl", [{"text": f"é line {i}"} for i in range(1000)])
    (tmp_path / "b.txt").write_text("é line\n" * (16 * CHUNK_CHARACTERS))
    told: list[tuple[str, float, str]] = []
    amounts: list[list[float]] = []

    class Told:
        def start(self, item: str, total: float, unit: str) -> None:
            told.append((item, total, unit))
            amounts.append([])

        def advance(self, amount: float) -> None:
            amounts[-1].append(amount)

        def note(self, message: str) -> None:
            pytest.fail(message)

    files = [PlainFile(path=tmp_path / name, weight=None if whole else 1.0) for name in ("a.jsonl", "b.txt")]
    sample(tokenizer, *files, samples=10, progress=Told())
    sizes = [file.path.stat().st_size for file in files]
    names = ("tokenizing a.jsonl", "tokenizing b.txt")
    if not whole:
        sizes, names = [5, 5], ("tokenizing pieces of a.jsonl", "tokenizing pieces of b.txt")
    assert told == [(name, size, "B" if whole else "pieces") for name, size in zip(names, sizes, strict=True)]
    assert [sum(each) for each in amounts] == sizes and all(len(each) > 1 for each in amounts)


def test_too_little_text_names_files_and_counts(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 20)
    (tmp_path / "b.txt").write_text("y" * 7)
    found = re.escape(f"there are 2 ({tmp_path}/a.txt: 20 tokens; {tmp_path}/b.txt: 7 tokens)")
    with pytest.raises(QuantizationError, match=r"4 pieces of 8 tokens are wanted, " + found):
        sample(tokenizer, tmp_path / "a.txt", tmp_path / "b.txt")


def test_tokenizer_of_another_model(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text to be cut into a few pieces of tokens")
    with pytest.raises(QuantizationError, match="vocabulary ends at 99"):
        sample(tokenizer, tmp_path / "a.txt", vocab_size=100)


CHATS = [
    [{"role": "user", "content": f"question {i}?"}, {"role": "assistant", "content": f"answer {i * 7}."}]
    for i in range(40)
]


def write_lines(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_json_lines_by_any_key(tokenizer: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"body": f"text {i}", "id": i} for i in range(10)])
    path.write_text(path.read_text().replace("\n", "\n\n", 3))  # blank lines are no records
    whole = "".join(f"text {i}\n\n" for i in range(10))
    tokens = sample(tokenizer, PlainFile(path=path, key="body"), samples=len(whole) // 8)
    assert "".join(decode(tokenizer, piece) for piece in tokens) == whole[: len(whole) // 8 * 8]


def test_transcripts_are_what_transformers_renders(tokenizer: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ eos_token }}"
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": chat} for chat in CHATS])
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    rendered = [theirs.apply_chat_template(chat, tokenize=True, return_dict=False) for chat in CHATS]
    assert all(ids[0] == 0 and ids.count(0) == 1 and ids[-1] == 1 for ids in rendered)
    stream = [token for ids in rendered for token in ids[1:]]
    count = len(stream) // 15
    tokens = sample(tokenizer, path, samples=count, length=16, bos=0)
    assert (tokens[:, 0] == 0).all() and not (tokens[:, 1:] == 0).any()  # one BOS, at the beginning of each piece
    assert tokens[:, 1:].flatten().tolist() == stream[: count * 15]


def test_templates_run_in_a_sandbox(tokenizer: Path, tmp_path: Path) -> None:
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": CHATS[0]}])
    with pytest.raises(QuantizationError, match=r"chats.jsonl:1: the model's chat template refuses it: .*unsafe"):
        sample(tokenizer, path)


def test_a_model_without_a_template(tokenizer: Path, tmp_path: Path) -> None:
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    path = write_lines(tmp_path / "chats.jsonl", [{"messages": CHATS[0]}])
    with pytest.raises(QuantizationError, match="has no chat template"):
        sample(tokenizer, path)


def test_mixtures_go_by_weight(tokenizer: Path, tmp_path: Path) -> None:
    for name, letter in (("a", "x"), ("b", "y"), ("c", "z")):
        (tmp_path / f"{name}.txt").write_text(letter * 4000)
    files = [PlainFile(path=tmp_path / f"{n}.txt", weight=w) for n, w in (("a", 3.0), ("b", None), ("c", 0.5))]
    tokens = sample(tokenizer, *files, samples=100, length=8)
    # 100 shared as 3 : 1 : 0.5 is 66.7, 22.2, 11.1; the largest remainder takes what is left.
    assert Counter(decode(tokenizer, piece)[0] for piece in tokens) == {"x": 67, "y": 22, "z": 11}
    with pytest.raises(QuantizationError, match=r"there are 93 .*c.txt: 36 tokens"):
        (tmp_path / "c.txt").write_text("z" * 36)
        sample(tokenizer, *files, samples=100, length=8)


@pytest.mark.parametrize("form", ["text", "jsonl"])
def test_large_files_are_entered_and_not_read(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    draw = random.Random(0)
    texts = [f"{i:05} " + "".join(draw.choices("abc", k=draw.randint(1, 60))) for i in range(5000)]
    path = tmp_path / "large"
    lines = texts if form == "text" else [json.dumps({"text": each}) for each in texts]
    path.write_text("".join(line + "\n" for line in lines))
    monkeypatch.setattr(text, "WHOLE_BYTES", 1000)
    read: list[int] = []
    true_read = documents.Documents._read_line

    def counted(self: documents.Documents, file: BinaryIO, part: int) -> bytes:
        line = true_read(self, file, part)
        read.append(len(line))
        return line

    monkeypatch.setattr(documents.Documents, "_read_line", counted)
    file = PlainFile(path=path, format=form)
    first, again, other = (sample(tokenizer, file, samples=20, length=50, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert sum(read) < 3 * 20 * 250 < path.stat().st_size / 10
    starts = []
    whole = ("\n" if form == "text" else "\n\n").join(texts)
    for piece in first:
        found = decode(tokenizer, piece)
        starts.append(int(found[:5]))
        assert found in whole
    # One from each twentieth of the file, in order, none overlapping.
    assert starts == sorted(set(starts)) and all(abs(start / 250 - i) < 1.2 for i, start in enumerate(starts))


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


def write_words(path: Path, form: str, documents: int, length: int) -> str:
    """`length` numbered words in each document, all on one line; what they are as one text."""
    words = [f"w{i:06}" for i in range(documents * length)]
    texts = [" ".join(words[i * length : (i + 1) * length]) for i in range(documents)]
    lines = [json.dumps({"text": text}) for text in texts] if form == "jsonl" else texts
    path.write_text("\n".join(lines) + "\n" * (form == "jsonl"))
    return ("\n\n" if form == "jsonl" else "\n").join(texts)


@pytest.mark.parametrize(("form", "documents"), [("text", 1), ("jsonl", 1), ("jsonl", 7), ("text", 7)])
def test_long_lines_are_entered_anywhere(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, documents: int
) -> None:
    """Forty pieces of few lines: spread over the file, cut between words, none twice, little tokenized."""
    monkeypatch.setattr(text, "WHOLE_BYTES", 1000)
    file = PlainFile(path=tmp_path / "long", format=form)
    whole = write_words(file.path, form, documents, 35_000 // documents)
    monkeypatch.setattr(text._Source, "cut", lambda self: pytest.fail("read whole"))
    first, again, other = (sample(tokenizer, file, samples=40, length=64, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    places = [whole.index(decode(tokenizer, piece)) for piece in first]  # raises where a piece is not the text's
    assert all(place == 0 or whole[place - 1].isspace() or whole[place].isspace() for place in places)
    assert places == sorted(places) and min(b - a for a, b in itertools.pairwise(places)) >= 64
    part = len(whole) / 40
    assert all(abs(place / part - i) < 1.3 for i, place in enumerate(places))


def test_what_has_no_text_at_its_end_is_not_read_again_for_every_piece(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_lines(
        tmp_path / "a.jsonl", [*({"text": f"def f{i}(x): pass"} for i in range(400)), *[{"text": ""}] * 4000]
    )
    monkeypatch.setattr(text, "WHOLE_BYTES", 1000)
    read, decoded = Documents._decode, []

    def count(self: Documents, line: bytes, begin: int) -> str:
        decoded.append(begin)
        return read(self, line, begin)

    monkeypatch.setattr(Documents, "_decode", count)
    assert len(sample(tokenizer, file, samples=20, length=8)) == 20
    assert len(decoded) < 5 * 4400


@pytest.mark.parametrize("form", ["text", "jsonl"])
def test_a_large_file_that_is_nearly_used_up_is_read_whole(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(text, "WHOLE_BYTES", 1000)
    file = PlainFile(path=tmp_path / "long", format=form)
    whole = write_words(file.path, form, 3, 500)
    fits = len(whole) // 50
    tokens = sample(tokenizer, file, samples=fits, length=50)
    assert "".join(decode(tokenizer, piece) for piece in tokens) == whole[: fits * 50]
    count = len(whole) + 2 * (form == "jsonl")
    found = re.escape(f"there are {fits} ({file.path}: {count:,} tokens for its share of 1,000 pieces)")
    with pytest.raises(QuantizationError, match=found):
        sample(tokenizer, file, samples=1000, length=50)


def test_what_a_file_is_too_short_for_comes_of_the_others(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without weights: its size, of JSON that is no text, promised more."""
    monkeypatch.setattr(text, "WHOLE_BYTES", 1000)
    write_lines(tmp_path / "a.jsonl", [{"text": "x" * 8, "more": "y" * 500}] * 60)
    (tmp_path / "b.txt").write_text("z" * 30_000)
    first, again = (sample(tokenizer, tmp_path / "a.jsonl", tmp_path / "b.txt", samples=200) for _ in range(2))
    assert torch.equal(first, again)
    counts = Counter(decode(tokenizer, piece)[0] == "z" for piece in first)
    assert counts[True] + counts[False] == 200 and 40 < counts[False] <= 75
    with pytest.raises(QuantizationError, match=r"a.jsonl: 600 tokens for its share of 101 pieces; .*b.txt: enough"):
        files = [PlainFile(path=tmp_path / name, weight=1.0) for name in ("a.jsonl", "b.txt")]
        sample(tokenizer, *files, samples=202)
    # Two others share what is missing, by their sizes; where all is too little, shares are those of the wish.
    (tmp_path / "c.txt").write_text("w" * 60_000)
    (tmp_path / "nothing.txt").touch()
    names = ("nothing.txt", "a.jsonl", "b.txt", "c.txt")
    drawn = Counter(
        decode(tokenizer, piece)[0] for piece in sample(tokenizer, *(tmp_path / n for n in names), samples=400)
    )
    assert drawn["x"] <= 75 and abs(drawn["w"] / drawn["z"] - 2) < 0.1
    with pytest.raises(QuantizationError) as caught:
        sample(tokenizer, *(tmp_path / n for n in names), samples=20_000)
    shares = re.findall(r"for its share of ([\d,]+) pieces", caught.value.message)
    assert len(shares) == 4 and sum(int(share.replace(",", "")) for share in shares) == 20_000


def test_a_key_is_not_passed_over(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text('{"body": "x"}\n' * 99)
    with pytest.raises(QuantizationError, match=r"a.txt: key: body is for JSON lines"):
        sample(tokenizer, PlainFile(path=tmp_path / "a.txt", key="body"))
    set_template(tmp_path, PLAIN)
    record = {"talk": ask(role="assistant", content="so"), "messages": 3, "text": "abcdefgh" * 9}
    path = write_lines(tmp_path / "a.jsonl", [record] * 9)
    found = [sample(tokenizer, PlainFile(path=path, key=key), samples=1) for key in ("talk", "text")]
    assert not torch.equal(*found)


def test_text_without_spaces_is_cut_between_characters(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "WHOLE_BYTES", 1000)
    (tmp_path / "a.txt").write_text("日本語" * 9000)
    assert sample(tokenizer, tmp_path / "a.txt", samples=30, length=64).shape == (30, 64)


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


def test_texts_of_nothing_are_no_text(tokenizer: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": " \n"}] * 100)
    with pytest.raises(QuantizationError, match=r"there are 0 \(.*a.jsonl: 0 tokens\)"):
        sample(tokenizer, path)


def set_template(folder: Path, template: str) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))


# DeepSeek-LLM's, and one in R1's manner: of an answer only what follows the reasoning.
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ 'User: ' + m['content'] + '\n\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'Assistant: ' + m['content'] + eos_token }}"
    "{% elif m['role'] == 'system' %}{{ m['content'] + '\n\n' }}{% endif %}{% endfor %}"
)
REASONING = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'].split('</think>')[-1] | trim }}\n{% endfor %}"
    "{%- for m in messages if m.tool_calls %}{{ m.tool_calls | tojson }}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% generation %}{{ p.text }}{% endgeneration %}{% endfor %}{% endif %}{% endfor %}"
)
V3_CALLS = (  # as DeepSeek-V3's does, nothing of what is said beside a call
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}"
    "({{ c.function.arguments }}){% endfor %}{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
REFUSING = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"


def ask(**answer: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": "why?"}, answer]


CALLS = [{"type": "function", "function": {"name": "look_up", "arguments": {"of": "é"}}}]
LISTED = [{"type": "text", "text": "since"}]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(
    ("template", "answer", "problem"),
    [
        (DEEPSEEK, {"from": "gpt", "value": "x"}, "(it has 'from', 'value'): ShareGPT's form; write \"messages\", "),
        (DEEPSEEK, {"role": "assistant"}, 'message 2, of role "assistant", has no text under "content"'),
        (DEEPSEEK, {"role": "assistant", "content": None}, 'message 2, of role "assistant", has no text'),
        (DEEPSEEK, {"role": "assistant", "content": [{"type": "image"}]}, 'message 2, of role "assistant", has no'),
        (
            DEEPSEEK,
            {"role": "Bot", "content": "why"},
            'leaves out message 2, of role "Bot" (it knows system, user, assistant)',
        ),
        (DEEPSEEK, {"role": "assistant", "content": LISTED}, "refuses it: "),
        (PLAIN, {"role": "assistant", "content": LISTED}, "takes no list as the content of message 2"),
        (REFUSING, {"role": "tool", "content": "x"}, "the model's chat template refuses it: no tools"),
        (DEEPSEEK, {"role": "assistant", "content": "since"}, ""),
        (REASONING, {"role": "assistant", "content": "<think>so</think> since"}, ""),
        (REASONING, {"role": "assistant", "content": "", "tool_calls": [{"name": "é"}]}, ""),
        (PARTS, {"role": "assistant", "content": LISTED}, ""),
        (V3_CALLS, {"role": "assistant", "content": "I ask", "tool_calls": CALLS}, ""),
        (V3_CALLS, {"role": "assistant", "tool_calls": CALLS}, ""),
        (DEEPSEEK, {"role": "assistant", "content": "I ask", "tool_calls": CALLS}, "leaves out the tool calls of mess"),
        (
            DEEPSEEK,
            {"role": "assistant", "content": None, "tool_calls": CALLS},
            "leaves out the tool calls of message 2",
        ),
        (DEEPSEEK, {"role": "assistant", "tool_calls": CALLS}, "leaves out the tool calls of message 2"),
        (V3_CALLS, {"role": "assistant", "content": {"a": 1}, "tool_calls": CALLS}, "message 2, of role"),
        (PLAIN.replace("m.content", "m.content | upper"), {"role": "assistant", "content": "since"}, ""),
        (PLAIN.replace("m.content", "m.content | tojson"), {"role": "assistant", "content": 'since "é"'}, ""),
        (
            PLAIN.replace("m.content", "m.content | tojson"),
            {"role": "assistant", "content": LISTED},
            "takes no list as the content of message 2",
        ),
    ],
)
def test_no_message_is_left_out(
    tokenizer: Path, tmp_path: Path, template: str, answer: dict[str, object], problem: str, quick: bool
) -> None:
    """And a look by jinja alone finds, and renders, the same as transformers."""
    from transformers import AutoTokenizer

    set_template(tmp_path, template)
    path = write_lines(tmp_path / "a.jsonl", [{"messages": ask(role="assistant", content="well"), "id": 1}])
    path.write_text(path.read_text() + json.dumps({"messages": ask(**answer)}) + "\n")
    documents_of = Documents(PlainFile(path=path), ChatTemplate(tmp_path, quick=quick))
    if problem and template != REFUSING:
        with pytest.raises(QuantizationError, match=f"a.jsonl:2: .*{re.escape(problem)}"):
            list(documents_of.read())
    elif problem:
        with pytest.raises(ValueError, match=re.escape(problem)):
            documents_of.template.render(ask(**answer))
    else:
        theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(ask(**answer), tokenize=False)
        assert list(documents_of.read())[1][1] == theirs


SHARED = [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "since"}]


def test_lines_of_sharegpt_are_told_as_such(tokenizer: Path, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"conversations": SHARED}])
    for file in (PlainFile(path=path), PlainFile(path=path, format="chat")):
        with pytest.raises(
            QuantizationError, match=r"a.jsonl:1: there is no key .*: ShareGPT's form; write .* \"role\""
        ):
            sample(tokenizer, file)


TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "<é>", "parameters": {"of": None}}}]
WITH_TOOLS = (
    "{% if tools is not none %}{{ tools | length }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% endif %}"
)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("tools", [None, [], TOOLS])
def test_tools_are_what_the_template_makes_of_them(
    tokenizer: Path, tmp_path: Path, tools: list[dict[str, object]] | None, quick: bool
) -> None:
    from transformers import AutoTokenizer

    chat = ask(role="assistant", content="since")
    path = write_lines(tmp_path / "a.jsonl", [{"messages": chat, "tools": tools}])
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": "used " + WITH_TOOLS + PLAIN}]
    for template, shown in ((PLAIN, False), (WITH_TOOLS + PLAIN, True), (named, True)):
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
        theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(chat, tools=tools, tokenize=False)
        found = "".join(text for _, text in Documents(PlainFile(path=path), ChatTemplate(tmp_path, quick=quick)).read())
        assert found == theirs and ("<é>" in found) == (shown and tools == TOOLS)


@pytest.mark.parametrize("tools", ["[]", {"name": "look_up"}, ["look_up"]])
def test_tools_are_objects(tokenizer: Path, tmp_path: Path, tools: object) -> None:
    set_template(tmp_path, PLAIN)
    chat = ask(role="assistant", content="since")
    path = write_lines(tmp_path / "a.jsonl", [{"messages": chat}, {"messages": chat, "tools": tools}])
    with pytest.raises(QuantizationError, match=r'a.jsonl:2: "tools" is no list of objects'):
        sample(tokenizer, path)


@pytest.mark.parametrize("quick", [False, True])
def test_a_broken_template_is_not_the_transcripts_fault(tokenizer: Path, tmp_path: Path, quick: bool) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"messages": ask(role="assistant", content="well")}])
    for template, problem in (
        ("\n{% for %}", "2 of .* is broken: Expected"),
        ("{{ x | sho }}", "No filter named"),
    ):
        set_template(tmp_path, template)
        with pytest.raises(QuantizationError, match=f"^{re.escape(str(tmp_path))}: line .*{problem}"):
            list(Documents(PlainFile(path=path), ChatTemplate(tmp_path, quick=quick)).read())
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(QuantizationError, match=r"^[^:]*chat_template.jinja is no UTF-8 text"):
        list(Documents(PlainFile(path=path), ChatTemplate(tmp_path, quick=quick)).read())


@pytest.mark.parametrize("quick", [False, True])
def test_templates_are_sought_where_transformers_does(tokenizer: Path, tmp_path: Path, quick: bool) -> None:
    from transformers import AutoTokenizer

    set_template(tmp_path, PLAIN)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    chat = ask(role="assistant", content="since")
    beside = tmp_path / "additional_chat_templates"

    def check(rendered: str) -> None:
        assert AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(chat, tokenize=False) == rendered
        assert ChatTemplate(tmp_path, quick=quick).render(chat) == rendered

    check("user: why?\nassistant: since\n")
    (tmp_path / "chat_template.jinja").write_text("file " + PLAIN)
    check("file user: why?\nassistant: since\n")
    beside.mkdir()
    (beside / "default.jinja").write_text("beside " + PLAIN)
    check("beside user: why?\nassistant: since\n")
    (beside / "default.jinja").rename(beside / "tool_use.jinja")
    check("file user: why?\nassistant: since\n")
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(QuantizationError, match="has no chat template, which chat transcripts need"):
        ChatTemplate(tmp_path, quick=quick).render(chat)
    (beside / "tool_use.jinja").unlink()
    del config["chat_template"]
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named " + PLAIN}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    check("named user: why?\nassistant: since\n")
    # For processors alone; and of several templates, none that is meant for every chat.
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": PLAIN}))
    for of_tokenizer in ({}, {"chat_template": named[:1]}, {"chat_template": [{"name": "default"}]}):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | of_tokenizer))
        with pytest.raises(QuantizationError, match="has no chat template, which chat transcripts need"):
            ChatTemplate(tmp_path, quick=quick).render(chat)


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
