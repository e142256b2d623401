"""Shell patterns of linears' names, as configs and recipes have them; without torch, for the config."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import translate
from functools import cache


@cache
def find_pattern(patterns: tuple[str, ...]) -> Callable[[str], int | None]:
    """Which of the shell patterns is the first to name a linear X, as `X` or as `X.weight`.

    One expression for all patterns, and each name looked up once: DeepSeek-V3 has 45,000 expert linears to hold against
    them, which a plan asks for several times.
    """
    if not patterns:
        return lambda name: None
    # The group around a whole pattern is the last to close.
    match = re.compile("|".join(f"(?P<pattern{i}>{translate(each)})" for i, each in enumerate(patterns))).match

    @cache
    def find(name: str) -> int | None:
        bare = name.removesuffix(".weight")
        groups = [found.lastgroup for spelled in (bare, f"{bare}.weight") if (found := match(spelled))]
        return min((int(str(group).removeprefix("pattern")) for group in groups), default=None)

    return find
