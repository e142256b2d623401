"""Coverage of calibration text: against numbers worked out by hand, numpy, and text that is or is not enough."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pipeline.quantization.coverage import CHANGED, Spread, summarize, warn


def measure(samples: list[torch.Tensor]) -> dict[str, float]:
    """Samples [length, I], fed in two batches that cut a sample apart."""
    length, rows = samples[0].shape[0], torch.cat(samples)
    spread, cut = Spread(length), rows.shape[0] // 2 + 1
    spread.add(rows[:cut], torch.arange(cut))
    spread.add(rows[cut:], torch.arange(cut, rows.shape[0]))
    figures = spread.finish()
    assert figures is not None
    return figures


def test_by_hand() -> None:
    """Even samples have means (1, 4), odd ones (3, 4): all of them (2, 4)."""
    even, odd = torch.tensor([[1.0, -4.0]] * 5), torch.tensor([[-3.0, 4.0]] * 5)
    found = measure([even, odd, even, odd])
    p = 1 / 3
    entropy = -(p * math.log(p) + (1 - p) * math.log(1 - p)) / math.log(2)
    # sqrt(2/1) - 1 and sqrt(2/3) - 1 in the first channel, nothing in the second.
    change = (abs(math.sqrt(2) - 1) + abs(math.sqrt(2 / 3) - 1)) / 2 / math.sqrt(2)
    assert found["entropy"] == pytest.approx(entropy, abs=1e-3)
    assert found["peak_entropy"] == pytest.approx(-(3 / 7 * math.log2(3 / 7) + 4 / 7 * math.log2(4 / 7)), abs=1e-3)
    assert found["change"] == pytest.approx(change, rel=5e-3)
    assert found["score"] == pytest.approx(entropy * (1 - change), rel=5e-3)
    assert found["peak_change"] == 0


def test_agreement_is_numpy_s_correlation() -> None:
    rows = torch.randn(8, 6, 32, generator=torch.Generator().manual_seed(0)) * torch.linspace(0.1, 3, 32)
    halves = [rows[half::2].abs().mean((0, 1)).log().numpy() for half in (0, 1)]
    assert measure(list(rows))["agreement"] == pytest.approx(np.corrcoef(*halves)[0, 1], abs=2e-3)


def test_change_settles_like_the_root_of_the_samples() -> None:
    generator = torch.Generator().manual_seed(1)
    changes = [measure(list(torch.randn(count, 4, 256, generator=generator)))["change"] for count in (16, 256)]
    assert changes[0] / changes[1] == pytest.approx(4, rel=0.25)


def test_scales_settle_as_samples_are_added() -> None:
    """k of n independent samples have n/k - 1 times the variance of half of them, against all."""
    found = measure(list(torch.randn(64, 4, 512, generator=torch.Generator().manual_seed(3))))
    assert found["change_of_eighth"] / found["change"] == pytest.approx(math.sqrt(7), rel=0.1)
    assert found["change_of_quarter"] / found["change"] == pytest.approx(math.sqrt(3), rel=0.1)
    few = measure(list(torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(3))))
    assert "change_of_quarter" in few and "change_of_eighth" not in few
    saturation = summarize({"0": {"a": found, "b": few}})["saturation"]
    assert [row["share"] for row in saturation] == [1 / 8, 1 / 4, 1 / 2]
    assert saturation[0] == {"share": 1 / 8, "mean": found["change_of_eighth"], "largest": found["change_of_eighth"]}
    assert few["change"] > found["change"]  # and is left out, where it would be beside inputs that have all shares
    assert saturation[2] == {"share": 1 / 2, "mean": found["change"], "largest": found["change"]}
    assert [row["share"] for row in summarize({"0": {"b": few}})["saturation"]] == [1 / 4, 1 / 2]


def test_equal_halves_change_nothing_and_outliers_lower_entropy() -> None:
    sample = torch.rand(4, 64, generator=torch.Generator().manual_seed(2)) + 0.5
    same = measure([sample] * 4)
    assert (same["change"], same["agreement"], same["peak_change"]) == (0, 1, 0)
    loud = sample * torch.where(torch.arange(64) == 5, 1000.0, 1.0)
    assert measure([loud] * 4)["entropy"] < 0.3 < 0.9 < same["entropy"]


def test_silence_is_covered_and_a_missing_half_is_not_judged() -> None:
    assert measure([torch.zeros(3, 8)] * 2)["change"] == 0
    spread = Spread(4)
    assert spread.finish() is None
    spread.add(torch.ones(4, 8), torch.arange(4))
    assert spread.finish() is None


def test_the_warning_names_what_would_change() -> None:
    settled = {"score": 0.9, "change": CHANGED / 2}
    moving = {"score": 0.7, "change": CHANGED * 2}
    enough = summarize({"0": {"mlp.down_proj": settled}, "1": {"mlp.down_proj": settled}})
    assert enough["score"] == 0.9 and warn(enough, 16) is None
    found = summarize({"0": {"mlp.down_proj": settled}, "1": {"mlp.down_proj": moving, "self_attn.q_proj": settled}})
    assert (found["score"], found["change"], found["changing"]) == (0.7, 0.1, ["1.mlp.down_proj"])
    assert "1 of 3 inputs moved by more than 5%, at most by 10.0% (first: layer 1.mlp.down_proj)" in str(
        warn(found, 16)
    )
    assert warn(summarize({}), 16) is None


def test_one_sample_is_warned_of() -> None:
    assert "one sample says nothing" in str(warn(summarize({}), 1))
    assert warn(summarize({}), None) is None  # nothing was measured
