"""Disks that are too small or cannot be written to: a typed error, nothing half-written, and the next run goes on."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults import children
from tests.faults.conftest import Finished

pytestmark = pytest.mark.timeout(children.HANG_S)

Mount = Callable[[Path, str], None]


def _mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


@pytest.fixture
def mount() -> Iterator[Mount]:
    """Mounts a tmpfs on a folder, or remounts it, with the given options."""
    mounted: list[Path] = []

    def mount(folder: Path, options: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        again = f"remount,{options}" if folder in mounted else options
        if not _mount("-t", "tmpfs", "-o", again, "tmpfs", str(folder)):
            pytest.skip("mounting a file system needs root")
        if folder not in mounted:
            mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)  # whoever looks into it just now may go on


def sizes_of(results: dict[str, bytes]) -> int:
    return sum(len(content) for name, content in results.items() if not name.startswith("package/"))


def test_a_disk_that_grows_until_the_run_fits(finished: Finished, workshop: Path, mount: Mount) -> None:
    disk = workshop / "disk"
    wanted = sizes_of(finished.results)
    logs: list[Path] = []
    code = children.REFUSED
    for step in range(1, 40):
        mount(disk, f"size={64 + step * wanted // 1024 // 12}k")
        config = children.make_config(disk / "project", finished.model)
        logs.append(workshop / f"log-{step}")
        code = children.run_child(config, logs[-1])
        if code == children.CLEAN:
            break
        log = children.read_log(logs[-1])
        assert code == children.REFUSED, log
        (refusal,) = (line for line in log if line.startswith("refused "))
        assert refusal.startswith("refused StoreError"), refusal
        assert "bytes" in refusal
        assert "disk" in refusal
        assert children.find_damage(config) == 0
    assert code == children.CLEAN
    assert len(logs) > 5, "the disk was never too small"
    assert children.read_results(config) == finished.results
    # A step that met the full disk, or whose commit did, is what may have to be done again.
    assert children.count_repeats(logs) <= len(logs) - 1


def test_a_disk_that_fills_between_any_two_steps(finished: Finished, workshop: Path, mount: Mount) -> None:
    """Ballast leaves a few pages less each time, so that every kind of write meets the full disk."""
    disk = workshop / "disk"
    mount(disk, "size=8m")
    needed = sizes_of(finished.results)
    refused = 0
    for index in range(24):
        folder = disk / str(index)
        config = children.make_config(folder, finished.model)
        free = os.statvfs(disk)
        room = int(needed * (index + 0.5) / 24) + 40_000
        (disk / "ballast").write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - room)))
        code = children.run_child(config, workshop / f"log-{index}")
        assert code in (children.REFUSED, children.CLEAN), children.read_log(workshop / f"log-{index}")
        refused += code == children.REFUSED
        (disk / "ballast").unlink()
        assert children.run_child(config, workshop / f"again-{index}") == children.CLEAN
        assert children.read_results(config) == finished.results
        subprocess.run(["rm", "-rf", str(folder)], check=True)
    assert refused > 12


@pytest.mark.parametrize("where", ["output", "store"])
def test_a_disk_that_is_read_only(finished: Finished, workshop: Path, mount: Mount, where: str) -> None:
    """Before anything was made a typed error that names the folder; after it, a run that makes nothing works."""
    disk = workshop / "disk"
    mount(disk, "size=8m")
    places = {"output": str(workshop / "out"), "store": str(workshop / "store"), where: str(disk / where)}
    config = children.make_config(workshop, finished.model, **places)
    mount(disk, "ro")
    assert children.run_child(config, workshop / "log") == children.REFUSED, children.read_log(workshop / "log")
    (refusal,) = (line for line in children.read_log(workshop / "log") if line.startswith("refused "))
    assert refusal.startswith(f"refused StoreError: {disk / where}"), refusal
    assert "read-only" in refusal
    mount(disk, "rw")
    assert children.run_child(config, workshop / "log") == children.CLEAN, children.read_log(workshop / "log")
    assert children.run_child(config, workshop / "log") == children.CLEAN  # its record says "cached" from now on
    mount(disk, "ro")
    assert children.run_child(config, workshop / "last") == children.CLEAN, children.read_log(workshop / "last")
    assert sum(": cached" in line for line in children.read_log(workshop / "last")) == len(children.NAMES)
    assert children.read_results(config) == finished.results


def test_a_read_only_model_is_no_obstacle(finished: Finished, workshop: Path, mount: Mount) -> None:
    disk = workshop / "disk"
    mount(disk, "size=8m")
    subprocess.run(["cp", "-r", str(finished.model), str(disk / "model")], check=True)
    mount(disk, "ro")
    config = children.make_config(workshop, disk / "model")
    assert children.run_child(config, workshop / "log") == children.CLEAN, children.read_log(workshop / "log")
    assert children.read_results(config) == finished.results
