"""`tensorrt_llm.json`: what stands beside an engine of TensorRT-LLM in the build stage's output, for `package`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline.engine.document import read_document
from pipeline.errors import BuildError

FORMAT = 1
RECORD, ENGINE = "tensorrt_llm.json", "engine"  # the latter: the folder of config.json and rank{N}.engine, beside it


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRecord:
    """version: TensorRT-LLM's. image: the container to serve it in. sm, tensorrt: what it was built on and with; None
    where no receipt says. job: the job's name. network_digest: of the network that was proved for the same
    checkpoint. request: as asked (EngineRequest). files: sizes in bytes, by name within the engine's folder."""

    version: str
    image: str
    sm: int | None
    tensorrt: str | None
    job: str
    network_digest: str
    request: Mapping[str, Any]
    files: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        return sum(self.files.values())

    def write(self, folder: Path) -> None:
        document = {"format": FORMAT, **asdict(self)}
        (folder / RECORD).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def load_record(folder: Path) -> EngineRecord:
    """Of the build stage's output. Raises BuildError where it is missing or damaged."""
    hint = "run the build stage again"
    values = read_document(folder / RECORD, kind="the record of a TensorRT-LLM engine", version=FORMAT, hint=hint)
    try:
        return EngineRecord(**values)
    except TypeError as error:
        raise BuildError(f"{folder / RECORD}: does not describe an engine: {error}", hint=hint) from None
