"""Makes `text/tasks.jsonl` from the shipped texts: python -m checkpoints.tasks

Multiple choice: which of four pieces of held-out text goes on where the prompt stops; the other three begin at the same
kind of place in other pages. Exact match: a prompt of held-out text that ends in words which `calibration.txt` follows
with one word only, again and again. Nothing is drawn by a model.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEXT = Path(__file__).parent / "text"
OUTPUT = TEXT / "tasks.jsonl"
CHOICES, EXACT = 24, 12  # lines of each kind
PROMPT, CHOICE = 160, 40  # characters
KNOWN_WORDS, TIMES = 3, 3  # words that decide the next one, and how often they must
SEED = 0


def make_tasks() -> list[dict[str, Any]]:
    """The lines of the file, as records; the same ones every time."""
    heldout = (TEXT / "heldout.txt").read_text(encoding="utf-8")
    draw = random.Random(SEED)
    return [*_make_choices(heldout, draw), *_make_exact(heldout, draw)]


def _make_choices(text: str, draw: random.Random) -> Iterator[dict[str, Any]]:
    # A space between two words in the middle of a sentence: every piece begins with a space and a small letter.
    places = [m.start() for m in re.finditer(r"(?<=[a-z]{4}) (?=[a-z]{2}[a-z ]{20})", text) if m.start() > PROMPT]
    for number, place in enumerate(draw.sample(places, CHOICES)):
        others = draw.sample([other for other in places if abs(other - place) > 10 * PROMPT], 3)
        pieces = [text[start : start + CHOICE] for start in (place, *others)]
        order = draw.sample(range(4), 4)
        yield {
            "id": f"goes-on-{number}",
            "task": "goes on",
            "prompt": text[place - PROMPT : place],
            "choices": [pieces[i] for i in order],
            "answer": order.index(0),
        }


def _make_exact(text: str, draw: random.Random) -> Iterator[dict[str, Any]]:
    words = re.findall(r"\S+", (TEXT / "calibration.txt").read_text(encoding="utf-8"))
    following: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for i in range(len(words) - KNOWN_WORDS):
        following[tuple(words[i : i + KNOWN_WORDS])][words[i + KNOWN_WORDS]] += 1
    settled = {known: next(iter(c)) for known, c in following.items() if len(c) == 1 and c.total() >= TIMES}
    found: dict[tuple[str, ...], tuple[int, str]] = {}
    spans = list(re.finditer(r"\S+", text))
    for i in range(KNOWN_WORDS, len(spans)):
        known = tuple(span.group() for span in spans[i - KNOWN_WORDS : i])
        word = spans[i].group()
        if settled.get(known) == word and word.isalnum() and spans[i - 1].end() > PROMPT:
            found.setdefault(known, (spans[i - 1].end(), word))
    for number, known in enumerate(draw.sample(sorted(found), EXACT)):
        end, word = found[known]
        yield {
            "id": f"one-word-{number}",
            "task": "one word",
            "prompt": text[end - PROMPT : end],
            "answer": word,
            "max_tokens": 8,
        }


if __name__ == "__main__":
    lines = [json.dumps(record, ensure_ascii=False) for record in make_tasks()]
    OUTPUT.write_text("\n".join(lines) + "\n", encoding="utf-8")
