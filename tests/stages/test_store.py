import contextlib
import dataclasses
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from blake3 import blake3

from pipeline.errors import StoreError
from pipeline.stages.executor import Executor
from pipeline.stages.store import FolderWorkspace, Partial, Store
from tests.stages.test_executor import ALL, run
from tests.stages.toys import COPY, STAGES, STEPS, make_config, read_log, read_tree

ROOT = Path(__file__).parents[2]


def spawn(folder, pause):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.stages.toys", str(folder), str(pause)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for_log(config, line):
    deadline = time.monotonic() + 60
    while line not in read_log(config):
        assert time.monotonic() < deadline, f"{line!r} never logged"
        time.sleep(0.01)


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGINT])
def test_killed_run_goes_on_and_ends_in_the_same_bytes(tmp_path, death):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    undisturbed, config = make_config(tmp_path / "whole"), make_config(tmp_path / "killed")
    run(undisturbed)
    child = spawn(tmp_path / "killed", 0.001)
    wait_for_log(config, "copy 2")
    time.sleep(0.05)  # somewhere within the third shard
    child.send_signal(death)
    child.communicate()
    assert child.returncode != 0
    assert not (config.output / "store" / "copy").exists()
    assert read_log(config) == ALL[:3]

    (plan, *_) = Executor(config, STAGES).plan()
    went_on = "goes on after 2 finished steps of a killed run"
    assert plan.reasons == ([went_on] if death == signal.SIGKILL else ["the last run was stopped here", went_on])
    work, notes = run(config)
    assert work == ALL[2:]
    assert "copy: goes on after 2 finished steps, the last of them 'shard 1'" in notes.lines
    for stage in ("copy", "upper", "link"):
        assert read_tree(config.output / "toy" / stage) == read_tree(undisturbed.output / "toy" / stage)
    assert not list((config.output / "store" / ".partial").iterdir())


class Stop(BaseException):
    """A kill, in a test that stays in its own process."""


def stop_at(monkeypatch, config, step):
    """A run that dies in the given step, leaving half of its file."""
    real = Partial.finish

    def finish(self, name, files):
        if name == f"shard {step}":
            os.truncate(files[0], 100)
            raise Stop
        real(self, name, files)

    with monkeypatch.context() as patch, contextlib.suppress(Stop):
        patch.setattr(Partial, "finish", finish)
        Executor(config, STAGES).run()
    return next((config.output / "store" / ".partial").iterdir())


