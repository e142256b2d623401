"""What `plan` and `validate` look at of a source checkpoint: its architecture, a tensor of every kind, and what
holds the linears that another tool has quantized.

Checking the headers of DeepSeek-V3's 91,000 tensors takes half of what `plan` may. What passed is remembered under the
identity (device, inode, size, modification time) of the index, the config and every shard, as digests are: a folder of
which one changed is checked anew, to the last tensor. Whatever reads weights opens the folder and checks it itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.architecture import Architecture, parse_architecture
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.foreign.holding import Held, Holding
from pipeline.checkpoint.foreign.marks import MARKS
from pipeline.checkpoint.foreign.methods import find_method
from pipeline.checkpoint.headers import check_headers, check_tokenizer
from pipeline.checkpoint.layouts import layout_for, list_kinds
from pipeline.checkpoint.shard_index import CONFIG, INDEX, SINGLE
from pipeline.checkpoint.strict_json import read_json
from pipeline.checkpoint.tensors import TensorInfo
from pipeline.digest import RACY_NS, identify

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

Identities = dict[str, list[int] | None]

FORMAT = 5  # of the remembered; raise it where a check refuses more than it did


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedHeaders:
    """`tensors` has, of every kind of tensor, the first, every tensor of layers for multi-token prediction, one of each
    type, and one that says that another tool has quantized the model; `count` and `nbytes` are of all. `holding` is of
    a model of type `dtype`, the one that was asked for. `files`: what is to be remembered; none where it was recalled.
    """

    architecture: Architecture
    tensors: Mapping[str, TensorInfo]
    count: int
    nbytes: int
    files: Identities
    dtype: str | None = None
    holding: Holding = field(default_factory=dict)


def read_checked(path: Path, memory: Path, dtype: str | None = None) -> CheckedHeaders:
    """The headers of the checkpoint in the folder `path`, all checks passed (CheckpointError). `memory`: a folder for
    what is remembered. `dtype`: what the engine's weights are to be (`stages.convert.dtype`)."""
    if (found := _recall(path, _place(path, memory), dtype)) is not None:
        check_tokenizer(path)
        return found
    before = _identify_all(path, (CONFIG, INDEX, SINGLE))
    folder = CheckpointFolder.open(path)
    shards = _identify_all(path, {file.name for file in folder.shards})
    check_headers(folder)
    tensors = folder.tensors
    unchanged = before == _identify_all(path, (CONFIG, INDEX, SINGLE))
    return CheckedHeaders(
        architecture=folder.architecture,
        tensors=_pick(folder.architecture, tensors),
        count=len(tensors),
        nbytes=folder.nbytes,
        files=before | shards if unchanged else {},
        dtype=dtype,
        holding=_list_holding(folder, dtype),
    )


def _list_holding(folder: CheckpointFolder, dtype: str | None) -> Holding:
    if find_method(folder) is None:
        return {}
    from pipeline.checkpoint.source import list_holding  # with numpy and torch, which nothing else here wants

    return list_holding(folder, dtype)


def _place(path: Path, memory: Path) -> Path:
    return memory / f"{zlib.crc32(os.fsencode(path.resolve())):08x}.json"


def _pick(architecture: Architecture, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    names = [name for kind in list_kinds(architecture) for name in kind.first.sources]
    names += [name for mapping in layout_for(architecture).mtp_mappings() for name in mapping.sources]
    names += {info.dtype: name for name, info in tensors.items()}.values()
    names += [name for name in tensors if name.endswith(MARKS)][:1]
    return {name: tensors[name] for name in names if name in tensors}


def _identify_all(path: Path, names: tuple[str, ...] | set[str]) -> Identities:
    """Each file's identity, None for what is not there."""
    found: Identities = {}
    for name in names:
        try:
            found[name] = list(identify(os.stat(path / name)))
        except OSError:
            found[name] = None
    return found


def _recall(path: Path, place: Path, dtype: str | None) -> CheckedHeaders | None:
    """None for what is not known, is known under other files or for another type, or cannot be read: it is then checked
    again."""
    try:
        text, _, checksum = place.read_bytes().rpartition(b"\n")
        if int(checksum) != zlib.crc32(text):
            return None
        document = json.loads(text)
        if document["format"] != FORMAT or document["folder"] != str(path.resolve()):
            return None
        if document["files"] != _identify_all(path, set(document["files"])):
            return None
        holding = {name: each if isinstance(each, str) else Held(**each) for name, each in document["holding"].items()}
        if holding and document["dtype"] != dtype:
            return None
        tensors = {name: TensorInfo(name, stored, tuple(shape)) for name, stored, shape in document["tensors"]}
        count, nbytes = int(document["count"]), int(document["nbytes"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    architecture = parse_architecture(read_json(path / CONFIG), str(path / CONFIG))
    return CheckedHeaders(
        architecture=architecture,
        tensors=tensors,
        count=count,
        nbytes=nbytes,
        files={},
        dtype=dtype,
        holding=holding,
    )


def remember(path: Path, memory: Path, checked: CheckedHeaders) -> None:
    """Keeps what was read, if it can be written, for the next time; but not of files so young that they could change
    once more within the same tick of the clock."""
    times = [identity[3] for identity in checked.files.values() if identity]
    if not times or time.time_ns() - max(times) <= RACY_NS:
        return
    document: dict[str, Any] = {
        "format": FORMAT,
        "folder": str(path.resolve()),
        "files": checked.files,
        "count": checked.count,
        "nbytes": checked.nbytes,
        "tensors": list(checked.tensors.values()),
        "dtype": checked.dtype,
        "holding": {name: each if isinstance(each, str) else asdict(each) for name, each in checked.holding.items()},
    }
    text = json.dumps(document, separators=(",", ":")).encode()
    place = _place(path, memory)
    partial = place.with_name(f".{place.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(text + b"\n" + str(zlib.crc32(text)).encode())
        partial.replace(place)
