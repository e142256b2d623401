"""Lists of linears as formats spell them: a pattern for all of a kind, names where a kind is divided."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def make_patterns(chosen: Collection[str], every: Iterable[str]) -> list[str]:
    """Regular expressions that match `chosen` of `every` in full and no other: 45,000 experts are three kinds."""
    return [
        re.escape(kind).replace(r"\#", r"\d+") if whole else re.escape(name)
        for kind, whole, name in _divide(chosen, every)
    ]


def make_suffixes(chosen: Collection[str], every: Iterable[str]) -> list[str]:
    """The same for readers that look for a part of a name: "self_attn.o_proj" for that of every layer."""
    suffixes = [
        kind.partition(".layers.#.")[2] if whole and kind.count("#") == 1 else name
        for kind, whole, name in _divide(chosen, every)
    ]
    return suffixes


def _divide(chosen: Collection[str], every: Iterable[str]) -> Iterable[tuple[str, bool, str]]:
    """(kind, whether all of it is chosen, its name): one row for a whole kind, else one for each name."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in every:
        kinds[_NUMBER.sub("#", name)].append(name)
    wanted = set(chosen)
    for kind, names in kinds.items():
        found = [name for name in names if name in wanted]
        if len(found) == len(names) > 1:
            yield kind, True, names[0]
        else:
            for name in found:
                yield kind, False, name
