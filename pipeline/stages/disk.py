"""What the operating system says about the disk, as an error a user can act on."""

from __future__ import annotations

import contextlib
import errno
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.errors import StoreError, TrtseekError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FULL = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "the file size limit is reached",
}
_REFUSED = {
    errno.EACCES: "is not writable for this user",
    errno.EPERM: "is not writable for this user",
    errno.EROFS: "is on a read-only file system",
    errno.ENOTDIR: "is a file where a folder should be",
    errno.EEXIST: "is a file where a folder should be",
    errno.EISDIR: "is a folder where a file should be",
    errno.ENAMETOOLONG: "is a name too long for the disk",
    errno.ELOOP: "is a link that leads back to itself",
}


@contextlib.contextmanager
def explain_disk_errors(
    path: Path, *, needed: Callable[[], int] = lambda: 0, only_under: Path | None = None
) -> Iterator[None]:
    """Turns what the disk under `path` refuses into StoreError; `needed` says how many bytes were to be written, or 0.

    A full disk is recognised in whatever exception a library made of it. Other refusals count only for files under
    `only_under`, where that is given: an unreadable source is not the store's trouble.
    """
    try:
        yield
    except TrtseekError:
        raise
    except Exception as error:
        explained = _explain(error, path, needed(), only_under)
        if explained is None:
            raise
        raise explained from error


def _explain(error: BaseException, path: Path, needed: int, only_under: Path | None) -> StoreError | None:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return _full(_FULL[cause.errno], path, needed)
        if "No space left on device" in str(cause):  # as Rust and C++ libraries pass it on
            return _full(_FULL[errno.ENOSPC], path, needed)
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, OSError):
        named = Path(error.filename) if isinstance(error.filename, str | Path) else path
        # Of a file, ENOENT is a fault of the program; of the folder to write in, the file system takes no folders.
        refused = {**_REFUSED, errno.ENOENT: "cannot be made there"} if named in (path, *path.parents) else _REFUSED
        if error.errno not in refused:
            return None
        if only_under is not None and not (named.is_relative_to(only_under) or only_under.is_relative_to(named)):
            return None
        return StoreError(
            f"{_culprit(named)} {refused[error.errno]}",
            hint="set `output:` to a folder that can be written to, or mend this one and run again",
        )
    return None


def _full(what: str, path: Path, needed: int) -> StoreError:
    usage = shutil.disk_usage(_existing(path))
    need = f", {needed:,} were to be written" if needed else ""
    return StoreError(
        f"{path}: {what} ({usage.free:,} bytes free{need})",
        hint="free some space, or set `output:` to a larger disk, and run again: finished steps are kept",
    )


def _existing(path: Path) -> Path:
    return next((p for p in (path, *path.parents) if p.exists()), Path("/"))


def _culprit(path: Path) -> Path:
    """The file that stands where a folder should be, else the path itself; for a file of the program's own, which has a
    name that no user knows (.draft-…), the folder it is in."""
    blocked = next((p for p in reversed(path.parents) if p.exists() and not p.is_dir()), None)
    return blocked or (path.parent if path.name.startswith(".") else path)
