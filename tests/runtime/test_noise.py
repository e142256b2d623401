import numpy as np
import pytest

from pipeline.runtime.noise import draw_uniforms, philox

# Random123's kat_vectors: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def _words(text: str) -> np.ndarray:
    return np.array([[int(word, 16)] for word in text.split()], np.uint64)


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_the_published_vectors(counter: str, key: str, result: str) -> None:
    assert philox(_words(counter), _words(key)).tolist() == _words(result).tolist()


def test_a_place_draws_the_same_in_any_company() -> None:
    rng = np.random.default_rng(0)
    places = [rng.integers(0, 2**63, 50).astype(np.uint64), *(rng.integers(0, 99, (2, 50)).astype(np.uint64))]
    together = draw_uniforms(*places)
    assert together.tolist() == [draw_uniforms(*(column[i : i + 1] for column in places))[0] for i in range(50)]


def test_every_part_of_the_place_counts() -> None:
    places = [(s, q, t) for s in (0, 1, 2**32, 2**64 - 1) for q in (0, 1) for t in (0, 1)]
    numbers = draw_uniforms(*(np.array(column, np.uint64) for column in zip(*places, strict=True)))
    assert len(set(numbers.tolist())) == len(places)


def test_uniforms_are_uniform_and_inside() -> None:
    steps = np.arange(200_000, dtype=np.uint64)
    numbers = draw_uniforms(np.full_like(steps, 7), np.zeros_like(steps), steps)
    assert numbers.min() > 0 and numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=50, range=(0, 1))
    assert ((counts - 4000) ** 2 / 4000).sum() < 95  # chi-squared, 49 degrees of freedom: p < 1e-4 beyond
