from __future__ import annotations

import json
from typing import Any

import pytest

from pipeline.engine.limits import BuildLimits, Rectangle
from pipeline.errors import CompatibilityError
from pipeline.network.inputs import STEP_INPUTS, Port


def limits(**changes: Any) -> BuildLimits:
    values: dict[str, Any] = {
        "max_seq_len": 4096,
        "max_batch_size": 64,
        "max_num_tokens": 1024,
        "generation": (Rectangle(batch=64, length=1000), Rectangle(batch=8, length=4096)),
        "max_blocks": 1100,
    }
    return BuildLimits(**values | changes)


def test_profiles_hold_what_the_limits_say() -> None:
    context, wide, long = limits().profiles()
    assert [p.phase for p in (context, wide, long)] == ["context", "generation", "generation"]
    # The context phase takes as many sequences as generation does at full length: 8, not 64.
    assert context.maximum == {"T": 1024, "B": 8, "Q": 256, "MB": 64, "N": 8, "NB": 1100}
    assert wide.maximum == {"T": 64, "B": 64, "Q": 1, "MB": 16, "N": 64, "NB": 1100}  # 1000 tokens fill 16 blocks
    assert long.maximum == {"T": 8, "B": 8, "Q": 1, "MB": 64, "N": 8, "NB": 1100}


def test_shapes_of_every_input_are_ordered_and_consistent() -> None:
    pool = Port(name="k_pool_0", dtype="float16", axes=("NB", 2, 64, 128), meaning="")
    for profile in limits().profiles():
        shapes = profile.shapes((*STEP_INPUTS, pool))
        assert shapes.keys() == {port.name for port in STEP_INPUTS} | {"k_pool_0"}
        for minimum, optimum, maximum in shapes.values():
            assert all(0 < a <= b <= c for a, b, c in zip(minimum, optimum, maximum, strict=True))
        assert shapes["update_lengths"][2] == (1101,)
        assert shapes["k_pool_0"] == ((1, 2, 64, 128), (1100, 2, 64, 128), (1100, 2, 64, 128))


@pytest.mark.parametrize(
    ("changes", "chunk"),
    [
        ({"max_chunk": 100}, 100),
        ({"max_chunk": 5000}, 1024),  # no more than the step's rows
        ({}, 256),  # 8 sequences of 256 rows: twice 1024
        ({"max_num_tokens": 3}, 1),
        ({"generation": (Rectangle(batch=1, length=4096),)}, 1024),
    ],
)
def test_chunk(changes: dict[str, Any], chunk: int) -> None:
    assert limits(**changes).chunk == chunk


def test_rows_never_exceed_batch_times_chunk() -> None:
    context = limits(max_chunk=16).profiles()[0]
    assert context.maximum["T"] == 8 * 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seq_len": 0}, "max_seq_len is 0"),
        ({"max_num_tokens": -1}, "max_num_tokens is -1"),
        ({"max_chunk": 0}, "max_chunk is 0"),
        ({"generation": ()}, "generation has no profile"),
        ({"generation": (Rectangle(batch=65, length=4096),)}, "65 x 4096 is outside"),
        ({"generation": (Rectangle(batch=1, length=4097),)}, "1 x 4097 is outside"),
        ({"generation": (Rectangle(batch=64, length=4095),)}, "no generation profile reaches max_seq_len 4096"),
        ({"max_blocks": 64}, "needs 65 blocks"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CompatibilityError, match=message):
        limits(**changes)


def test_json_round_trip() -> None:
    original = limits(max_chunk=128)
    assert BuildLimits.from_json(json.loads(json.dumps(original.to_json()))) == original
