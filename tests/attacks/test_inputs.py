"""Hostile inputs, executable: each must end in the typed error of its row, cheaply, and write nothing.

After the `attacks/` folder of the safetensors repository. A row: how the input is made below a folder of its own, what
is done with it, the error's type, and what its message must name.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch  # noqa: F401 (heavy, and so imported before an attack is caged)

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.headers import check_headers
from pipeline.checkpoint.text import encode_text
from pipeline.config.load import load_config
from tests import fixtures
from tests.attacks.cage import run_caged, snapshot
from tests.attacks.inputs import (
    MODEL,
    Build,
    config,
    entry,
    header,
    index,
    leave_hole,
    link,
    model,
    pipe,
    raw,
    repeat_inner_key,
    repeat_key,
    replace_file,
    settings,
    swap_offsets,
    yaml,
)


def open_model(folder: Path) -> None:
    check_headers(CheckpointFolder.open(folder / "model"))


def read_config(folder: Path) -> None:
    load_config(folder / "a.yaml")


def check_config(folder: Path) -> None:
    from pipeline.cli.source import check_source

    check_source(load_config(folder / "a.yaml"))


def validate(folder: Path) -> None:
    """The command itself; its message as an error of the type that has its exit code."""
    import contextlib
    import io

    from pipeline import errors
    from pipeline.cli.main import _run

    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        code = _run(["validate", str(folder / "a.yaml")])
    known = (value for value in vars(errors).values() if isinstance(value, type))
    kinds = {kind.exit_code: kind for kind in known if issubclass(kind, errors.TrtseekError)}
    raise kinds[code](text.getvalue()) if code in kinds else RuntimeError(text.getvalue())


def tokenize(folder: Path) -> None:
    encode_text(folder / "model" / "tokenizer.json", "def f(x): return x")


@dataclass(frozen=True)
class Attack:
    build: Build
    run: Callable[[Path], None]
    error: str
    names: str


LAUGHS = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'lol'}]\n" for i in range(12))
BASE = "model: {path: FOLDER/model}\ntarget: {gpu: L4}\n"
SMALL = "build: {max_seq_len: 128}, verify: {heldout: {files: [FOLDER/text.txt], window: 64}}"
BIG = 10**4000  # under Python's own limit on digits

ATTACKS: dict[str, Attack] = {
    # safetensors headers
    "two tensors over the same bytes": Attack(header(swap_offsets), open_model, "CheckpointError", "overlaps"),
    "a hole between tensors": Attack(header(leave_hole), open_model, "CheckpointError", "unused after"),
    "bytes after the last tensor": Attack(
        header(lambda e: None, b"x" * 9), open_model, "CheckpointError", "follow the"
    ),
    "a negative offset": Attack(header(entry(data_offsets=[-8, 0])), open_model, "CheckpointError", "data_offsets"),
    "an offset of 4000 digits": Attack(
        header(entry(data_offsets=[0, BIG])), open_model, "CheckpointError", "embed_tok"
    ),
    "an offset beyond 64 bits": Attack(
        header(entry(data_offsets=[0, 2**70])), open_model, "CheckpointError", "embed_tok"
    ),
    "an offset that is a fraction": Attack(
        header(entry(data_offsets=[0, 1.5])), open_model, "CheckpointError", "offsets"
    ),
    "an infinite offset": Attack(
        header(lambda e: json.dumps(e).replace('"data_offsets": [0', '"data_offsets": [1e999', 1).encode()),
        open_model,
        "CheckpointError",
        "data_offsets",
    ),
    "a name twice": Attack(header(repeat_key), open_model, "CheckpointError", "appears twice"),
    "a key of an entry twice": Attack(header(repeat_inner_key), open_model, "CheckpointError", "appears twice"),
    "a shape whose product overflows": Attack(
        header(entry(shape=[2**32, 2**32, 0])), open_model, "CheckpointError", "too many elements"
    ),
    "a shape of a million ones": Attack(header(entry(shape=[1] * 1_000_000)), open_model, "CheckpointError", "values"),
    "a size of 4000 digits": Attack(header(entry(shape=[BIG])), open_model, "CheckpointError", "too many elements"),
    "a size of 5000 digits": Attack(
        header(lambda e: json.dumps(e).replace('"shape": [', '"shape": [' + "9" * 5000 + ", ", 1).encode()),
        open_model,
        "CheckpointError",
        "not valid JSON",
    ),
    "a negative size": Attack(header(entry(shape=[-512, -128])), open_model, "CheckpointError", "list of sizes"),
    "true for a size": Attack(header(entry(shape=[True, 65536])), open_model, "CheckpointError", "list of sizes"),
    "an object for a shape": Attack(header(entry(shape={})), open_model, "CheckpointError", "list of sizes"),
    "an unknown type": Attack(header(entry(dtype="I4")), open_model, "CheckpointError", "'I4'"),
    "a list for a type": Attack(header(entry(dtype=["BF16"])), open_model, "CheckpointError", "type"),
    "bytes that are no UTF-8": Attack(
        header(lambda e: b'{"\xff\xfe": {}}'), open_model, "CheckpointError", "valid JSON"
    ),
    "a name with terminal codes": Attack(
        header(lambda e: e.update({"\x1b]0;owned\x07": e.pop("lm_head.weight")})),
        open_model,
        "CheckpointError",
        "no text",
    ),
    "a name of a megabyte": Attack(
        header(lambda e: e.update({"x" * 1_000_000: e.pop("lm_head.weight")})), open_model, "CheckpointError", "missing"
    ),
    "half a surrogate in a name": Attack(
        header(lambda e: json.dumps(e).replace("lm_head", "\\ud800", 1).encode()),
        open_model,
        "CheckpointError",
        "no text",
    ),
    "a header nested 100,000 deep": Attack(
        header(lambda e: b"[" * 100_000), open_model, "CheckpointError", "nested too deeply"
    ),
    "a header of empty lists": Attack(
        header(lambda e: b"[" + b"[]," * 3_000_000 + b"[]]"), open_model, "CheckpointError", "values"
    ),
    "a header of 100 MB": Attack(
        raw(struct.pack("<Q", 10**8) + b"{", 10**8 + 8), open_model, "CheckpointError", "header"
    ),
    "a header of a terabyte": Attack(raw(struct.pack("<Q", 2**40), 64), open_model, "CheckpointError", "claims"),
    "a header of 2^64 - 1 bytes": Attack(raw(b"\xff" * 8, 64), open_model, "CheckpointError", "claims"),
    "a file of zeros": Attack(raw(b"", 1 << 40), open_model, "CheckpointError", "not valid JSON"),
    "an empty file": Attack(raw(b""), open_model, "CheckpointError", "too few"),
    "metadata that is a list": Attack(
        header(lambda e: e.update(__metadata__=[])), open_model, "CheckpointError", "metadata"
    ),
    # index files
    "an index that leads out": Attack(
        index({"a": "../outside.safetensors"}), open_model, "CheckpointError", "not the name"
    ),
    "an index with an absolute path": Attack(
        index({"a": "/etc/passwd"}), open_model, "CheckpointError", "not the name"
    ),
    "an index through a folder": Attack(
        index({"a": "sub/part.safetensors"}), open_model, "CheckpointError", "not the name"
    ),
    "an index to the folder itself": Attack(index({"a": "."}), open_model, "CheckpointError", "not the name"),
    "an index with a backslash": Attack(index({"a": "..\\part"}), open_model, "CheckpointError", "not the name"),
    "an index with a name too long": Attack(index({"a": "x" * 5000}), open_model, "CheckpointError", "not the name"),
    "an index with a NUL": Attack(index({"a": "part\0.safetensors"}), open_model, "CheckpointError", "not the name"),
    "an index of numbers": Attack(index({"a": 1}), open_model, "CheckpointError", "not the name"),
    "an index to a pickle": Attack(index({"a": "pytorch_model.bin"}), open_model, "CheckpointError", "pickle"),
    "an index that is a list": Attack(index({}, whole=[]), open_model, "CheckpointError", "JSON object"),
    "an index with a key twice": Attack(
        index({}, whole=b'{"weight_map": {"a": "part.safetensors", "a": "part.safetensors"}}'),
        open_model,
        "CheckpointError",
        "appears twice",
    ),
    "an index of a million entries": Attack(
        index({}, whole=b'{"weight_map": {' + b",".join(b'"%d":"p"' % i for i in range(1_000_000)) + b"}}"),
        open_model,
        "CheckpointError",
        "values",
    ),
    "an index of two tensors more": Attack(
        index({"a": "part.safetensors", "b": "part.safetensors"}), open_model, "CheckpointError", "does not hold a"
    ),
    # config.json
    "sizes of 4000 digits": Attack(config(hidden_size=BIG), open_model, "CheckpointError", "hidden_size"),
    "a million layers": Attack(config(num_hidden_layers=10**6), open_model, "CheckpointError", "num_hidden_layers"),
    "a thousand layers that are not there": Attack(
        config(num_hidden_layers=1000), open_model, "CheckpointError", "is missing"
    ),
    "millions of experts": Attack(
        config(**{**fixtures.V2_CONFIG, "num_hidden_layers": 1000, "n_routed_experts": 4096}),
        open_model,
        "CheckpointError",
        "model.",
    ),
    "NaN for a size": Attack(config(hidden_size=float("nan")), open_model, "CheckpointError", "NaN is not JSON"),
    "infinity by exponent": Attack(
        replace_file(
            "config.json", b'{"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e999, "hidden_size": 8}'
        ),
        open_model,
        "CheckpointError",
        "config.json",
    ),
    "negative heads": Attack(config(num_attention_heads=-4), open_model, "CheckpointError", "num_attention_heads"),
    "rope of an unknown kind": Attack(config(rope_scaling={"type": "$(id)"}), open_model, "CheckpointError", "rope"),
    "config.json nested 50,000 deep": Attack(
        replace_file("config.json", b'{"a":' * 50_000 + b"1" + b"}" * 50_000), open_model, "CheckpointError", "deeply"
    ),
    "config.json of 100 MB": Attack(
        model(lambda folder: os.truncate(folder / "config.json", 10**8)), open_model, "CheckpointError", "too many"
    ),
    "code to run": Attack(
        config(auto_map={"AutoModel": "evil.Model"}, architectures=["EvilModel"]),
        open_model,
        "CheckpointError",
        "EvilModel",
    ),
    # links, pipes and devices
    "a shard linked to /dev/zero": Attack(link(MODEL, "/dev/zero"), open_model, "CheckpointError", MODEL),
    "a shard linked to itself": Attack(link(MODEL, MODEL), open_model, "CheckpointError", "a broken link"),
    "config.json linked to /dev/zero": Attack(
        link("config.json", "/dev/zero"), open_model, "CheckpointError", "config.json"
    ),
    "a shard that is a pipe": Attack(pipe(MODEL), open_model, "CheckpointError", "regular file"),
    "config.json that is a pipe": Attack(pipe("config.json"), open_model, "CheckpointError", "config.json"),
    "a folder linked into itself": Attack(
        lambda folder: (folder / "model").symlink_to(folder / "model"), open_model, "CheckpointError", "no such folder"
    ),
    # tokenizers
    "a tokenizer of zeros": Attack(
        model(lambda folder: os.truncate(folder / "tokenizer.json", 10**9)),
        tokenize,
        "CheckpointError",
        "tokenizer.json",
    ),
    "a tokenizer of nothing": Attack(
        replace_file("tokenizer.json", b""), tokenize, "CheckpointError", "tokenizer.json"
    ),
    "a tokenizer nested deeply": Attack(
        replace_file("tokenizer.json", b'{"model":' * 100_000), tokenize, "CheckpointError", "tokenizer.json"
    ),
    "a tokenizer linked to /dev/zero": Attack(
        link("tokenizer.json", "/dev/zero"), tokenize, "CheckpointError", "tokenizer.json"
    ),
    "a tokenizer that is a pipe": Attack(pipe("tokenizer.json"), tokenize, "CheckpointError", "tokenizer.json"),
    "ids beyond 32 bits": Attack(
        replace_file("tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": 99999999999}, "merges": []}}'),
        tokenize,
        "CheckpointError",
        "tokenizer.json",
    ),
    "a pattern that backtracks for ever": Attack(
        replace_file(
            "tokenizer.json",
            json.dumps(
                {
                    "version": "1.0",
                    "pre_tokenizer": {
                        "type": "Split",
                        "pattern": {"Regex": "(" * 5000},
                        "behavior": "Isolated",
                        "invert": False,
                    },
                    "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
                }
            ).encode(),
        ),
        tokenize,
        "CheckpointError",
        "tokenizer.json",
    ),
    # YAML
    "a billion laughs": Attack(yaml(LAUGHS), read_config, "ConfigError", "more than"),
    "an anchor that contains itself": Attack(yaml("a: &a [*a]\n"), read_config, "ConfigError", "contains itself"),
    "an anchor that nobody made": Attack(yaml("a: *b\n"), read_config, "ConfigError", "a.yaml:1"),
    "a tag that calls": Attack(
        yaml("a: !!python/object/apply:os.system [id]\n"), read_config, "ConfigError", "not allowed"
    ),
    "a tag of one's own": Attack(yaml("a: !evil 1\n"), read_config, "ConfigError", "not allowed"),
    "brackets without end": Attack(yaml("a: " + "[" * 100_000), read_config, "ConfigError", "a.yaml"),
    "braces without end": Attack(yaml("{a: " * 20_000), read_config, "ConfigError", "a.yaml"),
    "a megabyte of items": Attack(yaml("a: [" + "1," * 500_000 + "]"), read_config, "ConfigError", "bytes long"),
    "as many items as fit": Attack(yaml("a: [" + "1," * 60_000 + "]"), read_config, "ConfigError", "more than"),
    "an integer of 100,000 digits": Attack(yaml("a: " + "9" * 100_000), read_config, "ConfigError", "a.yaml:1"),
    "a hexadecimal of 100,000 digits": Attack(yaml("a: 0x" + "f" * 100_000), read_config, "ConfigError", "a.yaml:1"),
    "a float beyond all": Attack(
        yaml(BASE + "name: a\nstages: {verify: {gates: {mean_kl: 1e999}}}\n"), read_config, "ConfigError", "mean_kl"
    ),
    "a key twice": Attack(yaml("name: a\nname: b\n"), read_config, "ConfigError", "twice"),
    "a key that is a list": Attack(yaml("? [a, b]\n: 1\n"), read_config, "ConfigError", "a key must be"),
    "a merge key": Attack(yaml("a: &a {b: 1}\nc: {<<: *a}\n"), read_config, "ConfigError", "a.yaml"),
    "two documents": Attack(yaml("a: 1\n---\nb: 2\n"), read_config, "ConfigError", "a.yaml"),
    "bytes that are no text": Attack(yaml(b"\xff\xfe\x00a"), read_config, "ConfigError", "UTF-8"),
    "a NUL": Attack(yaml("a: b\0c\n"), read_config, "ConfigError", "a.yaml"),
    "files that extend each other": Attack(yaml("extends: a.yaml\n"), read_config, "ConfigError", "extends itself"),
    "extends that leads to a device": Attack(yaml("extends: /dev/zero\n"), read_config, "ConfigError", "/dev/zero"),
    "a name that leads out": Attack(settings("name: ../../evil\n" + BASE), check_config, "ConfigError", "name"),
    "a model path with a NUL": Attack(
        settings('model: {path: "FOLDER/mo\\0del"}\ntarget: {gpu: L4}\n'), check_config, "ConfigError", "model.path"
    ),
    "a name with terminal codes in YAML": Attack(
        settings('name: "a\\e[31m"\n' + BASE), check_config, "ConfigError", "a.yaml:1"
    ),
    "a model path of 3,000 letters": Attack(
        settings(f"model: {{path: {'x' * 3000}}}\ntarget: {{gpu: L4}}\n"), validate, "TrtseekError", "name too long"
    ),
    "calibration from a device": Attack(
        settings(BASE + f"stages: {{quantize: {{calibration: {{files: [/dev/zero], length: 64}}}}, {SMALL}}}\n"),
        check_config,
        "ConfigError",
        "/dev/zero",
    ),
    "limits of 18 digits": Attack(
        settings(BASE + "stages: {build: {max_seq_len: 999999999999999999}}\n"), check_config, "ConfigError", "at most"
    ),
    "limits of 9 digits": Attack(
        settings(BASE + "stages: {build: {max_seq_len: 128, max_batch_size: 999999999}}\n"),
        validate,
        "CompatibilityError",
        "max_batch_size",
    ),
    "a pattern that backtracks": Attack(
        settings(
            BASE + f"stages: {{quantize: {{exclude: ['{'*a' * 30}*b'], calibration: {{length: 64}}}}, {SMALL}}}\n"
        ),
        check_config,
        "CompatibilityError",
        "matches no linear",
    ),
}


@pytest.fixture(autouse=True)
def heavy_imports() -> None:
    """In the parent, so that a cage holds the attack's own needs only."""
    import tokenizers  # noqa: F401

    import pipeline.cli.source
    import pipeline.config.compatibility  # noqa: F401


@pytest.mark.parametrize("name", ATTACKS)
def test_attack(name: str, tmp_path: Path) -> None:
    attack = ATTACKS[name]
    place = tmp_path / "place"
    place.mkdir()
    attack.build(place)
    before = snapshot(tmp_path)
    outcome = run_caged(lambda: attack.run(place))
    assert outcome.kind == attack.error, outcome.message[-3000:]
    assert attack.names in outcome.message
    assert len(outcome.message) < 5000
    assert outcome.message.isprintable() or all(line.isprintable() for line in outcome.message.splitlines())
    assert snapshot(tmp_path) == before


def test_the_cage_holds(tmp_path: Path) -> None:
    """What an attack must not do is seen."""
    assert run_caged(lambda: bytearray(200_000_000)).kind == "crashed"
    assert run_caged(lambda: os.kill(os.getpid(), 9)).kind == "killed"
    assert run_caged(lambda: 1 / 0).kind == "crashed"
    assert run_caged(lambda: bytearray(20_000_000)).kind == "accepted"