def test_steps_whose_files_were_damaged_are_repeated(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    partial = stop_at(monkeypatch, config, 3)
    shard = partial / "files" / "shards" / "1.txt"
    shard.write_bytes(b"X" + shard.read_bytes()[1:])
    work, _ = run(config)
    assert work == ["copy 1", "copy 3", "copy 4", "upper", "link"]


def test_torn_journal_line_is_not_believed(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    partial = stop_at(monkeypatch, config, 3)
    journal = partial / "journal"
    os.truncate(journal, journal.stat().st_size - 10)
    assert run(config)[0] == ALL[2:]


def test_half_written_files_do_not_reach_the_artifact(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    partial = stop_at(monkeypatch, config, 3)
    (partial / "files" / "shards" / "model.tmp").write_text("half")
    (partial / "files" / "scratch").mkdir()
    run(config)
    assert sorted(path.name for path in (config.output / "toy" / "copy").iterdir()) == [
        "artifact.json",
        "shards",
        "summary.txt",
    ]
    assert len(list((config.output / "toy" / "copy" / "shards").iterdir())) == STEPS


def test_partial_result_of_another_fingerprint_is_not_used(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    stop_at(monkeypatch, config, 3)
    config.settings["copy"] = {"suffix": "!"}
    assert run(config)[0] == ALL
    assert "!" in (config.output / "toy" / "copy" / "shards" / "0.txt").read_text()


def test_partial_result_from_other_input_bytes_is_not_used(tmp_path):
    store = Store(tmp_path)
    partial = store.open_partial("upper", "blake3:" + "a" * 64, inputs={"copy": "one"})
    (partial.path / "file").write_text("x")
    partial.finish("step", [partial.path / "file"])
    assert store.open_partial("upper", "blake3:" + "a" * 64, inputs={"copy": "one"}).is_done("step")
    assert not store.open_partial("upper", "blake3:" + "a" * 64, inputs={"copy": "two"}).is_done("step")


def test_force_does_not_go_on_from_finished_steps(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    stop_at(monkeypatch, config, 3)
    assert run(config, force=["copy"])[0] == ALL


def test_two_runs_at_once_do_the_work_once_and_say_so(tmp_path):
    config = make_config(tmp_path)
    first = spawn(tmp_path, 0.002)
    wait_for_log(config, "copy 1")
    second = spawn(tmp_path, 0.002)
    outputs = [child.communicate()[0] for child in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], outputs
    assert read_log(config) == ALL
    assert f"copy: waits for process {first.pid}" in outputs[1]
    assert "copy: cached" in outputs[1]


def test_a_run_that_waits_goes_on_where_the_other_was_killed(tmp_path):
    config = make_config(tmp_path)
    first = spawn(tmp_path, 0.002)
    wait_for_log(config, "copy 2")
    second = spawn(tmp_path, 0)
    seen = ""
    while "waits for" not in seen:
        seen = second.stdout.readline()
        assert seen, "the second run never waited"
    first.kill()
    first.communicate()
    before = read_log(config)  # a slow machine may be a step further by now
    second.communicate()
    assert second.returncode == 0 and 3 <= len(before) < len(ALL)
    assert read_log(config)[len(before) :] in (ALL[len(before) - 1 :], ALL[len(before) :])


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_full_disk_stops_with_nothing_half_written_and_goes_on_after(tmp_path, small_disk):
    config = make_config(tmp_path)
    config.output = small_disk / "out"
    ballast = small_disk / "ballast"
    # Room for the bookkeeping (a page each: digests, lock, journal, begin.json) and some of the five shards.
    ballast.write_bytes(bytes(shutil.disk_usage(small_disk).free - 28 * 1024))
    with pytest.raises(StoreError, match=r"the disk is full \([\d,]+ bytes free\)") as error:
        run(config)
    assert str(small_disk / "out" / "store") in error.value.message
    assert not (config.output / "store" / "copy").exists()
    finished = sum(1 for line in read_log(config)) - 1
    ballast.unlink()
    work, notes = run(config)
    assert 0 < finished < STEPS
    assert work == ALL[finished:]
    assert any("goes on after" in line for line in notes.lines)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_recognised_when_the_commit_meets_it(tmp_path, monkeypatch, code):
    config = make_config(tmp_path)

    def fail(path):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch, pytest.raises(StoreError, match=r"full|quota"):
        patch.setattr("pipeline.stages.store.flush", fail)
        run(config)
    assert not (config.output / "toy" / "copy").exists()
    run(config)


def test_full_disk_is_recognised_through_a_library_and_names_what_was_needed(tmp_path):
    config = make_config(tmp_path)

    def run_full(context):
        context.workspace.require(1000)
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    with pytest.raises(StoreError, match=r"the disk is full \([\d,]+ bytes free, 1,000 were to be written\)"):
        run(config, [dataclasses.replace(COPY, run=run_full)])


def test_require_refuses_what_cannot_fit(tmp_path):
    workspace = FolderWorkspace(tmp_path)
    workspace.require(1)
    with pytest.raises(StoreError, match=r"1,000,000,000,000,000,000 bytes are still to be written"):
        workspace.require(10**18)


def test_file_size_limit_is_a_disk_error(tmp_path):
    script = (
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000));"
        f"sys.argv = ['toys', {str(tmp_path)!r}, '0'];"
        "runpy.run_module('tests.stages.toys', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "StoreError" in done.stderr
    assert "the file size limit is reached" in done.stderr


def test_regular_file_where_a_folder_should_be(tmp_path):
    config = make_config(tmp_path)
    config.output.write_text("mine")
    with pytest.raises(StoreError, match=r"/out is a file where a folder should be"):
        run(config)
    assert config.output.read_text() == "mine"


def test_regular_file_where_the_store_should_be(tmp_path):
    config = make_config(tmp_path)
    config.output.mkdir()
    (config.output / "store").write_text("mine")
    with pytest.raises(StoreError, match=r"/store is a file where a folder should be"):
        run(config)


def test_read_only_folder(tmp_path):
    folder = tmp_path / "sealed"
    folder.mkdir()
    config = make_config(tmp_path)
    config.output = folder / "out"
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:  # root ignores permissions, everyone else cannot mount: one of the two tells
        folder.chmod(0o555)
    try:
        with pytest.raises(StoreError, match=r"read-only file system|not writable"):
            run(config)
    finally:
        if not mounted.returncode:
            subprocess.run(["umount", str(folder)], check=True)


def test_cached_run_needs_no_room_and_no_permission(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    run(config)
    run(config)  # run.json says "cached" from now on
    monkeypatch.setattr(Store, "prepare", lambda self: pytest.fail("wrote"))
    monkeypatch.setattr("pipeline.stages.run_folder.RunFolder.write", lambda *_: pytest.fail("wrote"))
    assert run(config)[0] == []


def test_committed_files_are_read_only_but_a_users_own_are_not_touched(tmp_path):
    config = make_config(tmp_path)
    mine = tmp_path / "mine.txt"
    mine.write_text("x")

    def run_linked(context):
        os.link(mine, context.workspace.path / "linked.txt")
        (context.workspace.path / "own.txt").write_text("y")

    run(config, [dataclasses.replace(COPY, run=run_linked)])
    assert not (config.output / "toy/copy/own.txt").stat().st_mode & 0o222
    assert mine.stat().st_mode & 0o200


def test_marker_states_every_file(tmp_path):
    config = make_config(tmp_path)
    run(config)
    document = json.loads((config.output / "toy/copy/artifact.json").read_text())
    folder = config.output / "toy/copy"
    assert set(document["files"]) == set(read_tree(folder))
    for name, entry in document["files"].items():
        assert entry["digest"] == "blake3:" + blake3((folder / name).read_bytes()).hexdigest()
        assert entry["size"] == (folder / name).stat().st_size
    assert document["record"]["parameters"] == {"suffix": ""}
    assert len(folder.resolve().name) == 32
    assert document["fingerprint"].startswith("blake3:" + folder.resolve().name)
    assert set(document["versions"]) == {"trtseek", "python", "click", "no-such-library"}


def test_artifact_of_another_fingerprint_is_not_believed(tmp_path):
    config = make_config(tmp_path)
    run(config)
    store = Store(config.output / "store")
    real = (config.output / "toy/copy").resolve()
    other = "blake3:" + "0" * 64
    real.rename(store.place("copy", other))
    assert "belongs to another fingerprint" in store.find("copy", other).reason
