import os

import pytest

from pipeline.workspace import FolderWorkspace


def test_finished_step_is_known_to_the_next_run_in_any_folder_spelling(tmp_path, monkeypatch):
    workspace = FolderWorkspace(tmp_path / "work")
    file = workspace.path / "deep" / "shard"
    file.parent.mkdir()
    file.write_bytes(b"x")
    workspace.finish("one", [file])
    workspace.finish("nothing written", [])
    monkeypatch.chdir(tmp_path)
    again = FolderWorkspace(type(tmp_path)("work"))
    assert again.is_done("one")
    assert again.is_done("nothing written")
    assert not again.is_done("two")


def test_step_is_not_done_once_its_file_changed(tmp_path):
    workspace = FolderWorkspace(tmp_path)
    (tmp_path / "a").write_bytes(b"one")
    workspace.finish("step", [tmp_path / "a"])
    status = (tmp_path / "a").stat()
    (tmp_path / "a").write_bytes(b"two")
    os.utime(tmp_path / "a", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert not FolderWorkspace(tmp_path).is_done("step")
    (tmp_path / "a").unlink()
    assert not FolderWorkspace(tmp_path).is_done("step")


def test_the_last_finish_of_a_step_holds(tmp_path):
    for content in (b"one", b"two"):
        workspace = FolderWorkspace(tmp_path)
        (tmp_path / "a").write_bytes(content)
        workspace.finish("step", [tmp_path / "a"])
    assert FolderWorkspace(tmp_path).is_done("step")


def test_step_after_a_torn_line_can_be_recorded(tmp_path):
    workspace = FolderWorkspace(tmp_path)
    workspace.finish("one", [])
    with open(workspace.journal, "ab") as journal:
        journal.write(b'{"step": "two", "fi')
    workspace = FolderWorkspace(tmp_path)
    assert workspace.is_done("one")
    assert not workspace.is_done("two")
    workspace.finish("three", [])
    assert FolderWorkspace(tmp_path).is_done("three")


def test_files_are_those_of_the_stage(tmp_path):
    workspace = FolderWorkspace(tmp_path)
    (tmp_path / "b").touch()
    (tmp_path / "a").touch()
    workspace.finish("step", [tmp_path / "a"])
    assert workspace.files() == [tmp_path / "a", tmp_path / "b"]
    assert workspace.discard_unfinished() == ["b"]
    assert workspace.files() == [tmp_path / "a"]


def test_file_outside_is_refused(tmp_path):
    (tmp_path / "outside").touch()
    with pytest.raises(ValueError, match="not in the workspace"):
        FolderWorkspace(tmp_path / "work").finish("step", [tmp_path / "outside"])
