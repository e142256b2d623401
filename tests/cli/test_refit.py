"""The verb alone; what it calls is tested in tests/engine/test_refit.py."""

from __future__ import annotations

import pytest

from pipeline.errors import BuildError


def test_says_what_it_needs(invoke):
    text = invoke("refit", "--help").stdout
    assert "--checkpoint" in text and "stages.build.weights: stripped" in text


@pytest.mark.parametrize("options", [(), ("--check", "--output", "out")])
def test_either_checks_or_writes(invoke, tmp_path, options):
    import click

    with pytest.raises(click.UsageError, match="either --output or --check"):
        invoke("refit", str(tmp_path), "--checkpoint", str(tmp_path), *options)


def test_a_folder_without_an_engine(invoke, tmp_path):
    with pytest.raises(BuildError, match=r"engine\.json: No such file"):
        invoke("refit", str(tmp_path), "--checkpoint", str(tmp_path), "--check")
