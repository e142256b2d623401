"""Freed memory given back to the system."""

from __future__ import annotations

import ctypes


def trim_heap() -> None:
    """Gives back the whole pages that are free, of all threads; milliseconds.

    glibc keeps what was freed below anything that is still in use, so that the work on a layer would begin on top of
    what the one before took. Other C libraries know nothing of it: nothing is done.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
