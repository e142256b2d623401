"""Changing one key of a JSON text and no other byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint.json_text import remove_key, set_keys

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(
    value=st.dictionaries(st.text(), VALUES, max_size=5),
    key=st.text(),
    new=VALUES,
    indent=st.sampled_from([None, 0, 2, 4, "\t"]),
    tail=st.sampled_from(["", "\n", " \r\n"]),
)
def test_set_and_remove(value: dict[str, Any], key: str, new: Any, indent: Any, tail: str) -> None:
    text = json.dumps(value, indent=indent) + tail
    changed = set_keys(text, {key: new})
    assert json.loads(changed) == value | {key: new}
    assert list(json.loads(changed)) == list(value | {key: new})
    removed = remove_key(changed, key)
    assert json.loads(removed) == {k: v for k, v in value.items() if k != key}
    if key not in value:
        assert removed == text


def test_nothing_else_changes() -> None:
    text = '{\n  "a": 1.0E-5,\n  "é": [1,2],\n\n  "torch_dtype" :  "bfloat16",\n  "z": "}\\"{"\n}\n'
    changed = set_keys(text, {"torch_dtype": "float16", "own": {"x": 1, "y": None}})
    expected = '{\n  "a": 1.0E-5,\n  "é": [1,2],\n\n  "torch_dtype" :  "float16",\n  "z": "}\\"{",\n'
    assert changed == expected + '  "own": {\n    "x": 1,\n    "y": null\n  }\n}\n'
    assert remove_key(changed, "own") == text.replace("bfloat16", "float16")


@pytest.mark.parametrize("text", ['{"a":1}', "{}", " { } ", '{"b":2,"a":1}'])
def test_compact_texts(text: str) -> None:
    assert json.loads(set_keys(text, {"k": [1]})) == json.loads(text) | {"k": [1]}
    assert "a" not in json.loads(remove_key(text, "a"))
