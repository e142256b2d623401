"""Property-based fuzzing of quantization_config: whatever it holds, the checkpoint is read or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.checkpoint.source import open_source
from tests.attacks.test_fuzz import FUZZ, PATHS, VALUES, attempt, edit
from tests.checkpoint.foreign.cases import write

NAMES = ("awq", "gptq", "compressed-int4", "compressed-fp8-static", "modelopt-int4-apart")
STATED = "quantization_config"
WORDS = ["", "awq", "gptq", "modelopt", "Linear", "re:(", "channel", "group", "float", "marlin", "gptq_v2", [128, 128]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    return {name: write(name, tmp_path_factory.mktemp(name)) for name in NAMES}


@FUZZ
@given(name=st.sampled_from(NAMES), path=PATHS, value=st.one_of(st.sampled_from(WORDS), VALUES))
@example(name="awq", path=[2], value=-1)
@example(name="compressed-int4", path=[3, 0, 1], value={})
@example(name="compressed-int4", path=[3, 0, 1, 0], value=10**400)
@example(name="modelopt-int4-apart", path=[1], value="mixed_precision")
def test_any_quantization_config(folders: Mapping[str, Path], name: str, path: list[int], value: Any) -> None:
    folder = CheckpointFolder.open(folders[name])
    folder.config[STATED] = edit(folder.config[STATED], path, value)
    read: Callable[[], object] = lambda: open_source(folder, "float16", exact=False)  # noqa: E731
    attempt(read)


@pytest.mark.parametrize("name", NAMES)
def test_what_was_not_changed_is_read(folders: Mapping[str, Path], name: str) -> None:
    assert attempt(lambda: open_source(CheckpointFolder.open(folders[name]), None, exact=False))
