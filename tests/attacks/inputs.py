"""How hostile inputs are made, each below a folder of its own."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import fixtures

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"
Build = Callable[[Path], None]


def model(edit: Build) -> Build:
    """A small valid model, edited."""

    def build(folder: Path) -> None:
        fixtures.llama(folder / "model", num_hidden_layers=1, shards=1, tokenizer=True)
        edit(folder / "model")

    return build


def header(edit: Callable[[dict[str, Any]], Any], tail: bytes = b"") -> Build:
    """The model's one shard under an edited header; `edit` may return bytes in its place."""

    def rewrite(folder: Path) -> None:
        data = (folder / MODEL).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        entries = json.loads(data[8 : 8 + length])
        edited = edit(entries)
        text = edited if isinstance(edited, bytes) else json.dumps(entries).encode()
        (folder / MODEL).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :] + tail)

    return model(rewrite)


def entry(**changes: Any) -> Callable[[dict[str, Any]], None]:
    """Changes the embedding's entry."""
    return lambda entries: entries["model.embed_tokens.weight"].update(changes)


def raw(start: bytes, size: int = 0) -> Build:
    """A shard of these bytes and a hole up to `size`."""

    def write(folder: Path) -> None:
        with open(folder / MODEL, "wb") as file:
            file.write(start)
            file.truncate(max(size, len(start)))

    return model(write)


def index(places: Any, *, whole: Any = None) -> Build:
    def write(folder: Path) -> None:
        (folder / "part.safetensors").write_bytes((folder / MODEL).read_bytes())
        (folder / MODEL).unlink()
        document = {"metadata": {}, "weight_map": places} if whole is None else whole
        (folder / INDEX).write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())

    return model(write)


def config(**changes: Any) -> Build:
    def write(folder: Path) -> None:
        document = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(document))

    return model(write)


def replace_file(name: str, content: bytes) -> Build:
    return model(lambda folder: (folder / name).write_bytes(content) and None)


def link(name: str, target: str) -> Build:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return model(make)


def pipe(name: str) -> Build:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return model(make)


def yaml(text: str | bytes) -> Build:
    content = text if isinstance(text, bytes) else text.encode()
    return lambda folder: (folder / "a.yaml").write_bytes(content) and None


def settings(text: str) -> Build:
    """A config over a valid model, with more settings."""

    def build(folder: Path) -> None:
        fixtures.llama(folder / "model", num_hidden_layers=1, shards=1, tokenizer=True)
        (folder / "text.txt").write_text("text " * 1000)
        (folder / "a.yaml").write_text(text.replace("FOLDER", str(folder)))

    return build


def swap_offsets(entries: dict[str, Any]) -> None:
    names = [name for name in entries if name != "__metadata__"]
    entries[names[1]]["data_offsets"] = entries[names[0]]["data_offsets"]


def leave_hole(entries: dict[str, Any]) -> None:
    last = max((e for e in entries.values() if "dtype" in e), key=lambda e: int(e["data_offsets"][1]))
    last["data_offsets"] = [offset + 64 for offset in last["data_offsets"]]


def repeat_key(entries: dict[str, Any]) -> bytes:
    text = json.dumps(entries)
    return (text[:-1] + ', "lm_head.weight": ' + json.dumps(entries["lm_head.weight"]) + "}").encode()


def repeat_inner_key(entries: dict[str, Any]) -> bytes:
    return json.dumps(entries).replace('"dtype": "BF16"', '"dtype": "F32", "dtype": "BF16"', 1).encode()
