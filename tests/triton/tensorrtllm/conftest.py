"""One small engine checkpoint for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.workspace import FolderWorkspace


@pytest.fixture(scope="session")
def converted(llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    convert_checkpoint(CheckpointFolder.open(llama_path), FolderWorkspace(folder), dtype="float16", overflow="clip")
    return folder
