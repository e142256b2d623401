"""Tasks: what a file may say, and scores against transformers' own log-likelihoods and greedy continuations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.errors import ConfigError
from pipeline.evaluation.accuracy import Accuracy, measure_accuracy
from pipeline.evaluation.greedy import count_shared
from pipeline.evaluation.tasks import Choice, Exact, read_tasks
from pipeline.progress import SILENT
from tests import fixtures
from tests.evaluation.support import convert, subject

PROMPTS = ("The quick", "def f(x):", "abc", "A tensor is a", "1 2 3", "x")
CHOICES = ((" brown fox", " dog", "!"), ("\n    return x", " pass", " ..."), ("d", "defgh", "xyz z"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> CheckpointFolder:
    folder = tmp_path_factory.mktemp("accuracy")
    return convert(fixtures.llama(folder / "hf", dtype="float32", tokenizer=True), folder / "engine")


@pytest.fixture(scope="module")
def model(engine: CheckpointFolder):  # type: ignore[no-untyped-def]
    path = engine.path.parent / "hf"
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def write(path: Path, *records: object) -> Path:
    path.write_text("\n\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return path


def test_choices_are_those_of_transformers_likelihoods(engine, model) -> None:  # type: ignore[no-untyped-def]
    tokenizer = Tokenizer.from_file(str(engine.path / "tokenizer.json"))
    sums = []
    for prompt in PROMPTS:
        for choices in CHOICES:
            scores = []
            for choice in choices:  # a byte is a token here: the choice's are its bytes
                ids = [0, *tokenizer.encode(prompt + choice, add_special_tokens=False).ids]
                with torch.inference_mode():
                    log_p = torch.log_softmax(model(torch.tensor([ids])).logits[0].double(), -1)
                size = len(choice.encode())
                scores.append((sum(float(log_p[i - 1, ids[i]]) for i in range(len(ids) - size, len(ids))), size))
            sums.append((prompt, choices, scores))
    # Every choice is named the right one in turn: exactly one of them is chosen.
    items = [
        Choice(name="", task="t", prompt=prompt, choices=choices, answer=answer)
        for prompt, choices, _ in sums
        for answer in range(3)
    ]
    (found,) = measure_accuracy([subject(engine)], items, SILENT)
    best = [max(range(3), key=lambda i: scores[i][0]) for _, _, scores in sums]
    by_mean = [max(range(3), key=lambda i: scores[i][0] / scores[i][1]) for _, _, scores in sums]
    assert found.solved == tuple(answer == b for b in best for answer in range(3))
    assert found.normalised == tuple(answer == b for b in by_mean for answer in range(3))
    assert best != by_mean  # or the test would not tell them apart


def test_exact_match_is_transformers_greedy_continuation(engine, model) -> None:  # type: ignore[no-untyped-def]
    tokenizer = Tokenizer.from_file(str(engine.path / "tokenizer.json"))
    items, expected = [], []
    for i, prompt in enumerate(PROMPTS):
        ids = [0, *tokenizer.encode(prompt, add_special_tokens=False).ids]
        with torch.inference_mode():
            for _ in range(6):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
                if ids[-1] == 1:
                    break
        text = tokenizer.decode(ids[-6:])
        right = i % 2 == 0 and bool(text.strip())
        answer = f" {text.strip()} " if right else "no such text"
        items.append(Exact(name="", task="t", prompt=prompt, answer=answer, max_tokens=6))
        expected.append(right)
    (found,) = measure_accuracy([subject(engine)], items, SILENT)
    assert list(found.solved) == expected
    assert any(expected)


def test_a_mixed_file_keeps_its_order_and_reports_by_task(engine: CheckpointFolder, tmp_path: Path) -> None:
    file = write(
        tmp_path / "t.jsonl",
        {"prompt": "a", "answer": "zzz"},
        {"prompt": "a", "choices": ["b", "c"], "answer": 1, "task": "letters", "id": 7},
        {"prompt": "a", "choices": ["b", "c"], "answer": 0, "task": "letters"},
    )
    items = read_tasks([file], setting="--tasks")
    assert [item.task for item in items] == ["exact match", "letters", "letters"]
    assert [item.name for item in items] == [f"{file}:1", "7", f"{file}:5"]
    same = measure_accuracy([subject(engine), subject(engine)], items, SILENT)
    assert same[0].solved == same[1].solved
    assert same[0].solved[1] != same[0].solved[2]
    record = same[0].to_json()
    assert record["tasks"]["letters"]["accuracy"] == 0.5
    assert record["tasks"]["exact match"] == {
        "items": 1,
        "solved": 0,
        "normalised": 0,
        "accuracy": 0.0,
        "accuracy_normalised": 0.0,
    }
    assert same[0].share == pytest.approx(1 / 3)


def test_ties_and_values_that_are_not_finite_solve_nothing(engine: CheckpointFolder) -> None:
    same = [Choice(name="", task="t", prompt="a", choices=("b", "b"), answer=0)]
    broken = subject(engine, {"transformer.ln_f.weight": lambda w: w * float("nan")})
    other = [Choice(name="", task="t", prompt="a", choices=("b", "c"), answer=i) for i in (0, 1)]
    found: list[Accuracy] = measure_accuracy([subject(engine), broken], same + other, SILENT)
    assert found[0].solved[0] is False
    assert found[1].solved == (False, False, False)


BAD = [
    ("{", "is not JSON"),
    ("[]", "is not a JSON object"),
    ('{"prompt": ""}', "has no prompt"),
    ('{"prompt": "a", "x": 1}', "unknown key 'x'"),
    ('{"prompt": "a"}', "has no answer"),
    ('{"prompt": "a", "answer": 3}', "has no answer"),
    ('{"prompt": "a", "answer": "b", "max_tokens": true}', "max_tokens True"),
    ('{"prompt": "a", "choices": ["b"], "answer": 0}', "not two or more texts"),
    ('{"prompt": "a", "choices": ["b", "c"], "answer": 2}', "answer 2, not a place from 0 to 1"),
    ('{"prompt": "a", "choices": ["b", "c"], "answer": "c"}', "answer 'c', not a place"),
    ('{"prompt": "a", "answer": "b", "task": 5}', "task that is no text"),
    ('{"prompt": "a", "answer": ' + "[" * 100_000, "is not JSON"),
]


@pytest.mark.parametrize(("line", "problem"), BAD, ids=[problem for _, problem in BAD])
def test_a_bad_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n' + line, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"t\.jsonl:2 ") as caught:
        read_tasks([file], setting="--tasks")
    assert problem in caught.value.message


def test_a_file_without_tasks_and_no_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    for name in ("empty.jsonl", "absent.jsonl"):
        with pytest.raises(ConfigError, match=name) as caught:
            read_tasks([tmp_path / name], setting="--tasks")
        assert "--tasks" in (caught.value.hint or "")


def test_the_shipped_tasks_are_those_that_their_script_makes() -> None:
    from checkpoints.tasks import OUTPUT, make_tasks

    shipped = [json.loads(line) for line in OUTPUT.read_text(encoding="utf-8").splitlines()]
    assert shipped == make_tasks()
    items = read_tasks([OUTPUT], setting="--tasks")
    assert {type(item) for item in items} == {Choice, Exact}


def test_shared_beginnings_are_counted() -> None:
    assert [count_shared("abc", other) for other in ("abd", "abc", "ab", "", "xbc")] == [2, 3, 2, 0, 0]
