"""What quantization asks of the disk before it begins: what it will write, and no more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeline.errors import QuantizationError, StoreError
from pipeline.quantization.quantize import quantize_checkpoint
from pipeline.workspace import FolderWorkspace
from tests import fixtures
from tests.quantization.support import CalibrationSettings, Model, Settings


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


def test_too_much_calibration_is_told_as_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that is too short before the disk that more of it would take; else what takes it."""
    hub = fixtures.llama(tmp_path / "hub", tokenizer=True)
    source = Model.load(hub).write(tmp_path / "engine", hub)
    (tmp_path / "a.txt").write_text("".join(f"word{i} " for i in range(5000)))
    asked = Asked(tmp_path)
    settings = Settings(calibration=CalibrationSettings(files=(tmp_path / "a.txt",), samples=10**6, length=256))
    with pytest.raises(QuantizationError, match="too little calibration text: 1000000 pieces of 256 tokens"):
        quantize_checkpoint(source, asked, settings=settings)
    assert not asked.required

    def refuse(nbytes: int) -> None:
        raise StoreError(f"{nbytes:,} bytes are still to be written", hint="free some space")

    monkeypatch.setattr(asked, "require", refuse)
    settings = Settings(calibration=CalibrationSettings(files=(tmp_path / "a.txt",), samples=300, length=64))
    size = source.architecture.hidden_size
    of = f"{3 * 300 * 64 * size * 4:,} of them are what layers read of 300 x 64 tokens"
    with pytest.raises(StoreError, match=of) as caught:
        quantize_checkpoint(source, asked, settings=settings)
    assert caught.value.hint == "lower stages.quantize.calibration.samples or length; or free some space"
    with pytest.raises(StoreError) as caught:
        quantize_checkpoint(source, asked, settings=Settings(method="rtn", group_size=32))
    assert caught.value.hint == "free some space"
