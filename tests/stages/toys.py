"""Three toy stages in a chain, one with inner steps, over a toy config; `python -m tests.stages.toys` runs them."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.stages.executor import Executor
from pipeline.stages.graph import Stage, StageContext

STEPS = 5


@dataclass
class ToyConfig:
    output: Path
    source: Path
    name: str = "toy"
    store: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)  # stage -> its parameters
    log: Path | None = None  # one line per piece of work done
    pause: float = 0.0

    @property
    def run_folder(self) -> Path:
        return self.output / self.name

    @property
    def store_folder(self) -> Path:
        return self.store or self.output / "store"


def _say(context: StageContext, what: str) -> None:
    if path := getattr(context.config, "log", None):
        with open(path, "a") as log:
            log.write(what + "\n")
            log.flush()
            os.fsync(log.fileno())


def run_copy(context: StageContext) -> None:
    """One file per step, each larger than a disk block, then a summary; as a stage that writes shards does."""
    (text,) = (path.read_text() for path in context.sources["text"])
    for step in range(STEPS):
        shard = context.workspace.path / "shards" / f"{step}.txt"
        if context.workspace.is_done(f"shard {step}"):
            continue
        shard.parent.mkdir(exist_ok=True)
        _say(context, f"copy {step}")
        with open(shard, "w") as file:
            for line in range(200):
                file.write(f"{step} {line} {text} {context.parameters['suffix']}\n")
                file.flush()
                time.sleep(context.config.pause)
        context.workspace.finish(f"shard {step}", [shard])
    (context.workspace.path / "summary.txt").write_text(f"{STEPS} shards of {text}")


def run_upper(context: StageContext) -> None:
    _say(context, "upper")
    summary = context.inputs["copy"].path / "summary.txt"
    (context.workspace.path / "upper.txt").write_text(summary.read_text().upper() + str(context.parameters))


def run_link(context: StageContext) -> None:
    _say(context, "link")
    for name, artifact in context.inputs.items():
        os.link(next(iter(sorted(artifact.path.glob("*.txt")))), context.workspace.path / f"{name}.txt")


def _of(stage: str) -> Any:
    return lambda config: {"suffix": "", **config.settings.get(stage, {})}


COPY = Stage(
    name="copy",
    version=1,
    run=run_copy,
    sources=lambda config: {"text": [config.source]},
    parameters=_of("copy"),
    libraries=("click", "no-such-library"),
)
UPPER = Stage(name="upper", version=1, run=run_upper, inputs=("copy",), parameters=_of("upper"))
LINK = Stage(
    name="link",
    version=1,
    run=run_link,
    inputs=("copy", "upper"),
    parameters=_of("link"),
    target=lambda config: config.settings.get("target", "sm80"),
)
STAGES = (COPY, UPPER, LINK)


def make_config(folder: Path, **settings: Any) -> ToyConfig:
    source = folder / "source.txt"
    if not source.exists():
        source.write_text("hello")
        os.utime(source, (1e9, 1e9))  # old enough for the digest cache
    return ToyConfig(output=folder / "out", source=source, settings=settings, log=folder / "log")


def read_log(config: ToyConfig) -> list[str]:
    return config.log.read_text().split("\n")[:-1] if config.log and config.log.exists() else []


def read_tree(folder: Path) -> dict[str, bytes]:
    """The bytes of every file but the marker, which states times."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "artifact.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


if __name__ == "__main__":
    from pipeline.progress import PlainReporter

    toy = make_config(Path(sys.argv[1]))
    toy.pause = float(sys.argv[2])
    Executor(toy, STAGES, PlainReporter(sys.stdout)).run()
