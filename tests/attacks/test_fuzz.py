"""Property-based fuzzing of everything that is parsed: headers, index, config.json, YAML.

Whatever a file holds, it is read or refused with a TrtseekError: no other exception, and no more than 100 MB taken.
Values are drawn so that most get past the first check: valid files with parts replaced by what a parser may trip over.
"""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.headers import check_headers
from pipeline.checkpoint.safetensors_file import SafetensorsFile
from pipeline.config.load import load_config
from pipeline.errors import TrtseekError
from tests import fixtures
from tests.attacks.cage import ROOM, snapshot

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)

INTEGERS = st.sampled_from([0, 1, -1, 2, 7, 127, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**64, -(2**63), 10**30, 10**400])
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    INTEGERS,
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.sampled_from(
        ["", "F32", "BF16", "I64", "F8_E4M3", "../x", "/", "\0", "\x1b[2J", "\ud800", "a" * 5000, "é" * 300]
    ),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner, max_size=5), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)
PATHS = st.lists(st.integers(0, 50), max_size=4)


def edit(document: Any, path: list[int], value: Any) -> Any:
    """A copy of a JSON value with the part at `path` (indices, modulo the size at each level) replaced."""
    if not path or not isinstance(document, dict | list) or not document:
        return value
    keys = list(document) if isinstance(document, dict) else range(len(document))
    key = keys[path[0] % len(keys)]
    copy = dict(document) if isinstance(document, dict) else list(document)
    copy[key] = edit(document[key], path[1:], value)
    return copy


def dump(value: Any) -> bytes:
    """As a writer without scruples would: NaN, infinity and halves of surrogates included."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


def attempt(read: Callable[[], object]) -> bool:
    """Whether it was read; any exception that is no TrtseekError passes through.

    Bounded is what Python allocates in `read` alone, not what Hypothesis holds; test_inputs bounds what lies below.
    """
    tracemalloc.start()
    try:
        read()
    except TrtseekError as error:
        assert len(str(error)) < 20_000
        return False
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < ROOM
    return True


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures.llama(tmp_path_factory.mktemp("fuzz") / "model", num_hidden_layers=1, tokenizer=True)


def parse_header(shard: Path) -> tuple[dict[str, Any], bytes]:
    data = shard.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


@FUZZ
@given(path=PATHS, value=VALUES, extra=st.binary(max_size=16), data=st.data())
def test_headers(
    model: Path, tmp_path_factory: pytest.TempPathFactory, path: list[int], value: Any, extra: bytes, data: Any
) -> None:
    header, body = parse_header(model / "model-00001-of-000003.safetensors")
    text = dump(edit(header, path, value))
    if data.draw(st.booleans()):
        position = data.draw(st.integers(0, len(text)))
        text = text[:position] + extra + text[position:]
    file = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)
    if attempt(lambda: SafetensorsFile(file)):
        read = SafetensorsFile(file)
        assert sum(info.nbytes for info in read.tensors.values()) == len(body)
        for name in read.tensors:
            assert read.read(name).data.nbytes == read.tensors[name].nbytes


@FUZZ
@given(content=st.binary(max_size=300))
def test_files_of_any_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.safetensors"
    file.write_bytes(content)
    attempt(lambda: SafetensorsFile(file))


@FUZZ
@given(path=PATHS, value=VALUES)
def test_index(model: Path, path: list[int], value: Any) -> None:
    index = model / "model.safetensors.index.json"
    good = index.read_bytes()
    before = snapshot(model.parent)
    try:
        index.write_bytes(dump(edit(json.loads(good), path, value)))
        attempt(lambda: CheckpointFolder.open(model))
    finally:
        index.write_bytes(good)
    assert snapshot(model.parent).keys() == before.keys()


@FUZZ
@given(key=st.sampled_from(sorted({*fixtures.LLAMA_CONFIG, *fixtures.V2_CONFIG, *fixtures.V3_CONFIG})), value=VALUES)
@example(key="n_routed_experts", value=None)
def test_config_json(model: Path, key: str, value: Any) -> None:
    config = model / "config.json"
    good = config.read_bytes()
    try:
        for base in (fixtures.LLAMA_CONFIG, fixtures.V2_CONFIG, fixtures.V3_CONFIG):
            config.write_bytes(dump({**base, "rope_scaling": fixtures.V2_ROPES["yarn"], key: value}))
            attempt(lambda: check_headers(CheckpointFolder.open(model)))
    finally:
        config.write_bytes(good)


@FUZZ
@given(path=PATHS, value=VALUES)
def test_rope_scaling(model: Path, path: list[int], value: Any) -> None:
    config = model / "config.json"
    good = config.read_bytes()
    try:
        for rope in (fixtures.LLAMA_ROPES["llama3"], fixtures.V2_ROPES["yarn"]):
            config.write_bytes(dump({**json.loads(good), "rope_scaling": edit(rope, path, value)}))
            attempt(lambda: check_headers(CheckpointFolder.open(model)))
    finally:
        config.write_bytes(good)


SETTINGS: dict[str, Any] = {
    "name": "a",
    "model": {"path": "model"},
    "target": {"gpu": "L4", "backend": "tensorrt_rtx", "parallel": {"tensor": 1}},
    "output": "out",
    "stages": {
        "convert": {"dtype": "float16"},
        "quantize": {
            "method": "awq",
            "group_size": 64,
            "exclude": ["a*"],
            "calibration": {"files": ["t"], "samples": 8},
        },
        "verify": {"prompts": ["a"], "gates": {"mean_kl": 0.5}},
        "build": {"max_seq_len": 128, "generation": [{"batch": 2, "length": 128}]},
    },
}


@FUZZ
@given(path=PATHS, value=VALUES)
def test_settings(tmp_path_factory: pytest.TempPathFactory, path: list[int], value: Any) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    file.write_bytes(dump(edit(SETTINGS, path, value)))  # JSON is YAML
    attempt(lambda: load_config(file))


SIGNS = list("[]{}:,-?!&*|>'\"%@`#~ \n\t")
WORDS = "&a |*a|<<: |---\n|...\n|!!python/name:os.system |!!binary |? |- |0x|1e999|.inf|.nan|null|true|name|model: |1_0"
SPACES = ["  ", "\n  ", "\0", "\x85", "\u2028", "\ufeff"]
TOKENS = st.sampled_from([*SIGNS, *WORDS.split("|"), *SPACES])


@settings(FUZZ, max_examples=400)
@given(tokens=st.lists(st.one_of(TOKENS, st.text(max_size=3)), max_size=40))
def test_yaml_of_any_tokens(tmp_path_factory: pytest.TempPathFactory, tokens: list[str]) -> None:
    file = tmp_path_factory.getbasetemp() / "tokens.yaml"
    file.write_bytes("".join(tokens).encode("utf-8", "surrogatepass"))
    attempt(lambda: load_config(file))


@settings(FUZZ, max_examples=50)
@given(key=st.text(max_size=12), value=st.text(max_size=30))
def test_overrides(tmp_path_factory: pytest.TempPathFactory, key: str, value: str) -> None:
    file = tmp_path_factory.getbasetemp() / "base.yaml"
    file.write_bytes(dump(SETTINGS))
    for path in (key, f"stages.{key}", "stages.build.max_seq_len", "model.path", "stages.quantize.exclude.0"):
        attempt(lambda path=path: load_config(file, [f"{path}={value}"]))  # type: ignore[misc]
