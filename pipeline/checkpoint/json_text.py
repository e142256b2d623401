"""Changing single keys of a JSON file and nothing else: order, spacing, number spelling and unknown keys stay.

A config.json is somebody else's file. Parsed and written again it would come out different (1e-05 for 1e-5, other
spacing), and an export could not give the original back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class _Member:
    """One `"key": value` of the outermost object, as positions in the text."""

    key: str
    start: int  # of the key's opening quote
    value: int
    end: int


def set_keys(text: str, changes: Mapping[str, Any]) -> str:
    """Sets top-level keys of the JSON object in `text`: a present key's value in its place, a new key at the end."""
    for key, value in changes.items():
        members, opening = _locate_members(text)
        indent = text[opening + 1 : members[0].start] if members else "\n  "
        step = len(indent.rpartition("\n")[2]) if "\n" in indent else None
        spelled = json.dumps(value, indent=step, ensure_ascii=False)
        if step is not None:
            spelled = spelled.replace("\n", indent)
        present = next((m for m in members if m.key == key), None)
        if present is not None:
            text = text[: present.value] + spelled + text[present.end :]
            continue
        at = members[-1].end if members else opening + 1
        comma = "," if members else ""
        text = f"{text[:at]}{comma}{indent}{json.dumps(key, ensure_ascii=False)}: {spelled}{text[at:]}"
    return text


def remove_key(text: str, key: str) -> str:
    """Takes a top-level key out with its comma; undoes `set_keys` of a key that was new. An absent key is no error."""
    members, opening = _locate_members(text)
    at = next((i for i, m in enumerate(members) if m.key == key), None)
    if at is None:
        return text
    if at > 0:
        return text[: members[at - 1].end] + text[members[at].end :]
    if len(members) > 1:
        return text[: members[0].start] + text[members[1].start :]
    return text[: opening + 1] + text[members[0].end :]


def _locate_members(text: str) -> tuple[list[_Member], int]:
    """The members of the outermost object and the position of its brace; `text` must be valid JSON."""
    decoder = json.JSONDecoder()
    opening = _skip(text, 0)
    at = _skip(text, opening + 1)
    members = []
    while text[at] == '"':
        key, after = decoder.raw_decode(text, at)
        value = _skip(text, _skip(text, after) + 1)  # past the colon
        _, end = decoder.raw_decode(text, value)
        members.append(_Member(key, at, value, end))
        at = _skip(text, end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return members, opening


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
