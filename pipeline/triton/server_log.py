"""A server's log: whose it is, that it can be written, and what of it explains a failure."""

from __future__ import annotations

import contextlib
import fcntl
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from pipeline.triton.errors import ServerError

# What explains one: Triton's own error lines, and a Python model's last words.
_ERROR_LINE = re.compile(r"E\d{4} |error: |\w*Error: |\w*Exception: |terminate")
# Triton without a GPU says these as errors, and means nothing by them.
_NOISE = re.compile(r"CUDA driver version|NVML|DCGM|Cuda[A-Z]|unable to create stream|pinned")


@contextlib.contextmanager
def claim_log(path: Path, *, is_given: bool) -> Iterator[Path]:
    """A log that no other `trtseek serve` writes meanwhile: `path`, or where another has that, the first free one of
    serve-2.log, serve-3.log, …; of a path that was given, raises ServerError instead. What is no plain file, as
    /dev/null, may be everybody's."""
    number = 1
    while True:
        place = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
        with contextlib.ExitStack() as held:
            try:
                place.parent.mkdir(parents=True, exist_ok=True)
                file = held.enter_context(open(place, "ab"))
                if stat.S_ISREG(place.stat().st_mode):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if is_given:
                    raise ServerError(
                        f"{place}: another server writes its log there", hint="name another file with --log"
                    ) from None
                number += 1
                continue
            except OSError:
                pass  # a disk without locks, or one that cannot be written: who opens it says so
            yield place
            return


class ServerLog:
    """The file may be that of many starts: `open` marks where this one's lines begin, `mark` where later ones do."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start = 0

    def open(self) -> None:
        """Raises ServerError where it cannot be written."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab") as log:
                self._start = log.tell()
        except OSError as error:
            raise ServerError(
                f"{self.path}: the server's log cannot be written: {error.strerror}",
                hint="name another file with --log",
            ) from error

    def mark(self) -> None:
        """What is in it explains nothing that happens from now on."""
        with contextlib.suppress(OSError):
            self._start = self.path.stat().st_size

    def errors(self, lines: int = 6) -> str:
        """The last errors since the mark, for messages."""
        try:
            with open(self.path, encoding="utf-8", errors="replace") as log:
                log.seek(self._start)
                text = log.read()
        except OSError:
            return ""
        found = [line for line in text.splitlines() if _ERROR_LINE.match(line) and not _NOISE.search(line)]
        return "\n".join(line.strip() for line in found[-lines:])
