"""Why a fingerprint is another one than last time, in words a user can act on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

LONGEST = 60  # characters that a value is spelled in


def explain_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two records, one line each: "group_size: 128 → 64", "model: config.json changed"."""
    lines = []
    if old.get("version") != new.get("version"):
        lines.append(f"this version of trtseek makes it differently ({old.get('version')} → {new.get('version')})")
    lines += explain_values(old.get("parameters"), new.get("parameters"), "")
    lines += explain_values(old.get("target"), new.get("target"), "target")
    for source in _keys(old.get("sources"), new.get("sources")):
        lines += _explain_files(source, old.get("sources", {}).get(source, []), new.get("sources", {}).get(source, []))
    for library in _keys(old.get("libraries"), new.get("libraries")):
        before, after = old.get("libraries", {}).get(library), new.get("libraries", {}).get(library)
        if before != after:
            lines.append(f"library {library}: {before or 'absent'} → {after or 'absent'}")
    for stage in _keys(old.get("inputs"), new.get("inputs")):
        before, after = old.get("inputs", {}).get(stage), new.get("inputs", {}).get(stage)
        if before is None or after is None:
            lines.append(f"{'no longer reads' if after is None else 'now reads'} {stage}")
        elif before != after:
            lines.append(f"{stage} changed")
    return lines


def _keys(*mappings: Mapping[str, Any] | None) -> list[str]:
    return sorted({key for mapping in mappings for key in mapping or {}})


def explain_values(old: Any, new: Any, path: str = "") -> list[str]:
    """What differs between two nested values: "group.size: 128 → 64", "files.0.weight: unset → 2"."""
    if _holds_maps(old) and _holds_maps(new) and len(old) == len(new):
        pairs = enumerate(zip(old, new, strict=True))
        return _shorten([line for i, pair in pairs for line in explain_values(*pair, f"{path}.{i}")], path)
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for key in _keys(old, new)
            for line in explain_values(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        ]
    # As JSON: a record that was read again has lists where a new one has tuples.
    is_same = json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True)
    return [] if is_same else [f"{path}: {_spell_both(old, new)}"]


def _explain_files(source: str, old: list[list[str]], new: list[list[str]]) -> list[str]:
    before = {entry[0]: entry[1] for entry in old}
    after = {entry[0]: entry[1] for entry in new}
    if None in (*before.values(), *after.values()):  # never read: by their names alone
        before, after = dict.fromkeys(before, ""), dict.fromkeys(after, "")
        old = new = []
    lines = [f"{source}: {name} is new" for name in after if name not in before]
    lines += [f"{source}: {name} is gone" for name in before if name not in after]
    lines += [f"{source}: {name} changed" for name in after if before.get(name, after[name]) != after[name]]
    if not lines and old != new:
        lines.append(f"{source}: the order of its files changed")
    return _shorten(lines, source)


def _shorten(lines: list[str], path: str) -> list[str]:
    return lines if len(lines) <= 3 else [*lines[:2], f"{path}: {len(lines) - 2} more changed"]


def _holds_maps(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value)


def _spell_both(old: Any, new: Any) -> str:
    """Of long ones the part that differs."""
    before, after = _spell(old), _spell(new)
    pairs = enumerate(zip(before, after, strict=False))
    same = next((i for i, (one, other) in pairs if one != other), min(len(before), len(after)))
    start = 0 if max(len(before), len(after)) <= LONGEST or same <= LONGEST // 2 else same - LONGEST // 4
    return f"{_cut(before, start)} → {_cut(after, start)}"


def _cut(text: str, start: int) -> str:
    text = f"…{text[start:]}" if start else text
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _spell(value: Any) -> str:
    """As YAML takes it, on one line."""
    if value is None:
        return "unset"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
