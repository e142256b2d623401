"""From a job to an engine in the build stage's folder: built here by the job's own script, or taken from elsewhere.

Both ways end in the same check and the same record.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

from pipeline.engine.tensorrt import list_device_sms
from pipeline.engine.tensorrt_llm.engine_folder import EngineFolder, read_engine_folder
from pipeline.engine.tensorrt_llm.job import SCRIPT, name_job
from pipeline.engine.tensorrt_llm.record import ENGINE, EngineRecord
from pipeline.engine.tensorrt_llm.request import EngineRequest
from pipeline.engine.tensorrt_llm.resume import check_engine
from pipeline.errors import BuildError
from pipeline.progress import Progress

COMMAND = "trtllm-build"
_LOG = f"{ENGINE}.log"  # build.sh's, while it goes on and where it failed
_SERIALIZED = re.compile(r"Engine serialized\. Total time")
# The line that says why: Python's last, TensorRT's, argparse's, or build.sh's own.
_REASON = re.compile(r"^(build\.sh: .+|\w*(?:Error|Exception): .+|.*\[TRT\] \[E\] .+|trtllm-build: error: .+)$")
_BUFFER = 8 << 20


def list_lacks(request: EngineRequest) -> list[str]:
    """What this host has not that a build here would take; none where one may be tried."""
    lacks = [] if shutil.which(COMMAND) else [f"{COMMAND} of TensorRT-LLM {request.version}"]
    if request.sm not in list_device_sms():
        lacks.append(f"a GPU of SM{request.sm}, as the {request.gpu} is")
    return lacks


def build_engine(
    job: Path, folder: Path, request: EngineRequest, network_digest: str, progress: Progress
) -> EngineRecord:
    """Runs the job's script into `folder`/engine and writes the record. Raises BuildError with its own words; the log
    is kept either way, in engine/build.log or engine.log."""
    _run_script(job, folder, request.parallel.world, progress)
    return _finish(read_engine_folder(folder / ENGINE), job, folder, request, network_digest, progress)


def take_engine(
    engine: Path, job: Path, folder: Path, request: EngineRequest, network_digest: str, progress: Progress
) -> EngineRecord:
    """Copies an engine that was built elsewhere to `folder`/engine, if it is what `job` asked, and writes the record.
    Raises BuildError with all that differs, before anything is copied."""
    found = read_engine_folder(engine)
    check_engine(found, job, _report(progress, "check", found))
    advance = _report(progress, "copy", found)
    (folder / ENGINE).mkdir()
    for name in found.files:
        _copy(found.path / name, folder / ENGINE / name, advance)
    return _finish(read_engine_folder(folder / ENGINE), job, folder, request, network_digest, progress)


def _finish(
    engine: EngineFolder, job: Path, folder: Path, request: EngineRequest, network_digest: str, progress: Progress
) -> EngineRecord:
    for note in check_engine(engine, job, _report(progress, "check", engine)):
        progress.note(note)
    receipt = engine.receipt or {}
    record = EngineRecord(
        version=engine.version,
        image=request.image,
        sm=receipt.get("sm"),
        tensorrt=receipt.get("tensorrt"),
        job=name_job(job),
        network_digest=network_digest,
        request=request.to_json(),
        files=dict(engine.files),
    )
    record.write(folder)
    return record


def _report(progress: Progress, item: str, engine: EngineFolder) -> Callable[[int], None]:
    progress.start(item, sum(engine.files.values()), "B")
    return progress.advance


def _copy(source: Path, target: Path, on_bytes: Callable[[int], None]) -> None:
    """Follows no link, even one that has just been put there."""
    descriptor = os.open(source, os.O_RDONLY | os.O_NOFOLLOW)
    with open(descriptor, "rb") as origin, open(target, "wb") as copy:
        while data := origin.read(_BUFFER):
            copy.write(data)
            on_bytes(len(data))


def _run_script(job: Path, folder: Path, ranks: int, progress: Progress) -> None:
    progress.start(COMMAND, ranks, "ranks")
    reasons: list[str] = []
    child = subprocess.Popen(
        ["bash", str((job / SCRIPT).resolve()), ENGINE],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    with child:
        try:
            assert child.stdout is not None
            for line in child.stdout:
                if _SERIALIZED.search(line):
                    progress.advance(1)
                if found := _REASON.match(line.rstrip()):
                    reasons.append(found[1])
            code = child.wait()
        except BaseException:  # Ctrl-C above all: nobody waits for this engine any more
            os.killpg(child.pid, signal.SIGKILL)
            raise
    if code:
        raise _explain(code, reasons, folder / _LOG)


def _explain(code: int, reasons: list[str], log: Path) -> BuildError:
    if code < 0:
        return BuildError(f"the build was ended by {signal.Signals(-code).name}", hint=f"its last words are in {log}")
    # build.sh's own word comes last and says no more than that trtllm-build failed, where that had one of its own.
    own = [reason for reason in reasons if not reason.startswith("build.sh: trtllm-build failed")]
    why = (own or reasons or [f"it left with {code}"])[-1].removeprefix("build.sh: ")
    return BuildError(
        f"{COMMAND}: {why}", hint=f"its output is in {log}" if log.is_file() else "see the job's README.md"
    )
