from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.engine.refit_list import RefitList, fold_names, load_refit_list, unfold_names
from pipeline.errors import BuildError
from pipeline.network.placeholders import Placeholder

EXPERTS = tuple(f"transformer.layers.3.mlp.experts.{expert}.fc.weight" for expert in range(12))
STACK = Placeholder(
    name="layers.3.mlp.experts.fc.weight",
    dtype="int4",
    shape=(12, 8, 4),
    nbytes=192,
    digest="blake3:" + "0" * 64,
    sources=EXPERTS,
    stored=False,
)


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ((), ()),
        (("a.1.b",), ("a.1.b",)),
        (EXPERTS, ("transformer.layers.3.mlp.experts.{0..11}.fc.weight",)),
        (("a.9", "a.10"), ("a.{9..10}",)),
        (("a.1", "a.3"), ("a.1", "a.3")),
        (("a.1.x", "a.2.y"), ("a.1.x", "a.2.y")),
        (("a.2", "a.1"), ("a.2", "a.1")),
    ],
)
def test_names_fold_and_unfold(names: tuple[str, ...], folded: tuple[str, ...]) -> None:
    assert fold_names(names) == folded
    assert tuple(unfold_names(folded)) == names


def test_round_trip(tmp_path: Path) -> None:
    wanted = RefitList(network_digest="blake3:" + "1" * 64, constants=(STACK, STACK))
    (tmp_path / "refit.json").write_text(wanted.to_json())
    assert load_refit_list(tmp_path) == load_refit_list(tmp_path / "refit.json") == wanted
    assert wanted.nbytes == 384
    rows = json.loads(wanted.to_json())["constants"]
    assert rows[0]["sources"] == ["transformer.layers.3.mlp.experts.{0..11}.fc.weight"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "not a refit list of format 1"),
        ('{"format": 2}', "not a refit list of format 1"),
        ('{"format": 1}', "does not list an engine's constants"),
        ('{"format": 1, "network_digest": "x", "constants": [{"name": "a"}]}', "does not list an engine's constants"),
    ],
)
def test_damaged(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "refit.json").write_text(content)
    with pytest.raises(BuildError, match=message) as caught:
        load_refit_list(tmp_path)
    assert "stripped" in caught.value.hint


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="No such file"):
        load_refit_list(tmp_path)
