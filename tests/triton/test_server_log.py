"""Whose a server's log is."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from pipeline.triton.errors import ServerError
from pipeline.triton.server_log import claim_log


def test_each_server_has_a_log_of_its_own(tmp_path: Path) -> None:
    log = tmp_path / "run" / "serve.log"
    with contextlib.ExitStack() as first, contextlib.ExitStack() as others:
        assert first.enter_context(claim_log(log, is_given=False)) == log
        second, third = (others.enter_context(claim_log(log, is_given=False)) for _ in range(2))
        assert (second.name, third.name) == ("serve-2.log", "serve-3.log")
        with pytest.raises(ServerError, match=r"serve\.log: another server writes its log there") as caught:
            first.enter_context(claim_log(log, is_given=True))
        assert caught.value.hint == "name another file with --log"
        others.close()
        assert others.enter_context(claim_log(log, is_given=False)) == second
    with claim_log(log, is_given=True) as again:  # what a server left is gone on with
        assert again == log


def test_what_is_no_file_is_everybodys(tmp_path: Path) -> None:
    null = Path("/dev/null")
    with claim_log(null, is_given=True) as first, claim_log(null, is_given=True) as second:
        assert first == second == null


def test_what_cannot_be_written_is_said_by_who_opens_it(tmp_path: Path) -> None:
    with claim_log(tmp_path, is_given=True) as place:
        assert place == tmp_path
