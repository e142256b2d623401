"""Real stages over a random checkpoint, run in forked children that die where they are told to.

What is heavy to import is imported once, in the server; a child is a fork of it, so a hundred runs cost a hundred runs
and no more. A child counts *events*: every open for writing, rename, link, unlink, folder made or removed (Python's own
audit events), every fsync and every report of progress, and kills itself with SIGKILL at the one it was given. Nothing
of the product knows of it.
"""

from __future__ import annotations

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

ROOT = Path(__file__).parents[2]
AUDITED = ("os.rename", "os.link", "os.symlink", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.copyfile")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
SHARD = 60_000  # bytes: several shards of a checkpoint of a megabyte
CLEAN, REFUSED, CRASHED = 0, 7, 70


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
    quantize.STAGE,
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


class Recorder:
    """A reporter that counts events, keeps a log of notes and outcomes, and dies at event number `death`."""

    def __init__(self, log: Path, death: int | None) -> None:
        self.log, self.death, self.count, self.stage = log, death, 0, ""
        self.busy = False

    def begin(self, stage: str) -> None:
        self.stage = stage
        self.strike()

    def end(self, outcome: str) -> None:
        self.write(f"{self.stage}: {outcome}")
        self.strike()

    def start(self, item: str, total: float, unit: str) -> None:
        self.strike()

    def advance(self, amount: float) -> None:
        self.strike()

    def note(self, message: str) -> None:
        self.write(f"{self.stage}: {message}")
        self.strike()

    def write(self, line: str) -> None:
        self.busy = True
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.write(descriptor, line.encode() + b"\n")
        os.close(descriptor)
        self.busy = False

    def strike(self) -> None:
        self.count += 1
        if self.count == self.death:
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.busy:
            return
        if event in AUDITED or (event == "open" and isinstance(arguments[2], int) and arguments[2] & WRITING):
            if event == "open" and str(arguments[0]).endswith(".safetensors"):
                self.write(f"started {self.stage} {Path(str(arguments[0])).name}")
            self.strike()

    def watch(self) -> None:
        sys.addaudithook(self.audit)
        flush = os.fsync

        def fsync(descriptor: int) -> None:
            self.strike()
            flush(descriptor)
            self.strike()

        os.fsync = fsync  # type: ignore[assignment]  # in this child only


_server: subprocess.Popen[str] | None = None


def ask(request: dict[str, Any]) -> int:
    """The server's answer; the server is started where there is none yet."""
    global _server
    if _server is None or _server.poll() is not None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        _server = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.server"],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    assert _server.stdin is not None
    assert _server.stdout is not None
    _server.stdin.write(json.dumps(request) + "\n")
    _server.stdin.flush()
    return int(_server.stdout.readline())


def stop_server() -> None:
    global _server
    if _server is not None:
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
    _bound_time()
    artifacts = config.store_folder.glob("[a-z]*/*")
    return sum(read_marker(path).find_damage(full=True) is not None for path in artifacts)


def _bound_time() -> None:
    """A hang is a failure, too."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(120)


def run_stages(config: Config, log: Path, death: int | None, prepare: Callable[[], None]) -> int:
    """In a child."""
    from pipeline.errors import TrtseekError

    _bound_time()
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
