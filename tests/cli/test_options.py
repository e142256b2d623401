"""Files that are to be written are judged before any work."""

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pipeline.cli.options import OutputFile


@click.command()
@click.option("--to", type=OutputFile())
def command(to):
    click.echo(f"writes {to}")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        (".", "is a folder, where a file is to be written"),
        ("file/new.html", "file is no folder"),
        ("file/a/new.html", "file/a does not exist"),
        ("a/b/new.html", "a/b does not exist: make that folder first"),
        ("locked/new.html", "locked gives no permission"),
    ],
)
def test_what_cannot_be_written_is_named(tmp_path, monkeypatch, path, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "locked").mkdir()
    monkeypatch.setattr("os.access", lambda place, *_, **__: Path(place).name != "locked")  # root may write anywhere
    result = CliRunner().invoke(command, ["--to", path])
    assert result.exit_code == 2
    assert "--to" in result.output and path in result.output and words in result.output


@pytest.mark.parametrize("path", ["new.html", "old.html"])
def test_new_files_and_old_ones_may_be_written(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.html").touch()
    result = CliRunner().invoke(command, ["--to", path])
    assert (result.exit_code, result.output) == (0, f"writes {path}\n")
