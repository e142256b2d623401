"""Checkpoints that many tests only read, written once per run. A test that damages one writes its own copy."""

from __future__ import annotations

import os

os.environ.setdefault("GOMP_SPINCOUNT", "0")  # before torch is imported; see pipeline/cli/main.py

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from pipeline.checkpoint.convert import convert_checkpoint
from pipeline.checkpoint.folder import CheckpointFolder
from pipeline.workspace import FolderWorkspace
from plugins import passed
from tests import fixtures

# Whoever runs the tests in the background has them ignore Ctrl-C, and with them all that they start and interrupt.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples in every run, and none too slow: what a test takes depends on what runs beside it.
settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")


# What a slow test may take; pyproject.toml's timeout is for the others. Theirs is minutes of two idle cores.
SLOW_S = 1800


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SLOW_S))


@pytest.fixture(scope="session", autouse=True)
def no_kernel_has_passed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a config says nothing of is native, whatever plugins/passed.json has by now."""
    table = tmp_path_factory.mktemp("passed") / "passed.json"
    table.write_text('{"runs": []}')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passed, "TABLE", table)
        yield


@pytest.fixture(scope="session")
def llama_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GQA Llama with linear rope scaling, bfloat16, three shards."""
    return fixtures.llama(tmp_path_factory.mktemp("llama") / "hf", tokenizer=True)


@pytest.fixture(scope="session")
def deepseek_v2_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V2 with q_lora_rank and YaRN, bfloat16, three shards."""
    return fixtures.deepseek_v2(tmp_path_factory.mktemp("deepseek-v2") / "hf", tokenizer=True)


@pytest.fixture(scope="session")
def deepseek_v2_lite_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V2 without q_lora_rank, greedy routing, bfloat16, one file."""
    return fixtures.deepseek_v2(
        tmp_path_factory.mktemp("deepseek-v2-lite") / "hf",
        q_lora_rank=None,
        topk_method="greedy",
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        shards=1,
    )


@pytest.fixture(scope="session")
def converted_llama(llama_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The engine checkpoint of it, in float16."""
    folder = tmp_path_factory.mktemp("converted-llama")
    convert_checkpoint(CheckpointFolder.open(llama_path), FolderWorkspace(folder), dtype="float16", overflow="clip")
    return folder
