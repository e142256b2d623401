"""What quantization asks of the disk before it begins: what it will write, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.quantization.support import Model, Settings


class Asked(FolderWorkspace):
    """Remembers what it was asked for, and may be killed after so many steps."""

    def __init__(self, folder: Path, steps: int = 99) -> None:
        super().__init__(folder / "out", journal=folder / "journal")
        self.required: list[int] = []
        self.steps = steps

    def require(self, nbytes: int) -> None:
        self.required.append(nbytes)

    def finish(self, step: str, files: Sequence[Path]) -> None:
        if self.steps == 0:
            raise KeyboardInterrupt
        self.steps -= 1
        super().finish(step, files)


@pytest.mark.parametrize("method", ["rtn", "int8", "fp8_blocks"])
def test_what_is_left_to_write(tmp_path: Path, method: str) -> None:
    hub = fixtures.deepseek_v2(tmp_path / "hub", tokenizer=True)
    source = Model.load(hub).write(tmp_path / "engine", hub)
    settings = Settings(method=method, group_size=32)
    killed = Asked(tmp_path, steps=2)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(source, killed, settings=settings)
    again = Asked(tmp_path)
    report = quantize_checkpoint(source, again, settings=settings)
    assert report.bytes_after <= killed.required[0] < 1.2 * report.bytes_after < report.bytes_before
    assert 0 < again.required[0] < killed.required[0]
