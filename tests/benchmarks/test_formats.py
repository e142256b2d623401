from __future__ import annotations

import pytest

from benchmarks import formats


def test_arguments_are_told_and_read(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        formats.main(["--help"])
    assert left.value.code == 0 and "round-to-nearest INT4" in capsys.readouterr().out
    asked = []
    monkeypatch.setattr(formats, "measure", lambda tokens, methods: asked.append((tokens, tuple(methods))) or True)
    for arguments in ([], ["2048"], ["1024", "rtn", "fp8"]):
        assert formats.main(arguments) == 0
    assert asked == [(8192, formats.METHODS), (2048, formats.METHODS), (1024, ("rtn", "fp8"))]
