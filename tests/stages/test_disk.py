import errno
import os
from pathlib import Path

import pytest

from pipeline.errors import StoreError
from pipeline.stages.disk import explain_disk_errors


def explain(folder, error):
    with pytest.raises(StoreError) as caught, explain_disk_errors(folder):
        raise error
    return caught.value.message


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
@pytest.mark.parametrize("name", [".probe-1", ".run.json-2"])
def test_names_the_folder_that_the_user_knows(tmp_path, number, name):
    message = explain(tmp_path, OSError(number, os.strerror(number), str(tmp_path / name)))
    assert message.split(" is ")[0] == str(tmp_path)


def test_names_what_the_user_knows_itself(tmp_path):
    for name in ("run.json", "out"):
        error = PermissionError(errno.EACCES, "", str(tmp_path / name))
        assert explain(tmp_path, error).split(" is ")[0] == str(tmp_path / name)


def test_a_folder_that_cannot_be_made():
    folder = Path("/proc/trtseek/out")
    with pytest.raises(StoreError) as caught, explain_disk_errors(folder):
        folder.mkdir(parents=True)
    message = caught.value.message
    assert message == "/proc/trtseek cannot be made there"


def test_a_file_that_is_gone_is_no_trouble_of_the_disk(tmp_path):
    with pytest.raises(FileNotFoundError), explain_disk_errors(tmp_path):
        (tmp_path / "gone").read_bytes()
