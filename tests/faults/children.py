"""Real stages over a random checkpoint, run in forked children that die where they are told to.

What is heavy to import is imported once, in the server; a child is a fork of it, so a hundred runs cost a hundred runs
and no more.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config
from pipeline.digest import set_digest_cache
from pipeline.stages import convert, package, quantize
from pipeline.stages.artifact import read_marker
from pipeline.stages.executor import Executor
from pipeline.stages.graph import Stage, StageContext
from tests.faults.recorder import Recorder

ROOT = Path(__file__).parents[2]
SHARD = 60_000  # bytes: several shards of a checkpoint of a megabyte
CLEAN, REFUSED, CRASHED = 0, 7, 70
HANG_S = 1800  # a bound for tests that hang: many times what they take on a machine that is busy with other work


def convert_in_shards(context: StageContext) -> None:
    from pipeline.checkpoint.convert import convert_checkpoint
    from pipeline.checkpoint.folder import CheckpointFolder

    convert_checkpoint(
        CheckpointFolder.open(context.config.model.path),
        context.workspace,
        dtype=context.config.stages.convert.dtype,
        overflow="refuse",
        progress=context.progress,
        max_shard=SHARD,
    )


def link_everything(context: StageContext) -> None:
    """As packaging does: folders of hard links, and a list of them."""
    names = []
    for stage, artifact in context.inputs.items():
        for name, record in artifact.files.items():
            target = context.workspace.path / "artifacts" / stage / name
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(artifact.path / name, target)
            context.workspace.recognise(target, record.digest)
            names.append(f"{stage}/{name}")
    (context.workspace.path / "list.txt").write_text("\n".join(names) + "\n")


STAGES: tuple[Stage, ...] = (
    dataclasses.replace(convert.STAGE, run=convert_in_shards),
    dataclasses.replace(quantize.STAGE, inputs=("convert",)),  # no recipe is solved
    dataclasses.replace(package.STAGE, run=link_everything, inputs=("convert", "quantize")),
)
NAMES = tuple(stage.name for stage in STAGES)


def make_config(folder: Path, model: Path, **changes: Any) -> Config:
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "name": "tiny",
        "model": {"path": str(model)},
        "target": {"gpu": "A100-80GB"},
        "output": str(folder / "out"),
        "stages": {"convert": {"dtype": "float16"}, "quantize": {"method": "rtn", "group_size": 32}},
        **changes,
    }
    return Config.model_validate_json(json.dumps(document))


_server: subprocess.Popen[str] | None = None


def ask(request: dict[str, Any]) -> int:
    """The server's answer; the server is started where there is none yet. Its children end with it."""
    global _server
    if _server is None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        _server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    assert _server.stdin is not None
    assert _server.stdout is not None
    try:
        _server.stdin.write(json.dumps(request) + "\n")
        _server.stdin.flush()
        return int(_server.stdout.readline())
    except BaseException:  # a test that ran out of time, too: the next answer would be to its question
        stop_server()
        raise


def stop_server() -> None:
    global _server
    if _server is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(_server.pid, signal.SIGKILL)
        _server.communicate()
    _server = None


def run_child(config: Config, log: Path, *, death: int | None = None, prepare: Callable[[], None] | None = None) -> int:
    """Runs the stages in a fork. The exit code: negative for a signal, CLEAN, REFUSED (a typed error) or CRASHED."""
    return wait_child(start_child(config, log, death=death, prepare=prepare))


def start_child(
    config: Config, log: Path, *, death: int | None = None, prepare: Callable[[], None] | None = None
) -> int:
    """The process id of a run that is not waited for. `prepare`, a module's own function, is called in it first."""
    name = f"{prepare.__module__}:{prepare.__name__}" if prepare else None
    return ask(
        {"what": "run", "config": config.model_dump(mode="json"), "log": str(log), "death": death, "prepare": name}
    )


def wait_child(child: int) -> int:
    return ask({"what": "wait", "child": child})


def find_damage(config: Config) -> int:
    """How many artifacts of the store are not whole, to the last byte."""
    return wait_child(ask({"what": "damage", "config": config.model_dump(mode="json")}))


def count_damaged(config: Config) -> int:
    """In a child."""
    artifacts = config.store_folder.glob("[a-z]*/*")
    return sum(read_marker(path).find_damage(full=True) is not None for path in artifacts)


def run_stages(config: Config, log: Path, death: int | None, prepare: Callable[[], None]) -> int:
    """In a child."""
    from pipeline.errors import TrtseekError

    recorder = Recorder(log, death)
    set_digest_cache(None)
    try:
        prepare()
        recorder.watch()
        Executor(config, STAGES, recorder).run()
    except TrtseekError as error:
        recorder.write(f"refused {type(error).__name__}: {error.message} | {error.hint}")
        return REFUSED
    except BaseException:
        recorder.write(f"crashed {traceback.format_exc()}")
        return CRASHED
    finally:
        recorder.write(f"events {recorder.count}")
    return CLEAN


def read_log(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def count_events(log: Path) -> int:
    return int(next(line for line in reversed(read_log(log)) if line.startswith("events ")).split()[1])


def count_repeats(logs: Sequence[Path]) -> int:
    """How many files of weights were begun more often than once, over all runs together."""
    begun = Counter(line for log in logs for line in read_log(log) if line.startswith("started "))
    return sum(times - 1 for times in begun.values())


def read_results(config: Config) -> dict[str, bytes]:
    """Every file that the run shows, but for the markers, which state times."""
    found = {}
    for name in NAMES:
        folder = config.run_folder / name
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.name != "artifact.json":
                found[f"{name}/{path.relative_to(folder)}"] = path.read_bytes()
    return found


def copy_project(source: Path, target: Path) -> Path:
    """A copy of a finished project that keeps hard links among its files, as a store has them, and times."""
    shutil.copytree(source, target, symlinks=True, copy_function=_Linker())
    return target


class _Linker:
    def __init__(self) -> None:
        self.copies: dict[int, str] = {}

    def __call__(self, source: str, target: str) -> None:
        inode = os.stat(source, follow_symlinks=False).st_ino
        if inode in self.copies and not os.path.islink(source):
            os.link(self.copies[inode], target)
        else:
            shutil.copy2(source, target, follow_symlinks=False)
            self.copies[inode] = target
