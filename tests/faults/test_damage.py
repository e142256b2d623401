"""A store whose files were truncated, flipped, emptied or deleted: found, said, made again to the same bytes."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import children
from tests.faults.conftest import Finished

pytestmark = pytest.mark.timeout(children.HANG_S)

Damage = Callable[[Path, random.Random], None]


def truncate(path: Path, generator: random.Random) -> None:
    os.truncate(path, generator.randrange(path.stat().st_size))


def flip(path: Path, generator: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    with open(path, "r+b") as file:  # the same file, as a disk's fault leaves it
        file.write(content)


def grow(path: Path, generator: random.Random) -> None:
    with open(path, "ab") as file:
        file.write(generator.randbytes(17))


def blank(path: Path, generator: random.Random) -> None:
    """A block of zeros, as a file system may leave after a power cut."""
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.write(bytes(min(size, 4096)))


def delete(path: Path, _: random.Random) -> None:
    path.unlink()


DAMAGES: dict[str, Damage] = {"truncated": truncate, "flipped": flip, "grown": grow, "zeroed": blank, "deleted": delete}
KINDS = ["flipped", "deleted", *(pytest.param(k, marks=pytest.mark.thorough) for k in ("truncated", "grown", "zeroed"))]


def list_files(config_output: Path) -> list[Path]:
    """One of every file of the store and the run folder, by its first name; the locks hold nothing."""
    found: dict[int, Path] = {}
    for path in sorted(config_output.rglob("*")):
        if path.is_file() and not path.is_symlink() and path.suffix != ".lock" and path.stat().st_size:
            found.setdefault(path.stat().st_ino, path)
    return list(found.values())


@pytest.mark.parametrize("damage", KINDS)
def test_every_kind_of_file(finished: Finished, workshop: Path, damage: str) -> None:
    generator = random.Random(damage)
    names = [path.relative_to(finished.folder) for path in list_files(finished.folder / "out")]
    weights = [name for name in names if name.suffix == ".safetensors"]
    others = [name for name in names if name.suffix != ".safetensors"]
    chosen = others + generator.sample(weights, 4)
    assert {"artifact.json", "run.json", "list.txt", "config.json"} <= {name.name for name in chosen}
    for index, name in enumerate(chosen):
        folder = children.copy_project(finished.folder, workshop / f"{index}")
        config = children.make_config(folder, finished.model)
        victim = folder / name
        victim.chmod(0o644)
        before = victim.read_bytes()
        DAMAGES[damage](victim, generator)
        assert not victim.exists() or victim.read_bytes() != before or damage == "zeroed"
        log = workshop / f"log-{index}"
        assert children.run_child(config, log) == children.CLEAN, (name, children.read_log(log))
        assert children.read_results(config) == finished.results, name
        if "store" in name.parts and name.name != "digests.jsonl":
            said = [line for line in children.read_log(log) if "damaged: " in line]
            assert said, (name, children.read_log(log))
            # An edited marker is named by its own path; a file that two artifacts share by one of its names.
            assert any(name.name in line for line in said), (name, said)
        assert children.find_damage(config) == 0
        shutil.rmtree(folder)


@pytest.mark.parametrize("damage", KINDS)
def test_what_a_killed_run_left(finished: Finished, workshop: Path, damage: str) -> None:
    """Its finished shards, its journal, and what it was begun with."""
    generator = random.Random(damage)
    config = children.make_config(workshop / "project", finished.model)
    children.run_child(config, workshop / "killed", death=finished.events // 3)
    (partial,) = (config.store_folder / ".partial").iterdir()
    names = [path.relative_to(workshop / "project") for path in sorted(partial.rglob("*")) if path.is_file()]
    assert {"journal", "begin.json"} <= {name.name for name in names}
    assert len(names) > 8
    kept = [name for name in names if name.name in ("journal", "begin.json")]
    names = kept + generator.sample([name for name in names if name not in kept], 4)
    for index, name in enumerate(names):
        folder = children.copy_project(workshop / "project", workshop / f"{index}")
        other = children.make_config(folder, finished.model)
        if (folder / name).stat().st_size:
            DAMAGES[damage](folder / name, generator)
        log = workshop / f"log-{index}"
        assert children.run_child(other, log) == children.CLEAN, (name, children.read_log(log))
        assert children.read_results(other) == finished.results, name
        shutil.rmtree(folder)
